"""A reduction: how the problems of many ranks become spins that all of them share."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spingrad.distributed.handshake import agree
from spingrad.distributed.wire import Wire
from spingrad.problem import BinaryQuadratic
from spingrad.solvers import Solution, Solver


class Reduction(Solver):
    """A solver that all ranks call together, and that gives all of them the same spins.

    Args:
        inner: Solves a rank's part.
        wire: Connects the ranks.

    Attributes:
        awaited: Whether the other ranks wait to hear if this one has solved its part.
    """

    def __init__(self, inner: Solver, wire: Wire) -> None:
        self.inner, self.wire, self.awaited = inner, wire, False

    def settle(self, device: torch.device, error: Exception | None = None) -> None:
        """Raise on all ranks the error that one of them has met on the way to its spins."""
        self.awaited = False
        agree(self.wire, device, error=error)

    @abstractmethod
    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]: ...

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        return self.solve_all([problem], seed=seed)[0]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
