"""Solvers of the projection problem, from a sign to a proof."""

from typing import TYPE_CHECKING, Any

from spinstep.solvers.base import Solution, Solver, derive_seed
from spinstep.solvers.block_descent import BlockDescentSolver
from spinstep.solvers.dimod import DimodSolver
from spinstep.solvers.exact import ExactSolver
from spinstep.solvers.gurobi import GurobiSolver
from spinstep.solvers.sign import SignSolver

if TYPE_CHECKING:
    from spinstep.solvers.sampler import BlockDescentSampler

__all__ = [
    "BlockDescentSampler",
    "BlockDescentSolver",
    "DimodSolver",
    "ExactSolver",
    "GurobiSolver",
    "SignSolver",
    "Solution",
    "Solver",
    "derive_seed",
]


def __getattr__(name: str) -> Any:
    if name == "BlockDescentSampler":  # derives from a class of dimod, which takes 0.3 s to import
        from spinstep.solvers.sampler import BlockDescentSampler

        return BlockDescentSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
