"""Accuracy against bits per weight: the paper's future work, and what exact solving adds to it."""

import itertools
from typing import Any

import pandas as pd
from torch import nn
from torch.optim import Optimizer

from spingrad import QPSBGD, BinaryLinear, Bits
from spingrad_lab.methods import ONE_BATCH, SOLVER_LABELS, Method, Params, grid, make_solver
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import Paired, estimate, family
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.images import Images, Name
from spingrad_lab.tasks.small import PAIRS, DigitPair, pair_points
from spingrad_lab.tasks.training import Task, train
from spingrad_lab.trials import TUNING_SEED, ahead, best_trial, current_finals

COUNTS = (1, 2, 3)
SEEDS = {"pairs": 10, "wide": 5}
SOLVERS = {"pairs": ("feedback", "block", "exact"), "wide": ("block",)}
WIDE: tuple[Name, ...] = ("mnist", "fashion")
TRIALS = {
    "pairs": grid(lr=(1e-3, 3e-3, 1e-2, 3e-2), target_rms=(1, 3), momentum=(0,)),
    "wide": grid(lr=(3e-4, 1e-3, 2e-3, 3e-3), momentum=(0.9,)),
}


def network(count: int, *sizes: int) -> nn.Sequential:
    """Layers of ``count`` bits per weight with hardtanh between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [Bits(count), BinaryLinear(count * fan_in, fan_out), nn.Hardtanh()]
    return nn.Sequential(*layers[:-1])


class Pair(DigitPair):
    """The paper's 16-4-2 network on two digits, small enough to solve every step exactly."""

    def __init__(self, task: str, count: int, seed: int, tuning: bool, quick: bool) -> None:
        self.digits, self.count = PAIRS[task], count
        super().__init__(seed, tuning, quick)

    def network(self) -> nn.Module:
        return network(self.count, 16, 4, 2)


class WideImages(Images):
    """784-256-256-10."""

    def __init__(self, task: Name, count: int, seed: int, tuning: bool, quick: bool) -> None:
        self.name, self.count, self.epochs = task, count, 3
        super().__init__(seed, tuning, quick)

    def network(self) -> nn.Module:
        return network(self.count, 784, 256, 256, 10)


def make(params: Params, seed: int, solver: str, momentum: float, **settings: float) -> Optimizer:
    fixed = {} if momentum else ONE_BATCH
    return QPSBGD(
        params, solver=make_solver(solver), seed=seed, **{**fixed, "momentum": momentum, **settings}
    )


class BitsExperiment(Experiment):
    """Settings are chosen with the default solver, for each number of bits; then only the solver differs."""

    title = "Several bits per weight"
    source = "beyond the paper, which names it as future work"

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        places = [("wide", task) for task in WIDE] + [("pairs", task) for task in PAIRS]
        for kind, task in places[:: 4 if lab.quick else 1]:
            trials = TRIALS[kind][:: 4 if lab.quick else 1]
            for count in COUNTS:
                place = {"kind": kind, "task": task, "bits": count}
                tried = lab.run(
                    [
                        {
                            **place,
                            "stage": "trial",
                            "solver": "block",
                            "settings": trial,
                            "seed": TUNING_SEED + k,
                        }
                        for trial in trials
                        for k in range(3 if kind == "pairs" else 1)
                    ],
                    f"{task}, {count} bits, trials",
                )
                settings = best_trial(tried).settings
                seeds = range(lab.seeds or (2 if lab.quick else SEEDS[kind]))
                lab.run(
                    [
                        {**place, "stage": "final", "solver": solver, "settings": settings, "seed": seed}
                        for solver in SOLVERS[kind]
                        for seed in seeds
                    ],
                    f"{task}, {count} bits, finals",
                )

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            own: type[Any] = Pair if job["kind"] == "pairs" else WideImages
            task: Task = own(job["task"], job["bits"], job["seed"], job["stage"] == "trial", job["quick"])
            method = Method(make, TRIALS[job["kind"]])
            return train(task, method, {**job["settings"], "solver": job["solver"]}, job["seed"])

    def show(self, runs: pd.DataFrame) -> Section:
        finals = current_finals(runs, ["kind", "task", "bits"])
        rows: list[list[str]] = []
        gains: list[tuple[int, Paired]] = []
        for (kind, task, solver), own in groups(finals, _PLACE):
            counts = own["bits"].value_counts()
            last = counts.index.max()
            if last > 1 and counts[last] == counts[1]:
                gains.append((len(rows), ahead(own, last, 1, "bits")))
            cells = [
                str(estimate(where(own, bits=k)["test_accuracy"])) if k in counts else "–" for k in COUNTS
            ]
            rows.append([task, _NETWORKS[kind], SOLVER_LABELS[solver], *cells, "–"])
        for (place, _), test in zip(gains, family([gain for _, gain in gains]), strict=True):
            rows[place][-1] = str(test)
        bits = (f"{k} bit{'s' * (k > 1)}" for k in COUNTS)
        header = ["data", "network", "solver", *bits, "most bits minus one"]
        table = Table(header, rows, "Test accuracy against bits per weight. Holm over the table.")
        return Section(list(_NOTES), [table], [Figure("accuracy", _CAPTION, _figure(finals))])


def _figure(finals: pd.DataFrame) -> str:
    kinds = [kind for kind in _NETWORKS if kind in set(finals["kind"])]
    canvas, axes = figures.new(8.4, 3.2, columns=max(1, len(kinds)))
    colours = [figures.VERMILION, figures.BLUE, figures.GREEN]
    for panel, kind in zip(axes[0], kinds, strict=False):
        tasks = list(where(finals, kind=kind)["task"].unique())
        for (_, task, solver), own in groups(where(finals, kind=kind), _PLACE):
            means = own.groupby("bits")["test_accuracy"].mean()
            style = {"feedback": ":", "block": "-", "exact": "--"}[solver]
            colour = colours[tasks.index(task)]
            panel.plot(means.index, means, style, marker="o", markersize=3.5, color=colour)
            panel.plot(own["bits"], own["test_accuracy"], "_", color=colour, alpha=0.4)
            if solver == "block":
                end = means.index[-1], means.iloc[-1]
                panel.annotate(task, end, xytext=(6, -3), textcoords="offset points")
        panel.set(
            title=_NETWORKS[kind], xlabel="bits per weight", ylabel="test accuracy", xticks=list(COUNTS)
        )
    return to_svg(canvas)


_PLACE = ["kind", "task", "solver"]
_NETWORKS = {"pairs": "16-4-2, two digits", "wide": "784-256-256-10"}
_CAPTION = (
    "Test accuracy against bits per weight: seeds and their mean. Dotted: one sweep of error feedback; "
)
_CAPTION += "solid: the default solver; dashed: every step solved exactly."
_NOTES = (
    "A weight of k bits is k spins on the input at full strength, half of it, a quarter; the projection is "
    "the same problem with k times as many spins. Settings are chosen for each number of bits with the "
    "default solver on held-out images (eight trials of three seeds for pairs, four of one for "
    "784-256-256-10, which has no BatchNorm and trains for 3 epochs); the other solvers take the same ones.",
)
