"""The mathematics of one step, as functions of tensors: prepare, scale, average, pose, whiten, move."""

from dataclasses import replace

import torch
from torch import Tensor

from spingrad.problem import BinaryQuadratic
from spingrad.record import Check, LayerRecord, checks
from spingrad.rows import DenseRows, Rows
from spingrad.scaling import (
    TargetRms,
    Weighting,
    jacobian,
    leading,
    suitable_target,
    target_factor,
    unit_rms,
    whitened,
)


def prepared(
    record: LayerRecord,
    found: tuple[Check, Tensor] | None = None,
    *,
    rows: Weighting = "uniform",
    target_rms: TargetRms = "auto",
) -> LayerRecord:
    """The rows of a record that have a gradient; the paper takes all rows.

    Args:
        record: Inputs and output gradients.
        found: What :func:`~spingrad.record.checks` found; by default it is called here.
        rows: As in :class:`~spingrad.QPSBGD`, like the argument that follows.
        target_rms: Gradients are rescaled before their squares underflow, if the target does not depend on
            their size.

    Example:
        >>> record = LayerRecord(DenseRows(torch.ones(3, 4)), torch.tensor([[1.0], [0.0], [2.0]]))
        >>> prepared(record).rows.shape  # without the row in the middle
        (2, 4)
    """
    check, live = checks([record])[0][0] if found is None else found
    if rows == "uniform":
        record = record.only(live, check.live)
    if check.extreme:
        if rows == "normalized":
            raise FloatingPointError(
                'squares of the layer\'s inputs overflow or underflow, and rows="normalized" divides by '
                'them; scale the inputs, or use rows="uniform"'
            )
        record = record.with_inputs_in_range()
    return record.rescaled() if check.tiny and target_rms is not None else record


def scale(
    record: LayerRecord, rows: Weighting = "uniform", target_rms: TargetRms = "auto"
) -> tuple[Rows, Tensor, Tensor]:
    """``Z`` from the inputs, and the factor that turns each unit's gradient into its target.

    Args:
        record: Inputs and output gradients.
        rows: How the rows are weighted, as in :class:`~spingrad.QPSBGD`.
        target_rms: Root mean square of each unit's target; ``None`` keeps the gradient, as in the paper.

    Returns:
        ``Z``, the factors of shape ``(m,)``, and the root mean square of each unit's target, shape ``(m,)``.

    Example:
        >>> record = LayerRecord(DenseRows(torch.eye(4)), torch.full((4, 2), 1e-6))
        >>> Z, factor, rms = scale(record, target_rms=0.5)
        >>> factor, rms
        (tensor([500000., 500000.]), tensor([0.5000, 0.5000]))
    """
    Z = jacobian(record.rows, rows)
    rms = unit_rms(record.grad, max(1, len(Z)))
    if target_rms is None:
        return Z, torch.ones_like(rms), rms
    target = suitable_target(Z) if target_rms == "auto" else target_rms * Z.fixed_target_factor
    factor = target_factor(rms, target)
    return Z, factor, rms * factor


def average(
    Z: Rows,
    grad: Tensor,
    factor: Tensor,
    momentum: float,
    exp_avg: Tensor | None,
    step: int,
    out: Tensor | None = None,
) -> Tensor:
    """The running average of ``ZᵀV`` after this step, in the layout of a weight, shape ``(m, n)``.

    Args:
        Z: Rows.
        grad: Output gradient.
        factor: Factor of each unit's gradient, which makes ``V`` of it.
        momentum: Weight of the past; zero for this step only.
        exp_avg: The average before this step, shape ``(m, n)``, or ``None`` at the first step.
        step: Number of steps in ``exp_avg``.
        out: Memory that may be used for the result.

    Example:
        >>> Z, one = DenseRows(torch.eye(2)), torch.ones(1)
        >>> first = average(Z, torch.tensor([[1.0], [1.0]]), one, 0.9, None, 0)
        >>> average(Z, torch.tensor([[1.0], [3.0]]), one, 0.9, first, 1)
        tensor([[1.0000, 2.0526]])
    """
    if exp_avg is None:
        return Z.pull_back(grad, factor, out=out)
    weight = (1 - momentum) / (1 - momentum ** (step + 1))  # no bias to a zero at the start
    return Z.pull_back(grad, factor, exp_avg, weight, out)


