"""The scale of a step's problem: the size of its linear term, its leading directions, and those of units."""

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

TargetRms = float | Literal["auto"] | None

ROUNDING = 1e-6  # a gradient below this fraction of the layer's largest is rounding error
AUTO = 0.35  # target of a row whose inputs no other row shares
LONGEST = 3.0  # medians, at which the length of a unit's gradient is cut
SHARED = 16  # directions of the units that whitening weakens


def size_of(length: Tensor, reach: Tensor) -> Tensor:  # (m,), (m,) -> (m,)
    """The factors that give the units' gradients a root mean square length of ``reach``.

    A loss has gradients of any size, and the spins nearest to a target near zero do nothing. Taken from the
    gradients' own length, the factors undo whatever has multiplied them. Lengths above three medians are cut,
    so that one unit cannot starve the others. A gradient that is zero, or only the rounding error of a zero
    (as where both classes get equal weights), gets the factor zero.

    Args:
        length: Of each unit's gradient.
        reach: Root mean square of the lengths after scaling, for each unit.

    Example:
        >>> size_of(torch.tensor([3.0, 4.0, 0.0]), torch.ones(3))
        tensor([0.3464, 0.3464, 0.0000])
        >>> size_of(torch.tensor([1.0, 1.0, 1000.0]), torch.ones(3)) * torch.tensor([1.0, 1.0, 1000.0])
        tensor([0.5222, 0.5222, 1.5667])
    """
    longest = length.max()
    live, relative = length > ROUNDING * longest, length / longest  # whose squares are in range
    cut = relative.clamp(max=LONGEST * relative.where(live, torch.nan).nanmedian())
    factors = reach / cut.square().mean().sqrt() * (cut / relative) / longest
    return factors.where(live, 0.0)


def overlap(products: Tensor, count: Tensor) -> Tensor:  # (..., s, s), (...) -> (...)
    """With how many of ``count`` rows a row shares its inputs, itself included: a sum of squared cosines.

    Args:
        products: Inner products of a sample of the rows; rows of zeros do not count.
        count: Number of all rows.

    Example:
        >>> count = torch.tensor(8.0)
        >>> overlap(torch.eye(8), count), overlap(torch.ones(8, 8), 100 * count)
        (tensor(1.), tensor(800.))
    """
    own = products.diagonal(dim1=-2, dim2=-1)
    s, total, squares = (own > 0).sum(-1), own.sum(-1), own.square().sum(-1)
    others = (products.square().sum((-2, -1)) - squares) / (s - 1).clamp(min=1)
    return (s * (squares + (count - 1) * others) / total.square()).where(total > 0, 0)


def leading(rows: Tensor, products: Tensor, rank: int) -> Tensor:  # (..., s, n) -> (..., at most rank, n)
    """A few rows ``L`` in place of many: ``LᵀL`` has the leading directions of ``rowsᵀ rows``.

    Found by subspace iteration from a fixed start.

    Args:
        rows: Shape ``(..., s, n)``.
        products: Their inner products, shape ``(..., s, s)``.
        rank: Number of directions.

    Example:
        >>> rows = torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 0.1]])
        >>> leading(rows, rows @ rows.T, 1).abs().round(decimals=4)
        tensor([[5., 0.]])
    """
    rank = min(rank, rows.shape[-1])
    if rows.shape[-2] <= rank:
        return rows
    directions = products @ _start(rows.shape[-2], rank, rows.dtype, rows.device)
    directions = products @ torch.linalg.qr(directions)[0]
    found: Tensor = torch.linalg.qr(directions)[0].mT @ rows
    return found


@lru_cache(256)
def _start(rows: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Signs that mix all rows, so that it does not matter which of them are zero."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, (rows, rank), generator=generator).mul_(2).sub_(1).to(device, dtype)


def factor(gram: Tensor) -> Tensor:  # (n, n) -> (k, n)
    """A ``Z`` of as few rows as possible with ``ZᵀZ = gram``, by Cholesky's method with pivots.

    Inputs that are always zero stay exactly zero, and equal ones equal, as an exact solver likes it. It reads
    values back to the host.

    Args:
        gram: In double precision, so that its rank can be told from rounding.

    Example:
        >>> factor(torch.tensor([[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 0.0]]).double())
        tensor([[1., 2., 0.]], dtype=torch.float64)
    """
    rest = gram.diagonal().clone()
    negligible = 8 * len(gram) * torch.finfo(gram.dtype).eps * float(rest.max())
    Z = torch.zeros_like(gram)
    for k in range(len(gram)):
        pivot = int(rest.argmax())
        largest = float(rest[pivot])
        if not largest > negligible:
            return Z[:k]
        torch.sub(gram[pivot], Z[:k, pivot] @ Z[:k], out=Z[k]).div_(largest**0.5)
        rest -= Z[k].square()
        rest[pivot] = 0
    return Z


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
