"""Solvers of the projection problem, from a sign to a proof."""

from spinstep.solvers.base import Solution, Solver, derive_seed
from spinstep.solvers.block_descent import BlockDescentSolver
from spinstep.solvers.dimod import DimodSolver
from spinstep.solvers.exact import ExactSolver
from spinstep.solvers.sign import SignSolver

__all__ = [
    "BlockDescentSolver",
    "DimodSolver",
    "ExactSolver",
    "SignSolver",
    "Solution",
    "Solver",
    "derive_seed",
]
