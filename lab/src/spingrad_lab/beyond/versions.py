"""The default step of this version beside that of 0.2.0: the same networks, learning rates and seeds."""

import itertools
from collections.abc import Callable
from typing import Any

import pandas as pd
from torch import nn
from torch.optim import Optimizer

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear
from spingrad_lab.methods import METHODS, Method
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate, paired
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where
from spingrad_lab.tasks.graphs import Cora
from spingrad_lab.tasks.networks import CIFAR, FULLY_CONNECTED, SPEECH, FullyConnected, Text
from spingrad_lab.tasks.training import Task, train
from spingrad_lab.trials import matched

BEFORE = "0.2.0"
FRESH = 3_000
"""Seeds of these runs begin here: no earlier choice has seen them."""


class SmallConvolutional(FullyConnected):
    """Two 3 × 3 convolutions of stride 2 with 16 and 32 channels and a linear layer, batches of 100."""

    name, widths, batch = "mnist", (), 100

    def network(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            BinaryConv2d(1, 16, 3, stride=2, padding=1), nn.Hardtanh(),
            BinaryConv2d(16, 32, 3, stride=2, padding=1), nn.Hardtanh(),
            nn.Flatten(), BinaryLinear(32 * 49, 10),
        )  # fmt: skip


class ShortText(Text):
    """The transformer on tiny Shakespeare for 600 steps."""

    steps = 600


TASKS: dict[str, tuple[type[Task], float, int]] = {
    "mnist, 784-512-512-10, hardtanh": (FULLY_CONNECTED["mnist, 784-512-512-10, hardtanh"], 1e-3, 10),
    "mnist, 784-512-512-10, sign": (FULLY_CONNECTED["mnist, 784-512-512-10, sign"], 0.0215, 10),
    "mnist, convolutional": (SmallConvolutional, 1e-3, 10),
    "Cora": (Cora, 3e-3, 10),
    "tiny Shakespeare, 600 steps": (ShortText, 2.15e-4, 10),
    "fashion, 784-512-512-10, hardtanh": (FULLY_CONNECTED["fashion, 784-512-512-10, hardtanh"], 2.15e-4, 10),
    "fashion, 8 layers of 256, sign": (FULLY_CONNECTED["fashion, 8 layers of 256, sign"], 2.15e-4, 10),
    "spoken digits, 1-d convolutions": (SPEECH["spoken digits, 1-d convolutions"], 2.15e-4, 10),
    "CIFAR-10, residual, BatchNorm": (CIFAR["CIFAR-10, residual"], 0.1, 3),
}
"""Networks, the learning rate that trials of 0.2.0 chose for its default, and the number of seeds."""


def _more_directions(params: Any, seed: int, lr: float) -> Optimizer:
    return QPSBGD(params, lr, rank=32, seed=seed)


STEPS: dict[str, Callable[..., Optimizer] | None] = {
    BEFORE: None,
    "gradient and sketch": None,
    "look ahead": _more_directions,
    "look ahead, 16 directions": METHODS["QP-SBGD"].make,
}
"""How the optimizer of each step is made; those of earlier commits are on file."""


class Versions(Experiment):
    title = "The default step, version by version"
    source = "beyond the paper"

    def plan(self, lab: Lab) -> None:
        for task, (_, lr, seeds) in list(TASKS.items())[: 1 if lab.quick else None]:
            chosen = range(FRESH, FRESH + (1 if lab.quick else min(lab.seeds or seeds, seeds)))
            made = [name for name, make in STEPS.items() if make is not None]
            jobs = [
                {"task": task, "step": name, "lr": lr, "seed": seed}
                for seed, name in itertools.product(chosen, made)
            ]
            lab.run(jobs, task)

    def compute(self, job: Job) -> dict[str, Any]:
        (kind, _, _), make = TASKS[job["task"]], STEPS[job["step"]]
        assert make is not None, "a step of an earlier commit"
        with seeded(job["seed"]):
            task = kind(job["seed"], tuning=False, quick=job["quick"])
            if "BatchNorm" in job["task"]:
                vars(task)["normalisation"] = "BatchNorm"
            scores = train(task, Method(make, []), {"lr": job["lr"]}, job["seed"])
            return {name: value for name, value in scores.items() if name.startswith("test")}

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for task in TASKS:
            own = where(runs, task=task)
            score = "test_accuracy" if "test_accuracy" in own else "test_loss"
            for name in STEPS:
                found = where(own, step=name)
                if found.empty:
                    continue
                both = ([], []) if name == BEFORE else matched(own, name, BEFORE, "step", score)
                less = str(paired(*both)) if len(both[0]) > 1 else "–"
                what = f"{task}: {score.removeprefix('test_')}"
                rows.append([what, name, str(estimate(found[score])), less, str(len(found))])
        return Section([_NOTE], [Table(["network", "step", "mean", f"minus {BEFORE}", "seeds"], rows)])


_NOTE = (
    "The learning rates are those that trials of 0.2.0 chose for its own default, and the seeds are new to "
    "both. Mean and 95 % interval over seeds; differences are paired by seed."
)
