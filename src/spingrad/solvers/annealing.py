"""Simulated annealing of a whole layer: descent with noise on the fields, all units at once."""

import numpy as np
import torch
from torch import Tensor

from spingrad._numbers import check_whole
from spingrad.kernels.descent import MOST_DESCENTS, Array, anneal_, flip_, has_kernel, logistic
from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Solution, Solver, checked_start

NARROW = 64  # inputs; up to here problems are hard and sweeps are cheap
COLD = 0.1  # last temperature, in units of the mean coupling of a spin with itself
BLOCK = 32


class AnnealingSolver(Solver):
    """Anneal all units of a layer together, spin by spin: slower than the default, with lower energies.

    A heat bath sets a spin to the sign of its field plus logistic noise times the temperature. So a sweep of
    annealing is a sweep of descent on fields with noise. It works on the outputs ``Z G``: each visit of a
    spin costs as many operations as ``Z`` has rows, and the couplings ``ZᵀZ`` are never formed. A read cools
    down in some sweeps, and descends without noise. The next read heats up the best spins that each unit has
    found so far, with a temperature at which most spins stay.

    On CPUs in single precision a compiled kernel does this (extra ``fast``), elsewhere torch.

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
        U = None if start is None else start @ Z.T
        G = H.new_zeros(H.shape) if start is None else start
        if has_kernel(H, len(Z), "auto"):
            anneal_(Z, H, G, temperatures, reads, seed, U)
        else:
            G = _anneal(Z, H, G, temperatures, reads, seed, U)
        return Solution(problem, G.T)


def _anneal(
    Z: Tensor, H: Tensor, G: Tensor, temperatures: Array, reads: int, seed: int, U: Tensor | None
) -> Tensor:  # (m, n)
    """What the kernel does, in torch, on any device."""
    random, started = np.random.default_rng(seed), U is not None
    blocks = [(z.T @ z, z) for z in Z.split(BLOCK, 1)]
    U = G @ Z.T if U is None else U

    def sweep(fields: Tensor) -> bool:
        """Set spin after spin; whether any has changed."""
        changed = torch.zeros((), device=G.device)
        for (K, z), h, g in zip(blocks, fields.split(BLOCK, 1), G.split(BLOCK, 1), strict=True):
            change = flip_(K, torch.addmm(h, U, z, alpha=-1), g)
            U.addmm_(change, z.T)
            changed += change.abs().sum()
        return bool(changed)

    def energy() -> Tensor:
        return U.square().sum(1) - 2 * (H * G).sum(1)

    best, outputs = G.clone(), U.clone()
    lowest = energy() if started else H.new_full((len(H),), torch.inf)
    for _ in range(reads):
        for temperature in temperatures:
            noise = torch.from_numpy(logistic(random, H.numel())).view(H.shape)
            sweep(H + float(temperature) * noise.to(H))
        for _ in range(MOST_DESCENTS):
            if not sweep(H):
                break
        found = energy()
        lower = (found < lowest)[:, None]
        best, outputs = torch.where(lower, G, best), torch.where(lower, U, outputs)
        lowest = torch.minimum(found, lowest)
        G.copy_(best)
        U.copy_(outputs)
    return best
