"""How long training takes with each solver, and how the cost of a layer grows with width and batch."""

import itertools
import time
from typing import Any

import pandas as pd
import torch

from spingrad.solvers import BlockDescentSolver
from spingrad_lab.bench.timing import exponent, larger_half, processor_seconds
from spingrad_lab.methods import ALL_DIRECTIONS
from spingrad_lab.posed import scaled
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import significant
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where
from spingrad_lab.tasks.graphs import Cora, Karate, PubMed
from spingrad_lab.tasks.small import AdultTwoLayers, Digits12, pair_points
from spingrad_lab.tasks.training import Task, endless_batches, optimizers, take_step

TASKS: dict[str, type[Task]] = {
    "MNIST pair 1/2": Digits12,
    "Karate": Karate,
    "Adult, two layers": AdultTwoLayers,
    "Cora": Cora,
    "PubMed": PubMed,
}
PAPER = {
    "MNIST pair 1/2": "6 h, of which 1 min of QPU time",
    "Karate": "within 1 h",
    "Adult, two layers": "within 1 h",
    "Cora": "6 h of CPU time",
    "PubMed": "6 h of CPU time",
}
SOLVERS = {
    "block": "block descent",
    "exact": "exact",
    "annealing": "simulated annealing",
    "tabu": "tabu search",
}
SAMPLED = ("annealing", "tabu")
TIMED_STEPS = 20
WARM_UP = 3
WIDTHS = (64, 128, 256, 512, 1024, 2048)
BATCHES = (32, 64, 128, 256, 512, 1024)
FIXED_BATCH, FIXED_WIDTH = 100, 512


class Runtime(Experiment):
    """A complete training run with each solver beside signSGD, and one layer's solve at many sizes."""

    title = "Runtime"
    source = "appendix, runtime analysis; section 5, resources"
    repeats = 3

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        repeats = range(lab.seeds or (1 if lab.quick else self.repeats))
        runs = itertools.product(TASKS, SOLVERS, repeats)
        lab.run([{"stage": "train", "task": t, "solver": s, "seed": k} for t, s, k in runs], "training")
        widths, batches = (WIDTHS[:3], BATCHES[:3]) if lab.quick else (WIDTHS, BATCHES)
        sizes = [("width", width, FIXED_BATCH) for width in widths]
        sizes += [("batch", FIXED_WIDTH, batch) for batch in batches]
        lab.run(
            [
                {"stage": "growth", "axis": axis, "width": width, "batch": batch, "seed": seed}
                for (axis, width, batch), seed in itertools.product(sizes, repeats)
            ],
            "growth",
        )

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            if job["stage"] == "growth":
                return {"seconds": solve_seconds(job["width"], job["batch"])}
            task = TASKS[job["task"]](job["seed"], False, job["quick"])
            total = task.epochs * sum(1 for _ in task.batches())
            steps = min(total, TIMED_STEPS) if job["solver"] in SAMPLED else total
            steps = min(steps, 5) if job["quick"] else steps
            ours = {"lr": 3e-3, "solver": job["solver"]}
            own = train_seconds(task, ALL_DIRECTIONS, ours, steps, job["seed"])
            unit = train_seconds(
                task, "BinaryConnect signSGD", {"lr": 1e-3, "momentum": 0}, total, job["seed"]
            )
        return {
            "seconds": round(own * total / steps, 5),
            "signSGD": round(unit, 5),
            "steps": total,
            "timed_steps": steps,
        }

    def show(self, runs: pd.DataFrame) -> Section:
        trained, solved = where(runs, stage="train"), where(runs, stage="growth")
        trained = trained.assign(ratio=trained["seconds"] / trained["signSGD"])
        growth = {axis: where(solved, axis=axis).groupby(axis)["seconds"] for axis in ("width", "batch")}
        repeats = trained.groupby(["task", "solver"]).size().max()
        parts = sorted(set(trained["timed_steps"][trained["timed_steps"] < trained["steps"]]))
        caption = (
            "Processor seconds of a training run on one core, and in brackets as a multiple of signSGD's in "
            f"the same process; median of {repeats}. † extrapolated from {', '.join(map(str, parts))} steps."
        )
        header = ["task", "steps", "signSGD", *SOLVERS.values(), "paper"]
        medians = {axis: own.median() for axis, own in growth.items()}
        exponents = {axis: exponent(larger_half(points)) for axis, points in medians.items()}
        drawn = Figure("growth", _GROWTH_CAPTION, _figure(solved, exponents))
        rows = [_row(task, where(trained, task=task)) for task in TASKS if task in set(trained["task"])]
        return Section([*_NOTES, *_verdict(trained, exponents)], [Table(header, rows, caption)], [drawn])


