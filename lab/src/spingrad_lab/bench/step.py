"""The time of a training step, beside SignSGD's and beside its bare matrix products."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import spingrad
from spingrad import QPSBGD, binary_parameters
from spingrad._timing import threads
from spingrad.baselines import BinaryConnect, SignSGD
from spingrad.solvers import BlockDescentSolver
from spingrad_lab.bench import beside
from spingrad_lab.bench.beside import Turn, package_in, revision, steps_of
from spingrad_lab.bench.timing import batch, network
from spingrad_lab.methods import ONE_BATCH, OneSweep
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.images import FashionConvolutional, pixels

WIDE, CONVOLUTIONAL = "784-1024-1024-10", "convolutional, 1-16-32 channels"
ACCUMULATED = f"16 passes of {WIDE}"
SIZES = (784, 1024, 1024, 10)
BATCH = {WIDE: 128, CONVOLUTIONAL: 100, ACCUMULATED: 512}
METHODS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SignSGD": lambda model: SignSGD(binary_parameters(model)),
    "BinaryConnect Adam": lambda model: BinaryConnect(binary_parameters(model), torch.optim.Adam),
    "QP-SBGD": lambda model: QPSBGD(binary_parameters(model)),
    "QP-SBGD, whitening 0.125": lambda model: QPSBGD(binary_parameters(model), whitening=0.125),
    "QP-SBGD, 8 directions, 1 sweep": lambda model: QPSBGD(
        binary_parameters(model), rank=8, solver=OneSweep()
    ),
    "QP-SBGD, all directions": lambda model: QPSBGD(binary_parameters(model), rank=None),
    "QP-SBGD, one batch alone": lambda model: QPSBGD(binary_parameters(model), **ONE_BATCH),
    "QP-SBGD, one batch alone, 2 sweeps": lambda model: QPSBGD(
        binary_parameters(model), solver=BlockDescentSolver(num_sweeps=2), **ONE_BATCH
    ),
}
PRODUCTS = "products of SignSGD alone", "products of QP-SBGD alone"


class Step(Experiment):
    """Every method trains its own copy of one network; they take turns of ten steps."""

    title = "The time of a training step"
    source = "784-1024-1024-10 on MNIST and a small convolutional network on Fashion-MNIST"
    repeats = 3
    revision = 4  # gradients and sketches, and 16 directions; since 3, with a row for whitening

    def __init__(self, device: str = "cpu", beside: Path | None = None) -> None:
        self.device, self.beside = device, beside

    def plan(self, lab: Lab) -> None:
        repeats = range(1 if lab.quick else lab.seeds or self.repeats)
        cases = itertools.product(BATCH, (1,) if lab.quick else (1, 2), repeats)
        place = {} if self.device == "cpu" else {"device": self.device}
        if self.beside:
            package_in(self.beside)  # an unsuitable folder ends here
            here = Path(spingrad.__file__).parents[2]
            place |= {"here": revision(here), "beside": revision(self.beside)}
        jobs = [{"network": name, "threads": count, "repeat": k, **place} for name, count, k in cases]
        lab.run(jobs, "steps")

    def compute(self, job: Job) -> dict[str, Any]:
        device, name = torch.device(job.get("device", "cpu")), job["network"]
        with threads(job["threads"]), seeded(job["repeat"]), ExitStack() as open_until_the_end:
            model, batches = _network_and_batches(name)
            few = "beside" in job or name == ACCUMULATED
            methods = {k: METHODS[k] for k in beside.METHODS} if few else METHODS
            turns = {
                k: _turns(_training(deepcopy(model), batches, make, device, passes_of(name)))
                for k, make in methods.items()
            }
            if "beside" in job:
                assert self.beside is not None
                setting = {"network": name.removeprefix("16 passes of "), "passes": passes_of(name)}
                setting |= {"weights": model.state_dict(), "batches": batches}
                setting |= {"threads": job["threads"], "device": str(device)}
                others = open_until_the_end.enter_context(steps_of(self.beside, setting))
                turns |= {f"{k}, beside": turn for k, turn in others.items()}
            elif name == WIDE:
                turns |= {k: _turns(_products(bool(i), device)) for i, k in enumerate(PRODUCTS)}
            seconds = alternated(turns, *((2, 1) if job["quick"] else (100 // passes_of(name), 10)))
        return {name: _ratios(own, _base(name, seconds)) for name, own in seconds.items()}

    def show(self, runs: pd.DataFrame) -> Section:
        tables, notes = [], list(_NOTES)
        if "beside" in runs:
            notes.insert(0, _BESIDE)
            for (here, there, name), own in groups(runs, ["here", "beside", "network"]):
                tables.append(_versions(here, there, name, own))
            runs = runs[runs["beside"].isna()]
            if runs.empty:
                return Section(notes[:1], tables)
        for name, own in groups(runs, "network"):
            counts = groups(own.sort_values("threads"), "threads")
            header = ["method"]
            for count, _ in counts:
                header += [f"{count} thread{'s' * (count > 1)}: ms", "× SignSGD", "runs"]
            rows = []
            for method in [method for method in (*METHODS, *PRODUCTS) if method in where(own)]:
                row = [method]
                for _, timed in counts:
                    found = pd.DataFrame(list(timed[method].dropna()))
                    ratio = found["ratio"]
                    row += [f"{found['ms'].median():.1f}", f"{ratio.median():.2f}"]
                    row.append(f"{ratio.min():.2f}–{ratio.max():.2f}")
                rows.append(row)
            tables.append(Table(header, rows, f"{name}, batches of {BATCH[name]}"))
        return Section(notes, tables, [Figure("ratios", _CAPTION, _figure(runs))])


def _versions(here: str, there: str, name: str, runs: pd.DataFrame) -> Table:
    """Both versions' times, their ratios to SignSGD and to each other."""
    header, rows = ["method"], []
    counts = groups(runs.sort_values("threads"), "threads")
    for count, _ in counts:
        header += [f"{count} thread{'s' * (count > 1)}: here / there", "× SignSGD here", "there"]
    for method in beside.METHODS:
        row = [method]
        for _, own in counts:
            mine, theirs = (pd.DataFrame(list(own[k])) for k in (method, f"{method}, beside"))
            faster = mine["ms"] / theirs["ms"]
            row.append(f"{faster.median():.2f} ({faster.min():.2f}–{faster.max():.2f})")
            row += [f"{found['ratio'].median():.2f}" for found in (mine, theirs)]
        rows.append(row)
    return Table(header, rows, f"{name}, batches of {BATCH[name]}: here is {here}, there is {there}")


