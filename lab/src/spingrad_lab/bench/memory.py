"""Peak memory of large layers, each measured in a process of its own."""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters
from spingrad.baselines import SignSGD
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab, groups

METHODS = {"SignSGD": SignSGD, "QP-SBGD": QPSBGD}
LAYERS = {
    "linear, 4096 × 4096, B = 256": ((4096, 4096), (256, 4096)),
    "3 × 3 convolution, 256 → 256, 128 images of 32 × 32": ((256, 256, 3), (128, 256, 32, 32)),
}
QUICK = {
    "linear, 512 × 512, B = 64": ((512, 512), (64, 512)),
    "3 × 3 convolution, 32 → 32, 16 images of 16 × 16": ((32, 32, 3), (16, 32, 16, 16)),
}


class Memory(Experiment):
    """A forward pass, a backward pass and a step of one layer."""

    title = "Memory"
    source = "one large layer at a time"
    repeats = 3
    revision = 2  # since the default has 32 directions and two sweeps

    def plan(self, lab: Lab) -> None:
        layers = QUICK if lab.quick else LAYERS
        repeats = range(1 if lab.quick else lab.seeds or self.repeats)
        lab.run([{"layer": x, "method": y, "repeat": k} for x in layers for y in METHODS for k in repeats])

    def compute(self, job: Job) -> dict[str, Any]:
        # A process of its own: the peak of another layer, or of whoever started us, must not show.
        command = [sys.executable, "-m", "spingrad_lab.bench.memory", job["layer"], job["method"]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        metrics: dict[str, Any] = json.loads(done.stdout)
        return metrics

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for (layer, method), own in groups(runs, ["layer", "method"]):
            peak, before = own["peak"].max(), own["imported"].max()
            seconds = [own[part].median() for part in ("passes", "step")]
            rows.append(
                [f"{layer}: {method}", f"{peak / 2**30:.2f}", f"{(peak - before) / 2**30:.2f}"]
                + [f"{s:.2f}" for s in (*seconds, sum(seconds))]
            )
        header = ["layer and method", "peak GiB", "of the layer", "passes, s", "step, s", "both, s"]
        return Section(list(_NOTES), [Table(header, rows)])


def measure(layer: str, method: str) -> dict[str, float]:
    """Peak memory in bytes and seconds of a step of one layer, the second, in this process."""
    for small in QUICK.values():  # what is imported and compiled at first use is not the layer's
        _steps(small, method)
    before = peak()
    passes, step = _steps({**QUICK, **LAYERS}[layer], method)
    return {"imported": before, "peak": peak(), "passes": passes, "step": step}


def _steps(layer: tuple[tuple[int, ...], tuple[int, ...]], method: str) -> tuple[float, float]:
    """Two steps, of which the second has a past; the seconds of its passes and of the step itself."""
    shape, inputs = layer
    torch.manual_seed(0)
    model: nn.Module = BinaryLinear(shape[0], shape[1])
    if len(shape) > 2:
        model = BinaryConv2d(shape[0], shape[1], shape[2], padding=1)
    optimizer = METHODS[method](binary_parameters(model))
    x = torch.randn(inputs)
    for _ in range(2):
        optimizer.zero_grad()
        begin = time.perf_counter()
        out = model(x)
        grad = torch.randn_like(out)
        out.backward(grad)
        del out, grad
        between = time.perf_counter()
        optimizer.step()
    return between - begin, time.perf_counter() - between


def peak() -> int:
    """Largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux, where ru_maxrss of a new process begins at the size of its parent
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_NOTES = (
    "A forward pass, a backward pass and a step of one layer on random data, the second of two, in a fresh "
    "process with all threads: the largest resident size (of some repeats), how much of it came after steps "
    "of small layers, which import and compile what is needed, and the median seconds. The first layer of a "
    "network asks for no gradient by its input, and neither does this one.",
)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layer")
    parser.add_argument("method")
    print(json.dumps(measure(**vars(parser.parse_args()))))
