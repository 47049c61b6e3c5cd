"""A whole layer at once: error feedback from zero, then descent, block of inputs by block."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spinstep.problem import BinaryLeastSquares
from spinstep.solvers._kernels import HAS_NUMBA, Backend, flip_
from spinstep.solvers.base import Solution, Solver

SMALL_FAN_IN = 32


class BlockDescentSolver(Solver):
    """Descend on all units together, a block of inputs at a time; the default solver.

    The first sweep starts at ``G = 0`` and sets every spin once, while a residual feeds the error of the
    spins set so far back into those that follow (starting at the sign of the gradient would overshoot):

        ``G_b = sign(Z_bᵀ R),  R ← R - Z_b G_b``

    Its cost is two matrix products, linear in rows, inputs and units. Further sweeps visit the spins in
    the same order and flip each whose flip lowers the energy, so the energy never rises.

    One sweep is right for wide layers, which are almost convex. Small layers are combinatorial: there
    descent stalls above the optimum, and restarts from random spins help.

    Args:
        num_sweeps: Sweeps, the first included. By default 1, or 8 with a fan-in of 32 or less.
        num_reads: Starts, of which the best is kept: zero, then random spins. By default 1, or 8 with a
            fan-in of 32 or less.
        block_size: Spins set at once in the first sweep from zero. By default 1 with a fan-in of 32 or less,
            else 32 if more sweeps follow, else about an eighth of the fan-in, up to 128.
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
            raise ImportError('backend="numba" needs numba: pip install "spinstep[fast]"')
        if backend not in ("auto", "numba", "torch"):
            raise ValueError(f'backend is "auto", "numba" or "torch", got {backend!r}')
        self.num_sweeps, self.num_reads = num_sweeps, num_reads
        self.block_size, self.backend = block_size, backend

    def solve(self, problem: BinaryLeastSquares, *, seed: int = 0) -> Solution:
        small = problem.num_spins <= SMALL_FAN_IN
        sweeps = self.num_sweeps or (8 if small else 1)
        reads = self.num_reads or (8 if small else 1)
        block = self.block_size or (1 if small else 32 if sweeps > 1 else _block_size(problem.num_spins))
        if _compression_pays(problem, sweeps * reads):
            problem = problem.compressed()
        if reads > 1:
            return self._best_of(problem, reads, sweeps, seed)
        if block > 1:
            G, R = _error_feedback(problem, block)
            sweeps -= 1
        else:
            G, R = problem.Z.new_zeros(problem.num_units, problem.num_spins), _rows_of_units(problem.V)
        self._descend(problem, G, R, sweeps)
        return Solution(G.T, _energy(problem, G, R) + problem.offset)

    def _best_of(self, problem: BinaryLeastSquares, reads: int, sweeps: int, seed: int) -> Solution:
        """Restarts are more units: one descent takes all of them."""
        n, m = problem.num_spins, problem.num_units
        generator = torch.Generator().manual_seed(seed)
        random = torch.randint(2, ((reads - 1) * m, n), generator=generator).mul_(2).sub_(1)
        G = torch.cat([problem.Z.new_zeros(m, n), random.to(problem.Z)])
        H = None if problem.H is None else problem.H.repeat(1, reads)
        many = BinaryLeastSquares(problem.Z, problem.V.repeat(1, reads), H=H)
        R = _rows_of_units(many.V).addmm_(G, problem.Z.T, alpha=-1)
        self._descend(many, G, R, sweeps)
        energy, best = _energy(many, G, R).view(reads, m).min(0)
        spins = G.view(reads, m, n)[best, torch.arange(m, device=best.device)]
        return Solution(spins.T, energy + problem.offset)

    def _descend(self, problem: BinaryLeastSquares, G: Tensor, R: Tensor, sweeps: int) -> None:
        """Set spin after spin to the sign of its field; ``G`` (m, n) and residual ``R`` (m, r) change."""
        blocks = list(zip(*_blocks(problem, 32), G.split(32, dim=1), strict=True)) if sweeps else []
        couplings = [z.T @ z for z, _, _ in blocks]
        for _ in range(sweeps):
            for K, (z, h, g) in zip(couplings, blocks, strict=True):
                R.addmm_(flip_(K, _fields(R, z, h), g, self.backend), z.T, alpha=-1)


# All below is in the layout of nn.Linear.weight, one row per unit: transposing G costs as much as a sweep.


def _error_feedback(problem: BinaryLeastSquares, size: int) -> tuple[Tensor, Tensor]:  # (m, n), (m, r)
    """Spins from zero, a block at once, each block knowing the error of those before it; and the residual."""
    R, one, spins = _rows_of_units(problem.V), problem.Z.new_ones(()), []
    for z, h in zip(*_blocks(problem, size), strict=True):
        field = _fields(R, z, h)
        spins.append(torch.copysign(one, field, out=field))  # a tie may fall either way
        R.addmm_(spins[-1], z.T, alpha=-1)
    return torch.cat(spins, 1), R


def _blocks(problem: BinaryLeastSquares, size: int) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """``Z`` and ``Hᵀ`` by blocks of inputs, shapes ``(r, b)`` and ``(m, b)``."""
    z: tuple[Tensor, ...] = problem.Z.split(size, dim=1)
    return z, [None] * len(z) if problem.H is None else problem.H.T.split(size, dim=1)


def _fields(R: Tensor, z: Tensor, h: Tensor | None) -> Tensor:  # (m, b)
    return R @ z if h is None else torch.addmm(h, R, z)


def _rows_of_units(V: Tensor) -> Tensor:  # (r, m) -> (m, r), never a view of V
    return V.T.clone(memory_format=torch.contiguous_format)


def _energy(problem: BinaryLeastSquares, G: Tensor, R: Tensor) -> Tensor:  # (m,)
    energy = R.square().sum(1)
    return energy if problem.H is None else energy - 2 * (problem.H.T * G).sum(1)


def _block_size(n: int) -> int:
    """An eighth of the inputs, in whole vector registers: larger blocks are faster, smaller ones finer."""
    return min(128, 16 * -(-n // 128))


def _compression_pays(problem: BinaryLeastSquares, sweeps: int) -> bool:
    """Is a QR factorisation cheaper than the rows it saves? Each sweep costs 4 r n m operations."""
    (r, n), m = problem.Z.shape, problem.num_units
    return r > n and 4 * r * n**2 + 2 * r * n * m + 4 * n * n * m * sweeps < 4 * r * n * m * sweeps
