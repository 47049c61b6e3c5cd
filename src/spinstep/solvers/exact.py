"""Proven optima: enumeration for a handful of spins, a sphere decoder beyond."""

import time

import torch
from torch import Tensor

from spinstep.problem import BinaryLeastSquares
from spinstep.signs import spins_of
from spinstep.solvers._kernels import HAS_NUMBA, compiled, decode
from spinstep.solvers.base import Solution, Solver
from spinstep.solvers.block_descent import BlockDescentSolver

ENUMERABLE = 12
NODES_PER_SLICE = 1_000_000 if HAS_NUMBA else 2_000  # between looks at the clock


class ExactSolver(Solver):
    """The best spins there are, and whether that was proved.

    Up to 12 spins are enumerated. Beyond, each unit is decoded by a Schnorr-Euchner search, which
    proves most problems of up to 60 spins in well under a second (with numba, extra ``fast``; the same
    loop in plain Python is much slower). A search that reaches a limit returns the best
    spins found; ``info["proved"]`` tells for each unit.

    Args:
        max_nodes: Nodes to visit for each unit.
        time_limit: Seconds for each call of ``solve``, over all units.

    Example:
        >>> problem = BinaryLeastSquares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
        >>> ExactSolver().solve(problem).info["proved"]
        tensor([True])
    """

    def __init__(self, max_nodes: int = 10_000_000, time_limit: float | None = None) -> None:
        if max_nodes < 1:
            raise ValueError(f"max_nodes is at least 1, got {max_nodes}")
        if time_limit is not None and not time_limit > 0:
            raise ValueError(f"time_limit is None or a positive number of seconds, got {time_limit}")
        self.max_nodes, self.time_limit = max_nodes, time_limit

    def solve(self, problem: BinaryLeastSquares, *, seed: int = 0) -> Solution:
        double = problem.double()
        if problem.num_spins <= ENUMERABLE:
            spins, info = _enumerate(double), {"proved": torch.ones(problem.num_units, dtype=torch.bool)}
        else:
            spins, info = self._search(double, seed)
        return Solution(spins.to(problem.Z), double.energy(spins.to(double.Z)).to(problem.Z.dtype), info)

    def _search(self, problem: BinaryLeastSquares, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        spins = spins_of(problem.fields()).cpu()  # right for inputs that are always zero
        live = problem.Z.abs().amax(0) > 0
        if live.any():
            H = None if problem.H is None else problem.H[live]
            part = BinaryLeastSquares(problem.Z[:, live], problem.V, problem.offset, H)
            spins[live.cpu()], info = self._search_live(part.compressed(), seed)
            return spins, info
        return spins, {"proved": torch.ones(problem.num_units, dtype=torch.bool)}

    def _search_live(self, problem: BinaryLeastSquares, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        deadline = float("inf") if self.time_limit is None else time.monotonic() + self.time_limit
        start = BlockDescentSolver(num_sweeps=16, num_reads=16).solve(problem, seed=seed).spins.cpu()
        gram, fields = (problem.Z.T @ problem.Z).cpu(), problem.fields().cpu()
        shifts, centers = _tightest_shifts(gram, fields)
        proved = torch.zeros(problem.num_units, dtype=torch.bool)
        nodes = torch.zeros(problem.num_units, dtype=torch.long)
        for j in range(problem.num_units):
            # The most certain coordinates, far from zero in the relaxation, are decided first.
            order = centers[:, j].abs().argsort()
            shifted = gram - shifts[j] * torch.eye(len(gram), dtype=gram.dtype)
            L = torch.linalg.cholesky(shifted[order][:, order])
            target = torch.linalg.solve_triangular(L, fields[order, j, None], upper=False)[:, 0]
            best = start[order, j].clone()
            nodes[j], proved[j] = self._decode(L.T.contiguous(), target, best, deadline)
            start[order, j] = best
        return start, {"proved": proved, "nodes": nodes}

    def _decode(self, R: Tensor, target: Tensor, best: Tensor, deadline: float) -> tuple[int, bool]:
        n = len(R)
        radius = float((target - R @ best).square().sum()) * (1 + 1e-12)
        left_to_try = torch.full((n + 1,), 2)
        left_to_try[n] = n - 1
        state = [t.numpy() for t in (left_to_try, torch.zeros(n).double(), torch.zeros(n + 1).double())]
        nodes, done = 0, False
        while not done and nodes < self.max_nodes and time.monotonic() < deadline:
            budget = min(NODES_PER_SLICE, self.max_nodes - nodes)
            radius, visited, done = compiled(decode)(
                R.numpy(), target.numpy(), best.numpy(), radius, budget, *state
            )
            nodes += visited
        return nodes, done


def _enumerate(problem: BinaryLeastSquares) -> Tensor:  # (n, m)
    n = problem.num_spins
    bits = torch.arange(2**n, device=problem.Z.device)[:, None] >> torch.arange(n, device=problem.Z.device)
    every = (bits & 1).mul_(2).sub_(1).to(problem.Z)  # (2^n, n)
    own = (every @ problem.Z.T).square().sum(1)
    best = [(own - 2 * every @ h).argmin() for h in problem.fields().T]
    return every[torch.stack(best)].T


def _tightest_shifts(gram: Tensor, fields: Tensor) -> tuple[Tensor, Tensor]:
    """The constant to take off the diagonal of each unit, and the minimum of what is left.

    On spins ``gᵀg = n``, so ``gᵀKg`` and ``gᵀ(K - μ)g + μn`` are equal; unconstrained, their minima are
    not. The ``μ`` with the largest minimum (that of the sphere ``‖g‖² = n``) prunes most. It also gives a
    rank-deficient ``K`` its positive definite form.
    """
    values, vectors = torch.linalg.eigh(gram)
    squares = (vectors.T @ fields).square()
    scale = values[-1].clamp(min=torch.finfo(gram.dtype).tiny ** 0.5)
    high = (values[0] - 1e-6 * scale).expand(fields.shape[1])
    low = high - (squares.sum(0) / len(gram)).sqrt()
    for _ in range(60):  # bisect the concave bound μn - Σ b²/(λ - μ)
        middle = (low + high) / 2
        rising = (squares / (values[:, None] - middle).square()).sum(0) < len(gram)
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    centers = vectors @ ((vectors.T @ fields) / (values[:, None] - low))
    return low, centers
