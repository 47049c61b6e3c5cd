"""A reduction: how the records of many workers become spins that all of them share."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from spingrad.distributed.wire import Wire
from spingrad.problem import BinaryQuadratic
from spingrad.record import LayerRecord
from spingrad.solvers import Solution, Solver

Counts = list[list[int]]
"""Samples, nodes or images, for every worker and layer."""


class Reduction(Solver):
    """A solver that all workers call together, and that gives all of them the same spins.

    Args:
        inner: Solves a worker's part.
        wire: Connects the workers.
    """

    def __init__(self, inner: Solver, wire: Wire) -> None:
        self.inner, self.wire = inner, wire

    @abstractmethod
    def join(self, records: list[list[LayerRecord]], counts: Counts) -> list[list[LayerRecord]]:
        """The records that this worker poses its problems from, one per layer and group of channels."""

    @abstractmethod
    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]: ...

    def solve(self, problem: BinaryQuadratic, *, seed: int = 0) -> Solution:
        return self.solve_all([problem], seed=seed)[0]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
