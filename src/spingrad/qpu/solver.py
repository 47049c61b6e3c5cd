"""Solves the problems of a training step on a quantum annealer, all units of all layers side by side."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from spingrad.problem import BinaryQuadratic
from spingrad.qpu.calls import Call, block_sizes, calls_for
from spingrad.qpu.chip import Chip
from spingrad.qpu.journal import MICRO, BudgetError, Journal
from spingrad.qpu.packing import PREFACTOR, Ising, Reading, Spins, packed, packed_gauge
from spingrad.qpu.service import QPUService
from spingrad.qpu.submission import GraphChangedError, Submission
from spingrad.solvers.base import Info, Solution, Solver, checked_start

log = logging.getLogger(__name__)

SLICE = 0.1  # seconds of a single wait: Windows cannot interrupt one with Ctrl-C
PAUSE, GRACE = 0.02, 0.7  # seconds between two attempts to stop the calls of a step, and of all of them
REPLAYED = (
    "num_reads",
    "block_size",
    "num_sweeps",
    "chain_strength_prefactor",
    "spin_reversal",
    "reverse_schedule",
    "reinitialize_state",
    "sample_kwargs",
)
"""The settings that decide which problems are sent; the journal keeps them for a replay."""

REVERSE_SCHEDULE = ((0.0, 1.0), (5.0, 0.45), (15.0, 0.45), (20.0, 1.0))
"""Points (microseconds, ``s``) of a reverse anneal: back to ``s = 0.45``, a pause there, and forward again.

