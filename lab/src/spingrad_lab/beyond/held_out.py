"""Changes of the default's step on held-out data: whitening, averages, targets, directions, more rows."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from torch import Tensor
from torch.optim import Optimizer

import spingrad.sketch
from spingrad import QPSBGD, BinaryQuadratic
from spingrad.scaling import AUTO
from spingrad.solvers import BlockDescentSolver, Solution, Solver
from spingrad_lab.beyond.candidates import AgainstOverlap
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


def _averaged(params: Params, seed: int, lr: float, momentum: float, rank: int) -> Optimizer:
    return QPSBGD(params, lr, momentum=momentum, rank=rank, seed=seed)


def _directions(params: Params, seed: int, lr: float, rank: int) -> Optimizer:
    return QPSBGD(params, lr, rank=rank, seed=seed)


def _longer(params: Params, seed: int, lr: float, times: float) -> Optimizer:
    return AgainstOverlap(params, lr, target_rms=times * AUTO, rank=32, seed=seed)


def _more_rows(params: Params, seed: int, lr: float) -> Optimizer:
    """The default with its directions from a larger sample of a layer's rows."""
    with patch.object(spingrad.sketch, "SLOTS", MORE_ROWS):
        return QPSBGD(params, lr, seed=seed)


class Blocks(Solver):
    """One sweep from zero that sets 32 spins at once; in narrow layers single spins, from 8 starts."""

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        if problem.num_spins <= 32:
            return BlockDescentSolver(num_sweeps=1).solve(problem, initial=initial, seed=seed)
        G, U = torch.empty_like(problem.H), problem.H.new_zeros(len(problem.Z), problem.num_units)
        for z, h, g in zip(problem.Z.split(32, 1), problem.H.split(32), G.split(32), strict=True):
            g.copy_(torch.where(h - z.T @ U >= 0, 1.0, -1.0))
            U += z @ g
        return Solution(problem, G)


def _coarse(params: Params, seed: int, lr: float) -> Optimizer:
    return QPSBGD(params, lr, solver=Blocks(), seed=seed)


@dataclass(frozen=True)
class HeldOut(Experiment):
    """Some steps on the networks of ``TASKS``, at two learning rates each; no test set is looked at.

    Args:
        title: What the report calls it.
        steps: How an optimizer is made, by name.
        notes: What the steps are.
        source: Where it is in the paper, or not.
        seeds: How many.
        tasks: Which of ``TASKS``.
    """

    title: str
    steps: Steps
    notes: tuple[str, ...]
    source: str = "beyond the paper"
    seeds: int = 2
    tasks: tuple[str, ...] = tuple(TASKS)

    def plan(self, lab: Lab) -> None:
        seeds = range(TUNING_SEED, TUNING_SEED + (1 if lab.quick else lab.seeds or self.seeds))
        for seed, task in itertools.product(seeds, self.tasks[1:2] if lab.quick else self.tasks):
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
        **{f"momentum {momentum:g}": partial(_averaged, momentum=momentum, rank=32) for momentum in MOMENTA},
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
        "is what the default once took without numba, in place of two sweeps over single spins.",
    ),
)
CHOICES = HeldOut(
    "How long the average, how long the target, and how many directions",
    {
        DEFAULT: partial(_directions, rank=32),
        **{f"{rank} directions": partial(_directions, rank=rank) for rank in (16, 8)},
        "momentum 0.8": partial(_averaged, momentum=0.8, rank=32),
        **{f"target × {times:g}": partial(_longer, times=times) for times in (0.7, 1.4)},
    },
    (
        "One setting is changed at a time. The default had 32 directions then, and so have the others unless "
        "they say otherwise; since then it has 16. *Target* is the length of the linear term, which "
        '`target_rms="auto"` chooses.',
    ),
    tasks=tuple(TASKS)[:-1],
)
