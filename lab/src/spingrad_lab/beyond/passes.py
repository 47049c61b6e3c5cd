"""The same batch in one backward pass, in many small ones, and in bfloat16."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from spingrad_lab.beyond.versions import FRESH, SmallConvolutional
from spingrad_lab.methods import DEFAULT, METHODS
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate, paired
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where
from spingrad_lab.tasks.networks import FullyConnected
from spingrad_lab.tasks.training import Task, loss_of, train
from spingrad_lab.trials import matched

SHARE = 0.01  # of the mean variance, below which a direction is not amplified further


class Wide(FullyConnected):
    name, widths = "mnist", (512, 512)


class Whitened(Wide):
    """Pixels whose principal components are all equally strong: the slowest decay there is."""

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        super().__init__(seed, tuning, quick)
        (x, y), (other, labels) = self.train, self.test
        mean = x.mean(0)
        variance, basis = torch.linalg.eigh((x - mean).T.double() @ (x - mean).double() / len(x))
        whiten = (basis / (variance.clamp(min=0) + SHARE * variance.mean()).sqrt()).float()
        self.train, self.test = ((x - mean) @ whiten, y), ((other - mean) @ whiten, labels)


TASKS: dict[str, tuple[type[Task], float]] = {
    "mnist, 784-512-512-10, hardtanh": (Wide, 1e-3),
    "the same on whitened pixels": (Whitened, 1e-3),
    "mnist, convolutional": (SmallConvolutional, 1e-3),
}
PASSES = {"one pass": 1, "8 passes": 8, "40 passes": 40, "one pass, bfloat16": 1}


class Passes(Experiment):
    title = "One batch in several passes, and in bfloat16"
    source = "beyond the paper"
    seeds = 5

    def plan(self, lab: Lab) -> None:
        for task, (_, lr) in list(TASKS.items())[: 1 if lab.quick else None]:
            seeds = range(FRESH, FRESH + (1 if lab.quick else lab.seeds or self.seeds))
            jobs = [
                {"task": task, "passes": name, "lr": lr, "seed": seed}
                for seed, name in itertools.product(seeds, PASSES)
                if task != "mnist, convolutional" or PASSES[name] == 1
            ]
            lab.run(jobs, task)

    def compute(self, job: Job) -> dict[str, Any]:
        (kind, lr), name = TASKS[job["task"]], job["passes"]
        with seeded(job["seed"]):
            task = kind(job["seed"], tuning=False, quick=job["quick"])
            vars(task)["batches"] = lambda: _in_passes(task, PASSES[name], low="bfloat16" in name)
            scores = train(task, METHODS[DEFAULT], {"lr": lr}, job["seed"])
            return {name: value for name, value in scores.items() if name.startswith("test")}

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for task in TASKS:
            own = where(runs, task=task)
            for name in PASSES:
                found = where(own, passes=name)
                if found.empty:
                    continue
                whole = name == "one pass"
                both = ([], []) if whole else matched(own, name, "one pass", "passes", "test_accuracy")
                less = str(paired(*both)) if len(both[0]) > 1 else "–"
                rows.append([task, name, str(estimate(found["test_accuracy"])), less, str(len(found))])
        return Section([_NOTE], [Table(["network", "batch", "accuracy", "minus one pass", "seeds"], rows)])


def _in_passes(task: Any, count: int, low: bool) -> Iterator[Callable[[nn.Module], Tensor]]:
    """The losses of an epoch; of a batch in several parts, all but the last are sent backward at once."""
    x, y = task.train

    def loss(model: nn.Module, rows: Tensor, whole: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            return loss_of(model(x[rows]), y[rows]) * len(rows) / whole

    def losses(model: nn.Module, rows: Tensor) -> Tensor:
        *others, last = rows.chunk(count)
        for part in others:
            loss(model, part, len(rows)).backward()
        return loss(model, last, len(rows))

    for rows in torch.randperm(len(x)).split(task.batch):
        yield lambda model, rows=rows: losses(model, rows)  # type: ignore[misc]


_NOTE = (
    "Three epochs of 20,000 images in batches of 200, or of 100 for the convolution, as they are or in equal "
    "parts whose gradients and sketches add up. Images are not shifted here, as they are elsewhere. Inputs "
    "*on whitened pixels* have no leading directions, of which sums of sketches find least. In bfloat16, "
    "layers compute by `torch.autocast`; latent weights and the step are in single precision. Mean and 95 % "
    "interval over seeds; differences are paired by seed."
)
