"""Gurobi as a solver: branch and bound, with a proof or a gap for every unit."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Solution, Solver, checked_start
from spingrad.solvers.sign import SignSolver

if TYPE_CHECKING:
    import gurobipy

LARGEST_SEED = 2_000_000_000


class GurobiSolver(Solver):
    """Hand each unit to Gurobi, as a quadratic problem over bits (extra ``gurobi``).

    ``info["proved"]`` tells for each unit whether its spins are optimal (to within ``MIPGap``, zero unless
    given here), and ``info["gap"]`` how far below its energy an optimum could lie, as a fraction of that
    energy. A unit for which the limits leave no time to find any spins gets the sign of its fields and
    an infinite gap.

    The licence that comes with ``gurobipy`` takes up to 200 spins. Other licences are found where Gurobi
    looks for them.

    Args:
        time_limit: Seconds for each unit. What is found in a given time may differ from run to run; a
            limit that repeats is Gurobi's own ``WorkLimit``.
        **parameters: Parameters of Gurobi by their names. By default ``Threads=1``, which with a ``Seed``
            from the solver's seed makes runs repeat, ``MIPGap=0``, and ``PreQLinearize=0``, with which dense
            problems of 50 spins are proved in seconds and without which they are not.

    Example:
        >>> from spingrad.testing import random_problem
        >>> problem = random_problem(r=8, n=6, m=2, seed=0)
        >>> solution = GurobiSolver(time_limit=10, MIPFocus=1).solve(problem)
        >>> solution.info["proved"]
        tensor([True, True])
    """

    keeps_starts = True

    def __init__(self, time_limit: float | None = None, **parameters: Any) -> None:
        if time_limit is not None and not time_limit > 0:
            raise ValueError(f"time_limit is None or a positive number of seconds, got {time_limit}")
        self.time_limit, self.parameters = time_limit, parameters
        _gurobipy().Env(empty=True, params=self._all_parameters(0)).dispose()  # names a wrong parameter now

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        """Solve every unit; ``initial``, shape ``(n, m)``, is Gurobi's first incumbent."""
        gurobipy = _gurobipy()
        double = problem.double()
        gram, fields = double.gram(), double.H
        # Bits are 0 where spins are -1: g = 2x - 1.
        linear = (-4 * (gram.sum(1, keepdim=True) + fields)).cpu().numpy()
        constant = double.energy(torch.full_like(fields, -1)).tolist()
        start = None if initial is None else checked_start(double, initial).cpu()
        spins = SignSolver().solve(double).spins.cpu() if start is None else start.clone()
        proved = torch.zeros(problem.num_units, dtype=torch.bool)
        gap = torch.full((problem.num_units,), torch.inf, dtype=torch.float64)
        with (
            gurobipy.Env(params=self._all_parameters(seed)) as env,
            gurobipy.Model(env=env) as model,
        ):
            x = model.addMVar(problem.num_spins, vtype=gurobipy.GRB.BINARY)
            model.setMObjective(4 * gram.cpu().numpy(), None, 0.0, sense=gurobipy.GRB.MINIMIZE)
            for unit in range(problem.num_units):
                model.reset()  # or the answer to one unit would depend on those before it
                x.Obj, model.ObjCon = linear[:, unit], constant[unit]
                if start is not None:
                    x.Start = (start[:, unit].numpy() + 1) / 2
                _optimize(model)
                if model.SolCount > 0:
                    spins[:, unit] = torch.from_numpy(x.X.round()).mul_(2).sub_(1)
                    proved[unit], gap[unit] = model.Status == gurobipy.GRB.OPTIMAL, model.MIPGap
        return Solution(problem, spins.to(problem.H), {"proved": proved, "gap": gap})

    def _all_parameters(self, seed: int) -> dict[str, Any]:
        defaults = {"OutputFlag": 0, "PreQLinearize": 0, "Threads": 1, "MIPGap": 0.0}
        limit = {} if self.time_limit is None else {"TimeLimit": self.time_limit}
        return {**defaults, "Seed": seed % LARGEST_SEED, **limit, **self.parameters}


def _gurobipy() -> ModuleType:
    try:
        import gurobipy
        import scipy.sparse  # noqa: F401, gurobipy's matrices are scipy's
    except ImportError:
        raise ImportError('GurobiSolver needs gurobipy and scipy: pip install "spingrad[gurobi]"') from None
    return gurobipy


def _optimize(model: "gurobipy.Model") -> None:
    """Run Gurobi. Only its licence knows how many spins it may have; it refuses a larger model at once."""
    import gurobipy

    try:
        model.optimize()
    except gurobipy.GurobiError as error:
        if error.errno != gurobipy.GRB.Error.SIZE_LIMIT_EXCEEDED:
            raise
        raise ValueError(
            f"this Gurobi licence is limited in size, got {model.NumVars} spins (the licence that comes with "
            "gurobipy takes 200); install a full licence, which academics get for free, or use a solver "
            "without a limit, such as BlockDescentSolver"
        ) from error
    if model.Status == gurobipy.GRB.INTERRUPTED:  # Gurobi swallows Ctrl-C
        raise KeyboardInterrupt
