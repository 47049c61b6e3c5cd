"""Flash, RAM and time of networks on simulated chips, each class compared with the packed network's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from spingrad import BinaryLinear, Sign
from spingrad.export import PackedModel, chips, pack
from spingrad.export.vectors import examples
from spingrad_lab.bench.graphs import CASES
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where

Shape = tuple[int, ...]


def uno() -> nn.Sequential:
    """The network of ``examples/arduino.py``."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), nn.AvgPool2d(2), nn.Flatten(), BinaryLinear(196, 256), Sign(),
        BinaryLinear(256, 320), Sign(), BinaryLinear(320, 10),
    )  # fmt: skip


def two_layers() -> nn.Sequential:
    return nn.Sequential(BinaryLinear(784, 128), Sign(), BinaryLinear(128, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Shape | None]] = {
    "averages of 2 × 2 pixels, 196-256-320-10": (uno, None),
    "784-128-10": (two_layers, None),
    "depthwise, Fashion-MNIST": (CASES["depthwise, Fashion-MNIST, sign"].network, (1, 28, 28)),
    "residual, CIFAR-10, all signs": (CASES["residual, CIFAR-10, all signs"].network, (3, 32, 32)),
}
CHIPS = {chip.name: chip for chip in chips.CHIPS}


def packed(name: str) -> PackedModel:
    """One of the networks, with random weights."""
    network, shape = NETWORKS[name]
    with seeded(0):
        return pack(network().eval(), shape, scale=1 / 128)


class Devices(Experiment):
    """Networks of random weights, whose cost is that of trained ones, on every chip they fit."""

    title = "Devices"
    source = "simavr and qemu, random inputs"

    def plan(self, lab: Lab) -> None:
        networks = list(NETWORKS)[:1] if lab.quick else list(NETWORKS)
        ready = [chip.name for chip in chips.CHIPS if not chip.missing]
        count = 1 if lab.quick else 3
        lab.run([{"network": n, "chip": c, "inputs": count} for n in networks for c in ready], "chips")

    def compute(self, job: Job) -> dict[str, Any]:
        model = packed(job["network"])
        x, chip = examples(model, job["inputs"]), CHIPS[job["chip"]]
        try:
            ran = chips.run(chip, model, x)
        except MemoryError:
            return {"fits": False}
        return {
            "fits": True,
            "unit": chip.unit,
            "cost": int(np.median(ran.cost)),
            "flash": ran.flash,
            "ram": ran.ram,
            "different": int((ran.classes != model.classes(x)).sum()),
        }

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for network in NETWORKS:
            for _, run in where(runs, network=network).iterrows():
                if run["fits"]:
                    cells = [f"{int(run[name]):,}" for name in ("flash", "ram", "cost")]
                    rows.append([network, run["chip"], *cells, run["unit"], str(int(run["different"]))])
                else:
                    rows.append([network, run["chip"], "does not fit", "", "", "", ""])
        header = ["network", "chip", "flash, bytes", "RAM, bytes", "per input", "", "different classes"]
        return Section(list(_NOTES), [Table(header, rows)])


_NOTES = (
    "Whole programs by the chip's gcc with -O2: flash without the stored inputs; RAM with one input, the "
    "buffers and the deepest stack. Cycles are those of timer 1 in simavr at 16 MHz; instructions are "
    "counted by qemu with -icount shift=0: by SysTick on Cortex-M (to 63 of them), by instret on RISC-V.",
)
