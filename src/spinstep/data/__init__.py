"""Data sets, checked against pinned SHA-256 sums before a byte is parsed."""

from spinstep.data.mnist import Images, fashion_mnist, mnist

__all__ = ["Images", "fashion_mnist", "mnist"]
