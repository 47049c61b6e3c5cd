"""Proven optima: enumeration for a handful of spins, a sphere decoder beyond."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spingrad._numbers import check_whole
from spingrad.kernels.compiled import HAS_NUMBA, compiled
from spingrad.kernels.decode import decode
from spingrad.nn.sign import spins_of
from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Info, Solution, Solver, checked_start
from spingrad.solvers.block_descent import BlockDescentSolver

ENUMERABLE = 12
MOST_VALUES = 200  # that the sum of a bundle's spins may take
FIELD_ROUNDING = 1e-6  # of the largest field: sums in single precision round differently
NODES_PER_SLICE = 1_000_000 if HAS_NUMBA else 2_000  # between looks at the clock


class ExactSolver(Solver):
    """The best spins there are, and whether that was proved.

    Up to 12 spins are enumerated. Beyond, each unit is decoded by a Schnorr-Euchner search, which
    proves most problems of up to 60 spins in well under a second (with numba, extra ``fast``; the same
    loop in plain Python is much slower). Spins of equal inputs, or of the bits of a weight, count as
    one. A search that reaches a limit returns the best spins found; ``info["proved"]`` tells for each
    unit.

    Args:
        max_nodes: Nodes to visit for each unit.
        time_limit: Seconds for each call of ``solve``, over all units.

    Example:
        >>> problem = BinaryQuadratic.least_squares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
        >>> ExactSolver().solve(problem).info["proved"]
        tensor([True])
    """

    keeps_starts = True

    def __init__(self, max_nodes: int = 10_000_000, time_limit: float | None = None) -> None:
        check_whole("max_nodes", max_nodes, 1)
        if time_limit is not None and not time_limit > 0:
            raise ValueError(f"time_limit is None or a positive number of seconds, got {time_limit}")
        self.max_nodes, self.time_limit = max_nodes, time_limit

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        """Solve every unit; ``initial``, shape ``(n, m)``, is one of the spins that the search must beat."""
        if not bool(problem.H.isfinite().all() & problem.Z.isfinite().all()):
            raise ValueError("expected a problem of finite numbers, got NaN or infinity in Z or in H")
        double = problem.double()
        start = None if initial is None else checked_start(double, initial)
        if problem.num_spins <= ENUMERABLE:
            spins, info = _enumerate(double), Info(proved=torch.ones(problem.num_units, dtype=torch.bool))
        else:
            spins, info = self._search(double, start, seed)
        return Solution(problem, spins.to(problem.H), info)

    def _search(self, problem: BinaryQuadratic, start: Tensor | None, seed: int) -> tuple[Tensor, Info]:
        spins = spins_of(problem.H).cpu()  # right for inputs that are always zero
        Z = problem.Z
        used = (Z != 0).any(0)
        if used.any() and problem.num_units:
            part = replace(problem, Z=Z[:, used], H=problem.H[used])
            start = None if start is None else start[used]
            spins[used.cpu()], info = self._search_used(part, start, seed)
            return spins, info
        return spins, {"proved": torch.ones(problem.num_units, dtype=torch.bool)}

    def _search_used(
        self, problem: BinaryQuadratic, initial: Tensor | None, seed: int
    ) -> tuple[Tensor, Info]:
        deadline = float("inf") if self.time_limit is None else time.monotonic() + self.time_limit
        bundles, whole, problem = list(_bundles(problem)), problem, problem.compressed()
        start = BlockDescentSolver.accurate().solve(problem, initial=initial, seed=seed).spins.cpu()
        found, alone = start, len(bundles) == len(start)  # every spin a bundle of its own, in their order
        if not alone:
            found = torch.stack([bundle.value(start) for bundle in bundles])  # (number of bundles, m)
            problem = _of_bundles(whole, bundles).compressed()
        counts = torch.tensor([len(bundle.values) for bundle in bundles])
        values = nn.utils.rnn.pad_sequence([bundle.values for bundle in bundles], batch_first=True)
        gram, fields = problem.gram().cpu(), problem.H.cpu()
        shifts, centers = _tightest_shifts(gram, fields, alone)
        proved = torch.zeros(problem.num_units, dtype=torch.bool)
        nodes = torch.zeros(problem.num_units, dtype=torch.long)
        for j in range(problem.num_units):
            # The most certain coordinates, far from zero in the relaxation, are decided first.
            order = centers[:, j].abs().argsort()
            shifted = gram - shifts[j] * torch.eye(len(gram), dtype=gram.dtype)
            L = torch.linalg.cholesky(shifted[order][:, order])
            target = torch.linalg.solve_triangular(L, fields[order, j, None], upper=False)[:, 0]
            best, prices = found[order, j].clone(), shifts[j] * (values[order].square() - 1)
            radius = (target - L.T @ best).square().sum() + shifts[j] * (best.square() - 1).sum()
            choice = values[order], prices, counts[order]
            nodes[j], proved[j] = self._decode(
                (L.T.contiguous(), target, *choice, best), float(radius), deadline
            )
            found[order, j] = best
        if not alone:
            for bundle, value in zip(bundles, found, strict=True):
                start[bundle.members] = bundle.spins(value)
        return start, {"proved": proved, "nodes": nodes}

    def _decode(self, search: tuple[Tensor, ...], radius: float, deadline: float) -> tuple[int, bool]:
        n = len(search[0])
        next_ = torch.full((n + 1, 2), -1)
        next_[n] = n - 1
        state = [t.numpy() for t in (next_, torch.zeros(n).double(), torch.zeros(n + 1).double())]
        nodes, done = 0, False
        while not done and nodes < self.max_nodes and time.monotonic() < deadline:
            budget = min(NODES_PER_SLICE, self.max_nodes - nodes)
            radius, visited, done = compiled(decode)(*(t.numpy() for t in search), radius, budget, *state)
            nodes += visited
        return nodes, done


@dataclass(frozen=True)
class _Bundle:
    """Spins whose inputs and fields are multiples of each other, such as those of equal pixels or of the bits
    of a weight. Only the sum of the spins times their strengths matters; it lies between -1 and +1.
    """

    members: list[int]
    strengths: Tensor  # (k,), of absolute sum 1
    values: Tensor  # (c,), the sums there are, rising
    choices: Tensor  # (c, k), spins for each of them

    @staticmethod
    def of(strengths: dict[int, float], sums: dict[float, tuple[int, ...]]) -> "_Bundle":
        values, choices = zip(*sorted(sums.items()), strict=True)
        own, rising, spins = (
            torch.tensor(part).double() for part in ([*strengths.values()], values, choices)
        )
        whole = own.abs().sum()
        return _Bundle([*strengths], own / whole, rising / whole, spins)

    def value(self, spins: Tensor) -> Tensor:  # (n, m) -> (m,)
        return self.values[self._nearest(self.strengths @ spins[self.members])]

    def spins(self, value: Tensor) -> Tensor:  # (m,) -> (k, m)
        return self.choices[self._nearest(value)].T

    def _nearest(self, value: Tensor) -> Tensor:
        return (self.values - value[:, None]).abs().argmin(1)


_ALONE = torch.ones(1).double(), torch.tensor([-1.0, 1.0]).double(), torch.tensor([[-1.0], [1.0]]).double()


def _bundles(problem: BinaryQuadratic) -> Iterator[_Bundle]:
    """The spins with parallel couplings, which leave a search little to prune, together in bundles."""
    inputs = problem.Z.T  # (n, r)
    peaks = inputs.gather(1, inputs.abs().argmax(1, keepdim=True))
    shapes, fields = inputs / peaks + 0.0, problem.H / peaks  # + 0.0: no negative zero
    alike: dict[bytes, list[int]] = {}
    for i, row in enumerate(shapes.cpu().numpy()):
        alike.setdefault(row.tobytes(), []).append(i)
    for members in _with_parallel_fields(alike, fields.cpu()):
        if len(members) == 1:
            yield _Bundle(members, *_ALONE)
            continue
        strengths: dict[int, float] = {}
        sums: dict[float, tuple[int, ...]] = {0.0: ()}
        for i in members:
            strength = float(peaks[i] / peaks[members[0]])
            more = {at + s * strength: (*spins, s) for at, spins in sums.items() for s in (1, -1)}
            if len(more) > MOST_VALUES:  # of arbitrary strengths, or of very many spins: in parts
                yield _Bundle.of(strengths, sums)
                strengths, more = {}, {s * strength: (s,) for s in (1, -1)}
            strengths, sums = {**strengths, i: strength}, more
        yield _Bundle.of(strengths, sums)


def _with_parallel_fields(alike: dict[bytes, list[int]], fields: Tensor) -> Iterator[list[int]]:
    """Spins with parallel inputs, taken together if their fields are parallel too, up to rounding."""
    for members in alike.values():
        while members:
            near = fields[members] - fields[members[0]]
            limit = FIELD_ROUNDING * fields[members[0]].abs().max()
            same = (near.abs().amax(1) <= limit).tolist()
            yield [i for i, fits in zip(members, same, strict=True) if fits]
            members = [i for i, fits in zip(members, same, strict=True) if not fits]


def _of_bundles(problem: BinaryQuadratic, bundles: list[_Bundle]) -> BinaryQuadratic:
    """The problem over sums of spins: a bundle's inputs are those of its spins, all up."""
    first = [bundle.members[0] for bundle in bundles]
    times = torch.stack([1 / bundle.strengths[0] for bundle in bundles]).to(problem.H)
    Z, H = problem.Z[:, first] * times, problem.H[first] * times[:, None]
    return replace(problem, Z=Z, H=H)


