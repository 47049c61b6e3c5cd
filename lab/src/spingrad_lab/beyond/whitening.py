"""A step between the default and Muon, weaker where the units of a layer agree: judged on held-out data."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
from torch.optim import Optimizer

from spingrad_lab.beyond.networks import ENTRANTS, whitened
from spingrad_lab.methods import DEFAULT, Method
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where
from spingrad_lab.tasks.networks import CIFAR, FULLY_CONNECTED, TEXT, Built, Norm
from spingrad_lab.tasks.training import train
from spingrad_lab.trials import TUNING_SEED

RATES = (0.000215, 0.00464)
STRENGTHS = (1 / 16, 1 / 8, 1 / 4, 1, 100)
TASKS: dict[str, tuple[type[Built], Norm]] = {
    **{
        name: (FULLY_CONNECTED[name], "none")
        for name in (
            "mnist, 784-512-512-10, hardtanh",
            "mnist, 8 layers of 256, sign",
            "fashion, 784-512-512-10, sign",
            "fashion, 8 layers of 256, hardtanh",
        )
    },
    "tiny Shakespeare, transformer": (TEXT["tiny Shakespeare, transformer"], "none"),
    "CIFAR-10, residual": (CIFAR["CIFAR-10, residual"], "BatchNorm"),
}
LENGTHS = {
    "tiny Shakespeare, transformer": {"steps": 400},
    "CIFAR-10, residual": {"epochs": 4},  # two leave the network far from what it learns
}
_STEPS: dict[str, Callable[..., Optimizer]] = {
    DEFAULT: ENTRANTS[DEFAULT].make,
    **{f"whitened, {strength:g}": partial(whitened, strength=strength) for strength in STRENGTHS},
    "Muon": ENTRANTS["Muon"].make,
}


class Whitening(Experiment):
    """Some strengths at two learning rates, beside the default and Muon."""

    title = "Weaker where the units of a layer agree"
    source = "beyond the paper"
    seeds = 2

    def plan(self, lab: Lab) -> None:
        seeds = range(TUNING_SEED, TUNING_SEED + (1 if lab.quick else lab.seeds or self.seeds))
        for seed, task in itertools.product(seeds, list(TASKS)[1:2] if lab.quick else TASKS):
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
                vars(task).update(LENGTHS.get(job["task"], {}))
            scores = train(task, Method(_STEPS[job["method"]], []), {"lr": job["lr"]}, job["seed"])
            return {name: value for name, value in scores.items() if name.startswith("test")}

    def show(self, runs: pd.DataFrame) -> Section:
        found = [(task, where(runs, task=task)) for task in TASKS]
        return Section([_NOTE], [_table(task, own) for task, own in found if len(own)])


def _table(task: str, runs: pd.DataFrame) -> Table:
    score = "test_accuracy" if "test_accuracy" in runs.dropna(axis=1, how="all") else "test_loss"
    rates = sorted(runs["lr"].unique().tolist())
    rows = []
    for name in (name for name in _STEPS if name in set(runs["method"])):
        found = [where(runs, method=name, lr=lr)[score] for lr in rates]
        rows.append([name, *(str(estimate(own)) if len(own) else "–" for own in found)])
    what = score.removeprefix("test_")
    return Table(["step", *(f"lr {lr:g}" for lr in rates)], rows, f"{task}: {what} on held-out data")


_NOTE = (
    "Muon makes all directions of a layer's update equally strong, the default those of the inputs. Between "
    "the two: the default with a linear term `H` that becomes `H (1 + s · HᵀH / λ)^-½`, where `λ` is the "
    "mean eigenvalue of `HᵀH`, in its 16 leading directions: `QPSBGD(whitening=s)`. Trials as in the "
    "experiments with these networks (CIFAR-10: 4 epochs, text: 400 steps). Muon's learning rates are 30 "
    "times those shown. Mean and 95 % interval over seeds, which also draw the training data and the data "
    "held out of it (the text has one part held out). Test sets are not used. These lines took the root by "
    "eigenvalues; the library takes Newton's steps, which round differently, so single runs at a later "
    "commit differ."
)
