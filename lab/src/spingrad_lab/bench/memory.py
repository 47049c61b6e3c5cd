"""Memory of large layers, each measured in a process of its own, and of whole training steps."""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters, convert
from spingrad.baselines import SignSGD
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded
from spingrad_lab.tasks.networks import VGG
from spingrad_lab.tasks.text import LENGTH, Transformer
from spingrad_lab.tasks.training import Loss

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
        networks = list(NETWORKS)[: 1 if lab.quick else None]
        lab.run([{"network": x, "method": y} for x in networks for y in METHODS], "networks")

    def compute(self, job: Job) -> dict[str, Any]:
        if "network" in job:
            return whole_step(job["network"], job["method"])
        # A process of its own: the peak of another layer, or of whoever started us, must not show.
        command = [sys.executable, "-m", "spingrad_lab.bench.memory", job["layer"], job["method"]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        metrics: dict[str, Any] = json.loads(done.stdout)
        return metrics

    def show(self, runs: pd.DataFrame) -> Section:
        rows, steps = [], []
        of_steps = runs.dropna(subset="network") if "network" in runs else runs[:0]
        for (name, method), own in groups(of_steps, ["network", "method"]):
            sizes = (own[part].max() / 2**20 for part in ("weights", "between", "peak"))
            steps.append([f"{name}: {method}", *(f"{size:.2f}" for size in sizes)])
        for (layer, method), own in groups(runs.dropna(subset="layer"), ["layer", "method"]):
            peak, before = own["peak"].max(), own["imported"].max()
            seconds = [own[part].median() for part in ("passes", "step")]
            rows.append(
                [f"{layer}: {method}", f"{peak / 2**30:.2f}", f"{(peak - before) / 2**30:.2f}"]
                + [f"{s:.2f}" for s in (*seconds, sum(seconds))]
            )
        header = ["layer and method", "peak GiB", "of the layer", "passes, s", "step, s", "both, s"]
        caption = "What torch has allocated in a training step, MiB"
        between = ["network and method", "latent weights", "between backward and step", "peak"]
        return Section(list(_NOTES), [Table(header, rows), Table(between, steps, caption)])


def whole_step(name: str, method: str) -> dict[str, float]:
    """Bytes that torch has allocated in the third training step, beyond those at its beginning."""
    with seeded(0):
        model, loss = NETWORKS[name]()
    optimizer = METHODS[method](binary_parameters(model))

    def step() -> None:
        loss(model).backward()
        with torch.profiler.record_function("between"):
            pass
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    live = peak = between = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        elif event.name() == "between":
            between = live
    weights = sum(weight.nbytes for _, weight in binary_parameters(model))
    return {"weights": weights, "between": between, "peak": peak}


def _vgg() -> tuple[nn.Module, Loss]:
    task = object.__new__(VGG)
    task.channels = 32
    x, y = torch.randn(64, 3, 32, 32), torch.arange(64) % 10
    return task.network(), lambda model: nn.functional.cross_entropy(model(x), y)


def _transformer() -> tuple[nn.Module, Loss]:
    model = convert(Transformer(65, 128, 4), keep="last")
    text = torch.arange(12 * LENGTH).view(12, LENGTH) % 65
    return model, lambda model: nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten())


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "VGG-like, 64 images of 32 × 32": _vgg,
    "transformer, 12 texts of 64 characters": _transformer,
}


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
    "Of a whole training step, by torch's own account of its allocations: what there is between backward and "
    "step (gradients, and the sketches of QP-SBGD), and at the peak, beyond what there was at the beginning.",
)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layer")
    parser.add_argument("method")
    print(json.dumps(measure(**vars(parser.parse_args()))))
