"""What a solver is: it takes a problem and returns spins."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import numpy as np
from torch import Tensor

from spingrad.problem import BinaryQuadratic

if TYPE_CHECKING:
    import dimod


class Info(TypedDict, total=False):
    """What a solver has to say beside the spins. A key is there only if the solver knows it.

    Attributes:
        proved: Whether each unit's spins are known to be optimal, shape ``(m,)``.
        nodes: Nodes of the search for each unit, shape ``(m,)``.
        gap: How far below its energy each unit's optimum could lie, as a fraction, shape ``(m,)``.
        timing: The sampler's own report of its time, per call; keys and units of time are the sampler's.
        chain_breaks: Share of chains that were broken, a mean over each unit's samples, shape ``(m,)``.
        samples: All samples, on request: one set per call, which is a unit or the whole layer.
        embeddings: The qubits of each variable, one embedding per call.

    Example:
        >>> from spingrad.solvers import ExactSolver
        >>> from spingrad.testing import random_problem
        >>> ExactSolver().solve(random_problem(r=8, n=6, m=3, seed=0)).info["proved"]
        tensor([True, True, True])
    """

    proved: Tensor
    nodes: Tensor
    gap: Tensor
    timing: "list[dict[str, Any]]"
    chain_breaks: Tensor
    samples: "list[dimod.SampleSet]"
    embeddings: "list[dict[Any, Any]]"


@dataclass(frozen=True, eq=False)
class Solution:
    """Spins for a problem, one column per unit.

    Args:
        problem: The problem that they answer.
        spins: Entries exactly -1 or +1, shape ``(n, m)``, in the dtype and on the device of the problem.
        info: What else the solver has to say.

    Example:
        >>> from spingrad.solvers import SignSolver
        >>> from spingrad.testing import random_problem
        >>> problem = random_problem(r=8, n=6, m=3, seed=0)
        >>> solution = SignSolver().solve(problem)
        >>> solution.spins.shape, (solution.energy >= problem.lower_bound()).all()
        (torch.Size([6, 3]), tensor(True))
    """

    problem: BinaryQuadratic
    spins: Tensor
    info: Info = field(default_factory=Info)

    @cached_property
    def energy(self) -> Tensor:  # (m,)
        """Energy of each unit's spins; computed when it is first asked for."""
        return self.problem.energy(self.spins)


class Solver(ABC):
    """Finds spins that make the energy of a problem small.

    A subclass writes :meth:`solve`. A solver that can pack several problems into one call overrides
    :meth:`solve_all`, which gets all layers of a training step together.
    ``spingrad.testing.check_solver`` tests the contract.

    Example:
        >>> import torch
        >>> class AllUp(Solver):
        ...     def solve(self, problem, *, initial=None, seed=0):
        ...         return Solution(problem, torch.ones_like(problem.H))
    """

    keeps_starts: ClassVar[bool] = False
    """Whether ``solve(problem, initial=spins)`` promises energies no higher than those of the start."""

    @abstractmethod
    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        """Solve every unit of one problem. Equal seeds give equal answers.

        Args:
            problem: The problem.
            initial: Spins to begin at, shape ``(n, m)``. A solver that begins nowhere ignores them.
            seed: For solvers that draw random numbers.
        """

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        """Solve the problems of one step; each gets a seed of its own."""
        return [self.solve(p, seed=derive_seed(seed, i)) for i, p in enumerate(problems)]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the optimizer keeps of the solver: nothing, unless it spends money."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027, most solvers have none
        """Take back what :meth:`state_dict` gave."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({settings})"


def checked_start(problem: BinaryQuadratic, initial: Tensor) -> Tensor:  # (n, m)
    """A copy of spins to begin at, in the dtype and on the device of the problem."""
    if not isinstance(initial, Tensor) or initial.shape != problem.H.shape:
        found = tuple(initial.shape) if isinstance(initial, Tensor) else type(initial).__name__
        raise ValueError(f"initial holds spins of shape {tuple(problem.H.shape)}, like H; got {found}")
    if not bool((initial.abs() == 1).all()):
        raise ValueError("initial holds spins, -1 or +1; got other values (torch.where(x >= 0, 1.0, -1.0)?)")
    return initial.to(problem.H, copy=True)


def check_spins(name: str, problem: BinaryQuadratic, spins: Tensor) -> None:
    """Raise a ``ValueError`` unless an answer holds a spin for every input and unit of the problem."""
    if spins.shape != problem.H.shape or not bool(((spins == 1) | (spins == -1)).all()):
        raise ValueError(
            f"{name} returned spins of shape {tuple(spins.shape)} from {float(spins.min()):g} to "
            f"{float(spins.max()):g}; expected the shape {tuple(problem.H.shape)}, of inputs and units, and "
            "every entry -1 or +1. spingrad.testing.check_solver(solver) tests a solver"
        )


def solved(solver: Solver, problems: list[BinaryQuadratic], seed: int) -> list[Solution]:
    """The solver's answers. If it is not of this package, they are checked, and get the problem's dtype."""
    solutions = solver.solve_all(problems, seed=seed)
    if type(solver).__module__.partition(".")[0] == "spingrad":
        return solutions
    name = type(solver).__name__
    if len(solutions) != len(problems):
        raise ValueError(f"{name} returned {len(solutions)} solutions of {len(problems)} problems")
    for problem, solution in zip(problems, solutions, strict=True):
        check_spins(name, problem, solution.spins)
    pairs = zip(problems, solutions, strict=True)
    return [replace(solution, spins=solution.spins.to(problem.H)) for problem, solution in pairs]


def derive_seed(*keys: int) -> int:
    """A seed for a place in a run, such as (run seed, step) or (step seed, layer).

    Example:
        >>> derive_seed(0, 1), derive_seed(0, 2), derive_seed(0, 1)
        (1982462498, 1570558271, 1982462498)
    """
    return int(np.random.SeedSequence(keys).generate_state(1)[0] >> 1)  # samplers take 31 bits
