"""The projection without its quadratic term: the sign of the gradient."""

from spingrad.nn.sign import spins_of
from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Solution, Solver


class SignSolver(Solver):
    """``sign(H)``, which makes QP-SBGD into signSGD: the limit of a target far out of reach."""

    def solve(self, problem: BinaryQuadratic, *, seed: int = 0) -> Solution:
        return Solution(problem, spins_of(problem.H))