def train_seconds(task: Task, method: str, settings: dict[str, Any], steps: int, seed: int) -> float:
    """Processor seconds of some steps of training, after a few that compile and load what they need."""
    network = task.network().train()
    steppers = optimizers(network, task, method, settings, seed)
    begin = 0.0
    for step, loss in enumerate(endless_batches(task)):  # drawing the next batch is part of the time
        if step == WARM_UP:
            begin = time.process_time()
        if step == WARM_UP + steps:
            break
        take_step(network, loss, steppers)
    return time.process_time() - begin


def solve_seconds(width: int, batch: int) -> float:
    """Processor seconds to pose and solve the step of one layer of ``width`` inputs and units, all rows."""
    x, grad, solver = torch.randn(batch, width), torch.randn(batch, width), BlockDescentSolver()
    return significant(processor_seconds(lambda: solver.solve(scaled(x, grad)), at_least=0.3, calls=3), 4)


def _row(task: str, own: pd.DataFrame) -> list[str]:
    cells = []
    for solver in SOLVERS:
        found = where(own, solver=solver)
        if found.empty:
            cells.append("–")
            continue
        mark = "†" if (found["timed_steps"] < found["steps"]).iloc[0] else ""
        cells.append(f"{found['seconds'].median():.2f}{mark} ({found['ratio'].median():.1f} ×)")
    return [task, str(own["steps"].iloc[0]), f"{own['signSGD'].median():.2f}", *cells, PAPER[task]]


def _figure(solved: pd.DataFrame, exponents: dict[str, float]) -> str:
    canvas, axes = figures.new(8.4, 3.6, columns=2)
    labels = {
        "width": ("width (inputs and units)", f"batch of {FIXED_BATCH}", figures.VERMILION),
        "batch": ("batch size", f"width {FIXED_WIDTH}", figures.BLUE),
    }
    for panel, (axis, (name, fixed, colour)) in zip(axes[0], labels.items(), strict=True):
        own = where(solved, axis=axis)
        medians = own.groupby(axis)["seconds"].median()
        sizes = list(medians.index)
        label = f"block descent, exponent {exponents[axis]:.2f}"
        panel.plot(sizes, medians, "-", color=colour, linewidth=1.6, label=label)
        panel.plot(own[axis], own["seconds"], "o", color=colour, markersize=3.5, alpha=0.6)
        slope = [medians.iloc[-1] * (size / sizes[-1]) ** 2 for size in sizes]
        panel.plot(
            sizes, slope, "--", color=figures.GREY, linewidth=1.2, label="quadratic, as the paper says"
        )
        panel.set(xscale="log", yscale="log", xlabel=name, title=f"one layer, {fixed}")
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.legend()
    axes[0, 0].set_ylabel("processor seconds of a solve")
    return to_svg(canvas)


_GROWTH_CAPTION = (
    "Processor time to pose and solve the step of one square layer, on one core; exponents are fitted to the "
    "larger half of the sizes, and the dashed line of slope 2 is drawn through the last point."
)
_NOTES = (
    "A complete training run of each task with its own number of steps, with *QP-SBGD, all "
    "directions* (`target_rms` 1, no momentum: not the default), without scoring; drawing batches is "
    "included. Each run has one thread, and signSGD runs on the same task in the same process. "
    "All layers here have at most 20 inputs, so that the exact solver can do them. "
    "Tabu search takes 5 ms for every unit, whatever its size.",
    "The paper's times are of other hardware and software, and it does not say how many runs or which solver "
    "they cover: they are orders of magnitude. It puts the six hours with D-Wave down to minor embedding, "
    "and says that most experiments take minutes on one CPU.",
    "The paper states that its QUBO grows quadratically in batch size and layer width. Block descent never "
    "forms it: its two matrix products are linear in the batch, in the inputs and in the units.",
)


def _verdict(trained: pd.DataFrame, exponents: dict[str, float]) -> list[str]:
    """Each solver against signSGD, and the growth."""
    medians = trained.groupby(["solver", "task"])[["ratio", "seconds"]].median()
    parts = []
    for solver, name in SOLVERS.items():
        if solver in medians.index:
            ratios = medians["ratio"][solver]
            parts.append(f"{name} {ratios.min():.1f} to {ratios.max():.1f}")
    longest = medians["seconds"]["block"].max()
    return [
        f"Times signSGD's, over the tasks: {', '.join(parts)}. The longest run with block descent takes "
        f"{longest:.1f} s.",
        f"One layer's solve grows with the width to the power {exponents['width']:.2f} and with the batch to "
        f"the power {exponents['batch']:.2f}.",
    ]


RUNTIME = Runtime()
