"""A reduction: how the records of many workers become spins that all of them share."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from spingrad.distributed.wire import Wire
from spingrad.problem import BinaryLeastSquares
from spingrad.record import LayerRecord
from spingrad.solvers import Solution, Solver

Rows = list[list[list[int]]]
"""Rows of ``x`` and of ``grad``, for every worker and layer."""


class Reduction(Solver):
    """A solver that all workers call together, and that gives all of them the same spins.

    Args:
        inner: Solves a worker's part.
        wire: Connects the workers.
    """

    def __init__(self, inner: Solver, wire: Wire) -> None:
        self.inner, self.wire = inner, wire

    @abstractmethod
    def join(self, records: list[list[LayerRecord]], rows: Rows) -> list[list[LayerRecord]]:
        """The records that this worker poses its problems from; one for each layer and group of channels."""

    @abstractmethod
    def stream(self, problems: Sequence[BinaryLeastSquares], *, seed: int = 0) -> list[Iterable[Tensor]]: ...

    def solve(self, problem: BinaryLeastSquares, *, seed: int = 0) -> Solution:
        spins = torch.cat([*self.stream([problem], seed=seed)[0]]).T
        return Solution(spins, problem.energy(spins))

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
