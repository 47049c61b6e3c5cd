"""The mathematics of one step, as functions of tensors: scale, average, pose, move.

A layer with groups of channels is a batch of problems, one per group; shapes begin with ``g``, their number.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from spingrad.problem import BinaryQuadratic
from spingrad.scaling import AUTO, TargetRms, factor, leading, overlap, whitened
from spingrad.sketch import Kind


class Quadratic(NamedTuple):
    """What a step takes from a sketch.

    Args:
        Z: Rows of the quadratic term, shape ``(g, k, n)``.
        reach: Root mean square length of the units' linear terms, shape ``(g,)``; with ``target_rms=None``
            the factor of their gradients.
        offset: A constant to be added to each unit's energy, shape ``(g, m / g)``.

    Example:
        >>> quadratic = Quadratic(torch.eye(3)[None], torch.ones(1), torch.zeros(1, 2))
        >>> [problem] = pose(quadratic, H=torch.ones(2, 3), idle=torch.tensor([False, False]))
        >>> problem.energy(torch.ones(3, 2))  # of two units: ‖Z G‖² - 2⟨H, G⟩
        tensor([-3., -3.])
    """

    Z: Tensor
    reach: Tensor
    offset: Tensor


def scale(
    sketch: Tensor, kind: Kind, units: int, rank: int | None, target_rms: TargetRms = "auto"
) -> Quadratic:
    """The rows of the quadratic term, and how long the linear term is to be.

    Rows are divided by ``√(n · mean ‖x‖²)``: spins reach ``|z · g| ≤ 1`` at a row of mean norm, whatever the
    unit of the inputs. The targets of different rows are mostly noise to each other: of N rows with the same
    inputs, spins can reach only ``1/√N`` of theirs. So ``"auto"`` gives them ``√N`` times the target of a row
    with inputs of its own.

    Args:
        sketch: Shape ``(g, rows, columns)``, as :func:`~spingrad.sketch.sketch_of` leaves it.
        kind: Of the sketch.
        units: Of the layer.
        rank: How many leading directions the quadratic term keeps; ``None`` for all.
        target_rms: Root mean square of each unit's target; ``None`` keeps the gradient as it is.

    Example:
        >>> from spingrad.sketch import sketch_of
        >>> x, grad = torch.eye(4), torch.ones(4, 3)
        >>> sketch = sketch_of(x, grad, torch.Size([1, 17, 4]), torch.float32, "rows", ())
        >>> Z, reach, _ = scale(sketch, "rows", units=3, rank=2)
        >>> Z.shape, reach
        (torch.Size([1, 2, 4]), tensor([0.3500]))
    """
    table, count, n = sketch[:, :-1, :], sketch[:, -1, 0], _inputs(sketch, kind)
    offset = sketch.new_zeros(len(sketch), units // len(sketch))
    if kind == "rows":
        size = table.abs().amax(2)  # (g, slots)
        if len(table) == 1 and table.device.type == "cpu" and count < table.shape[1]:
            used = size[0] > 0  # constant shapes would only cost time here
            used[0] |= ~used.any()  # a problem has at least one row
            table = table[:, used]
        peak = _positive(size.amax(1))
        rows = table / peak[:, None, None]
        products = rows @ rows.mT
        norm = _positive(products.diagonal(dim1=1, dim2=2).sum(1)).sqrt()
        common, unit = overlap(products, count), (count / n).sqrt() / norm
        Z = leading(rows, products, rank or len(rows)) * unit[:, None, None]
        unit = unit / peak
    else:
        gram = table[:, :, :n]
        trace, unit = gram.diagonal(dim1=1, dim2=2).sum(1), torch.ones_like(count)
        common = count * (gram.square().sum((1, 2)) / _positive(trace).square())
        if kind == "gram":
            unit = (count / n / _positive(trace)).sqrt()
            gram = gram * unit.square()[:, None, None]
        else:
            offset = sketch[:, -1, n : n + offset.shape[1]]
        factors = [factor(own) for own in gram]
        most = max(len(own) for own in factors)
        Z = torch.stack([pad(own, (0, 0, 0, most - len(own))) for own in factors])
    if target_rms is None:
        return Quadratic(Z, unit, offset)
    target = AUTO * common.sqrt() if target_rms == "auto" else float(target_rms)
    return Quadratic(Z, target * (count / n).sqrt(), torch.zeros_like(offset))


def _inputs(sketch: Tensor, kind: Kind) -> int:
    return sketch.shape[2] if kind == "rows" else sketch.shape[1] - 1


def _positive(values: Tensor) -> Tensor:
    return values.where(values > 0, 1)


def published(sketch: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:  # (m, n) -> (m, n), (g,)
    """The paper's linear term, and by what number the gradient is a multiple of what backward passes left.

    The paper's rows have weights of their own, which a gradient does not know. So ``ZᵀV`` is summed in the
    backward pass, and the gradient may be multiplied by a number for each group, but not changed otherwise.

    Raises:
        RuntimeError: The gradient is no multiple of that of the backward passes.

    Example:
        >>> from spingrad.sketch import sketch_of
        >>> x, V = torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.tensor([[1.0], [4.0]])
        >>> sketch = sketch_of(x, V, torch.Size([1, 3, 4]), torch.float32, "published", ())
        >>> published(sketch, 10 * V.T @ x)
        (tensor([[25.,  5.]], dtype=torch.float64), tensor([10.], dtype=torch.float64))
    """
    n, by_group = grad.shape[1], grad.double().unflatten(0, (len(sketch), -1))  # (g, m / g, n)
    linear, plain = sketch[:, :-1, n:].mT.chunk(2, 1)
    squares, units = sketch[:, -1, n:], plain.shape[1]  # ‖V‖² of each unit, then ‖X‖²
    eps = torch.finfo(grad.dtype).eps
    noise = 8 * eps * (squares[:, :units].sum(1) * squares[:, units]).sqrt()  # of sums that cancel, too
    ratio = (by_group * plain).sum((1, 2)) / _positive(plain.square().sum((1, 2)))
    factors = torch.where(_length(by_group - plain) <= noise, 1.0, ratio)
    rest = _length(by_group - factors[:, None, None] * plain)
    if bool((rest > 1e3 * eps * _length(by_group) + noise * (factors == 1)).any()):
        raise RuntimeError(
            "weight.grad was changed (or computed in low precision), and the paper's rows have weights of "
            "their own that a gradient does not know: as published, it may only be multiplied by a number. "
            'Use rows="uniform" to change it'
        )
    return (factors[:, None, None] * linear).flatten(0, 1), factors


def _length(by_group: Tensor) -> Tensor:  # (g, units, n) -> (g,)
    length: Tensor = torch.linalg.vector_norm(by_group, dim=(1, 2))
    return length


def weight_of(momentum: float, step: int) -> float:
    """The weight of a step in the running average: without a bias to the zero at the start.

    Example:
        >>> weight_of(0.9, 0), round(weight_of(0.9, 1), 4), round(weight_of(0.9, 1000), 4)
        (1.0, 0.5263, 0.1)
    """
    return (1 - momentum) / (1 - momentum ** (step + 1))


def pose(
    quadratic: Quadratic, H: Tensor, idle: Tensor, whitening: float = 0.0, first: int = 0
) -> list[BinaryQuadratic]:
    """The problems of one layer's step, one for each group of which there are units.

    Args:
        quadratic: Rows and offsets.
        H: Linear terms of some units, shape ``(m, n)``.
        idle: Which of them have no gradient, shape ``(m,)``.
        whitening: How much weaker the linear term becomes in directions which units share.
        first: Number of the first of these units.

    Example:
        >>> quadratic = Quadratic(torch.eye(3)[None], torch.ones(1), torch.zeros(1, 2))
        >>> [problem] = pose(quadratic, torch.ones(2, 3), torch.tensor([False, True]))
        >>> problem.Z.shape, problem.H.shape
        (torch.Size([3, 3]), torch.Size([3, 2]))
    """
    size = quadratic.offset.shape[1]  # units of a group
    problems = []
    for group, Z in enumerate(quadratic.Z):
        start, end = max(first, group * size), min(first + len(H), (group + 1) * size)
        if start >= end:
            continue
        fields, rests = H[start - first : end - first], idle[start - first : end - first]
        offset = quadratic.offset[group, start - group * size : end - group * size]
        if whitening:
            fields, offset = whitened(fields.T, whitening).T, torch.zeros_like(offset)
        problems.append(BinaryQuadratic(Z, fields.T, offset, rests))
    return problems
