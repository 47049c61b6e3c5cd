"""Train binary neural networks in PyTorch by taking every step in spins."""

from spinstep.layers import BinaryConv2d, BinaryLinear, Sign, binary_parameters, real_parameters, sign
from spinstep.optim import QPSBGD
from spinstep.problem import BinaryLeastSquares
from spinstep.record import LayerRecord, start_recording, stop_recording

__version__ = "0.1.0"

__all__ = [
    "QPSBGD",
    "BinaryConv2d",
    "BinaryLeastSquares",
    "BinaryLinear",
    "LayerRecord",
    "Sign",
    "binary_parameters",
    "real_parameters",
    "sign",
    "start_recording",
    "stop_recording",
]
