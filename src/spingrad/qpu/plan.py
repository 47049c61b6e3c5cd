"""What a run will cost, before anything is sent."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from spingrad.nn.linear import binary_parameters
from spingrad.qpu.calls import Call, block_sizes, calls_for
from spingrad.qpu.chip import Chip
from spingrad.qpu.journal import MICRO


@dataclass(frozen=True)
class Plan:
    """Calls, qubits and QPU time of a training run.

    Args:
        chip: The chip that the plan is for.
        layers: Number of inputs and units of each binary layer.
        rounds: The calls of a step. The calls of one round are sent together; each round waits for the one
            before, since each block of a wide layer needs the spins of the block before.
        step_seconds: QPU time per step.
        one_by_one_seconds: QPU time per step if every unit were sent alone, as the paper did.
        steps_per_epoch: Steps per epoch.
        epochs: Epochs of the run.

    Example:
        >>> small = plan([16, 4, 2], batch_size=50, num_examples=1000, epochs=3, chip=Chip.ideal(size=6))
        >>> small.layers, small.steps_per_epoch, small.run_seconds < 2
        (((16, 4), (4, 2)), 20, True)
    """

    chip: Chip
    layers: tuple[tuple[int, int], ...]
    rounds: tuple[tuple[Call, ...], ...]
    step_seconds: float
    one_by_one_seconds: float
    steps_per_epoch: int
    epochs: int

    @property
    def calls(self) -> list[Call]:
        return [call for calls in self.rounds for call in calls]

    @property
    def qubits(self) -> int:
        """Number of qubits of the largest call."""
        return max(len(call.page.qubits) for call in self.calls)

    @property
    def chain_lengths(self) -> list[int]:
        return [len(chain) for call in self.calls for clique in call.page.cliques for chain in clique]

    @property
    def epoch_seconds(self) -> float:
        return self.step_seconds * self.steps_per_epoch

    @property
    def run_seconds(self) -> float:
        return self.epoch_seconds * self.epochs

    def summary(self) -> list[tuple[str, str]]:
        """The plan as text: pairs of a name and a value."""
        lengths, reads, rounds = self.chain_lengths, {call.num_reads for call in self.calls}, len(self.rounds)
        copies = {len(call.units) // len(set(call.units)) for call in self.calls}
        return [
            ("chip", f"{self.chip.name}, {len(self.chip.qubits)} working qubits"),
            ("layers", ", ".join(f"{inputs} × {units}" for inputs, units in self.layers)),
            ("calls per step", f"{len(self.calls)}" + (f", in {rounds} rounds" if rounds > 1 else "")),
            ("qubits per call", f"{self.qubits} at most"),
            ("copies of each unit", f"{max(copies)}, read {max(reads)} times"),
            ("chain lengths", f"{sum(lengths) / len(lengths):.1f} on average, {max(lengths)} at most"),
            ("QPU time per step", f"{self.step_seconds:.4f} s"),
            ("… if sent unit by unit", f"{self.one_by_one_seconds:.4f} s"),
            ("QPU time per epoch", f"{self.epoch_seconds:.2f} s ({self.steps_per_epoch} steps)"),
            ("QPU time of the run", f"{self.run_seconds:.1f} s ({self.epochs} epochs)"),
        ]


def plan(
    model: nn.Module | Sequence[int],
    batch_size: int,
    num_examples: int,
    epochs: int = 1,
    *,
    chip: Chip | None = None,
    num_reads: int = 100,
    block_size: int = 32,
    num_sweeps: int = 1,
    **sample_kwargs: Any,
) -> Plan:
    """Calls and QPU time of training a model on a QPU; nothing is sent.

    Args:
        model: The network, or the widths of its layers, such as ``[16, 4, 4, 2]``.
        batch_size: Examples per batch.
        num_examples: Examples in the training set.
        epochs: Passes over the training set.
        chip: The QPU, such as ``QPUService().chip``; by default an ideal Advantage.
        num_reads: Samples per unit, as in :class:`~spingrad.qpu.QPUSolver`.
        block_size: Most spins of a unit that are on the chip at once.
        num_sweeps: Passes over the blocks of a wide layer.
        **sample_kwargs: Further parameters of the QPU, such as ``annealing_time``.

    Example:
        >>> small = plan([16, 4, 4, 2], batch_size=50, num_examples=1000, chip=Chip.ideal(size=6))
        >>> len(small.calls), small.steps_per_epoch
        (1, 20)
    """
    chip = Chip.ideal() if chip is None else chip
    layers = _shapes(model)
    blocks = [block_sizes(inputs, block_size) for inputs, _ in layers]
    rounds, alone = [], 0.0
    for turn in range(max(map(len, blocks))):
        sizes = [
            own[turn]
            for own, (_, units) in zip(blocks, layers, strict=True)
            if turn < len(own)
            for _ in range(units)
        ]
        rounds.append(tuple(calls_for(chip, sizes, num_reads, **sample_kwargs)))
        alone += _one_by_one(rounds[-1], num_reads, sample_kwargs)
    step = sum(call.cost_us(**sample_kwargs) for calls in rounds for call in calls)
    return Plan(
        chip,
        tuple(layers),
        tuple(rounds) * num_sweeps,
        step * num_sweeps * MICRO,
        alone * num_sweeps * MICRO,
        math.ceil(num_examples / batch_size),
        epochs,
    )


def _shapes(model: nn.Module | Sequence[int]) -> list[tuple[int, int]]:
    if isinstance(model, nn.Module):
        shapes = [(weight[0].numel(), len(weight)) for _, weight in binary_parameters(model)]
        if not shapes:
            raise ValueError("the model has no binary layers")
        return shapes
    if len(model) < 2:
        raise ValueError(
            f"widths must be the number of inputs and the units of every layer, got {list(model)}"
        )
    return list(itertools.pairwise(model))


def _one_by_one(calls: Sequence[Call], num_reads: int, sample_kwargs: dict[str, Any]) -> float:
    """Microseconds of QPU time if every unit had a call of its own."""
    qubits = {
        unit: sum(len(chain) for chain in clique)
        for call in calls
        for unit, clique in zip(call.units, call.page.cliques, strict=True)
    }
    chip = calls[0].page.chip
    return sum(chip.access_time(q, num_reads=num_reads, **sample_kwargs) for q in qubits.values())
