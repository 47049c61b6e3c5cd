"""A whole layer at once: error feedback from zero, then descent, block of inputs by block."""

from collections.abc import Iterator

import torch
from torch import Tensor

from spingrad._memory import Pool
from spingrad.kernels.descent import HAS_NUMBA, Backend, flip_
from spingrad.kernels.feedback import can_feed_back, feed_back_
from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Solution, Solver

SMALL_FAN_IN = 32


class BlockDescentSolver(Solver):
    """Descend on all units together, a block of inputs at a time; the default solver.

    The first sweep starts at ``G = 0`` and sets every spin once. The outputs ``U = Z G`` of the spins set so
    far are fed back into the fields of those that follow (starting at the sign of ``H`` would overshoot):

        ``G_b = sign(H_b - Z_bᵀ U),  U ← U + Z_b G_b``

    Its cost is at most two matrix products, linear in rows, inputs and units. Further sweeps visit the
    spins in the same order and flip each whose flip lowers the energy, so the energy never rises.

    One sweep is right for wide layers, which are almost convex. Small layers are combinatorial: there
    descent stalls above the optimum, and restarts from random spins help.

    Args:
        num_sweeps: Sweeps, the first included. By default 1, or 8 with a fan-in of 32 or less.
        num_reads: Starts, of which the best is kept: zero, then random spins. By default 1, or 8 with a
            fan-in of 32 or less.
        block_size: Spins set at once in the first sweep from zero. By default 1 with a fan-in of 32 or less,
            else 32 if more sweeps follow, else about a third of the fan-in.
        backend: Who flips single spins in further sweeps: ``"numba"`` (CPU only, extra ``fast``),
            ``"torch"``, or by default numba where it can.

    Example:
        >>> problem = BinaryQuadratic.least_squares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
        >>> BlockDescentSolver().solve(problem).spins
        tensor([[ 1.],
                [-1.]])
    """

    def __init__(
        self,
        num_sweeps: int | None = None,
        num_reads: int | None = None,
        block_size: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        counts = {"num_sweeps": num_sweeps, "num_reads": num_reads, "block_size": block_size}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1, got {value}")
        if backend == "numba" and not HAS_NUMBA:
            raise ImportError('backend="numba" needs numba: pip install "spingrad[fast]"')
        if backend not in ("auto", "numba", "torch"):
            raise ValueError(f'backend is "auto", "numba" or "torch", got {backend!r}')
        self.num_sweeps, self.num_reads = num_sweeps, num_reads
        self.block_size, self.backend = block_size, backend
        self._pool = Pool()

    @classmethod
    def accurate(cls) -> "BlockDescentSolver":
        """Many restarts, for layers of up to 64 inputs: on average within 0.1 % of the optimum there."""
        return cls(num_sweeps=8, num_reads=64)

    def solve(self, problem: BinaryQuadratic, *, seed: int = 0) -> Solution:
        sweeps, reads, block = self._effort(problem)
        small = problem.compressed() if _compression_pays(problem, sweeps * reads) else problem
        if reads > 1:
            return Solution(problem, self._best_of(small, reads, sweeps, seed).T)
        H = small.H.T  # (m, n), the layout of a weight: transposing it costs as much as a sweep
        U = H.new_zeros(len(H), len(small.rows))
        if block > 1:
            G = self._error_feedback(small, H, U, block, last=sweeps == 1)
            self._descend(small, H, G, U, sweeps - 1)
        else:
            G = torch.zeros_like(H)
            self._descend(small, H, G, U, sweeps)
        return Solution(problem, G.T)

    def _effort(self, problem: BinaryQuadratic) -> tuple[int, int, int]:
        """Sweeps, reads and the block size of the first sweep, chosen by the fan-in where not given."""
        n = problem.num_spins
        sweeps = self.num_sweeps or (8 if n <= SMALL_FAN_IN else 1)
        reads = self.num_reads or (8 if n <= SMALL_FAN_IN else 1)
        block = 1 if n <= SMALL_FAN_IN else 32 if sweeps > 1 else _block_size(*problem.rows.shape)
        return sweeps, reads, self.block_size or block

    def _best_of(self, problem: BinaryQuadratic, reads: int, sweeps: int, seed: int) -> Tensor:  # (m, n)
        """The best of several starts for every unit; restarts are more units, so one descent takes all."""
        n, m = problem.H.shape
        generator = torch.Generator().manual_seed(seed)
        random = torch.randint(2, ((reads - 1) * m, n), generator=generator).mul_(2).sub_(1)
        G = torch.cat([problem.H.new_zeros(m, n), random.to(problem.H)])
        H = problem.H.T.repeat(reads, 1)
        U = G @ problem.rows.dense().T
        self._descend(problem, H, G, U, sweeps)
        energy = U.square().sum(1) - 2 * (H * G).sum(1)
        best = energy.view(reads, m).argmin(0)
        return G.view(reads, m, n)[best, torch.arange(m, device=best.device)]

    def _error_feedback(
        self, problem: BinaryQuadratic, H: Tensor, U: Tensor, size: int, last: bool
    ) -> Tensor:
        """Spins from zero, one block after the other, each block knowing the outputs of those before it.

        With few rows a kernel sets spin after spin, which is finer than blocks, and faster. ``U`` (m, r)
        receives the outputs of the spins, unless this is the ``last`` sweep, which does not need them all.
        """
        G = self._pool.empty(len(H), H.shape[1] + 16, H)[:, :-16]  # rows that are not 4096 bytes apart
        if not self.block_size and can_feed_back(H, len(problem.rows), self.backend):
            feed_back_(H, problem.rows.dense(), G)
            if not last:
                torch.mm(G, problem.rows.dense().T, out=U)
            return G
        one = G.new_ones(())
        for own, z in _blocks(problem, size):
            g = G[:, own]
            field = H[:, own] if own.start == 0 else torch.addmm(H[:, own], U, z, alpha=-1, out=g)
            torch.copysign(one, field, out=g)  # a tie may fall either way
            if not last or own.stop < problem.num_spins:
                U.addmm_(g, z.T)
        return G

    def _descend(self, problem: BinaryQuadratic, H: Tensor, G: Tensor, U: Tensor, sweeps: int) -> None:
        """Set spin after spin to the sign of its field; ``G`` (m, n) and its outputs ``U`` (m, r) change."""
        blocks = [(z.T @ z, z, H[:, own], G[:, own]) for own, z in _blocks(problem, 32)] if sweeps else []
        for _ in range(sweeps):
            for K, z, h, g in blocks:
                U.addmm_(flip_(K, torch.addmm(h, U, z, alpha=-1), g, self.backend), z.T)


def _blocks(problem: BinaryQuadratic, size: int) -> Iterator[tuple[slice, Tensor]]:
    """About ``size`` inputs at a time: which, and their columns of ``Z``."""
    start = 0
    for z in problem.rows.blocks(size):
        yield slice(start, start := start + z.shape[1]), z


def _block_size(r: int, n: int) -> int:
    """A third of the inputs, in whole vector registers: larger is faster, finer cheap with few rows."""
    return 32 if r <= 32 else 16 * -(-n // 48)


def _compression_pays(problem: BinaryQuadratic, sweeps: int) -> bool:
    """Is a QR factorisation cheaper than the rows it saves? Each sweep costs 4 r n m operations."""
    (r, n), m = problem.rows.shape, problem.num_units
    return r > n and 4 * r * n**2 + 4 * n * n * m * sweeps < 4 * r * n * m * sweeps
