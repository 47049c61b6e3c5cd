"""50,000 steps in one process: does the memory grow, does a step become slower?"""

import time
from typing import Any

import pandas as pd
import torch
from torch import nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters
from spingrad.baselines import SignSGD
from spingrad_lab.bench.memory import peak
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab

BATCH, PARTS = 50, 50
NETWORKS = ["784-64-64-10", "convolutional"]


def make(network: str) -> nn.Sequential:
    if network == "convolutional":
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            BinaryConv2d(1, 8, 3, stride=3),
            nn.Hardtanh(),
            nn.Flatten(),
            BinaryLinear(8 * 81, 10),
        )
    return nn.Sequential(
        BinaryLinear(784, 64), nn.Hardtanh(), BinaryLinear(64, 64), nn.Hardtanh(), BinaryLinear(64, 10)
    )


class Endurance(Experiment):
    """QP-SBGD's steps in parts; each part is timed beside a tenth as many steps of SignSGD."""

    title = "Fifty thousand steps"
    source = "MNIST, batches of 50, one thread"

    def plan(self, lab: Lab) -> None:
        lab.run([{"network": network, "steps": 500 if lab.quick else 50_000} for network in NETWORKS])

    def compute(self, job: Job) -> dict[str, Any]:
        from spingrad_lab.data import mnist

        data = mnist("train")
        x, y = data.pixels(), data.labels
        torch.manual_seed(0)
        ours, beside = make(job["network"]), make(job["network"])
        optimizers = QPSBGD(binary_parameters(ours), lr=1e-3), SignSGD(binary_parameters(beside), lr=1e-3)

        def seconds(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
            begin = time.process_time()
            for _ in range(steps):
                rows = torch.randint(len(x), (BATCH,))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            return (time.process_time() - begin) / steps

        steps = job["steps"] // PARTS
        ratios, memory = [], []
        for _ in range(PARTS):
            own = seconds(ours, optimizers[0], steps)
            ratios.append(round(own / seconds(beside, optimizers[1], max(steps // 10, 1)), 3))
            memory.append(peak())
        return {"ratios": ratios, "memory": memory}

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for _, run in runs.iterrows():
            ratios, memory = pd.Series(run["ratios"]), run["memory"]
            fifth = PARTS // 5
            first, last = ratios.iloc[:fifth].median(), ratios.iloc[-fifth:].median()
            cells = [f"{memory[fifth - 1] / 2**20:,.0f}", f"{(memory[-1] - memory[fifth - 1]) / 2**20:+.1f}"]
            times = [f"{number:.2f}" for number in (first, last, last / first)]
            rows.append([run["network"], f"{run['steps']:,}", *cells, *times])
        header = ["network", "steps", "MB after a fifth", "growth after that, MB"]
        header += ["step / SignSGD, first fifth", "last fifth", "ratio"]
        note = "A step is forward, backward and update, in processor time. Memory is the peak of the process."
        return Section([note], [Table(header, rows)])
