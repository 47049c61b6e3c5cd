"""Optimizers of binary weights: QP-SBGD and its rivals."""

from spingrad.optim.capture import capture
from spingrad.optim.qpsbgd import QPSBGD

__all__ = ["QPSBGD", "capture"]
