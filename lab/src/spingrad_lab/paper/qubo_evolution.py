"""The QUBO matrix of a layer along the way: how dense it is, and what its diagonal holds."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from spingrad import BinaryQuadratic
from spingrad_lab.paper.layer_problems import POSINGS, TIE, UPDATES, Columns, DigitExperiment, Readings
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Table, to_svg
from spingrad_lab.report.statistics import Estimate, significant


def qubo_matrix(problem: BinaryQuadratic, unit: int) -> Tensor:  # (n, n)
    """The symmetric ``Q`` with ``bᵀ Q b = E(2b - 1) - E(-1)`` for all bits ``b``, in double precision."""
    h, J, _ = problem.double().to_ising(unit)
    J = J + J.T
    return 2 * J + torch.diag(2 * h - 2 * J.sum(1))


class QuboEvolution(DigitExperiment):
    """The QUBO matrix along the way."""

    title = "Evolution of the QUBO"
    source = "appendix, evolution of the QUBO"

    def measure(self, problem: BinaryQuadratic, unit: int, seed: int) -> dict[str, Any]:
        h, J, _ = problem.double().to_ising(unit)
        couplings = J[tuple(torch.triu_indices(len(h), len(h), 1))]
        rms_bias, rms_coupling = (float(t.square().mean().sqrt()) for t in (h, couplings))
        metrics: dict[str, Any] = {
            "density": float((couplings.abs() > TIE * couplings.abs().max()).double().mean()),
            "ratio": rms_bias / rms_coupling,
            "rms_coupling": rms_coupling,
        }
        if seed == 0:  # the one that is drawn
            Q = qubo_matrix(problem, unit).tolist()
            metrics["upper"] = [[significant(v, 5) for v in row[i:]] for i, row in enumerate(Q)]
        return metrics

    def tables(self, found: Readings) -> list[Table]:
        caption = (
            "Share of the 120 couplings that are not zero, and ratio of the root mean squares of biases and "
            "couplings (of spins, h and J): mean ± 95 % interval over seeds"
        )
        columns: Columns = {
            "nonzero couplings": ("density", Estimate.percent),
            "bias / coupling": ("ratio", str),
        }
        return [found.table(columns, caption)]

    def notes(self, found: Readings) -> list[str]:
        density, ratio = (found.means(key) for key in ("density", "ratio"))
        couplings = (found.pooled(name, "rms_coupling") for name in POSINGS)
        same = float(np.mean([abs(a - b) < 1e-4 * abs(a) for a, b in zip(*couplings, strict=True)]))
        return [
            f"The paper calls the graph sparse. Measured, {density['as published']:.1%} of the couplings are "
            "not zero: ZᵀZ of a batch is dense, and a zero is two inputs that agree as often as they differ.",
            f"The biases carry the gradient. As published they are {ratio['as published']:.3f} times the "
            f"couplings, with our target {ratio['ours']:.2f} times. The inputs are spins, rows of equal "
            f"norm, so in {same:.0%} of the problems both posings have the same couplings and differ only in "
            "the diagonal; in the others ours leaves out rows without a gradient.",
        ]

    def draw(self, run: pd.Series) -> list[Figure]:
        from matplotlib.colors import SymLogNorm

        shown = [update for update in UPDATES if str(update) in run]
        matrices = {
            (name, update): _symmetric(run[str(update)][name]["upper"])
            for name, update in itertools.product(POSINGS, shown)
        }
        limit = max(float(np.abs(matrix).max()) for matrix in matrices.values())
        norm = SymLogNorm(limit / 30, vmin=-limit, vmax=limit)
        canvas, axes = figures.new(10, 3.5, rows=len(POSINGS), columns=len(shown))
        for matrix, panel in zip(matrices.values(), axes.flat, strict=True):
            image = panel.imshow(matrix, cmap="PuOr", norm=norm)
            panel.grid(visible=False)
            panel.set(xticks=(0, 15), yticks=(0, 15), xticklabels=(1, 16), yticklabels=(1, 16))
        for update, top, bottom in zip(shown, *axes, strict=True):
            top.set_title(f"update {update}")
            bottom.set_xlabel("bit")
        for name, panel in zip(POSINGS, axes[:, 0], strict=True):
            panel.set_ylabel(f"{name}\nbit")
        canvas.colorbar(image, ax=axes, label="entry of the QUBO matrix", shrink=0.8)
        caption = (
            "QUBO matrices over bits: couplings off the diagonal, linear terms on it (they hold the row "
            "sums of the couplings too). One colour scale for all, logarithmic except near zero; one seed."
        )
        return [Figure("qubo-evolution", caption, to_svg(canvas))]


def _symmetric(upper: list[list[float]]) -> "np.ndarray":
    """The matrix whose rows, each from its diagonal on, are given."""
    full = np.zeros((len(upper), len(upper)))
    for i, row in enumerate(upper):
        full[i, i:] = full[i:, i] = row
    return full


QUBO_EVOLUTION = QuboEvolution()