It takes as long as an anneal forward does by default. At a larger ``s`` the samples stay closer to the start,
at a smaller one they forget it; which is best depends on the chip and the problem.
"""


class QPUSolver(Solver):
    """Solve every unit of a step on a D-Wave QPU, in as few calls as the chip allows.

    Each unit is a clique of chains. Many cliques share the chip, so a small network takes one call per step.
    Units with more than ``block_size`` inputs are solved block by block: the QPU sets the spins of one block
    while the others are fixed (in the first sweep, blocks that were not solved yet are left out). So layers
    of any width run on any chip.

    The journal holds everything that was sent, paid and answered. Steps that it already has are read from
    it: a run that is resumed from a checkpoint pays nothing twice, and :meth:`replay` repeats a whole run
    bit for bit without a QPU.

    ``solve(problem, initial=spins)`` begins at given spins by reverse annealing, and returns no unit with a
    higher energy than its start has.

    Args:
        journal: File of the run's journal; a new file starts a new run. A :class:`~spingrad.qpu.Journal` that
            was opened with ``read_only=True`` is replayed, without a QPU.
        budget: Seconds of QPU time that the run may use, over all its processes.
        service: The QPU; by default, the solver connects to the one of D-Wave's configuration.
        num_reads: Samples per unit. They take fewer reads if the chip has room for several copies of a unit.
        fallback: Solves the rest of the run when the budget is used up. Without it, the step then raises
            :class:`~spingrad.qpu.BudgetError` and moves no weight, so that a checkpoint can be saved.
        block_size: Most spins of a unit that are on the chip at once.
        num_sweeps: Passes over the blocks of a wide layer.
        chain_strength_prefactor: Prefactor of uniform torque compensation.
        spin_reversal: Whether each call sets every spin of every copy of a unit upright or upside down at
            random, by a *gauge* drawn from the step's seed, and turns the samples back. An error that a qubit
            keeps then pushes a spin up in one step and down in the next. It takes no further reads. It is
            off, as in D-Wave's samplers: whether it trains better networks on a real chip is not known.
        reverse_schedule: Points (microseconds, ``s``) of the anneal from given spins, from ``s = 1`` back to
            a smaller one and forward to 1. It replaces ``annealing_time`` and ``anneal_schedule`` there.
        reinitialize_state: Whether each read begins at the given spins, or where the read before has ended.
        deadline: Seconds that a call may take, including its time in the queue.
        settle: Seconds to look for a job whose submission failed.
        calls_in_flight: Most calls that are sent at the same time, if a step needs several.
        **sample_kwargs: Further parameters of the QPU, such as ``annealing_time``.

    Example:
        >>> import tempfile
        >>> from spingrad.testing import random_problem
        >>> from spingrad.testing.sapi import Sapi
        >>> with tempfile.TemporaryDirectory() as folder, Sapi(size=4) as sapi, sapi.configured():
        ...     with QPUSolver(f"{folder}/run.journal", budget=1.0, num_reads=10) as solver:
        ...         solution = solver.solve(random_problem(r=8, n=4, m=3, seed=0))
        >>> solution.spins.shape, len(sapi.ledger())  # three units, one call
        (torch.Size([4, 3]), 1)
    """

    keeps_starts: ClassVar[bool] = True

    def __init__(
        self,
        journal: str | Path | Journal,
        budget: float,
        *,
        service: QPUService | None = None,
        num_reads: int = 100,
        fallback: Solver | None = None,
        block_size: int = 32,
        num_sweeps: int = 1,
        chain_strength_prefactor: float = PREFACTOR,
        spin_reversal: bool = False,
        reverse_schedule: Sequence[Sequence[float]] = REVERSE_SCHEDULE,
        reinitialize_state: bool = True,
        deadline: float = 600.0,
        settle: float = 10.0,
        calls_in_flight: int = 4,
        **sample_kwargs: Any,
    ) -> None:
        for name, value in (("num_reads", num_reads), ("block_size", block_size), ("num_sweeps", num_sweeps)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= settle < deadline:
            raise ValueError(
                f"settle must be at least 0 and less than the deadline of {deadline} s, got {settle}"
            )
        for name in ("answer_mode", "auto_scale", "initial_state", "label", "num_reads"):
            if name in sample_kwargs:
                raise ValueError(f"{name} is set by the solver and cannot be passed")
        if is_reverse(forward := sample_kwargs.get("anneal_schedule")):
            raise ValueError(
                f"a schedule that begins at s = 1 is passed as reverse_schedule, got {forward!r}"
            )
        self.num_reads, self.block_size, self.num_sweeps = num_reads, block_size, num_sweeps
        self.chain_strength_prefactor, self.sample_kwargs = chain_strength_prefactor, sample_kwargs
        self.spin_reversal = spin_reversal
        self.reverse_schedule = checked_reverse(reverse_schedule)
        self.reinitialize_state = reinitialize_state
        self.fallback, self.calls_in_flight = fallback, calls_in_flight
        self._service: QPUService | None = None
        if isinstance(journal, Journal):
            if not journal.read_only:
                raise ValueError("journal must be a path, or a Journal that was opened with read_only=True")
            self._journal = journal
        else:
            self._service = QPUService() if service is None else service
            self._journal = Journal(journal, budget)
            self._journal.keep_chip(self._service.chip)
            self._journal.keep_settings({name: getattr(self, name) for name in REPLAYED})
        self._submission = Submission(self._service, self._journal, deadline, settle)
        self._known_calls: dict[tuple[str | None, str, tuple[int, ...], bool], list[Call]] = {}

    @classmethod
    def replay(cls, journal: str | Path) -> "QPUSolver":
        """A solver that answers from the journal of an earlier run, with that run's settings."""
        answers = Journal(journal, read_only=True)
        if not answers.settings:
            raise ValueError(f"{journal} holds no run that could be replayed")
        settings = {name: answers.settings[name] for name in REPLAYED}
        sample_kwargs = settings.pop("sample_kwargs")
        return cls(answers, budget=0.0, **settings, **sample_kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def chip(self) -> Chip:
        """The chip of the QPU; in a replay, the last chip of the run."""
        return self._service.chip if self._service else list(self._journal.chips.values())[-1]

    @property
    def qpu_seconds(self) -> float:
        """Seconds of QPU time of the run so far, reserved or charged."""
        return self._journal.spent_us * MICRO

    def state_dict(self) -> dict[str, Any]:
        """What was spent, for the optimizer's checkpoint."""
        return {"spent_us": self._journal.spent_us, "jobs": len(self._journal.attempts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint: what it says was spent counts against the budget here too."""
        if self._service is not None:
            self._journal.carry(state["spent_us"])

    def close(self) -> None:
        """Close the journal; leaving a ``with`` block does it too."""
        self._journal.close()

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        """Solve every unit of one problem.

        Args:
            problem: The problem.
            initial: Spins to begin at, shape ``(n, m)``: the QPU anneals backwards from there, by the
                ``reverse_schedule``. A unit keeps its start where no sample is better.
            seed: Names the step in the journal; the QPU itself has no seed.
        """
        layer = _Layer(problem, self.block_size, initial)
        return self._solve_layers([layer], seed)[0]

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        return self._solve_layers([_Layer(problem, self.block_size) for problem in problems], seed)

    def _solve_layers(self, layers: "list[_Layer]", seed: int) -> list[Solution]:
        rounds = max((len(layer.blocks) for layer in layers), default=0)
        try:
            for turn in range(rounds * self.num_sweeps):
                taking = [layer for layer in layers if turn % rounds < len(layer.blocks)]
                units = [(i, unit) for i, layer in enumerate(taking) for unit in layer.units(turn % rounds)]
                readings = self._sample([unit for _, unit in units], f"{seed:x}-{turn}")
                for i, layer in enumerate(taking):
                    own = [reading for (k, _), reading in zip(units, readings, strict=True) if k == i]
                    layer.settle(turn % rounds, own)
        except BudgetError as error:
            if self.fallback is None:
                raise
            log.warning("%s; going on with %r", error, self.fallback)
            found = self.fallback.solve_all([layer.problem for layer in layers], seed=seed)
            return [layer.better(solution) for layer, solution in zip(layers, found, strict=True)]
        return [layer.solution() for layer in layers]

    def _sample(self, units: "list[_Unit]", key: str) -> list[Reading]:
        """Samples of every unit."""
        try:
            return self._sample_once(units, key)
        except GraphChangedError as error:
            log.warning("%s; the units are laid out again", error)
            self._journal.keep_chip(self.chip)
            return self._sample_once(units, key)

    def _sample_once(self, units: "list[_Unit]", key: str) -> list[Reading]:
        calls = self._calls(tuple(len(unit.ising.h) for unit in units), key, _reverse(units))
        answers = self._side_by_side(
            [
                partial(self._call, call, [units[u] for u in call.units], f"{key}-{number}")
                for number, call in enumerate(calls)
            ]
        )
        copies: list[list[Reading]] = [[] for _ in units]
        for call, answer in zip(calls, answers, strict=True):
            for unit, reading in zip(call.units, answer, strict=True):
                copies[unit].append(reading)
        return [Reading.joined(own) for own in copies]

    def _side_by_side(self, calls: Sequence[Callable[[Event], list[Reading]]]) -> list[list[Reading]]:
        """The results of all calls; each is given an event that is set when the step is interrupted."""
        stopped, pool = Event(), ThreadPoolExecutor(self.calls_in_flight, "spingrad call")
        futures: list[Future[list[Reading]]] = []
        try:
            for call in calls:
                futures.append(pool.submit(call, stopped))
            while wait(futures, SLICE).not_done:
                pass
        except BaseException:  # Ctrl-C
            begun = [future for future in futures if not future.cancel()]
            end = time.monotonic() + GRACE
            while begun and time.monotonic() < end:
                self._submission.stop(stopped)  # again and again, since a call may begin a request meanwhile
                begun = list(wait(begun, PAUSE).not_done)
            raise
        finally:
            pool.shutdown(wait=False)
        return [future.result() for future in futures]

    def _calls(self, sizes: tuple[int, ...], key: str, reverse: bool) -> list[Call]:
        """The calls that were answered earlier, on any of the run's chips, or else new ones."""
        earlier = self._journal.chips.values() if self._journal.attempts_of(f"{key}-0") else ()
        for chip in (self.chip, *earlier):
            calls = self._calls_on(chip, sizes, reverse)
            if all(self._journal.has_answer(f"{key}-{n}", call.page.name) for n, call in enumerate(calls)):
                return calls
        return self._calls_on(self.chip, sizes, reverse)

    def _calls_on(self, chip: Chip, sizes: tuple[int, ...], reverse: bool) -> list[Call]:
        place = (chip.graph_id, chip.key, sizes, reverse)
        if place not in self._known_calls:
            calls = calls_for(chip, sizes, self.num_reads, **self._params(reverse))
            for call in calls:
                if self._service is not None:
                    self._journal.keep_layout(call.page.name, call.page.cliques)
            self._known_calls[place] = calls
        return self._known_calls[place]

    def _params(self, reverse: bool) -> dict[str, Any]:
        """The parameters of the QPU that the user has set, for an anneal forward or from a start."""
        if not reverse:
            return self.sample_kwargs
        kept = {k: v for k, v in self.sample_kwargs.items() if k not in ("annealing_time", "anneal_schedule")}
        schedule = {"anneal_schedule": self.reverse_schedule, "reinitialize_state": self.reinitialize_state}
        return kept | schedule

    def _call(self, call: Call, units: "list[_Unit]", key: str, stopped: Event) -> list[Reading]:
        page, problems = call.page, [unit.ising for unit in units]
        gauge = page.random_gauge(key) if self.spin_reversal else np.ones(page.starts[-1], np.int8)
        turned = list(zip(units, page.by_clique(gauge), strict=True))
        sent = [unit.ising.in_gauge(signs) for unit, signs in turned]
        programmed = page.program(sent, self.chain_strength_prefactor)
        own = self._params(_reverse(units))
        params = {"num_reads": call.num_reads, **own, "answer_mode": "histogram", "auto_scale": False}
        if _reverse(units):
            starts = [unit.start * signs for unit, signs in turned if unit.start is not None]
            params["initial_state"] = page.state(starts)
        once = dict(zip(call.units, problems, strict=True))
        facts = {"layout": page.name, "units": call.units, "problems": packed(list(once.values()))}
        facts["gauge"] = packed_gauge(gauge)
        cost = call.cost_us(**own)
        answer = self._submission.sample(programmed, page.chip, key, cost, params, stopped, **facts)
        return page.read(answer.spins * gauge[page.spin_of], answer.occurrences, problems)


class _Unit(NamedTuple):
    """What the chip is given of one unit."""

    ising: Ising
    start: Spins | None  # (n,)


def _reverse(units: Sequence[_Unit]) -> bool:
    return any(unit.start is not None for unit in units)  # all of them, or none


class _Layer:
    """One layer's problem while its blocks are solved in turn."""

    def __init__(self, problem: BinaryQuadratic, block_size: int, initial: Tensor | None = None) -> None:
        self.problem, self.has_start = problem, initial is not None
        double = problem.double()
        self.Z, self.H = double.Z.cpu(), double.H.cpu()
        self.blocks = torch.arange(problem.num_spins).split(block_sizes(problem.num_spins, block_size))
        start = torch.zeros_like(self.H) if initial is None else checked_start(problem, initial).to(self.H)
        self.spins = start
        self.broken = torch.zeros(problem.num_units, dtype=torch.float64)
        self.visits = 0

    def part(self, block: int) -> BinaryQuadratic:
        """The problem of one block, the others fixed."""
        own = self.blocks[block]
        others = self.spins.clone()
        others[own] = 0
        z = self.Z[:, own]
        return BinaryQuadratic.of(z, self.H[own] - z.T @ (self.Z @ others))

    def units(self, block: int) -> list[_Unit]:
        """Every unit of one block in Ising form; they share their couplings."""
        part = self.part(block)
        J = (2 * part.gram().triu(1)).cpu().numpy()
        starts = self.spins[self.blocks[block]].T.to(torch.int8).numpy()
        return [
            _Unit(Ising(h, J), start if self.has_start else None)
            for h, start in zip((-2 * part.H).T.contiguous().cpu().numpy(), starts, strict=True)
        ]

    def settle(self, block: int, readings: Sequence[Reading]) -> None:
        """Take the best sample of every unit, unless the block was better before."""
        own, part = self.blocks[block], self.part(block)
        before = self.spins[own]
        found = torch.stack([torch.from_numpy(reading.best()) for reading in readings], 1)
        worse = before.any(0) & (part.energy(before) <= part.energy(found))
        self.spins[own] = torch.where(worse, before, found)
        self.broken += torch.tensor([reading.broken for reading in readings], dtype=torch.float64)
        self.visits += 1

    def solution(self) -> Solution:
        info = Info(chain_breaks=self.broken / max(self.visits, 1))
        return Solution(self.problem, self.spins.to(self.problem.H), info)

    def better(self, other: Solution) -> Solution:
        """The solution of another solver, with the spins of this layer where those are better."""
        if not self.has_start:
            return other
        own = self.spins.to(self.problem.H)
        worse = self.problem.energy(own) <= other.energy
        return Solution(self.problem, torch.where(worse, own, other.spins), other.info)


def is_reverse(schedule: Any) -> bool:
    """Whether an anneal schedule begins at ``s = 1``."""
    return bool(schedule) and schedule[0][1] == 1


def checked_reverse(schedule: Sequence[Sequence[float]]) -> list[list[float]]:
    """The points of a reverse anneal; the limits of a chip are checked by its service."""
    points = [[float(value) for value in point] for point in schedule]
    times, s = ([point[k] for point in points if len(point) == 2] for k in (0, 1))
    increasing = all(before < after for before, after in pairwise(times))
    inside = all(0 <= value <= 1 for value in s)
    if not (len(s) == len(points) >= 2 and times[0] == 0 and s[0] == s[-1] == 1 and increasing and inside):
        raise ValueError(
            "reverse_schedule has points (microseconds, s) at increasing times from 0 on, with s between 0 "
            f"and 1, and 1 at both ends, such as {[list(p) for p in REVERSE_SCHEDULE]}; got {schedule!r}"
        )
    return points
