"""QP-SBGD against every baseline on MNIST without BatchNorm, all tuned alike.

    python benchmarks/mnist_methods.py --out benchmarks/results/mnist_methods.jsonl

784-256-256-10, hardtanh, first 10,000 training images, 4 epochs of batches of 100, cosine schedule. Every
method gets 12 trials of its hyper-parameters, trained on 8,000 images and judged on the other 2,000; the best
trial then trains on all 10,000 with five fresh seeds and is tested on the 10,000 test images. Every finished
run is a line of the output file; a stopped experiment goes on where it was.
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad.baselines import BinaryConnect, Bop, ProxQuant, SignSGD
from spingrad.solvers import BlockDescentSolver
from spingrad_lab.data import mnist

SIZES, BATCH, EPOCHS, IMAGES, HELD_OUT = (784, 256, 256, 10), 100, 4, 10_000, 2_000
TUNING_SEED, TEST_SEEDS = 0, (1, 2, 3, 4, 5)
Params = list[tuple[str, nn.Parameter]]


def grid(**values: Iterable[float]) -> list[dict[str, float]]:
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def adam(params: Params, lr: float, beta2: float) -> torch.optim.Optimizer:
    return BinaryConnect(params, torch.optim.Adam, lr=lr, betas=(0.9, beta2))


def sgd(params: Params, lr: float, momentum: float) -> torch.optim.Optimizer:
    return BinaryConnect(params, torch.optim.SGD, lr=lr, momentum=momentum)


def proxquant(params: Params, lr: float, regularization: float) -> torch.optim.Optimizer:
    for _, weight in params:  # real weights begin where binary ones are: at magnitude one
        nn.init.uniform_(weight, -1, 1)
    return ProxQuant(params, regularization=regularization, lr=lr)


def published(params: Params, lr: float) -> torch.optim.Optimizer:
    return QPSBGD.as_published(params, lr, solver=BlockDescentSolver(num_sweeps=5))


def real(params: Params, lr: float, beta2: float) -> torch.optim.Optimizer:
    """A control, not a rival: Adam on the same network with real weights, never made binary."""
    for _, weight in params:
        nn.init.uniform_(weight, -1, 1)
    return ProxQuant(params, regularization=0, lr=lr, betas=(0.9, beta2))


METHODS: dict[str, tuple[Callable[..., torch.optim.Optimizer], list[dict[str, float]]]] = {
    "BinaryConnect SGD": (sgd, grid(lr=(0.01, 0.03, 0.1, 0.3, 1, 3), momentum=(0, 0.9))),
    "BinaryConnect signSGD": (SignSGD, grid(lr=(3e-5, 1e-4, 3e-4, 6e-4, 1e-3, 3e-3), momentum=(0, 0.9))),
    "BinaryConnect Adam": (adam, grid(lr=(3e-4, 6e-4, 1e-3, 2e-3, 4e-3, 1e-2), beta2=(0.999, 0.99))),
    "ProxQuant": (proxquant, grid(lr=(3e-3, 1e-2, 3e-2), regularization=(3e-4, 1e-3, 3e-3, 1e-2))),
    "Bop": (Bop, grid(lr=(1e-4, 3e-4, 1e-3, 3e-3), threshold=(3e-6, 1e-5, 3e-5))),
    "QP-SBGD as published": (published, [{"lr": 10 ** (k / 2 - 6)} for k in range(12)]),
    "QP-SBGD": (
        partial(QPSBGD, momentum=0.0, rank=None),
        grid(lr=(3e-3, 1e-2, 3e-2, 1e-1), target_rms=(0.5, 1, 2)),
    ),
    "real weights, Adam": (real, grid(lr=(1e-2, 2e-2, 4e-2, 8e-2, 0.15, 0.3), beta2=(0.999, 0.99))),
    "QP-SBGD, momentum 0.9": (
        partial(QPSBGD, rank=None),
        grid(lr=(3e-3, 1e-2, 3e-2), target_rms=(1, 2, 4, 8), momentum=(0.9,)),
    ),
    "QP-SBGD, the default": (QPSBGD, grid(lr=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2), momentum=(0.9, 0.95))),
}


@cache
def images(split: str) -> tuple[Tensor, Tensor]:
    data = mnist(split)  # type: ignore[arg-type]
    scale = mnist("train").pixels().square().mean().sqrt()
    return data.pixels() / scale, data.labels  # unit root mean square, zero stays zero


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


def run(method: str, settings: dict[str, float], seed: int, tuning: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    begin = time.perf_counter()
    x, y = images("train")
    count = IMAGES - HELD_OUT if tuning else IMAGES
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(SIZES):
        layers += [BinaryLinear(fan_in, fan_out), nn.Hardtanh()]
    model = nn.Sequential(*layers[:-1])
    make, _ = METHODS[method]
    optimizer = make(binary_parameters(model), **settings)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * count // BATCH)
    for _ in range(EPOCHS):
        for rows in torch.randperm(count).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            scheduler.step()
    if isinstance(optimizer, ProxQuant) and optimizer.regularization:
        optimizer.project()
    held_out = slice(count, IMAGES)
    scored = (x[held_out], y[held_out]) if tuning else images("test")
    return {
        "method": method,
        "settings": settings,
        "seed": seed,
        "tuning": tuning,
        "accuracy": accuracy(model, *scored),
        "train_accuracy": accuracy(model, x[:count], y[:count]),
        "seconds": round(time.perf_counter() - begin, 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def key(method: str, settings: dict[str, float], seed: int, tuning: bool) -> str:
    return json.dumps([method, settings, seed, tuning], sort_keys=True)


class Results:
    """Finished runs, one JSON line each, so that none is ever computed twice."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines: dict[str, dict[str, Any]] = {}
        if os.path.exists(path):
            with open(path) as file:
                for line in file:
                    self._keep(json.loads(line))

    def _keep(self, line: dict[str, Any]) -> None:
        self.lines[key(line["method"], line["settings"], line["seed"], line["tuning"])] = line

    def finish(self, jobs: list[tuple[str, dict[str, float], int, bool]], workers: int, title: str) -> None:
        missing = [job for job in jobs if key(*job) not in self.lines]
        columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with ProcessPoolExecutor(workers) as pool, Progress(*columns) as progress:
            task = progress.add_task(title, total=len(jobs), completed=len(jobs) - len(missing))
            for future in as_completed([pool.submit(run, *job) for job in missing]):
                line = future.result()
                self._keep(line)
                with open(self.path, "a") as file:
                    file.write(json.dumps(line) + "\n")
                progress.advance(task)

    def best(self, method: str) -> dict[str, float]:
        trials = [line for line in self.lines.values() if line["method"] == method and line["tuning"]]
        return max(trials, key=lambda line: line["accuracy"])["settings"]  # type: ignore[no-any-return]

    def tests(self, method: str) -> list[dict[str, Any]]:
        lines = [line for line in self.lines.values() if line["method"] == method and not line["tuning"]]
        chosen = self.best(method)
        return [line for line in lines if line["settings"] == chosen]

    def worst(self, method: str) -> float:
        trials = (line for line in self.lines.values() if line["method"] == method and line["tuning"])
        return min(line["accuracy"] for line in trials)  # type: ignore[no-any-return]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of the 95 % interval (Student, five seeds: t = 2.776)."""
    return statistics.mean(values), 2.776 * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", default="mnist_methods.jsonl")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    results = Results(args.out)
    trials = [(m, s, TUNING_SEED, True) for m, (_, settings) in METHODS.items() for s in settings]
    results.finish(trials, args.workers, "trials")
    tests = [(m, results.best(m), seed, False) for m in METHODS for seed in TEST_SEEDS]
    results.finish(tests, args.workers, "tests ")

    print("\nMNIST, 784-256-256-10 without BatchNorm, 10,000 images, 4 epochs, 5 seeds")
    head = f"{'method':24} {'test':>7} {'± 95 %':>7} {'train':>7} {'s/run':>6} {'worst trial':>12}"
    print(f"{head}  chosen of 12 trials")
    for method in METHODS:
        lines = results.tests(method)
        mean, half = interval([line["accuracy"] for line in lines])
        train = statistics.mean(line["train_accuracy"] for line in lines)
        seconds = statistics.median(line["seconds"] for line in lines)
        chosen = ", ".join(f"{k}={v:g}" for k, v in results.best(method).items())
        row = f"{method:24} {mean:7.4f} {half:7.4f} {train:7.4f} {seconds:6.1f} {results.worst(method):12.3f}"
        print(f"{row}  {chosen}")


if __name__ == "__main__":
    main()