def passes_of(name: str) -> int:
    return 16 if name == ACCUMULATED else 1


def _base(name: str, seconds: dict[str, list[float]]) -> list[float]:
    """SignSGD of the same version."""
    return seconds["SignSGD, beside" if name.endswith(", beside") else "SignSGD"]


def _ratios(own: list[float], base: list[float]) -> dict[str, Any]:
    quartiles = np.quantile(np.divide(own, base), [0.25, 0.75])
    return {
        "ms": round(1e3 * statistics.median(own), 3),
        "ratio": round(statistics.median(own) / statistics.median(base), 4),
        "quartiles": [round(float(q), 4) for q in quartiles],
    }


def alternated(turns: Mapping[str, Turn], repeats: int, turn: int) -> dict[str, list[float]]:
    """Seconds of every step; candidates take turns of several steps, and the first turn only warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for round_ in range(1 + -(-repeats // turn)):
        for name, take in turns.items():
            taken = take(turn)
            seconds[name] += taken if round_ else []
    return seconds


def _turns(call: Callable[[], None]) -> Turn:
    def take(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return seconds

    return take


def _network_and_batches(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    size = BATCH[name]
    if name != CONVOLUTIONAL:
        return network(SIZES), [batch(size, step) for step in range(20)]
    x, y = pixels("fashion", "train")
    batches = [(x[size * i : size * (i + 1)], y[size * i : size * (i + 1)]) for i in range(20)]
    return object.__new__(FashionConvolutional).network(), batches


def _training(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    make: Callable[[nn.Module], torch.optim.Optimizer],
    device: torch.device,
    passes: int,
) -> Callable[[], None]:
    """A call that takes the next step of training; batches are ready before the clock starts."""
    model.to(device)
    optimizer, supply = make(model), itertools.cycle((x.to(device), y.to(device)) for x, y in batches)

    def step() -> None:
        inputs, labels = next(supply)
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(passes), labels.chunk(passes), strict=True):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        _finish(device)

    return step


def _products(projected: bool, device: torch.device) -> Callable[[], None]:
    """The matrix products of a step and nothing else: forward, to the inputs, and to the weights or spins."""
    layers, rows = [], BATCH[WIDE]
    for place, (n, m) in enumerate(itertools.pairwise(SIZES)):
        shapes = (rows, n), (rows, m), (m, n), (m, n), (rows, m), (rows, n)
        layers.append((place, [torch.randn(shape, device=device) for shape in shapes]))

    def call() -> None:
        for place, (x, grad, weight, to_weight, out, to_input) in layers:
            torch.mm(x, weight.T, out=out)
            if place:
                torch.mm(grad, weight, out=to_input)
            torch.mm(grad.T, x, out=to_weight)
            if projected:  # two sweeps over 16 directions: fields, and what the spins give back
                for _ in range(2):
                    torch.mm(torch.mm(weight, x[:16].T), x[:16], out=to_weight)
        _finish(device)

    return call


def _finish(device: torch.device) -> None:
    """Wait until a device that works on its own has done all."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _figure(runs: pd.DataFrame) -> str:
    canvas, axes = figures.new(8.4, 3.2, columns=2)
    for panel, name in zip(axes[0], (WIDE, CONVOLUTIONAL), strict=True):
        own = where(runs, network=name)
        methods = [method for method in METHODS if len(own)]
        for shift, (count, colour) in enumerate(((1, figures.VERMILION), (2, figures.BLUE))):
            for place, method in enumerate(methods):
                ratios = [
                    timed["ratio"] for timed in where(own, threads=count).get(method, pd.Series()).dropna()
                ]
                panel.plot(
                    ratios, [place + 0.22 * shift - 0.11] * len(ratios), "o", color=colour, markersize=4.5,
                    label=f"{count} thread{'s' * (count > 1)}" if not place else None,
                )  # fmt: skip
        panel.axvline(1, color=figures.GREY, linewidth=1)
        panel.set(title=name, xlabel="× SignSGD's step", ylim=(len(methods) - 0.5, -0.5))
        panel.set_yticks(range(len(methods)), methods if panel is axes[0, 0] else [""] * len(methods))
        panel.legend()
    return to_svg(canvas)


_BESIDE = (
    "Both versions train copies of one network on the same batches, in turns of ten steps; the other version "
    "in a process of its own, where its steps are timed. Medians over runs of the median over 100 steps; "
    "below one, this version is faster."
)
_CAPTION = "Time of a training step as a multiple of SignSGD's in the same run; a dot is a run of 100 steps."
_NOTES = (
    "Medians over runs of the median over 100 steps of each method, in turns of ten on one network; columns "
    "of ratios are to SignSGD in the same run. *Products alone* are the matrix products of the step without "
    "anything else: forward, to the inputs and to the weights; for QP-SBGD also those of two sweeps over 16 "
    "directions. *16 passes* are of 32 rows each, whose gradients add up to one step.",
)
