"""The topology of BNN-PYNQ's network LFC on MNIST: one bit per weight, per activation and per input."""

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, Sign, binary_parameters, real_parameters
from spingrad.export import pack
from spingrad_lab.data import Split, mnist
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded
from spingrad_lab.tasks.training import Loss, accuracy_of, loss_of, take_step

LEARNING_RATES = {"none": 1.5e-4, "BatchNorm": 4e-4}
WIDTH, EPOCHS, LONG, BATCH, SHIFT = 1_024, 16, 64, 200, 1
PUBLISHED = 0.9888  # BNN-PYNQ's LFC with BatchNorm and Adam


def spins(split: Split) -> tuple[Tensor, Tensor]:
    """Images of -1 and +1, which is a pixel above 127; shape ``(count, 28, 28)``."""
    data = mnist(split)
    return torch.where(data.images > 127, 1.0, -1.0), data.labels


def network(norm: str, width: int = WIDTH) -> nn.Sequential:
    """784-1024-1024-1024-10 with sign activations; BatchNorm, if any, only before a sign."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, units in itertools.pairwise([784, width, width, width]):
        layers += [BinaryLinear(fan_in, units), *([nn.BatchNorm1d(units)] if norm == "BatchNorm" else [])]
        layers.append(Sign())
    return nn.Sequential(*layers, BinaryLinear(width, 10))


def shifted(images: Tensor, most: int = SHIFT) -> Tensor:
    """Each image moved by at most that many pixels in both directions; background moves in."""
    padded = nn.functional.pad(images, (most,) * 4, value=-1.0)
    count, place = len(images), torch.arange(28)
    down, right = torch.randint(0, 2 * most + 1, (2, count, 1))
    rows, columns = (down + place)[:, :, None], (right + place)[:, None, :]
    return padded[torch.arange(count)[:, None, None], rows, columns]


def _loss(x: Tensor, y: Tensor) -> Loss:
    return lambda model: loss_of(model(x), y)


def _job(norm: str, epochs: int, seed: int) -> Job:
    settings = {"epochs": epochs, "batch": BATCH, "shift": SHIFT}
    return {"norm": norm, "lr": LEARNING_RATES[norm], **settings, "seed": seed}


class LFC(Experiment):
    """Final runs only; the learning rates were chosen in shorter runs on 5,000 training images held out.

    With ``--workers 0`` the packed networks are kept too, in the folder ``networks`` of the results.
    """

    title = "The topology of LFC, 784-1024-1024-1024-10"
    source = "beyond the paper"
    seeds = 3
    _folder: Path | None = None

    def plan(self, lab: Lab) -> None:
        self._folder = lab.folder / "networks"
        for seed in range(1 if lab.quick else lab.seeds or self.seeds):  # by seed: both have some early
            lab.run([_job(norm, 1 if lab.quick else EPOCHS, seed) for norm in LEARNING_RATES], f"seed {seed}")
        if not lab.quick:
            lab.run([_job(norm, LONG, 0) for norm in reversed(LEARNING_RATES)], f"{LONG} epochs")

    def compute(self, job: Job) -> dict[str, Any]:
        (x, y), (x_test, y_test) = spins("train"), spins("test")
        if job["quick"]:
            x, y = x[:1_000], y[:1_000]
        with seeded(job["seed"]):
            model = network(job["norm"], 64 if job["quick"] else WIDTH)
            steppers: list[torch.optim.Optimizer] = [
                QPSBGD(binary_parameters(model), job["lr"], seed=job["seed"])
            ]
            if real := real_parameters(model):
                steppers.append(torch.optim.Adam([value for _, value in real], lr=0.01))
            steps = job["epochs"] * -(-len(x) // job["batch"])
            cosine = [torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=steps) for one in steppers]
            for _ in range(job["epochs"]):
                for rows in torch.randperm(len(x)).split(job["batch"]):
                    take_step(model, _loss(shifted(x[rows], job["shift"]), y[rows]), steppers)
                    for schedule in cosine:
                        schedule.step()
        with torch.no_grad():
            out = torch.cat([model.eval()(part) for part in x_test.split(1_000)])
        packed = pack(model[1:], kind="spins")
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)
            long = "-long" * (job["epochs"] == LONG)
            packed.save(self._folder / f"lfc-{job['norm'].lower()}-{job['seed']}{long}.safetensors")
        found = packed.classes(x_test.flatten(1).numpy())
        return {
            "test_accuracy": accuracy_of(out, y_test),
            "classes_that_differ": int((found != out.argmax(1).numpy()).sum()),
            "bytes": len(packed.to_bytes()),
        }

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for (norm, epochs), own in groups(runs, ["norm", "epochs"]):
            accuracy = str(estimate(own["test_accuracy"]))
            other = f"{own['classes_that_differ'].sum():,}"
            rows.append([norm, f"{epochs}", f"{len(own)}", accuracy, other, f"{own['bytes'].iloc[0]:,}"])
        return Section([_NOTE], [Table(_HEADER, rows)] if rows else [])


_HEADER = ["normalisation", "epochs", "seeds", "test accuracy", "packed: other classes", "bytes"]
_NOTE = (
    "784-1024-1024-1024-10 on MNIST, trained by the default QP-SBGD with a cosine: weights, activations and "
    "inputs are spins; a pixel above 127 is +1. Training images are moved by up to one pixel. BatchNorm, if "
    "any, stands before each sign, and is trained by Adam. BNN-PYNQ publishes "
    f"{PUBLISHED:.4f} for this topology. *Other classes*: test images to which the packed network gives "
    "another class than torch."
)
