"""A whole layer at once: error feedback from zero, then descent, block of inputs by block."""

from typing import Literal

import torch
from torch import Tensor

from spinstep.layers import spins_of
from spinstep.problem import BinaryLeastSquares
from spinstep.solvers._kernels import HAS_NUMBA, compiled, descend_block
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
        backend: Literal["auto", "numba", "torch"] = "auto",
    ) -> None:
        for name, value in (
            ("num_sweeps", num_sweeps),
            ("num_reads", num_reads),
            ("block_size", block_size),
        ):
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
        if reads == 1:
            spins, energy = self._descend(problem, None, sweeps, block)
            return Solution(spins.T, energy + problem.offset)
        return self._best_of(problem, reads, sweeps, block, seed)

    def _best_of(
        self, problem: BinaryLeastSquares, reads: int, sweeps: int, block: int, seed: int
    ) -> Solution:
        """Restarts are more units: one descent takes all of them."""
        n, m = problem.num_spins, problem.num_units
        generator = torch.Generator().manual_seed(seed)
        random = torch.randint(2, ((reads - 1) * m, n), generator=generator).mul_(2).sub_(1)
        start = torch.cat([problem.Z.new_zeros(m, n), random.to(problem.Z)])
        H = None if problem.H is None else problem.H.repeat(1, reads)
        many = BinaryLeastSquares(problem.Z, problem.V.repeat(1, reads), H=H)
        spins, energy = self._descend(many, start, sweeps, block)
        energy, best = energy.view(reads, m).min(0)
        spins = spins.view(reads, m, n)[best, torch.arange(m, device=best.device)]
        return Solution(spins.T, energy + problem.offset)

    def _descend(
        self, problem: BinaryLeastSquares, start: Tensor | None, sweeps: int, block: int
    ) -> tuple[Tensor, Tensor]:  # (m, n), (m,)
        # All in the layout of nn.Linear.weight, one row per unit: transposing G costs as much as a sweep.
        Z, R = problem.Z, problem.V.T.clone(memory_format=torch.contiguous_format)  # (r, n), (m, r)
        feedback = start is None and block > 1  # the first sweep may set a block at once
        if start is None:
            G = (Z.new_empty if feedback else Z.new_zeros)(len(R), problem.num_spins)
        else:
            G = start
            R.addmm_(G, Z.T, alpha=-1)
        size = block if block > 1 else 32
        blocks = Z.split(size, dim=1)
        pulls = None if problem.H is None else problem.H.T.split(size, dim=1)
        couplings = [] if feedback and sweeps == 1 else [z.T @ z for z in blocks]
        one = Z.new_ones(())
        for sweep in range(sweeps):
            for b, (z, g) in enumerate(zip(blocks, G.split(size, dim=1), strict=True)):
                field = R @ z if pulls is None else torch.addmm(pulls[b], R, z)
                if feedback and sweep == 0:
                    change = torch.copysign(one, field, out=field)  # a tie may fall either way
                    g.copy_(change)
                else:
                    change = self._flip(couplings[b], field, g)
                R.addmm_(change, z.T, alpha=-1)
        energy = R.square_().sum(1)
        return G, energy if problem.H is None else energy - 2 * (problem.H.T * G).sum(1)

    def _flip(self, K: Tensor, field: Tensor, g: Tensor) -> Tensor:
        change = torch.empty_like(field)
        if self.backend != "torch" and HAS_NUMBA and g.device.type == "cpu":
            compiled(descend_block)(K.numpy(), field.numpy(), g.numpy(), change.numpy())
            return change
        for i in range(len(K)):
            old = g[:, i].clone()
            g[:, i] = spins_of(field[:, i] + K[i, i] * old)
            change[:, i] = g[:, i] - old
            field.addr_(change[:, i], K[i], alpha=-1)
        return change


def _block_size(n: int) -> int:
    """An eighth of the inputs, in whole vector registers: larger blocks are faster, smaller ones finer."""
    return min(128, 16 * -(-n // 128))


def _compression_pays(problem: BinaryLeastSquares, sweeps: int) -> bool:
    """Is a QR factorisation cheaper than the rows it saves? Each sweep costs 4 r n m operations."""
    (r, n), m = problem.Z.shape, problem.num_units
    return r > n and 4 * r * n**2 + 2 * r * n * m + 4 * n * n * m * sweeps < 4 * r * n * m * sweeps
