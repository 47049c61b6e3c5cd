"""The projection without its quadratic term: the sign of the gradient."""

from torch import Tensor

from spingrad.nn.sign import spins_of
from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Solution, Solver


class SignSolver(Solver):
    """``sign(H)``, which makes QP-SBGD into signSGD: the limit of a target far out of reach.

    Example:
        >>> import torch
        >>> problem = BinaryQuadratic.least_squares(torch.eye(3), torch.tensor([[2.0], [-0.1], [0.5]]))
        >>> SignSolver().solve(problem).spins.T
        tensor([[ 1., -1.,  1.]])
    """

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        return Solution(problem, spins_of(problem.H))
