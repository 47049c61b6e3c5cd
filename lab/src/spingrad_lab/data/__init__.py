"""Data sets, checked against pinned SHA-256 sums before a byte is parsed."""

from spingrad_lab.data.adult import Table, adult
from spingrad_lab.data.cifar10 import cifar10
from spingrad_lab.data.graphs import Graph, karate, planetoid
from spingrad_lab.data.mnist import Images, Split, fashion_mnist, mnist
from spingrad_lab.data.shakespeare import tiny_shakespeare
from spingrad_lab.data.spoken_digits import Recording, spoken_digits
from spingrad_lab.data.superpixels import key_points, line_features

__all__ = [
    "Graph",
    "Images",
    "Recording",
    "Split",
    "Table",
    "adult",
    "cifar10",
    "fashion_mnist",
    "karate",
    "key_points",
    "line_features",
    "mnist",
    "planetoid",
    "spoken_digits",
    "tiny_shakespeare",
]
