"""What a solver is: it takes a problem and returns spins, and says what they cost."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from spingrad.problem import BinaryLeastSquares


@dataclass(frozen=True)
class Solution:
    """Spins, one column per unit, and the energy of each column.

    Args:
        spins: Entries exactly -1 or +1, shape ``(n, m)``, in the dtype and on the device of the problem.
        energy: Energy of each unit's spins, shape ``(m,)``.
        info: What else the solver has to say (as dimod's ``SampleSet.info``).
    """

    spins: Tensor
    energy: Tensor
    info: dict[str, Any] = field(default_factory=dict)


class Solver(ABC):
    """Finds spins that make ``‖V - Z G‖²`` small.

    A subclass writes ``solve``. A solver that can pack several problems into one call overrides
    ``solve_all``, which gets all layers of a training step together.
    ``spingrad.testing.check_solver`` tests the contract.

    Example:
        >>> class AllUp(Solver):
        ...     def solve(self, problem, *, seed=0):
        ...         spins = problem.fields().fill_(1)
        ...         return Solution(spins, problem.energy(spins))
    """

    @abstractmethod
    def solve(self, problem: BinaryLeastSquares, *, seed: int = 0) -> Solution:
        """Solve every unit of one problem. Equal seeds give equal answers."""

    def solve_all(self, problems: Sequence[BinaryLeastSquares], *, seed: int = 0) -> list[Solution]:
        """Solve the problems of one step; each gets a seed of its own."""
        return [self.solve(p, seed=derive_seed(seed, i)) for i, p in enumerate(problems)]

    def stream(self, problems: Sequence[BinaryLeastSquares], *, seed: int = 0) -> list[Iterable[Tensor]]:
        """The spins of each problem as rows of a weight, ``(units, n)``, some units after the other.

        A solver may hand out units as it goes, so that their weights move while spins are in the cache.
        """
        return [[solution.spins.T] for solution in self.solve_all(problems, seed=seed)]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the optimizer keeps of the solver: nothing, unless it spends money."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027, most solvers have none
        """Take back what :meth:`state_dict` gave."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({settings})"


def derive_seed(*keys: int) -> int:
    """A seed for a place in a run, such as (run seed, step) or (step seed, layer)."""
    return int(np.random.SeedSequence(keys).generate_state(1)[0] >> 1)  # samplers take 31 bits
