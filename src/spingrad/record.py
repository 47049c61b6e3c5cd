"""The record: a layer's inputs and output gradients, as a step needs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spingrad.rows import DenseRows, Rows, peak_of


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """A layer's inputs as rows, and the gradient of the loss by its linear output.

    Nothing downstream knows which kind of layer it serves.

    Args:
        rows: Inputs, one row per sample, patch or node.
        grad: Gradient, shape ``(N, m)``; ``(N, m, height, width)`` for a convolution in two dimensions. Units
            are in dimension 1, and all other dimensions together count the rows.

    Example:
        >>> from spingrad.optim.functional import problem_of
        >>> record = LayerRecord(DenseRows(torch.eye(3)), torch.tensor([[1.0], [-2.0], [3.0]]))
        >>> problem_of(record).H.sign().T  # one field per input, of one unit
        tensor([[ 1., -1.,  1.]])
    """

    rows: Rows
    grad: Tensor

    @staticmethod
    def joined(parts: Sequence[tuple[Rows, Tensor]]) -> "LayerRecord":
        """Several passes as one, in single precision at least."""
        rows, grads = zip(*parts, strict=True)
        if any(not own.joins(rows[0]) for own in rows):  # such as one weight with two strides
            parts = [(own.rows, own.grad) for own in (LayerRecord(*part).dense() for part in parts)]
            rows, grads = zip(*parts, strict=True)
        dtype = torch.promote_types(torch.promote_types(rows[0].dtype, grads[0].dtype), torch.float32)
        return LayerRecord(*rows[0].join([own.to(dtype) for own in rows], [grad.to(dtype) for grad in grads]))

    def check(self) -> tuple[Tensor, Tensor]:
        """What the host needs to know of a record, and which rows have a gradient.

        Returns:
            The entries of a :class:`Check`, shape ``(4,)``, and a mask of the rows with a gradient, shape
            ``(r,)``. Nothing is read back to the host.
        """
        if not self.grad.numel():
            nothing = torch.tensor([1, 0, 0, 0], device=self.grad.device)
            return nothing, self.grad.new_zeros(0, dtype=torch.bool)
        peaks = self.grad.abs().amax(1).flatten()
        live, peak = peaks > 0, peaks.max()
        largest = self.rows.peak()
        finite = torch.isfinite(peak) & torch.isfinite(largest)
        low, high = _range(peak.dtype)
        extreme = (largest > 0) & ((largest < low) | (largest > high))
        return torch.stack([finite.long(), live.sum(), (peak < low).long(), extreme.long()]), live

    def only(self, live: Tensor, count: int) -> "LayerRecord":
        """The record of the ``count`` rows that have a gradient, if enough have none to be worth dropping.

        Nodes outside a training set would otherwise hold back every step towards their zero target.
        """
        if not 0 < count < self.rows.drop_below * len(self.rows):
            return self
        index = live.argsort(descending=True, stable=True)[:count]  # of known length: no read back
        return LayerRecord(*self.rows.select(index, self.grad))

    def dense(self) -> "LayerRecord":
        """The same record with its rows and its gradient as matrices, ``(r, n)`` and ``(r, m)``."""
        return LayerRecord(DenseRows(self.rows.dense()), self.grad.transpose(0, 1).flatten(1).T)

    def rescaled(self) -> "LayerRecord":
        """The gradient divided by its largest entry, so that its squares do not underflow."""
        peak = peak_of(self.grad)
        return LayerRecord(self.rows, self.grad / torch.where(peak > 0, peak, torch.ones_like(peak)))

    def with_inputs_in_range(self) -> "LayerRecord":
        """The inputs divided by their largest entry, so that their squares neither overflow nor underflow."""
        peak = self.rows.peak()
        return LayerRecord(self.rows.map(lambda data: data / peak), self.grad)


class Check(NamedTuple):
    """What a step has to know of a record before it computes anything.

    Args:
        finite: Whether all inputs and gradients are finite.
        live: Number of rows with a gradient.
        tiny: Whether squares of the gradient may underflow.
        extreme: Whether squares of the inputs may overflow or underflow.

    Example:
        >>> record = LayerRecord(DenseRows(torch.ones(1, 2)), torch.tensor([[torch.inf]]))
        >>> [(check, mask)], _ = checks([record])
        >>> check.finite
        False
    """

    finite: bool
    live: int
    tiny: bool
    extreme: bool


def checks(
    records: Sequence[LayerRecord], weights: Sequence[Tensor] = ()
) -> tuple[list[tuple[Check, Tensor]], list[bool]]:
    """The checks of all records, and which weights are finite; one tensor is read back for all together.

    Args:
        records: The records of a step.
        weights: Latent weights.

    Returns:
        For every record its check and a mask of the rows with a gradient; for every weight whether all its
        entries are finite.

    Example:
        >>> record = LayerRecord(DenseRows(torch.ones(3, 2)), torch.tensor([[1.0], [0.0], [2.0]]))
        >>> [(check, mask)], _ = checks([record])
        >>> check
        Check(finite=True, live=2, tiny=False, extreme=False)
        >>> mask
        tensor([ True, False,  True])
    """
    found = [record.check() for record in records]
    sums = [torch.isfinite(weight.sum()).long().expand(4) for weight in weights]  # faster than extremes
    entries = [own for own, _ in found] + sums
    numbers = torch.stack([own.to(entries[0].device) for own in entries]).tolist()
    seen = [
        (Check(bool(finite), live, bool(tiny), bool(extreme)), mask)
        for (finite, live, tiny, extreme), (_, mask) in zip(numbers[: len(found)], found, strict=True)
    ]
    return seen, [bool(finite) for finite, *_ in numbers[len(found) :]]


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Between these, squares and sums of squares neither underflow nor overflow."""
    limits = torch.finfo(dtype)
    return float(limits.tiny**0.4), float(limits.max**0.4)
