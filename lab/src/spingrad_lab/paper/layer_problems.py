"""The problems that a layer meets in training, each posed as published and with our scales."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import pandas as pd
from torch import Tensor

from spingrad import QPSBGD, BinaryLinear, BinaryQuadratic, binary_parameters
from spingrad_lab.methods import ONE_BATCH, Settings
from spingrad_lab.posed import posed
from spingrad_lab.report.sections import Figure, Section, Table
from spingrad_lab.report.statistics import Estimate, estimate
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where
from spingrad_lab.tasks.small import Digits12, pair_points
from spingrad_lab.tasks.training import VectorTask, endless_batches

POSINGS: dict[str, Settings] = {
    "as published": {"rows": "normalized", "target_rms": None, "rank": None},
    "ours": {"rows": "uniform", "target_rms": 1.0, "rank": None},
}
"""How a batch becomes a problem: its rows and its target, as in the paper and with our scales."""
UPDATES = (0, 10, 20, 30, 40, 50)
ALIVE = 1e-6
"""A gradient of smaller root mean square is zero up to rounding; true ones are about 1e-3 and more."""
TIE = 1e-9
"""Values closer than this, as a fraction of their spread or size, are the same."""

SETTING = (
    "Network 16-4-2 on MNIST digits 1 and 2, trained by *QP-SBGD, all directions* (one batch at a time, "
    "without momentum: not the default); the problem is the first layer's (16 spins), before updates 0 to "
    "50. The *same* batches are posed as published (normalised rows, the gradient as target) and with our "
    "scales (uniform rows, target of root mean square 1), so that only the posing differs. At each "
    "update it is the unit of largest gradient that is shown: of four units, those with two equal outgoing "
    "weights have none. Outputs are divided by √fan-in, as in *mnist-pairs*."
)


class Snapshot(NamedTuple):
    """The problem of a layer before an update, posed in each way, and how large each unit's gradient is."""

    update: int
    problems: dict[str, BinaryQuadratic]
    gradients: Tensor  # (m,)

    @property
    def unit(self) -> int:
        """The unit of largest gradient."""
        return int(self.gradients.argmax())

    @property
    def live_units(self) -> list[int]:
        """The units that have a gradient."""
        return (self.gradients > ALIVE).nonzero()[:, 0].tolist()


def snapshots(task: VectorTask, seed: int) -> Iterator[Snapshot]:
    """Train a task's network without end, by ``ONE_BATCH``; its first layer's problem before every update."""
    network = task.network()
    first = next(module for module in network.modules() if isinstance(module, BinaryLinear))
    optimizer = QPSBGD(binary_parameters(network), seed=seed, **ONE_BATCH)
    for update, loss in enumerate(endless_batches(task)):
        optimizer.zero_grad()
        loss(network).backward()
        problems = {name: posed(network, loss, **posing)[0] for name, posing in POSINGS.items()}
        assert first.weight.grad is not None
        yield Snapshot(update, problems, first.weight.grad.square().mean(1).sqrt())
        optimizer.step()


def digit_snapshots(job: Job) -> Iterator[Snapshot]:
    """The six updates of a network on digits 1 and 2, without those at which no unit has a gradient."""
    task = Digits12(job["seed"], False, job["quick"])
    for snapshot in itertools.islice(snapshots(task, job["seed"]), UPDATES[-1] + 1):
        if snapshot.update in UPDATES and snapshot.live_units:
            yield snapshot


Columns = Mapping[str, tuple[str, Callable[[Estimate], str]]]
"""Quantities of a table by label: the key in the metrics, and the format."""


@dataclass(frozen=True)
class Readings:
    """What the runs measured: a row for each seed, update and posing; NaN is what could not be measured."""

    measured: pd.DataFrame

    @classmethod
    def of(cls, runs: pd.DataFrame) -> Self:
        rows = [
            {"seed": seed, "update": update, "posing": name, **measured}
            for update in UPDATES
            if str(update) in runs
            for seed, posed in zip(runs["seed"], runs[str(update)], strict=True)
            if isinstance(posed, dict)  # a run has no entry at an update without any gradient
            for name, measured in posed.items()
        ]
        return cls(pd.DataFrame(rows))

    def pooled(self, name: str, key: str) -> list[float]:
        """The values of a posing one by one."""
        return where(self.measured, posing=name)[key].to_list()

    def values(self, name: str, key: str, update: int | None = None) -> list[float]:
        """One value for each seed: at an update, or the mean over its updates."""
        own = where(self.measured, posing=name, **({} if update is None else {"update": update}))
        return own.groupby("seed", sort=False)[key].mean().dropna().to_list() if len(own) else []

    def estimate(self, name: str, key: str) -> Estimate:
        return estimate(self.values(name, key))

    def means(self, key: str) -> dict[str, float]:
        return {name: self.estimate(name, key).mean for name in POSINGS}

    def table(self, columns: Columns, caption: str) -> Table:
        """Quantities by update, then over all, for each posing."""
        keys = [(name, key, text) for name in POSINGS for key, text in columns.values()]
        rows = []
        for update in (*UPDATES, None):
            found = ((self.values(name, key, update), text) for name, key, text in keys)
            cells = (text(estimate(own)) if own else "–" for own, text in found)
            rows.append(["all" if update is None else str(update), *cells])
        return Table(
            ["update", *(f"{label}, {name}" for name in POSINGS for label in columns)], rows, caption
        )


class DigitExperiment(Experiment):
    """Measures every snapshot of the digits' network, one run for each seed; the first is drawn."""

    seeds = 20

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        lab.run([{"seed": seed} for seed in range(lab.seeds or (2 if lab.quick else self.seeds))])

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            return {
                str(snapshot.update): {
                    name: self.measure(problem, snapshot.unit, job["seed"])
                    for name, problem in snapshot.problems.items()
                }
                for snapshot in digit_snapshots(job)
            }

    def show(self, runs: pd.DataFrame) -> Section:
        found, drawn = Readings.of(runs), runs.sort_values("seed").iloc[0].dropna()
        return Section([SETTING, *self.notes(found)], self.tables(found), self.draw(drawn))

    @abstractmethod
    def measure(self, problem: BinaryQuadratic, unit: int, seed: int) -> dict[str, Any]: ...

    @abstractmethod
    def notes(self, found: Readings) -> list[str]: ...

    @abstractmethod
    def tables(self, found: Readings) -> list[Table]: ...

    @abstractmethod
    def draw(self, run: pd.Series) -> list[Figure]: ...
