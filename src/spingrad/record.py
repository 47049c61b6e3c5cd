"""The record: what a layer saw in the backward pass, as two matrices."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spingrad.rows import Patches

ToRows = Callable[[Tensor, Tensor], Iterable[tuple[Tensor | Patches, Tensor]]]


@dataclass(frozen=True)
class LayerRecord:
    """A layer's input and the gradient at its output, one row per sample, patch or node.

    Nothing downstream knows which kind of layer it serves.

    Args:
        x: Inputs, shape ``(r, n)``; a convolution's are not unfolded yet.
        grad: Gradient of the loss by the layer's linear output, shape ``(r, m)``.
    """

    x: Tensor | Patches
    grad: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.grad):
            raise ValueError(f"x and grad need equally many rows, got {len(self.x)} and {len(self.grad)}")

    def is_finite(self) -> bool:
        # One pass and no mask: a sum is finite unless an entry is not (or the entries near overflow).
        return bool(torch.isfinite(self.x.sum() + self.grad.sum()))


class Pass(NamedTuple):
    """Raw tensors of one backward pass. Patches are unfolded late: they are k² times the image."""

    x: Tensor
    grad: Tensor
    to_rows: ToRows


class Record:
    """The backward passes of one weight since its last step, kept beside ``weight.grad``.

    A layer in training mode adds to it whenever its weight has one. Passes of gradient accumulation, or
    of a weight used twice, add up as more rows.
    """

    def __init__(self, keep_grad: bool = False) -> None:
        self.passes: list[Pass] = []
        self.keep_grad = keep_grad

    def add(self, x: Tensor, grad: Tensor, to_rows: ToRows) -> None:
        self.passes.append(Pass(x, grad, to_rows))

    def clear(self) -> None:
        self.passes.clear()

    def layers(self) -> list[LayerRecord]:
        """One :class:`LayerRecord` for each group of channels (one in all but grouped layers)."""
        groups = zip(*(p.to_rows(p.x, p.grad) for p in self.passes), strict=True)
        pairs = (zip(*group, strict=True) for group in groups)
        return [LayerRecord(_join(x), _join(grad)) for x, grad in pairs]


def _join(rows: tuple[Any, ...]) -> Any:  # of tensors, or of patches
    cat = Patches.cat if isinstance(rows[0], Patches) else torch.cat
    joined = rows[0] if len(rows) == 1 else cat(rows)
    return joined if joined.dtype == torch.float64 else joined.float()


def start_recording(weight: Tensor, keep_grad: bool = False) -> Record:
    """Make the layers of ``weight`` record, and no longer compute ``weight.grad`` unless asked."""
    stop_recording(weight)
    record = Record(keep_grad)
    weight.record = record  # type: ignore[attr-defined]
    return record


def stop_recording(weight: Tensor) -> None:
    """Return ``weight`` to binary passes and ordinary gradients, as any torch optimizer expects them."""
    for mark in ("record", "relaxed"):
        if hasattr(weight, mark):
            delattr(weight, mark)


def record_of(weight: Tensor) -> Record | None:
    return getattr(weight, "record", None)
