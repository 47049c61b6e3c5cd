"""A whole layer at once: error feedback from zero, then descent, block of inputs by block."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from spingrad.kernels.descent import HAS_NUMBA, Backend, can_feed_back, feed_back_, flip_
from spingrad.problem import BinaryLeastSquares, PatchLeastSquares
from spingrad.solvers.base import Solution, Solver, derive_seed

SMALL_FAN_IN = 32
_Block = tuple[Tensor, Tensor]
CACHED = 2**20  # spins set together, so that they are still in the cache when they move the weights


class BlockDescentSolver(Solver):
    """Descend on all units together, a block of inputs at a time; the default solver.

    The first sweep starts at ``G = 0`` and sets every spin once, while a residual feeds the error of the
    spins set so far back into those that follow (starting at the sign of the gradient would overshoot):

        ``G_b = sign(Z_bᵀ R),  R ← R - Z_b G_b``

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
        >>> problem = BinaryLeastSquares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
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

    @classmethod
    def accurate(cls) -> "BlockDescentSolver":
        """Many restarts, for layers of up to 64 inputs: on average within 0.1 % of the optimum there."""
        return cls(num_sweeps=8, num_reads=64)

    def solve(self, problem: BinaryLeastSquares, *, seed: int = 0) -> Solution:
        sweeps, reads, block = self._effort(problem)
        if _compression_pays(problem, sweeps * reads):
            problem = problem.compressed()
        if reads > 1:
            return self._best_of(problem, reads, sweeps, seed)
        R = problem.V.clone().T
        G = R.new_zeros(problem.num_units, problem.num_spins)
        if block > 1:
            z, g = self._error_feedback(problem, G, R, block)
            R.addmm_(g, z.T, alpha=-1)
            sweeps -= 1
        self._descend(problem, G, R, sweeps)
        return Solution(G.T, _energy(problem, G, R) + problem.offset)

    def stream(self, problems: Sequence[BinaryLeastSquares], *, seed: int = 0) -> list[Iterable[Tensor]]:
        return [self._stream(problem, derive_seed(seed, i)) for i, problem in enumerate(problems)]

    def _stream(self, problem: BinaryLeastSquares, seed: int) -> Iterator[Tensor]:
        sweeps, reads, block = self._effort(problem)
        if sweeps * reads > 1 or block == 1 or _compression_pays(problem, 1):
            yield self.solve(problem, seed=seed).spins.T
            return
        once = isinstance(problem, PatchLeastSquares)  # or patches would be unfolded again for every part
        for units in problem.units(problem.num_units if once else max(1, CACHED // problem.num_spins)):
            G = units.V.new_empty(units.num_units, units.num_spins + 16)[:, :-16]  # no stride of 4096 bytes
            self._error_feedback(units, G, units.V.clone().T, block)
            yield G

    def _effort(self, problem: BinaryLeastSquares) -> tuple[int, int, int]:
        """Sweeps, reads and the block size of the first sweep, chosen by the fan-in where not given."""
        n = problem.num_spins
        sweeps = self.num_sweeps or (8 if n <= SMALL_FAN_IN else 1)
        reads = self.num_reads or (8 if n <= SMALL_FAN_IN else 1)
        block = 1 if n <= SMALL_FAN_IN else 32 if sweeps > 1 else _block_size(*problem.shape)
        return sweeps, reads, self.block_size or block

    def _best_of(self, problem: BinaryLeastSquares, reads: int, sweeps: int, seed: int) -> Solution:
        """Restarts are more units: one descent takes all of them."""
        n, m = problem.num_spins, problem.num_units
        generator = torch.Generator().manual_seed(seed)
        random = torch.randint(2, ((reads - 1) * m, n), generator=generator).mul_(2).sub_(1)
        G = torch.cat([problem.Z.new_zeros(m, n), random.to(problem.Z)])
        H = None if problem.H is None else problem.H.repeat(1, reads)
        many = BinaryLeastSquares(problem.Z, problem.V.repeat(1, reads), H=H)
        R = many.V.clone().T.addmm_(G, problem.Z.T, alpha=-1)
        self._descend(many, G, R, sweeps)
        energy, best = _energy(many, G, R).view(reads, m).min(0)
        spins = G.view(reads, m, n)[best, torch.arange(m, device=best.device)]
        return Solution(spins.T, energy + problem.offset)

    def _error_feedback(self, problem: BinaryLeastSquares, G: Tensor, R: Tensor, size: int) -> _Block:
        """Spins from zero, a block at once, each block knowing the error of those before it.

        ``G`` (m, n) receives the spins. ``R`` (m, r) becomes the residual of all blocks but the last, which
        is returned: its ``Z`` and its spins. Few rows are one block, whose spins know of each other.
        """
        driven = problem.V.sum() or problem.V.any()  # if not, the linear term alone drives the spins
        H = None if driven else problem.H
        if H is not None and not self.block_size and can_feed_back(R, self.backend):
            feed_back_(H.T, problem.Z, G)
            return problem.Z, G
        one, last = G.new_ones(()), None
        for own, z, h in problem.blocks(size):
            if last is not None:
                R.addmm_(last[1], last[0].T, alpha=-1)
            g = G[:, own]
            field = _fields(R, z, h, out=g) if H is None or h is None or last is not None else h
            last = z, torch.copysign(one, field, out=g)  # a tie may fall either way
        assert last is not None
        return last

    def _descend(self, problem: BinaryLeastSquares, G: Tensor, R: Tensor, sweeps: int) -> None:
        """Set spin after spin to the sign of its field; ``G`` (m, n) and residual ``R`` (m, r) change."""
        blocks = [(z.T @ z, z, h, G[:, own]) for own, z, h in problem.blocks(32)] if sweeps else []
        for _ in range(sweeps):
            for K, z, h, g in blocks:
                R.addmm_(flip_(K, _fields(R, z, h), g, self.backend), z.T, alpha=-1)


# All below is in the layout of nn.Linear.weight, one row per unit: transposing G costs as much as a sweep.


def _fields(R: Tensor, z: Tensor, h: Tensor | None, out: Tensor | None = None) -> Tensor:  # (m, b)
    return torch.mm(R, z, out=out) if h is None else torch.addmm(h, R, z, out=out)


def _energy(problem: BinaryLeastSquares, G: Tensor, R: Tensor) -> Tensor:  # (m,)
    energy = R.square().sum(1)
    return energy if problem.H is None else energy - 2 * (problem.H.T * G).sum(1)


def _block_size(r: int, n: int) -> int:
    """A third of the inputs, in whole vector registers: larger is faster, finer cheap with few rows."""
    return 32 if r <= 32 else 16 * -(-n // 48)


def _compression_pays(problem: BinaryLeastSquares, sweeps: int) -> bool:
    """Is a QR factorisation cheaper than the rows it saves? Each sweep costs 4 r n m operations."""
    (r, n), m = problem.shape, problem.num_units
    return r > n and 4 * r * n**2 + 2 * r * n * m + 4 * n * n * m * sweeps < 4 * r * n * m * sweeps
