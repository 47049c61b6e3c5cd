"""What Muon has that the default has not: the steps between the two, one change each, on held-out data."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
from torch import Tensor
from torch.optim import Optimizer

from spingrad import QPSBGD, BinaryQuadratic
from spingrad.baselines import BinaryConnect
from spingrad.optim.qpsbgd import Layer
from spingrad.solvers import BlockDescentSolver
from spingrad_lab.methods import DEFAULT, Method, Params
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate
from spingrad_lab.rivals import MOMENTUM, Muon, SignOfMuon, orthogonal
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.networks import CIFAR, FULLY_CONNECTED, Built, Norm
from spingrad_lab.tasks.training import train
from spingrad_lab.trials import TUNING_SEED

RATES = (0.000215, 0.0215)  # what the default and Muon chose on this residual network
EPOCHS = 4
TASKS: dict[str, tuple[type[Built], Norm]] = {
    "CIFAR-10, residual": (CIFAR["CIFAR-10, residual"], "BatchNorm"),
    "fashion, 8 layers of 256, hardtanh": (FULLY_CONNECTED["fashion, 8 layers of 256, hardtanh"], "none"),
}
"""Where Muon is ahead of the default, and where it is level."""


class Orthogonal(QPSBGD):
    """The linear term is made orthogonal, as Muon's update is; each unit's keeps its length."""

    def pose(self, layer: Layer) -> tuple[list[BinaryQuadratic], Tensor | None]:
        problems, exp_avg = super().pose(layer)
        return [replace(problem, H=orthogonal_units(problem.H)) for problem in problems], exp_avg


def orthogonal_units(H: Tensor) -> Tensor:
    other = orthogonal(H)
    length = other.norm(dim=0)
    return other.mul_(H.norm(dim=0) / length.where(length > 0, 1))


_STEPS: dict[str, Callable[[Params, int, float], Optimizer]] = {
    DEFAULT: lambda params, seed, lr: QPSBGD(params, lr, seed=seed),
    "64 directions, five sweeps": lambda params, seed, lr: QPSBGD(
        params, lr, rank=64, solver=BlockDescentSolver(5), seed=seed
    ),
    "all directions": lambda params, seed, lr: QPSBGD(params, lr, rank=None, seed=seed),
    f"momentum {MOMENTUM}": lambda params, seed, lr: QPSBGD(params, lr, momentum=MOMENTUM, seed=seed),
    "orthogonal linear term": lambda params, seed, lr: Orthogonal(params, lr, seed=seed),
    "sign of Muon": lambda params, seed, lr: SignOfMuon(params, lr),
    "Muon": lambda params, seed, lr: BinaryConnect(params, Muon, lr=30 * lr),
}


class TowardsMuon(Experiment):
    """Each step at two learning rates; no test set is looked at."""

    title = "What Muon has that the default has not"
    source = "beyond the paper"
    seeds = 3

    def plan(self, lab: Lab) -> None:
        seeds = range(TUNING_SEED, TUNING_SEED + (1 if lab.quick else lab.seeds or self.seeds))
        for seed, task in itertools.product(seeds, list(TASKS)[1:] if lab.quick else TASKS):
            jobs = [
                {"task": task, "method": name, "lr": lr, "seed": seed}
                for name, lr in itertools.product(_STEPS, RATES[:1] if lab.quick else RATES)
            ]
            lab.run(jobs, f"{task}, seed {seed}")

    def compute(self, job: Job) -> dict[str, Any]:
        kind, norm = TASKS[job["task"]]
        with seeded(job["seed"]):
            task = kind(job["seed"], tuning=True, quick=job["quick"])
            task.normalisation = norm
            if not job["quick"]:
                task.epochs = EPOCHS
            scores = train(task, Method(_STEPS[job["method"]], []), {"lr": job["lr"]}, job["seed"])
            return {name: value for name, value in scores.items() if name.startswith("test")}

    def show(self, runs: pd.DataFrame) -> Section:
        return Section([_NOTE], [_table(task, where(runs, task=task)) for task, _ in groups(runs, "task")])


def _table(task: str, runs: pd.DataFrame) -> Table:
    rates = sorted(runs["lr"].unique().tolist())
    rows = []
    for name in (name for name in _STEPS if name in set(runs["method"])):
        found = [where(runs, method=name, lr=lr)["test_accuracy"] for lr in rates]
        rows.append([name, *(str(estimate(own)) if len(own) else "–" for own in found)])
    return Table(["step", *(f"lr {lr:g}" for lr in rates)], rows, f"{task}: accuracy on held-out images")


_NOTE = (
    "Each row changes the default in one thing; the last two are Muon and the sign of its update. 5,000 "
    "photographs with BatchNorm, or 8,000 images without, 4 epochs with a cosine. The two learning rates are "
    "those that the default and Muon chose on the residual network; Muon's are 30 times as large. An "
    "*orthogonal linear term* is the default's running average, made orthogonal as Muon's is. Mean and 95 % "
    "interval over seeds, which also draw the training data and the data held out of it. Test sets are not "
    "used."
)
