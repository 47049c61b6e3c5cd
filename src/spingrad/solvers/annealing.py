"""Simulated annealing of a whole layer: descent with noise on the fields, all units at once."""

import numpy as np
import torch
from torch import Tensor

from spingrad._numbers import check_whole
from spingrad.kernels.compiled import Array
from spingrad.kernels.operators import anneal_
from spingrad.kernels.plain import LANES
from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Solution, Solver, checked_start

NARROW = 64  # inputs; up to here problems are hard and sweeps are cheap
COLD = 0.1  # last temperature, in units of the mean coupling of a spin with itself
NOISE = 2**16  # random numbers to choose a beginning from


class AnnealingSolver(Solver):
    """Anneal all units of a layer together, spin by spin: slower than the default, with lower energies.

    A heat bath sets a spin to the sign of its field plus logistic noise times the temperature. So a sweep of
    annealing is a sweep of descent on fields with noise. It works on the outputs ``Z G``: each visit of a
    spin costs as many operations as ``Z`` has rows, and the couplings ``ZᵀZ`` are never formed. A read cools
    down in some sweeps, and descends without noise. The next read heats up the best spins that each unit has
    found so far, with a temperature at which most spins stay.

    All devices draw the same noise and set the same spins, up to rounding
    (``spingrad.kernels.operators``).

    Args:
        num_reads: Reads, each from the best spins so far. By default 200 with a fan-in of 64 or less, else
            20.
        num_sweeps: Sweeps of a read with noise. By default 50 with a fan-in of 64 or less, else 10.

    Example:
        >>> problem = BinaryQuadratic.least_squares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
        >>> AnnealingSolver().solve(problem).spins
        tensor([[ 1.],
                [-1.]])
    """

    keeps_starts = True

    def __init__(self, num_reads: int | None = None, num_sweeps: int | None = None) -> None:
        for name, value in {"num_reads": num_reads, "num_sweeps": num_sweeps}.items():
            if value is not None:
                check_whole(name, value, 1)
        self.num_reads, self.num_sweeps = num_reads, num_sweeps

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        """Solve every unit; the first read heats up ``initial``, shape ``(n, m)``, if given."""
        small = problem.compressed()
        reads, sweeps, hot = (200, 50, 0.5) if problem.num_spins <= NARROW else (20, 10, 1.0)
        reads, sweeps = self.num_reads or reads, self.num_sweeps or sweeps
        Z, H = small.Z, small.H.T
        temperatures = float(Z.square().sum(0).mean()) * np.geomspace(hot, COLD, sweeps)
        start = None if initial is None else checked_start(problem, initial).T.contiguous()
        random = np.random.default_rng(seed)
        wide = -(-small.num_spins // 4) * 4  # kernels take four spins at a time
        noise = torch.from_numpy(logistic(random, NOISE + wide * LANES)).to(H)
        places = random.integers(0, NOISE, (-(-len(H) // LANES), reads, sweeps))
        where = torch.from_numpy(places).to(H.device)
        G = torch.empty_like(H, memory_format=torch.contiguous_format) if start is None else start
        anneal_(Z, H, G, temperatures.tolist(), noise, where, started=start is not None)
        return Solution(problem, G.T)


def logistic(random: np.random.Generator, count: int) -> Array:
    """Random numbers for which ``sign(f + T · number)`` is +1 with probability ``1 / (1 + exp(-f / T))``."""
    uniform = random.random(count, np.float32).clip(1e-7, 1 - 1e-7)
    return np.asarray(np.log(uniform / (1 - uniform)), np.float32)
