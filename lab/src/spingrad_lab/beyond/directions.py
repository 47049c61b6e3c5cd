"""How many directions the quadratic term keeps, and how many sweeps solve it: judged on held-out data."""

import itertools
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.optim import Optimizer

from spingrad import QPSBGD, BinaryLinear
from spingrad.solvers import BlockDescentSolver
from spingrad_lab.methods import Method, Params
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.cifar import SmallCifar
from spingrad_lab.tasks.images import Images, pixels
from spingrad_lab.tasks.text import Shakespeare
from spingrad_lab.tasks.training import Task, train
from spingrad_lab.trials import TUNING_SEED

RANKS, SWEEPS = (8, 16, 32, 64), (1, 2, 3, 5)
FEW = [(8, 1), (8, 2), (32, 1), (32, 2), (64, 2), (64, 5)]  # on the networks that take minutes
LR = 1e-3


class FashionNarrow(Images):
    """784-256-256-10 with hardtanh on 20,000 training images of Fashion-MNIST; 10,000 others are held out."""

    name = "fashion"

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        super().__init__(seed, tuning, quick)
        self.epochs, self.batch = 1 if quick else 3, 100
        if tuning and not quick:
            x, y = pixels(self.name, "train")
            fit, held_out = torch.randperm(len(x))[:30_000].split(20_000)
            self.train, self.test = (x[fit], y[fit]), (x[held_out], y[held_out])

    def network(self) -> nn.Module:
        first, second, last = BinaryLinear(784, 256), BinaryLinear(256, 256), BinaryLinear(256, 10)
        return nn.Sequential(first, nn.Hardtanh(), second, nn.Hardtanh(), last)


TASKS: dict[str, type[Task]] = {
    "Fashion-MNIST, 784-256-256-10": FashionNarrow,
    "CIFAR-10, three convolutions": SmallCifar,
    "tiny Shakespeare, transformer": Shakespeare,
}


def _make(params: Params, seed: int, lr: float, rank: int, num_sweeps: int) -> Optimizer:
    return QPSBGD(params, lr, rank=rank, seed=seed, solver=BlockDescentSolver(num_sweeps))


class Directions(Experiment):
    """Ranks with numbers of sweeps; no test set is looked at."""

    title = "How many directions, and how many sweeps"
    source = "beyond the paper"
    seeds = 2

    def plan(self, lab: Lab) -> None:
        seeds = range(TUNING_SEED, TUNING_SEED + (1 if lab.quick else lab.seeds or self.seeds))
        for seed, task in itertools.product(seeds, TASKS):
            pairs = list(itertools.product(RANKS, SWEEPS)) if TASKS[task] is FashionNarrow else FEW
            jobs = [
                {"task": task, "lr": LR, "rank": rank, "num_sweeps": count, "seed": seed}
                for rank, count in (FEW[::3] if lab.quick else pairs)
            ]
            lab.run(jobs, f"{task}, seed {seed}")

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            task = TASKS[job["task"]](job["seed"], tuning=True, quick=job["quick"])
            settings = {name: job[name] for name in ("lr", "rank", "num_sweeps")}
            return train(task, Method(_make, []), settings, job["seed"])

    def show(self, runs: pd.DataFrame) -> Section:
        return Section([_NOTE], [_table(task, own) for task, own in groups(runs, "task")])


def _table(task: str, runs: pd.DataFrame) -> Table:
    runs = where(runs, task=task)
    score = "test_accuracy" if "test_accuracy" in runs else "test_loss"
    ranks, sweeps = (sorted(runs[name].unique().tolist()) for name in ("rank", "num_sweeps"))
    rows = []
    for rank in ranks:
        found = [where(runs, rank=rank, num_sweeps=count).get(score, ()) for count in sweeps]
        rows.append([str(rank), *(str(estimate(own)) if len(own) else "–" for own in found)])
    header = ["directions", *(f"{count} sweep{'s' * (count > 1)}" for count in sweeps)]
    title = f"{task}: {'accuracy' if score == 'test_accuracy' else 'loss'} on held-out training data"
    return Table(header, rows, title)


_NOTE = (
    "All networks train at one learning rate with a cosine. The default had 8 directions and one sweep; "
    "since then it has 32 and two. Mean and 95 % interval over seeds, which also draw the training data and "
    "the data held out of it (the text has one part held out). Test sets are not used. In the runs with "
    "convolutions, directions came from the left edges of the first images, as in versions up to 0.2.0."
)