def _enumerate(problem: BinaryQuadratic) -> Tensor:  # (n, m)
    n = problem.num_spins
    device = problem.H.device
    bits = torch.arange(2**n, device=device)[:, None] >> torch.arange(n, device=device)
    every = (bits & 1).mul_(2).sub_(1).to(problem.H)  # (2^n, n)
    own = (every @ problem.Z.T).square().sum(1)
    best = [int((own - 2 * every @ h).argmin()) for h in problem.H.T]
    return every[best].T


def _tightest_shifts(gram: Tensor, fields: Tensor, alone: bool) -> tuple[Tensor, Tensor]:
    """The constant to take off the diagonal of each unit, and the minimum of what is left.

    On spins ``gᵀg = n``, so ``gᵀKg`` and ``gᵀ(K - μ)g + μn`` are equal; unconstrained, their minima are
    not. The ``μ`` with the largest minimum (that of the sphere ``‖g‖² = n``) prunes most. It also gives a
    rank-deficient ``K`` its positive definite form. Sums of spins lie within that sphere; their ``μ`` is
    not positive, and what ``μg²`` is above ``μ`` is a price in the search.
    """
    values, vectors = torch.linalg.eigh(gram)
    squares = (vectors.T @ fields).square()
    scale = values[-1].clamp(min=torch.finfo(gram.dtype).tiny ** 0.5)
    high = ((values[0] if alone else values[0].clamp(max=0)) - 1e-6 * scale).expand(fields.shape[1])
    low = high - (squares.sum(0) / len(gram)).sqrt()
    for _ in range(60):  # bisect the concave bound μn - Σ b²/(λ - μ)
        middle = (low + high) / 2
        rising = (squares / (values[:, None] - middle).square()).sum(0) < len(gram)
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    centers = vectors @ ((vectors.T @ fields) / (values[:, None] - low))
    return low, centers
