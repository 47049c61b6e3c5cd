"""The numbers behind a torch tensor: which integers stand for it, and how they are rounded and compared.

A bias or BatchNorm followed by a sign compares an integer with a constant. Over the finitely many integers
that a unit can reach, torch's result is monotonic, so bisection with torch's own float32 arithmetic finds
where the sign changes. The threshold then agrees with torch on every one of these integers, rounding
included.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor, nn

from spingrad.export.stages import Array, Flow, Pool, Rescale, Shape, Threshold

Norm = nn.BatchNorm1d | nn.BatchNorm2d
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Term:
    """A tensor of the torch network: an integer ``k`` of unit ``u`` stands for ``slope[u] * k + offset[u]``.

    Args:
        value: Number of the value that holds the integers.
        flow: What that value is.
        slope, offset: One number, or one for each unit.
        steps: The same function as torch computes it, in float32, for one number per unit.
        pools: Max pooling that was moved behind the activation: there it pools bits, not sums.
    """

    value: int
    flow: Flow
    slope: Array
    offset: Array
    steps: tuple[Step, ...]
    pools: tuple[Pool, ...] = ()

    @classmethod
    def plain(cls, value: int, flow: Flow, unit: float) -> "Term":
        """Integers that count units."""
        return cls(value, flow, np.array(unit), np.zeros(()), (lambda k: (unit * k).float(),))

    @property
    def is_plain(self) -> bool:
        """Whether the integers are torch's numbers in one unit: one factor, nothing to add, no pooling."""
        return self.slope.ndim == 0 and not self.offset.any() and not self.pools

    @property
    def shape(self) -> Shape:
        """The shape of torch's tensor, pooling included."""
        return reduce(lambda flow, pool: pool.flow(flow), self.pools, self.flow).shape

    @property
    def unit(self) -> float:
        return float(self.slope.flat[0])

    @property
    def largest(self) -> float:
        """No value of torch's tensor is larger in magnitude."""
        return float(np.max(np.abs(self.slope) * self.flow.bound + np.abs(self.offset)))

    def then(self, factor: Array | float, offset: Array | float, *steps: Step) -> "Term":
        """Followed by ``factor * x + offset``, which torch computes by these steps."""
        slope, offset = np.asarray(self.slope * factor), np.asarray(self.offset * factor + offset)
        return replace(self, slope=slope, offset=offset, steps=(*self.steps, *steps))

    def normalized(self, norm: Norm) -> "Term":
        """Followed by BatchNorm as in evaluation."""
        if norm.running_mean is None or norm.running_var is None:
            raise ValueError("needs a running mean and variance (track_running_stats=True)")
        if norm.num_features != self.flow.shape[0]:
            raise ValueError(f"has {norm.num_features} features after a layer of {self.flow.shape[0]} units")
        mean, variance = norm.running_mean, norm.running_var
        weight, bias = (
            (norm.weight, norm.bias) if norm.affine else (torch.ones_like(mean), torch.zeros_like(mean))
        )
        gain = weight.double() / (variance.double() + norm.eps).sqrt()
        offset = bias.double() - mean.double() * gain
        if not (gain.isfinite().all() and offset.isfinite().all()):
            raise ValueError("some of its parameters are not finite")

        def step(x: Tensor) -> Tensor:
            return nn.functional.batch_norm(x[None], mean, variance, weight, bias, eps=norm.eps)[0]

        return self.then(gain.numpy(), offset.numpy(), step)

    def sign(self) -> Threshold:
        """The sign of torch's tensor, as a comparison of the integers."""
        if not self.offset.any() and (self.slope > 0).all():
            return Threshold()
        bound, units = self.flow.bound, self.flow.shape[0]
        low, high = np.full(units, -bound - 1), np.full(units, bound + 1)
        first, last = self._is_positive(low + 1), self._is_positive(high - 1)
        rises = last | ~first  # if both ends have the same sign, it never changes and any direction is right
        while (high - low > 1).any():
            middle = (low + high) // 2
            beyond = self._is_positive(middle) == rises  # at the change or after it
            low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)
        # Rising: +1 where sum >= high. Falling: +1 where sum <= high - 1, which is -sum >= 1 - high.
        thresholds = np.where(rises, high, 1 - high)
        thresholds = np.where(first & last, -bound - 1, thresholds)
        thresholds = np.where(~first & ~last, bound + 1, thresholds)
        return Threshold(thresholds.astype(np.int32), np.where(rises, 1, -1).astype(np.int8))

    def _is_positive(self, numbers: Array) -> Array:
        """For which of these integers, one per unit, torch's sign is +1."""
        x = torch.from_numpy(numbers.astype(np.float64))
        for step in self.steps:
            x = step(x)
        return (x >= 0).numpy()

    def rounded(self, unit: float, low: int, high: int) -> Rescale:
        """Torch's tensor in whole multiples of a unit, clipped."""
        units = self.flow.shape[0]
        slope, offset = (np.broadcast_to(values / unit, units) for values in (self.slope, self.offset))
        return _line(slope, offset, self.flow.bound, low, high)


def _line(slope: Array, offset: Array, bound: int, low: int, high: int) -> Rescale:
    """``slope * k + offset``, rounded to nearest, with as many binary digits as fit; ``|k| <= bound``."""
    if np.allclose(slope, 1, rtol=1e-9, atol=0) and not offset.any():  # only clipped, not rounded
        return Rescale(np.ones(len(slope), np.int32), np.zeros(len(slope), np.int64), 0, low, high)
    digits = [
        31 - math.frexp(float(np.abs(slope).max()))[1],
        60 - math.frexp(float(np.abs(offset).max()))[1],
        60 - math.frexp(float(np.abs(slope).max() * bound))[1],
    ]
    shift = max(0, min(min(digits) - 1, 40))
    half = 2.0 ** (shift - 1) if shift else 0.0
    multipliers = np.round(slope * 2.0**shift)
    if np.abs(multipliers).max() >= 2**31:
        raise ValueError("the slope of BatchNorm is too steep for 32-bit integers")
    offsets = np.round(offset * 2.0**shift + half)
    return Rescale(multipliers.astype(np.int32), offsets.astype(np.int64), shift, low, high)
