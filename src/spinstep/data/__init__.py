"""Data sets, checked against pinned SHA-256 sums before a byte is parsed."""

from spinstep.data.adult import Table, adult
from spinstep.data.graphs import Graph, karate, planetoid
from spinstep.data.mnist import Images, fashion_mnist, mnist
from spinstep.data.superpixels import key_points, line_features

__all__ = [
    "Graph",
    "Images",
    "Table",
    "adult",
    "fashion_mnist",
    "karate",
    "key_points",
    "line_features",
    "mnist",
    "planetoid",
]
