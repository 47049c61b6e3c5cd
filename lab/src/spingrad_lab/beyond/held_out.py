"""Changes of the default's step on held-out data: whitening, longer averages, more rows, a coarser solver."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pandas as pd
from torch.optim import Optimizer

import spingrad.sketch
from spingrad import QPSBGD
from spingrad.solvers import BlockDescentSolver
from spingrad_lab.beyond.networks import ENTRANTS, whitened
from spingrad_lab.methods import DEFAULT, Method, Params
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where
from spingrad_lab.tasks.networks import CIFAR, FULLY_CONNECTED, TEXT, Built, Norm
from spingrad_lab.tasks.training import train
from spingrad_lab.trials import TUNING_SEED

RATES = (0.000215, 0.00464)
STRENGTHS = (1 / 16, 1 / 8, 1 / 4, 1, 100)
MOMENTA = (0.95, 0.98)
MORE_ROWS = 512  # in place of 128
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
Steps = dict[str, Callable[..., Optimizer]]


def _averaged(params: Params, seed: int, lr: float, momentum: float) -> Optimizer:
    return QPSBGD(params, lr, momentum=momentum, seed=seed)


def _more_rows(params: Params, seed: int, lr: float) -> Optimizer:
    """The default with its directions from a larger sample of a layer's rows."""
    with patch.object(spingrad.sketch, "SLOTS", MORE_ROWS):
        return QPSBGD(params, lr, seed=seed)


def _coarse(params: Params, seed: int, lr: float) -> Optimizer:
    return QPSBGD(params, lr, solver=BlockDescentSolver(num_sweeps=1, block_size=32), seed=seed)


@dataclass(frozen=True)
class HeldOut(Experiment):
    """Some steps on the networks of ``TASKS``, at two learning rates each; no test set is looked at.

    Args:
        title: What the report calls it.
        steps: How an optimizer is made, by name.
        notes: What the steps are.
    """

    title: str
    steps: Steps
    notes: tuple[str, ...]
    source: str = "beyond the paper"
    seeds: int = 2

    def plan(self, lab: Lab) -> None:
        seeds = range(TUNING_SEED, TUNING_SEED + (1 if lab.quick else lab.seeds or self.seeds))
        for seed, task in itertools.product(seeds, list(TASKS)[1:2] if lab.quick else TASKS):
            jobs = [
                {"task": task, "method": name, "lr": lr, "seed": seed}
                for name, lr in itertools.product(self.steps, RATES[:1] if lab.quick else RATES)
            ]
            lab.run(jobs, f"{task}, seed {seed}")

    def compute(self, job: Job) -> dict[str, Any]:
        kind, norm = TASKS[job["task"]]
        with seeded(job["seed"]):
            task = kind(job["seed"], tuning=True, quick=job["quick"])
            task.normalisation = norm
            if not job["quick"]:
                vars(task).update(LENGTHS.get(job["task"], {}))
            scores = train(task, Method(self.steps[job["method"]], []), {"lr": job["lr"]}, job["seed"])
            return {name: value for name, value in scores.items() if name.startswith("test")}

    def show(self, runs: pd.DataFrame) -> Section:
        found = [(task, where(runs, task=task)) for task in TASKS]
        return Section(
            [*self.notes, _NOTE], [_table(task, own, self.steps) for task, own in found if len(own)]
        )


def _table(task: str, runs: pd.DataFrame, steps: Steps) -> Table:
    score = "test_accuracy" if "test_accuracy" in runs.dropna(axis=1, how="all") else "test_loss"
    rates = sorted(runs["lr"].unique().tolist())
    rows = []
    for name in (name for name in steps if name in set(runs["method"])):
        found = [where(runs, method=name, lr=lr)[score] for lr in rates]
        rows.append([name, *(str(estimate(own)) if len(own) else "–" for own in found)])
    what = score.removeprefix("test_")
    return Table(["step", *(f"lr {lr:g}" for lr in rates)], rows, f"{task}: {what} on held-out data")


_NOTE = (
    "Trials as in the experiments with these networks (CIFAR-10: 4 epochs, text: 400 steps). Mean and 95 % "
    "interval over seeds, which also draw the training data and the data held out of it (the text has one "
    "part held out). Test sets are not used."
)
WHITENING = HeldOut(
    "Weaker where the units of a layer agree",
    {
        DEFAULT: ENTRANTS[DEFAULT].make,
        **{f"whitened, {strength:g}": partial(whitened, strength=strength) for strength in STRENGTHS},
        "Muon": ENTRANTS["Muon"].make,
    },
    (
        "Muon makes all directions of a layer's update equally strong, the default those of the inputs. "
        "Between the two: the default with a linear term `H` that becomes `H (1 + s · HᵀH / λ)^-½`, where "
        "`λ` is the mean eigenvalue of `HᵀH`, in its 16 leading directions: `QPSBGD(whitening=s)`. Muon's "
        "learning rates are 30 times those shown. All lines but those of CIFAR-10 took the root by "
        "eigenvalues; the library takes Newton's steps, which round differently, so single runs at a later "
        "commit differ.",
    ),
)
AVERAGES = HeldOut(
    "Longer averages, more rows, and a coarser solver",
    {
        DEFAULT: ENTRANTS[DEFAULT].make,
        **{f"momentum {momentum:g}": partial(_averaged, momentum=momentum) for momentum in MOMENTA},
        f"{MORE_ROWS} rows": _more_rows,
        "one sweep by blocks": _coarse,
        "signSGD": ENTRANTS["signSGD"].make,
        "signSGD, momentum 0.95": partial(ENTRANTS["signSGD"].make, momentum=0.95),
        "sign of Muon": ENTRANTS["sign of Muon"].make,
    },
    (
        "Muon also averages over more steps than the default: its momentum is 0.95, that of the default and "
        "of signSGD is 0.9. And the default finds its directions in a sample of 128 of a layer's rows; here "
        f"also in {MORE_ROWS}, or in all 200 of a fully connected network. *One sweep by blocks* of 32 spins "
        "is what the default takes without numba, in place of two sweeps over single spins.",
    ),
)
