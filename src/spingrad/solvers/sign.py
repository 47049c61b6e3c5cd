"""The projection without its quadratic term: the sign of the gradient."""

from spingrad.nn.sign import spins_of
from spingrad.problem import BinaryLeastSquares
from spingrad.solvers.base import Solution, Solver


class SignSolver(Solver):
    """``sign(ZᵀV)``, which makes QP-SBGD into signSGD: the limit of a target far out of reach."""

    def solve(self, problem: BinaryLeastSquares, *, seed: int = 0) -> Solution:
        spins = spins_of(problem.fields())
        return Solution(spins, problem.energy(spins))
