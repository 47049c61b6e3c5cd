"""Train binary neural networks in PyTorch by taking every step in spins."""

from spinstep.bits import Bits
from spinstep.convolution import BinaryConv2d
from spinstep.gain import Gain
from spinstep.layers import BinaryLinear, binary_parameters, real_parameters
from spinstep.optim import QPSBGD
from spinstep.problem import BinaryLeastSquares
from spinstep.record import LayerRecord, start_recording, stop_recording
from spinstep.signs import Sign, sign

__version__ = "0.1.0"

__all__ = [
    "QPSBGD",
    "BinaryConv2d",
    "BinaryLeastSquares",
    "BinaryLinear",
    "Bits",
    "Gain",
    "LayerRecord",
    "Sign",
    "binary_parameters",
    "real_parameters",
    "sign",
    "start_recording",
    "stop_recording",
]
