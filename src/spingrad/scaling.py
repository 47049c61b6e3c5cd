"""The scale of a step's problem: rows, targets, directions that rows have in common, and those of units."""

from typing import Literal

import torch
from torch import Tensor

from spingrad.rows import DenseRows, Rows

Weighting = Literal["uniform", "normalized"]
TargetRms = float | Literal["auto"] | None

ROUNDING = 1e-6  # a gradient below this fraction of the layer's largest is rounding error
AUTO = 0.35  # target of a row whose inputs no other row shares
SHARED = 16  # directions of the units that whitening weakens


def jacobian(rows: Rows, weighting: Weighting = "uniform") -> Rows:
    """Scale a layer's inputs to the ``Z`` of the problem.

    ``"uniform"`` divides all rows by ``√(n · mean ‖x‖²)``: they weigh the same, as a quadratic model of
    the loss asks, and spins reach ``|z · g| ≤ 1`` at a row of mean norm, whatever the unit of the inputs.
    ``"normalized"`` is the paper's ``x_b / ‖x_b‖²``, in which the shortest rows weigh most.

    Example:
        >>> x = torch.tensor([[3.0, 4.0], [300.0, 400.0]])
        >>> jacobian(DenseRows(x)).dense()
        tensor([[0.0060, 0.0080],
                [0.6000, 0.8000]])
        >>> jacobian(DenseRows(x), "normalized").dense()
        tensor([[0.1200, 0.1600],
                [0.0012, 0.0016]])
    """
    if weighting == "normalized":
        x = rows.dense()
        return DenseRows(x / x.square().sum(1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny))
    if weighting == "uniform":
        r, n = rows.shape
        norm = rows.norm() * (n / max(r, 1)) ** 0.5
        return rows / torch.where(norm > 0, norm, torch.ones_like(norm))
    raise ValueError(f'rows is "uniform" or "normalized", got {weighting!r}')


def unit_rms(grad: Tensor, count: int) -> Tensor:  # (N, m, ...) -> (m,)
    """The root mean square of each unit's gradient over ``count`` rows.

    Example:
        >>> unit_rms(torch.tensor([[3.0, 0.0], [-3.0, 0.0]]), 2)
        tensor([3., 0.])
    """
    others = [0, *range(2, grad.ndim)]
    return torch.sqrt(grad.square().sum(others) / count)  # faster than a norm along these dimensions


def target_factor(rms: Tensor, target_rms: Tensor | float) -> Tensor:  # (m,) -> (m,)
    """The factor that gives each unit's gradient a root mean square of ``target_rms``.

    A mean-reduced loss has gradients far smaller than what ``Z G`` can reach, and the spins nearest to a
    target near zero do nothing. A gradient that is zero, or only the rounding error of a zero (as where
    both classes get equal weights), gets the factor zero.

    Example:
        >>> target_factor(torch.tensor([0.25, 0.125, 0.0]), 0.5)
        tensor([2., 4., 0.])
    """
    return torch.where(rms > ROUNDING * rms.max(), target_rms / rms, 0)


def suitable_target(Z: Rows) -> Tensor:
    """A ``target_rms`` that suits the rows: it grows with the number of rows that share their inputs.

    The targets of different rows are mostly noise to each other. Of N rows with the same inputs, spins can
    reach only ``1/√N`` of their targets. So such rows get ``√N`` times the target of a row with inputs of
    its own.

    Example:
        >>> suitable_target(DenseRows(torch.eye(4))), suitable_target(DenseRows(torch.ones(4, 4)))
        (tensor(0.3500), tensor(0.7000))
    """
    return AUTO * overlap(Z.sketch[1], len(Z)).sqrt()


def overlap(products: Tensor, count: int) -> Tensor:
    """With how many of ``count`` rows a row shares its inputs, itself included: a sum of squared cosines.

    Args:
        products: Inner products of a sample of the rows, shape ``(s, s)``.
        count: Number of all rows.

    Example:
        >>> overlap(torch.eye(8), 8), overlap(torch.ones(8, 8), 8), overlap(torch.ones(8, 8), 800)
        (tensor(1.), tensor(8.), tensor(800.))
    """
    s, own = len(products), products.diagonal()
    norm, squares, total = own.mean(), own.square().mean(), products.square().sum()
    others = (total - s * squares) / max(1, s * (s - 1))
    return torch.where(norm > 0, (squares + (count - 1) * others) / norm.square(), 0)


def leading(rows: Tensor, products: Tensor, rank: int) -> Tensor:  # (s, n) -> (at most rank, n)
    """A few rows ``L`` in place of many: ``LᵀL`` has the leading directions of ``rowsᵀ rows``.

    Found by subspace iteration. It starts at rows of the batch, so it needs no random numbers.

    Args:
        rows: Shape ``(s, n)``.
        products: Their inner products, shape ``(s, s)``.
        rank: Number of directions.

    Example:
        >>> rows = torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 0.1]])
        >>> leading(rows, rows @ rows.T, 1).abs()
        tensor([[5., 0.]])
    """
    rank = min(rank, rows.shape[1])
    if len(rows) <= rank:
        return rows
    directions = products[:, :: len(rows) // rank][:, :rank]
    directions = products @ torch.linalg.qr(directions)[0]
    found: Tensor = torch.linalg.qr(directions)[0].T @ rows
    return found


def whitened(H: Tensor, strength: float) -> Tensor:  # (n, m) -> (n, m)
    """Fields that are weaker in the directions which units share: ``H (1 + strength · HᵀH / λ)^-½``.

    ``λ`` is the mean eigenvalue of ``HᵀH``. Only the leading directions change, which are found by subspace
    iteration from some of the units, and each unit's fields keep their length. Nothing is read back to the
    host.

    Args:
        H: Fields, a column for each unit.
        strength: At 1, a direction as strong as the mean is divided by √2. Much larger values make the
            leading directions equally strong, as Muon does with all of them.

    Example:
        >>> H = torch.tensor([[3.0, 3.0], [1.0, -1.0]])  # both units ask for the first spin
        >>> whitened(H, 1.0)
        tensor([[ 2.8180,  2.8180],
                [ 1.4349, -1.4349]])
    """
    low, high = torch.aminmax(H.T)
    peak = torch.maximum(-low, high)
    units = H.T / peak.where(peak > 0, 1)  # squares of the fields themselves may be out of range
    start = units[:: max(1, len(units) // SHARED)][:SHARED]
    shared = torch.linalg.qr(units @ start.T)[0].T @ units
    basis = torch.linalg.qr(units @ shared.T)[0]
    shared, length = basis.T @ units, units.norm(dim=1)
    mean, one = length.square().mean(), torch.eye(len(shared), dtype=H.dtype, device=H.device)
    kept = _inverse_root(one + strength / mean.where(mean > 0, 1) * (shared @ shared.T))
    units.addmm_(basis @ (one - kept), shared, alpha=-1)
    after = units.norm(dim=1)
    units *= (peak * length / after.where(after > 0, 1))[:, None]
    return units.T


def _inverse_root(matrix: Tensor) -> Tensor:
    """``matrix^-½`` for a small symmetric matrix with eigenvalues of at least 1, after Newton and Schulz."""
    size = torch.linalg.matrix_norm(matrix)
    one = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    root, inverse = matrix / size, one
    for _ in range(16):  # enough for a ratio of 1e4 between the eigenvalues
        factor = torch.addmm(one, inverse, root, beta=1.5, alpha=-0.5)
        root, inverse = root @ factor, factor @ inverse
    inverse *= size.rsqrt()
    return inverse
