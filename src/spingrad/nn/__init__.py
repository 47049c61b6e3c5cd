"""Layers with weights in {-1, +1}, and what goes between them."""

from spingrad.nn.attention import BinaryMultiheadAttention
from spingrad.nn.bits import Bits
from spingrad.nn.conv import BinaryConv1d, BinaryConv2d, BinaryConv3d, BinaryConvTranspose2d
from spingrad.nn.convert import convert
from spingrad.nn.gain import Gain
from spingrad.nn.gcn import BinaryGCNConv
from spingrad.nn.linear import BinaryLayer, BinaryLinear, binary_parameters, real_parameters
from spingrad.nn.sign import Sign, sign

__all__ = [
    "BinaryConv1d",
    "BinaryConv2d",
    "BinaryConv3d",
    "BinaryConvTranspose2d",
    "BinaryGCNConv",
    "BinaryLayer",
    "BinaryLinear",
    "BinaryMultiheadAttention",
    "Bits",
    "Gain",
    "Sign",
    "binary_parameters",
    "convert",
    "real_parameters",
    "sign",
]
