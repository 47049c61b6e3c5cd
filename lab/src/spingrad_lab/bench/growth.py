"""How the cost of a layer's step grows with its rows, inputs and units."""

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad._timing import threads
from spingrad.sketch import sketch_of
from spingrad_lab.bench.timing import exponent, processor_seconds
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where

AXES = {"B": "rows B", "n": "inputs n", "m": "units m"}
SIZES = (256, 512, 1024, 2048, 4096)
BASE = {"B": 256, "n": 512, "m": 512}


class Growth(Experiment):
    """Pose and solve one layer, each size over a factor of 16 while the others stay."""

    title = "Growth"
    source = "one layer, 256 to 4,096 rows, inputs and units"
    repeats = 3
    revision = 2  # with momentum and 32 directions

    def plan(self, lab: Lab) -> None:
        sizes = SIZES[:3] if lab.quick else SIZES
        repeats = range(1 if lab.quick else lab.seeds or self.repeats)
        jobs = [{"axis": a, **BASE, a: size, "repeat": k} for k in repeats for a in AXES for size in sizes]
        lab.run(jobs, "sizes")

    def compute(self, job: Job) -> dict[str, Any]:
        rows, n, m = job["B"], job["n"], job["m"]
        with threads(1), seeded(job["repeat"]):
            x, grad, layer = torch.randn(rows, n), torch.randn(rows, m), BinaryLinear(n, m)
            optimizer = QPSBGD(binary_parameters(layer))
            product = processor_seconds(lambda: grad.T @ x)
            solve = processor_seconds(lambda: _step(layer, optimizer, x, grad))
        return {"seconds": solve, "product": product}

    def show(self, runs: pd.DataFrame) -> Section:
        step, bare = _medians(runs, "seconds"), _medians(runs, "product")
        rows = []
        for label, points in (("", step), ("one bare product, ", bare)):
            for axis, own in points.items():
                rows.append([label + AXES[axis], *(f"{1e3 * s:.2f}" for s in own), f"{exponent(own):.2f}"])
        sizes = [f"{size:,}" for size in next(iter(step.values())).index]
        table = Table(["processor ms", *sizes, "exponent"], rows)
        return Section(list(_NOTES), [table], [Figure("growth", _CAPTION, _figure(step, bare))])


def _step(layer: BinaryLinear, optimizer: QPSBGD, x: Tensor, grad: Tensor) -> None:
    """What a backward pass leaves for the optimizer, and what that does with it."""
    layer.weight.grad = grad.T @ x
    leaf = layer.companion.leaf
    assert leaf is not None
    leaf.grad = sketch_of(x, grad, leaf.shape, leaf.dtype, "rows", ())
    optimizer.step()


def _medians(runs: pd.DataFrame, metric: str) -> dict[str, pd.Series]:
    """For each axis, the median over the repeats by size."""
    return {axis: own.groupby(axis)[metric].median() for axis in AXES if len(own := where(runs, axis=axis))}


def _figure(points: dict[str, pd.Series], bare: dict[str, pd.Series]) -> str:
    canvas, axes = figures.new(9.2, 3.2, columns=3)
    for panel, (axis, own) in zip(axes[0], points.items(), strict=True):
        label = f"step of one layer, exponent {exponent(own):.2f}"
        panel.plot(own.index, 1e3 * own, "o-", color=figures.VERMILION, markersize=4, label=label)
        label = f"one bare product, exponent {exponent(bare[axis]):.2f}"
        panel.plot(bare[axis].index, 1e3 * bare[axis], "s--", color=figures.GREY, markersize=3.5, label=label)
        rest = ", ".join(f"{name} = {size}" for name, size in BASE.items() if name != axis)
        panel.set(xscale="log", yscale="log", xlabel=AXES[axis], title=rest, ylim=(0.5, 300))
        panel.set_xticks(own.index, [f"{size:,}" for size in own.index])
        panel.set_yticks([1, 10, 100], ["1", "10", "100"])
        panel.minorticks_off()
        panel.legend(fontsize=7.5)
    axes[0, 0].set_ylabel("processor ms, one thread")
    return to_svg(canvas)


_CAPTION = "Processor time of one layer's step against its rows, inputs and units, beside one bare product."
_NOTES = (
    "One layer's gradient, sketch, problem, spins and move as in training, on Gaussian data (the work does "
    "not depend on the data), one thread, medians of processor time. Exponents are fitted to all sizes.",
)
