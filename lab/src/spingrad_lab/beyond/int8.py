"""One-bit weights beside int8 weights on an Arduino Uno: accuracy, memory and cycles."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, binary_parameters
from spingrad.export import chips, pack
from spingrad_lab.bench.devices import uno
from spingrad_lab.data import mnist
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded
from spingrad_lab.tasks.training import accuracy_of
from spingrad_lab.trials import TUNING_SEED, best_trial, current_finals

BINARY = "one bit, 196-256-320-10, sign"
HIDDEN = {f"int8, 196-{width}-10, ReLU": width for width in (24, 32, 48, 64)}
LEARNING_RATES = {BINARY: (5e-4, 1e-3, 2e-3)} | dict.fromkeys(HIDDEN, (1e-3, 3e-3, 1e-2))
SCALE = 1 / 64  # a power of two: torch's sums are then exact
EPOCHS, BATCH, HELD_OUT, ON_CHIP = 20, 100, 10_000, 20


def network(name: str) -> nn.Sequential:
    """A network on digits whose pixels are averaged in squares of 2 × 2."""
    if name == BINARY:
        return uno()
    averages, width = (nn.Unflatten(1, (1, 28, 28)), nn.AvgPool2d(2), nn.Flatten()), HIDDEN[name]
    return nn.Sequential(*averages, nn.Linear(196, width), nn.ReLU(), nn.Linear(width, 10))


class Int8(Experiment):
    """The learning rate of each network is chosen on held-out training images; then three seeds."""

    title = "One-bit and int8 weights on an Arduino Uno"
    source = "beyond the paper"

    def plan(self, lab: Lab) -> None:
        for name, rates in list(LEARNING_RATES.items())[: 2 if lab.quick else None]:
            settings = [{"lr": lr} for lr in (rates[:1] if lab.quick else rates)]
            trials = [
                {"network": name, "stage": "trial", "settings": each, "seed": TUNING_SEED}
                for each in settings
            ]
            chosen = best_trial(lab.run(trials, f"{name}, trials")).settings
            seeds = range(lab.seeds or (1 if lab.quick else 3))
            lab.run(
                [{"network": name, "stage": "final", "settings": chosen, "seed": s} for s in seeds],
                f"{name}, finals",
            )

    def compute(self, job: Job) -> dict[str, Any]:
        data, test = mnist("train"), mnist("test")
        x, y = data.images.flatten(1), data.labels
        if job["quick"]:
            x, y = x[: HELD_OUT + 1_000], y[: HELD_OUT + 1_000]
        with seeded(job["seed"]):
            model = network(job["network"])
            if job["stage"] == "trial":
                _train(model, x[HELD_OUT:], y[HELD_OUT:], job["settings"]["lr"], job["seed"], job["quick"])
                return {"test_accuracy": accuracy_of(_scores(model, x[:HELD_OUT]), y[:HELD_OUT])}
            _train(model, x, y, job["settings"]["lr"], job["seed"], job["quick"])
        packed = pack(model, scale=SCALE, calibration=x[:1_000].numpy())
        images, labels = test.images.flatten(1), test.labels.numpy()
        found = packed.classes(images.numpy())
        result = {
            "test_accuracy": float((found == labels).mean()),
            "in_torch": accuracy_of(_scores(model, images), test.labels),
            "weights": packed.num_weights,
        }
        if not chips.UNO.missing:
            ran = chips.run(chips.UNO, packed, images[:ON_CHIP].numpy())
            different = int((ran.classes != found[:ON_CHIP]).sum())
            result |= {"flash": ran.flash, "ram": ran.ram, "different": different}
            result["cycles"] = int(np.median(ran.cost))
        return result

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for name, own in groups(current_finals(runs, ["network"]), "network"):
            sizes = [f"{int(own[each].max()):,}" for each in ("weights", "flash", "ram", "cycles")]
            accuracy, in_torch = (str(estimate(own[each])) for each in ("test_accuracy", "in_torch"))
            rows.append([name, accuracy, in_torch, *sizes])
        return Section([_NOTE], [Table(_HEADER, rows)] if rows else [])


_HEADER = ["network", "accuracy", "in torch", "weights", "flash, bytes", "RAM, bytes", "cycles"]
_NOTE = (
    "MNIST, pixels averaged in squares of 2 × 2, 20 epochs with a cosine; the learning rate is the best of "
    "three on 10,000 training images held out. Both kinds of weights are written to C by spingrad and run "
    "on an ATmega328P in simavr; the accuracy is that of the packed network on all 10,000 test images."
)


def _train(model: nn.Module, x: Tensor, y: Tensor, lr: float, seed: int, quick: bool) -> None:
    binary = binary_parameters(model)
    optimizer: torch.optim.Optimizer = (
        QPSBGD(binary, lr, seed=seed) if binary else torch.optim.Adam(model.parameters(), lr)
    )
    epochs = 1 if quick else EPOCHS
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * -(-len(x) // BATCH))
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch] * SCALE), y[batch]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def _scores(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part * SCALE) for part in x.split(1_000)])
