"""Solvers of the projection problem, from a sign to a proof."""

from typing import TYPE_CHECKING, Any

from spingrad.solvers.annealing import AnnealingSolver
from spingrad.solvers.base import Info, Solution, Solver, derive_seed
from spingrad.solvers.block_descent import BlockDescentSolver
from spingrad.solvers.dimod import DimodSolver
from spingrad.solvers.exact import ExactSolver
from spingrad.solvers.gurobi import GurobiSolver
from spingrad.solvers.sign import SignSolver

if TYPE_CHECKING:
    from spingrad.solvers.sampler import AnnealingSampler, BlockDescentSampler

__all__ = [
    "AnnealingSampler",
    "AnnealingSolver",
    "BlockDescentSampler",
    "BlockDescentSolver",
    "DimodSolver",
    "ExactSolver",
    "GurobiSolver",
    "Info",
    "SignSolver",
    "Solution",
    "Solver",
    "derive_seed",
]


def __getattr__(name: str) -> Any:
    if name in ("AnnealingSampler", "BlockDescentSampler"):  # of a class of dimod: 0.3 s to import
        from spingrad.solvers import sampler

        return getattr(sampler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
