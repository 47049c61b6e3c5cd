"""How the cost of a layer's step grows with its rows, inputs and units."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spingrad import BinaryLeastSquares, LayerRecord
from spingrad._timing import threads
from spingrad.solvers import BlockDescentSolver
from spingrad_lab.bench.timing import processor_seconds
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.runs import Experiment, Job, Lab, Line, seeded

AXES = {"B": "rows B", "n": "inputs n", "m": "units m"}
SIZES = (256, 512, 1024, 2048, 4096)
BASE = {"B": 256, "n": 512, "m": 512}


class Growth(Experiment):
    """Pose and solve one layer, each size over a factor of 16 while the others rest."""

    title = "Growth"
    source = "one layer, 256 to 4,096 rows, inputs and units"
    repeats = 3

    def plan(self, lab: Lab) -> None:
        sizes = SIZES[:3] if lab.quick else SIZES
        repeats = range(1 if lab.quick else lab.seeds or self.repeats)
        jobs = [{"axis": a, **BASE, a: size, "repeat": k} for k in repeats for a in AXES for size in sizes]
        lab.run(jobs, "sizes")

    def compute(self, job: Job) -> dict[str, Any]:
        rows, n, m = job["B"], job["n"], job["m"]
        with threads(1), seeded(job["repeat"]):
            record = LayerRecord(torch.randn(rows, n), torch.randn(rows, m))
            weight = torch.randn(m, n)
        with threads(1):
            product = processor_seconds(lambda: record.grad.T @ record.x)  # type: ignore[operator]
            solve = processor_seconds(lambda: _step(record, weight))
        return {"seconds": solve, "product": product}

    def show(self, lines: Sequence[Line]) -> Section:
        points = _points(lines, "seconds")
        bare = _points(lines, "product")
        rows = [
            [AXES[axis], *(f"{1e3 * own[s]:.2f}" for s in own), f"{exponent(own):.2f}"]
            for axis, own in points.items()
        ]
        rows += [
            [f"one bare product, {AXES[a]}", *(f"{1e3 * own[s]:.2f}" for s in own), f"{exponent(own):.2f}"]
            for a, own in bare.items()
        ]
        sizes = [f"{size:,}" for size in next(iter(points.values()))]
        table = Table(["processor ms", *sizes, "exponent"], rows)
        return Section(list(_NOTES), [table], [Figure("growth", _CAPTION, _figure(points, bare))])


def _step(record: LayerRecord, weight: torch.Tensor) -> None:
    """What the optimizer does for one layer."""
    problem = BinaryLeastSquares.from_record(record, "uniform", 1.0)
    start = 0
    for spins in BlockDescentSolver().stream([problem])[0]:
        weight[start : start + len(spins)].add_(spins, alpha=-1e-3).clamp_(-1, 1)
        start += len(spins)


def _points(lines: Sequence[Line], metric: str) -> dict[str, dict[int, float]]:
    """Median over the repeats, for each axis and size."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        axis = line.job["axis"]
        found.setdefault(axis, {}).setdefault(line.job[axis], []).append(line.metrics[metric])
    return {a: {s: float(np.median(own[s])) for s in sorted(own)} for a, own in found.items()}


def exponent(points: dict[int, float]) -> float:
    """Slope of a straight line through all points on log-log axes.

    Example:
        >>> round(exponent({size: 5e-9 * size**1.5 for size in (256, 512, 1024)}), 3)
        1.5
    """
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


def _figure(points: dict[str, dict[int, float]], bare: dict[str, dict[int, float]]) -> str:
    canvas, axes = figures.new(9.2, 3.2, columns=3)
    for panel, (axis, own) in zip(axes[0], points.items(), strict=True):
        label = f"step of one layer, exponent {exponent(own):.2f}"
        panel.plot(*_ms(own), "o-", color=figures.VERMILION, markersize=4, label=label)
        label = f"one bare product, exponent {exponent(bare[axis]):.2f}"
        panel.plot(*_ms(bare[axis]), "s--", color=figures.GREY, markersize=3.5, label=label)
        rest = ", ".join(f"{name} = {size}" for name, size in BASE.items() if name != axis)
        panel.set(xscale="log", yscale="log", xlabel=AXES[axis], title=rest, ylim=(0.5, 300))
        panel.set_xticks(list(own), [f"{size:,}" for size in own])
        panel.set_yticks([1, 10, 100], ["1", "10", "100"])
        panel.minorticks_off()
        panel.legend(fontsize=7.5)
    axes[0, 0].set_ylabel("processor ms, one thread")
    return to_svg(canvas)


def _ms(points: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(points), [1e3 * seconds for seconds in points.values()]


_CAPTION = "Processor time of one layer's step against its rows, inputs and units, beside one bare product."
_NOTES = (
    "One layer posed, solved and moved as the optimizer does it, on Gaussian data (the work does not depend "
    "on the data), one thread, medians of processor time. Exponents are fitted to all sizes.",
)