def pose(
    record: LayerRecord,
    *,
    rows: Weighting = "uniform",
    target_rms: TargetRms = "auto",
    momentum: float = 0.0,
    rank: int | None = None,
    exp_avg: Tensor | None = None,
    step: int = 0,
    out: Tensor | None = None,
) -> BinaryQuadratic:
    """The problem of one layer's step.

    Args:
        record: Inputs and output gradients, as :func:`prepared` leaves them.
        rows: As in :class:`~spingrad.QPSBGD`, like the three arguments that follow.
        target_rms: Root mean square of each unit's target.
        momentum: Weight of the past in the linear term.
        rank: How many leading directions the quadratic term keeps; ``None`` for all.
        exp_avg: The linear term's average before this step, shape ``(m, n)``.
        step: Number of steps in ``exp_avg``.
        out: Memory that may be used for the new average, shape ``(m, n)``.

    Returns:
        The problem. Its ``H`` is the new average, transposed.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> record = LayerRecord(DenseRows(torch.randn(64, 10)), torch.randn(64, 3))
        >>> problem = pose(prepared(record), momentum=0.9, rank=4)
        >>> problem.rows.shape, problem.H.shape  # 4 directions in place of 64 rows
        ((4, 10), torch.Size([10, 3]))
    """
    if rows == "normalized":
        record = record.dense()  # rows of their own weight each
    Z, factor, rms = scale(record, rows, target_rms)
    H = average(Z, record.grad, factor, momentum, exp_avg, step, out).T
    # As published, every unit moves, unless the whole layer has no gradient at all.
    idle = (rms == 0).all().expand_as(rms) if target_rms is None else rms == 0
    offset = torch.zeros_like(rms) if momentum else len(Z) * rms.square()  # without momentum ‖V - Z G‖²
    if rank is not None:
        Z = DenseRows(leading(*Z.sketch, rank))
    return BinaryQuadratic(Z, H, offset, idle)


def whiten(problem: BinaryQuadratic, strength: float) -> BinaryQuadratic:
    """A problem whose linear term is weaker in the directions which its units share.

    Args:
        problem: As :func:`pose` returns it.
        strength: As in :func:`~spingrad.scaling.whitened`.

    Example:
        >>> record = LayerRecord(DenseRows(torch.eye(2)), torch.tensor([[3.0, 3.0], [1.0, -1.0]]))
        >>> whiten(pose(record, target_rms=None), 1.0).H
        tensor([[ 1.9926,  1.9926],
                [ 1.0146, -1.0146]])
    """
    return replace(problem, H=whitened(problem.H, strength), offset=torch.zeros_like(problem.offset))


def problem_of(
    record: LayerRecord, rows: Weighting = "uniform", target_rms: TargetRms = "auto"
) -> BinaryQuadratic:
    """The problem of one batch alone, without momentum, from a record as a backward pass left it.

    Example:
        >>> from spingrad.solvers import SignSolver
        >>> record = LayerRecord(DenseRows(torch.eye(3)), torch.tensor([[1.0], [-2.0], [3.0]]))
        >>> SignSolver().solve(problem_of(record)).spins.T
        tensor([[ 1., -1.,  1.]])
    """
    return pose(prepared(record, rows=rows, target_rms=target_rms), rows=rows, target_rms=target_rms)


def move_(weight: Tensor, spins: Tensor, idle: Tensor, lr: float, clamp: float | None) -> None:
    """``Ω ← clamp(Ω - lr · G)`` for the units that are not idle.

    Args:
        weight: Latent weights, shape ``(m, n)``; changed in place.
        spins: ``G``, shape ``(m, n)``.
        idle: Units that stay, shape ``(m,)``.
        lr: Learning rate.
        clamp: Largest magnitude of a latent weight; ``None`` for no limit.

    Example:
        >>> weight, spins = torch.zeros(2, 3), torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, 1.0]])
        >>> move_(weight, spins, idle=torch.tensor([False, True]), lr=0.01, clamp=1.0)
        >>> weight
        tensor([[-0.0100,  0.0100, -0.0100],
                [ 0.0000,  0.0000,  0.0000]])
    """
    weight.addcmul_(spins, torch.where(idle, 0.0, -float(lr)).to(weight.dtype)[:, None])
    if clamp is not None:
        weight.clamp_(-float(clamp), float(clamp))
