"""A constant factor in the place of BatchNorm: it keeps signals in range and is measured once."""

from typing import Any

import torch
from torch import Tensor, nn


class Gain(nn.Module):
    """Multiplies by one number, set on the first training batch so that the output has a given size.

    Where signals shrink from layer to layer (images that are mostly background, small convolutions),
    activations stay in their linear range and outputs are too small for the loss. BatchNorm corrects that
    with the statistics of every batch; here one constant does. It costs nothing in a deployed network: a sign
    does not depend on it, and the ends of a hardtanh are scaled with it.

    Args:
        rms: Root mean square of the output on that batch, over the entries that are not zero (zeros are the
            background of images). Use 1 before an activation and more for the network's outputs, such as
            1.5 or 3, if its classes are easy to tell apart.

    Note:
        The factor is measured in the first forward pass in training mode and is part of ``state_dict()``. An
        evaluation before that uses the factor of its own batch and does not keep it. With several workers,
        pass one batch through the network before it is copied to them: all need the same factor.

    Example:
        >>> from spingrad import BinaryConv2d, BinaryLinear
        >>> model = nn.Sequential(
        ...     BinaryConv2d(1, 16, 3), Gain(), nn.Hardtanh(),
        ...     nn.Flatten(), BinaryLinear(16 * 26 * 26, 10), Gain(3),
        ... )
        >>> first = model(torch.rand(8, 1, 28, 28)).detach()
        >>> round(float(first.square().mean().sqrt()), 3)
        3.0
    """

    factor: Tensor

    def __init__(self, rms: float = 1.0) -> None:
        super().__init__()
        if not 0 < rms < float("inf"):
            raise ValueError(f"rms is positive, got {rms}")
        self.rms = rms
        self.register_buffer("factor", torch.tensor(torch.nan))
        self._known = False  # asking the buffer every time would wait for a GPU

    def reset_parameters(self) -> None:
        """Measure the factor anew on the next training batch, as after ``to_empty``."""
        self.factor.fill_(torch.nan)
        self._known = False

    def forward(self, x: Tensor) -> Tensor:
        if not self._known:
            if self.factor.isnan():
                factor = self._measure(x.detach())
                if not self.training:
                    return x * factor
                self.factor.fill_(factor)
            self._known = True
        return x * self.factor

    def _measure(self, x: Tensor) -> float:
        rms = float((x.double().square().sum() / x.count_nonzero()).sqrt())
        if not 0 < rms < float("inf"):
            raise ValueError(
                f"the first batch has a root mean square of {rms} here: no gain makes it {self.rms:g}"
            )
        return self.rms / rms

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._known = False

    def extra_repr(self) -> str:
        return f"{self.rms:g}"
