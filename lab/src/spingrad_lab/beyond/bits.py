"""Accuracy against bits a weight: the paper's future work, and what exact solving adds to it."""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from spingrad import QPSBGD, BinaryLinear, Bits
from spingrad_lab.beyond.images import Images, Name
from spingrad_lab.methods import ONE_BATCH, SOLVER_LABELS, Method, Params, Settings, grid, make_solver
from spingrad_lab.paper.small import PAIRS, DigitPair, pair_points
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import estimate, paired
from spingrad_lab.runs import Experiment, Job, Lab, Line, seeded
from spingrad_lab.tasks.training import Task, train
from spingrad_lab.trials import TUNING_SEED

COUNTS = (1, 2, 3)
SEEDS = {"pairs": 10, "wide": 5}
SOLVERS = {"pairs": ("feedback", "block", "exact"), "wide": ("block",)}
WIDE: tuple[Name, ...] = ("mnist", "fashion")
TRIALS = {
    "pairs": grid(lr=(1e-3, 3e-3, 1e-2, 3e-2), target_rms=(1, 3), momentum=(0,)),
    "wide": grid(lr=(3e-4, 1e-3, 2e-3, 3e-3), momentum=(0.9,)),
}


def network(count: int, *sizes: int) -> nn.Sequential:
    """Layers of ``count`` bits a weight with hardtanh between them."""
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
    """Settings are chosen with the default solver, for each number of bits; then the solver alone differs."""

    title = "Several bits a weight"
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
                seeds = range(lab.seeds or (2 if lab.quick else SEEDS[kind]))
                lab.run(
                    [
                        {**place, "stage": "final", "solver": solver, "settings": best(tried), "seed": seed}
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

    def show(self, lines: Sequence[Line]) -> Section:
        finals: dict[tuple[str, str, str], dict[int, list[float]]] = {}
        for line in sorted(lines, key=lambda line: (line.job["bits"], line.job["seed"])):
            if line.job["stage"] == "final":
                place = line.job["kind"], line.job["task"], line.job["solver"]
                accuracy = line.metrics["test_accuracy"]
                finals.setdefault(place, {}).setdefault(line.job["bits"], []).append(accuracy)
        rows = []
        for (kind, task, solver), own in finals.items():
            last = max(own)
            gain = str(paired(own[last], own[1])) if len(own[last]) == len(own[1]) and last > 1 else "–"
            cells = [str(estimate(own[count])) if count in own else "–" for count in COUNTS]
            rows.append([task, _NETWORKS[kind], SOLVER_LABELS[solver], *cells, gain])
        header = [
            "data",
            "network",
            "solver",
            *(f"{k} bit{'s' * (k > 1)}" for k in COUNTS),
            "most less one bit",
        ]
        table = Table(header, rows, "Test accuracy against bits a weight")
        return Section(list(_NOTES), [table], [Figure("accuracy", _CAPTION, _figure(finals))])


def best(trials: Sequence[Line]) -> Settings:
    """The settings with the highest mean validation accuracy, the first of equals."""
    scores: dict[str, list[float]] = {}
    known: dict[str, Settings] = {}
    for line in trials:
        key = repr(line.job["settings"])
        known[key] = line.job["settings"]
        scores.setdefault(key, []).append(line.metrics["test_accuracy"])
    return known[max(scores, key=lambda key: sum(scores[key]) / len(scores[key]))]


def _figure(finals: dict[tuple[str, str, str], dict[int, list[float]]]) -> str:
    kinds = [kind for kind in _NETWORKS if any(place[0] == kind for place in finals)]
    canvas, axes = figures.new(8.4, 3.2, columns=max(1, len(kinds)))
    colours = [figures.VERMILION, figures.BLUE, figures.GREEN]
    for panel, kind in zip(axes[0], kinds, strict=False):
        tasks = list(dict.fromkeys(task for own, task, _ in finals if own == kind))
        for (own, task, solver), accuracies in finals.items():
            if own == kind:
                means = [estimate(values).mean for values in accuracies.values()]
                style = {"feedback": ":", "block": "-", "exact": "--"}[solver]
                colour = colours[tasks.index(task)]
                panel.plot(list(accuracies), means, style, marker="o", markersize=3.5, color=colour)
                for count, values in accuracies.items():
                    panel.plot([count] * len(values), values, "_", color=colour, alpha=0.4)
                if solver == "block":
                    panel.annotate(
                        task, (max(accuracies), means[-1]), xytext=(6, -3), textcoords="offset points"
                    )
        panel.set(title=_NETWORKS[kind], xlabel="bits a weight", ylabel="test accuracy", xticks=list(COUNTS))
    return to_svg(canvas)


_NETWORKS = {"pairs": "16-4-2, two digits", "wide": "784-256-256-10"}
_CAPTION = "Test accuracy against bits a weight: seeds and their mean. Dotted: one sweep of error feedback; "
_CAPTION += "solid: the default solver; dashed: every step solved exactly."
_NOTES = (
    "A weight of k bits is k spins on the input at full strength, half of it, a quarter; the projection is "
    "the same problem with k times as many spins. Settings are chosen for each number of bits with the "
    "default solver on held-out images (eight trials of three seeds for pairs, four of one for "
    "784-256-256-10, which has no BatchNorm and trains for 3 epochs); the other solvers take the same ones.",
)
