"""How far spins reach: rows that count, the scale of a target, what rows share, directions that lead."""

import math

import torch
from torch import Tensor

from spingrad.rows import Patches

ROUNDING = 1e-6  # of the largest root mean square in the layer
SAMPLE = 128  # rows that stand for all
AUTO = 0.35  # the target of a row that has nothing in common with others


def live_rows(x: Tensor | Patches, grad: Tensor) -> tuple[Tensor | Patches, Tensor]:
    """The rows that have a gradient, if some have none: not the nodes outside a training set.

    A few patches are not left out: that costs more than they do.
    """
    if grad.sum(1).all():  # else a row without gradient, or one that cancels
        return x, grad
    live = grad.abs().amax(1) > 0
    if not 0 < live.sum() < len(live) * (0.9 if isinstance(x, Patches) else 1):
        return x, grad
    return x.where(live) if isinstance(x, Patches) else x[live], grad[live]


def idle_units(V: Tensor) -> Tensor | None:  # (r, m) -> indices
    """The units that have no target to move to, if any."""
    if V.sum(0).all():
        return None
    return (V.abs().amax(0) == 0).nonzero()[:, 0]


def reachable_target(grad: Tensor, target_rms: float | None) -> Tensor:  # (r, m) -> (r, m)
    """Scale each unit's gradient over the batch to a root mean square of ``target_rms``.

    A mean-reduced loss has gradients far smaller than what ``Z G`` can be, and the nearest spins to a
    target near zero do nothing. ``None`` leaves the gradient alone, which is the paper. A gradient that
    is zero, or but the rounding error of a zero (equal weights to both classes, say), has a zero target.
    """
    if target_rms is None:
        return grad
    if grad.stride(0) == 1:  # unit by unit, as a convolution's: a norm is faster, elsewhere squares are
        rms = torch.linalg.vector_norm(grad, dim=0) / len(grad) ** 0.5
    else:
        rms = grad.square().mean(0).sqrt_()
    largest = rms.max()
    if largest < torch.finfo(grad.dtype).tiny ** 0.4 and (peak := grad.abs().max()) > 0:
        return reachable_target(grad / peak, target_rms)  # squares had underflowed
    return grad * torch.where(rms > ROUNDING * largest, target_rms / rms, 0)


def suitable_target(gram: Tensor, count: int) -> float:
    """A ``target_rms`` by how much ``count`` rows have in common, of some of which ``gram`` has the products.

    What rows ask for is mostly noise to the inputs, so ``N`` rows that resemble each other reach but
    ``1/√N`` of it. They get ``√N`` times the target of a row that stands alone.
    """
    return AUTO * math.sqrt(overlap(gram, count))


def sampled(x: Tensor | Patches) -> tuple[Tensor, Tensor]:  # (s, n), (s, s)
    """Some rows, as strong together as all, and their products with each other."""
    rows = x.sample(SAMPLE) if isinstance(x, Patches) else x[:: max(1, -(-len(x) // SAMPLE))]
    rows = rows if len(rows) == len(x) else rows * (len(x) / len(rows)) ** 0.5
    return rows, rows @ rows.T


def overlap(gram: Tensor, count: int) -> float:
    """With how many of ``count`` rows a row shares its inputs, itself included: a sum of squared cosines.

    Example:
        >>> overlap(torch.eye(8), 8), overlap(torch.ones(8, 8), 8), overlap(torch.ones(8, 8), 800)
        (1.0, 8.0, 800.0)
    """
    own = gram.diagonal()
    norm, squares, all_ = (float(t) for t in (own.mean(), own.square().mean(), gram.square().sum()))
    others = (all_ - len(gram) * squares) / max(1, len(gram) * (len(gram) - 1))
    return (squares + (count - 1) * others) / norm**2 if norm > 0 else 0.0


def leading(rows: Tensor, gram: Tensor, rank: int) -> Tensor:  # (s, n) -> (at most rank, n)
    """Few rows ``L`` in place of many: ``LᵀL`` has the leading directions of ``rowsᵀ rows``.

    Found by subspace iteration, which starts at rows of the batch, so that it needs no random numbers.

    Example:
        >>> rows = torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 0.1]])
        >>> leading(rows, rows @ rows.T, 1).abs()
        tensor([[5., 0.]])
    """
    rank = min(rank, rows.shape[1])
    if len(rows) <= rank:
        return rows
    directions = gram[:, :: len(rows) // rank][:, :rank]
    directions = gram @ torch.linalg.qr(directions)[0]
    found: Tensor = torch.linalg.qr(directions)[0].T @ rows
    return found
