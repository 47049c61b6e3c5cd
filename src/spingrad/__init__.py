"""Train binary neural networks in PyTorch: every weight is -1 or +1."""

from spingrad._version import __version__ as __version__
from spingrad.nn import (
    BinaryConv1d,
    BinaryConv2d,
    BinaryConv3d,
    BinaryConvTranspose2d,
    BinaryLayer,
    BinaryLinear,
    Bits,
    Gain,
    Sign,
    binary_parameters,
    convert,
    real_parameters,
    sign,
)
from spingrad.optim import QPSBGD
from spingrad.problem import BinaryQuadratic

__all__ = [
    "QPSBGD",
    "BinaryConv1d",
    "BinaryConv2d",
    "BinaryConv3d",
    "BinaryConvTranspose2d",
    "BinaryLayer",
    "BinaryLinear",
    "BinaryQuadratic",
    "Bits",
    "Gain",
    "Sign",
    "binary_parameters",
    "convert",
    "real_parameters",
    "sign",
]
