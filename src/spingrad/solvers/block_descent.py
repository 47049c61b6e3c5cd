"""A whole layer at once: error feedback from zero, then descent, block of inputs by block."""

import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from spingrad._memory import Pool
from spingrad._numbers import check_whole
from spingrad.kernels.descent import (
    HAS_NUMBA,
    Backend,
    descend_,
    descend_together_,
    fits_kernel,
    flip_,
    has_kernel,
)
from spingrad.nn.sign import spins_of
from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Solution, Solver, checked_start, derive_seed

SMALL_FAN_IN = 32
FEW_UNITS = 8  # of problems that are solved together
FEW_ROWS = 64  # up to here one sweep spin by spin is as fast as one by large blocks
NO_NUMBA = (
    f"numba is not installed: layers of more than {SMALL_FAN_IN} inputs get one sweep by blocks in place of "
    'two over single spins; accuracy may be lower. pip install "spingrad[fast]", or set num_sweeps'
)


class BlockDescentSolver(Solver):
    """Descend on all units together, a block of inputs at a time; the default solver.

    The first sweep starts at ``G = 0`` and sets every spin once. The outputs ``U = Z G`` of the spins set so
    far are fed back into the fields of those that follow (starting at the sign of ``H`` would overshoot):

        ``G_b = sign(H_b - Z_bᵀ U),  U ← U + Z_b G_b``

    Its cost is at most two matrix products, linear in rows, inputs and units. Further sweeps visit the
    spins in the same order and flip each whose flip lowers the energy, so the energy never rises.

    One or two sweeps are enough for wide layers, which are almost convex. Small layers are combinatorial:
    there descent stalls above the optimum, and restarts from random spins help.

    Args:
        num_sweeps: Sweeps, the first included. By default 8 with a fan-in of 32 or less; 2 in wider layers
            with at most 64 rows where numba sets single spins (CPU, single precision); else 1, with a warning
            if numba is missing.
        num_reads: Starts, of which the best is kept: zero, then random spins. By default 1, or 8 with a
            fan-in of 32 or less.
        block_size: Spins set at once in the first sweep from zero. By default 1 with a fan-in of 32 or less.
            Wider layers have blocks of 1 where numba sets single spins and there are at most 64 rows or
            several sweeps; else of 32 if more sweeps follow or there are at most 32 rows; else of about a
            third of the fan-in.
        backend: Who sets single spins: ``"numba"`` (CPU only, extra ``fast``), ``"torch"``, or by default
            numba where it can.

    Example:
        >>> problem = BinaryQuadratic.least_squares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
        >>> BlockDescentSolver().solve(problem).spins
        tensor([[ 1.],
                [-1.]])
    """

    keeps_starts = True

    def __init__(
        self,
        num_sweeps: int | None = None,
        num_reads: int | None = None,
        block_size: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        counts = {"num_sweeps": num_sweeps, "num_reads": num_reads, "block_size": block_size}
        for name, value in counts.items():
            if value is not None:
                check_whole(name, value, 1)
        if backend == "numba" and not HAS_NUMBA:
            raise ImportError('backend="numba" needs numba: pip install "spingrad[fast]"')
        if backend not in ("auto", "numba", "torch"):
            raise ValueError(f'backend is "auto", "numba" or "torch", got {backend!r}')
        self.num_sweeps, self.num_reads = num_sweeps, num_reads
        self.block_size, self.backend = block_size, backend
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
            self._descend(small, small.H.T, start, sweeps, start @ small.Z.T)
            return Solution(problem, start.T)
        H = small.H.T  # (m, n), the layout of a weight: transposing it costs as much as a sweep
        G = self._pool.empty(len(H), H.shape[1] + 16, H)[:, :-16]  # rows that are not 4096 bytes apart
        block = self._block_size(small, sweeps)
        if block == 1:
            self._descend(small, H, G, sweeps)
        else:
            U = self._error_feedback(small, H, G, block, last=sweeps == 1)
            if sweeps > 1:
                self._descend(small, H, G, sweeps - 1, U)
        return Solution(problem, G.T)

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        """Solve the problems of one step; neighbours of few units and one shape, such as groups, together."""
        solutions = []
        for number, (_, alike) in enumerate(groupby(problems, _form)):
            together, own = [*alike], derive_seed(seed, number)
            if len(together) == 1:
                solutions.append(self.solve(together[0], seed=own))
            elif together[0].num_units <= FEW_UNITS:
                solutions += self._solve_together(together, own)
            else:
                solutions += super().solve_all(together, seed=own)
        return solutions

    def _solve_together(self, problems: list[BinaryQuadratic], seed: int) -> list[Solution]:
        """Single spins of all problems at once."""
        sweeps, reads = self._effort(problems[0])
        n, m = problems[0].H.shape
        Z, H = torch.stack([p.Z for p in problems]), torch.stack([p.H.T.repeat(reads, 1) for p in problems])
        K = Z.mT @ Z
        G = _starts(H.flatten(0, 1).view(len(Z), reads, m, n).transpose(0, 1).flatten(0, 2), len(Z) * m, seed)
        G = G.view(reads, len(Z), m, n).transpose(0, 1).reshape(len(Z), reads * m, n)
        descend_together_(K, H - G @ K, G, sweeps, self.backend)
        energy = ((G @ K - 2 * H) * G).sum(2).view(len(Z), reads, m)
        best = energy.argmin(1)[:, None, :, None].expand(-1, 1, m, n)
        spins = G.view(len(Z), reads, m, n).gather(1, best)[:, 0]
        return [Solution(problem, own.T) for problem, own in zip(problems, spins, strict=True)]

    def _effort(self, problem: BinaryQuadratic) -> tuple[int, int]:
        """Sweeps and reads, chosen by the size of the problem where not given."""
        if problem.num_spins <= SMALL_FAN_IN:
            return self.num_sweeps or 8, self.num_reads or 8
        r = len(problem.Z)
        cheap = r <= FEW_ROWS and has_kernel(problem.H.T, r, self.backend)
        chosen = self.num_sweeps is not None or self.backend == "torch"
        if not (HAS_NUMBA or chosen) and r <= FEW_ROWS and fits_kernel(problem.H.T, r):
            warnings.warn(NO_NUMBA, stacklevel=3)
        return self.num_sweeps or (2 if cheap else 1), self.num_reads or 1

    def _block_size(self, problem: BinaryQuadratic, sweeps: int) -> int:
        """How many spins the first sweep sets at once."""
        r, n = problem.Z.shape
        if self.block_size or n <= SMALL_FAN_IN:
            return self.block_size or 1
        if (sweeps > 1 or r <= FEW_ROWS) and has_kernel(problem.H.T, r, self.backend):
            return 1
        if sweeps > 1 or r <= 32:
            return 32
        return 16 * -(-n // 48)  # larger is faster, and as good with many rows; whole vector registers

    def _best_of(
        self, problem: BinaryQuadratic, reads: int, sweeps: int, seed: int, start: Tensor | None
    ) -> Tensor:  # (m, n)
        """The best of several starts for every unit; restarts are more units, so one descent takes all."""
        n, m = problem.H.shape
        H, Z = problem.H.T.repeat(reads, 1), problem.Z
        G = _starts(H, m, seed)
        if start is not None:
            G[m : 2 * m] = start
        self._descend(problem, H, G, sweeps, G @ Z.T)
        energy = (G @ Z.T).square().sum(1) - 2 * (H * G).sum(1)
        best = energy.view(reads, m).argmin(0)
        return G.view(reads, m, n)[best, torch.arange(m, device=best.device)]

    def _error_feedback(
        self, problem: BinaryQuadratic, H: Tensor, G: Tensor, size: int, last: bool
    ) -> Tensor:  # -> (m, r)
        """Spins from zero, one block after the other, each block knowing the outputs of those before it.

        ``G`` (m, n) receives the spins. Returns their outputs; after the ``last`` sweep some are missing.
        """
        one, U = G.new_ones(()), H.new_zeros(len(H), len(problem.Z))
        for own, z in _blocks(problem, size):
            g = G[:, own]
            field = H[:, own] if own.start == 0 else torch.addmm(H[:, own], U, z, alpha=-1, out=g)
            torch.copysign(one, field, out=g)  # a tie may fall either way
            if not last or own.stop < problem.num_spins:
                U.addmm_(g, z.T)
        return U

    def _descend(
        self, problem: BinaryQuadratic, H: Tensor, G: Tensor, sweeps: int, U: Tensor | None = None
    ) -> None:
        """Set spin after spin of ``G`` (m, n) to the sign of its field; without ``U`` (m, r) from zero."""
        if has_kernel(H, len(problem.Z), self.backend):
            descend_(problem.Z, H, G, sweeps, U)
            return
        if U is None:
            G.zero_()
            U = H.new_zeros(len(H), len(problem.Z))
        blocks = [(z.T @ z, z, H[:, own], G[:, own]) for own, z in _blocks(problem, 32)]
        for _ in range(sweeps):
            for K, z, h, g in blocks:
                U.addmm_(flip_(K, torch.addmm(h, U, z, alpha=-1), g, self.backend), z.T)


def _form(problem: BinaryQuadratic) -> tuple[object, ...]:
    return problem.Z.shape, problem.H.shape, problem.H.dtype, problem.H.device


def _starts(H: Tensor, first: int, seed: int) -> Tensor:
    """Zero for the first units, random spins for the others, which turn round where their fields do."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(2, (len(H) - first, H.shape[1]), generator=generator).mul_(2).sub_(1)
    return torch.cat([H.new_zeros(first, H.shape[1]), random.to(H) * spins_of(H[first:])])


def _blocks(problem: BinaryQuadratic, size: int) -> Iterator[tuple[slice, Tensor]]:
    """About ``size`` inputs at a time: which, and their columns of ``Z``."""
    start = 0
    for z in problem.Z.split(size, dim=1):
        yield slice(start, start := start + z.shape[1]), z


def _compression_pays(problem: BinaryQuadratic, sweeps: int) -> bool:
    """Is a QR factorisation cheaper than the rows it saves? Each sweep costs 4 r n m operations."""
    (r, n), m = problem.Z.shape, problem.num_units
    return r > n and 4 * r * n**2 + 4 * n * n * m * sweeps < 4 * r * n * m * sweeps
