"""A whole layer at once: error feedback from zero, then descent over single spins."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from spingrad._memory import Pool
from spingrad._numbers import check_whole
from spingrad.kernels.operators import descend_
from spingrad.nn.sign import spins_of
from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Solution, Solver, checked_start

SMALL_FAN_IN = 32
FEW_UNITS = 8  # of problems that are solved together
FEW_ROWS = 64  # up to here one sweep spin by spin is as fast as one by large blocks


class BlockDescentSolver(Solver):
    """Descend on all units of a layer together; the default solver.

    The first sweep starts at ``G = 0`` and sets every spin once. The outputs ``U = Z G`` of the spins set so
    far are fed back into the fields of those that follow (starting at the sign of ``H`` would overshoot):

        ``g_i = sign(H_i - z_iᵀ U),  U ← U + z_i g_i``

    Its cost is at most two matrix products, linear in rows, inputs and units. Further sweeps visit the
    spins in the same order and flip each whose flip lowers the energy, so the energy never rises. All
    devices set the same spins, up to rounding (``spingrad.kernels.operators``).

    Problems with many rows, as of ``rank=None``, get one sweep by default, which sets a third of the inputs
    at once. It is two large matrix products, and with many rows single spins are hardly better.

    One or two sweeps are enough for wide layers, which are almost convex. Small layers are combinatorial:
    there descent stalls above the optimum, and restarts from random spins help.

    Args:
        num_sweeps: Sweeps, the first included. By default 8 with a fan-in of 32 or less; in wider layers 2
            with at most 64 rows, else 1.
        num_reads: Starts, of which the best is kept: zero, then random spins. By default 1, or 8 with a
            fan-in of 32 or less.

    Example:
        >>> problem = BinaryQuadratic.least_squares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
        >>> BlockDescentSolver().solve(problem).spins
        tensor([[ 1.],
                [-1.]])
    """

    keeps_starts = True

    def __init__(self, num_sweeps: int | None = None, num_reads: int | None = None) -> None:
        for name, value in {"num_sweeps": num_sweeps, "num_reads": num_reads}.items():
            if value is not None:
                check_whole(name, value, 1)
        self.num_sweeps, self.num_reads = num_sweeps, num_reads
        self._pool = Pool()

    @classmethod
    def accurate(cls) -> "BlockDescentSolver":
        """Many restarts, for layers of up to 64 inputs: slower, with energies at or close to the optimum."""
        return cls(num_sweeps=8, num_reads=64)

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        """Solve every unit. From ``initial``, shape ``(n, m)``, sweeps only flip what lowers the energy.

        With several reads the start is one of them, in place of random spins.
        """
        sweeps, reads = self._effort(problem)
        start = None if initial is None else checked_start(problem, initial).T.contiguous()
        small = problem.compressed() if _compression_pays(problem, sweeps * reads) else problem
        if reads > 1:
            return Solution(problem, self._best_of(small, reads, sweeps, seed, start).T)
        if start is not None:
            descend_(small.Z, small.H.T, start, sweeps, started=True)
            return Solution(problem, start.T)
        H = small.H.T  # (m, n), the layout of a weight: transposing it costs as much as a sweep
        G = self._pool.empty(len(H), H.shape[1] + 16, H)[:, :-16]  # rows that are not 4096 bytes apart
        if sweeps == 1 and _by_blocks(small):
            _error_feedback(small.Z, H, G)
        else:
            descend_(small.Z, H, G, sweeps)
        return Solution(problem, G.T)

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        """Solve the problems of one step; neighbours of few units and one shape, such as groups, together."""
        solutions = []
        for _, alike in groupby(problems, _form):
            together = [*alike]
            if len(together) > 1 and together[0].num_units <= FEW_UNITS:
                solutions += self._solve_together(together, seed)
            else:
                solutions += [self.solve(problem, seed=seed) for problem in together]
        return solutions

    def _solve_together(self, problems: list[BinaryQuadratic], seed: int) -> list[Solution]:
        """Single spins of all problems at once."""
        sweeps, reads = self._effort(problems[0])
        Z, H = torch.stack([p.Z for p in problems]), torch.stack([p.H.T for p in problems])
        F = H.repeat(1, reads, 1)  # restarts are more units
        G = _starts(H, reads, seed).movedim(0, 1).flatten(1, 2)
        descend_(Z, F, G, sweeps, started=True)
        energy = (G @ Z.mT).square().sum(2) - 2 * (F * G).sum(2)
        best = energy.unflatten(1, (reads, -1)).argmin(1)[:, None, :, None].expand(-1, -1, -1, H.shape[2])
        spins = G.unflatten(1, (reads, -1)).gather(1, best)[:, 0]
        return [Solution(problem, own.T) for problem, own in zip(problems, spins, strict=True)]

    def _effort(self, problem: BinaryQuadratic) -> tuple[int, int]:
        """Sweeps and reads, chosen by the size of the problem where not given."""
        if problem.num_spins <= SMALL_FAN_IN:
            return self.num_sweeps or 8, self.num_reads or 8
        return self.num_sweeps or (2 if len(problem.Z) <= FEW_ROWS else 1), self.num_reads or 1

    def _best_of(
        self, problem: BinaryQuadratic, reads: int, sweeps: int, seed: int, start: Tensor | None
    ) -> Tensor:  # (m, n)
        """The best of several starts for every unit; restarts are more units, so one descent takes all."""
        n, m = problem.H.shape
        H, Z = problem.H.T.repeat(reads, 1), problem.Z
        G = _starts(problem.H.T, reads, seed).flatten(0, 1)
        if start is not None:
            G[m : 2 * m] = start
        descend_(Z, H, G, sweeps, started=True)
        energy = (G @ Z.T).square().sum(1) - 2 * (H * G).sum(1)
        best = energy.view(reads, m).argmin(0)
        return G.view(reads, m, n)[best, torch.arange(m, device=best.device)]


def _form(problem: BinaryQuadratic) -> tuple[object, ...]:
    return problem.Z.shape, problem.H.shape, problem.H.dtype, problem.H.device


def _starts(H: Tensor, reads: int, seed: int) -> Tensor:  # (..., n) -> (reads, ..., n)
    """Zero for the first read, random spins for the others, which turn round where their fields do.

    They are the same for all units, whose answers then do not depend on which units are solved together.
    """
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(2, (reads - 1, H.shape[-1]), generator=generator).mul_(2).sub_(1).to(H)
    random = random.view(-1, *[1] * (H.ndim - 1), H.shape[-1])
    return torch.cat([torch.zeros_like(H)[None], random * spins_of(H)])


def _by_blocks(problem: BinaryQuadratic) -> bool:
    """Whether one sweep by large blocks is faster than one over single spins."""
    return problem.num_spins > SMALL_FAN_IN and len(problem.Z) > FEW_ROWS


def _error_feedback(Z: Tensor, H: Tensor, G: Tensor) -> None:
    """Spins from zero, a third of the inputs after the other, each third knowing the outputs before it.

    ``G`` (m, n) receives the spins.
    """
    n = Z.shape[1]
    size = 16 * -(-n // 48)  # whole vector registers
    one, U = G.new_ones(()), H.new_zeros(len(H), len(Z))
    for first in range(0, n, size):
        own = slice(first, first + size)
        z, g = Z[:, own], G[:, own]
        field = H[:, own] if first == 0 else torch.addmm(H[:, own], U, z, alpha=-1, out=g)
        torch.copysign(one, field, out=g)  # a tie may fall either way
        if first + size < n:
            U.addmm_(g, z.T)


def _compression_pays(problem: BinaryQuadratic, sweeps: int) -> bool:
    """Is a QR factorisation cheaper than the rows it saves? Each sweep costs 4 r n m operations."""
    (r, n), m = problem.Z.shape, problem.num_units
    return r > n and 4 * r * n**2 + 4 * n * n * m * sweeps < 4 * r * n * m * sweeps
