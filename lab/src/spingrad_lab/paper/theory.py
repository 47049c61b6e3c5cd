"""What Proposition 1 and Theorem 1 say, tried on problems that are small enough to enumerate."""

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from spingrad import BinaryQuadratic, sign
from spingrad.solvers import ExactSolver
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab, seeded

SPINS, ROWS, STEPS = 6, 4, 400
SAME = 1e-6


class Theory(Experiment):
    """Random logistic regressions of six spins and four rows, and what the published step does on each."""

    title = "Proposition 1 and Theorem 1, tried"
    source = "sections 3.2 and 3.3, and the proofs in the appendix"
    seeds = 300

    def plan(self, lab: Lab) -> None:
        lab.run([{"seed": seed} for seed in range(lab.seeds or (5 if lab.quick else self.seeds))])

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            X = torch.randn(ROWS, SPINS, dtype=torch.float64)
            y = torch.where(torch.rand(ROWS) < 0.5, -1.0, 1.0).double()
            lengths, v = 0.5 + torch.rand(2, ROWS, dtype=torch.float64)
            starts = 2 * torch.rand(SPINS, 2**SPINS, dtype=torch.float64) - 1
        orthogonal = torch.linalg.qr(X.T)[0].T * lengths[:, None]
        every = _every()
        fixed = (_projected(X, y, every) == -every).all(0)
        ends = _ends(X, y, starts)
        at = (ends[:, :, None] == every[:, None, :]).all(0).float().argmax(1)
        return {
            "fixed points": int(fixed.sum()),
            "ended at one": float(fixed[at].double().mean()),
            "gap": _gap(X, v),
            "gap of orthogonal rows": _gap(orthogonal, v),
        }

    def show(self, runs: pd.DataFrame) -> Section:
        some = runs[runs["fixed points"] > 0]
        ended = f"{some['ended at one'].mean():.0%}" if len(some) else "–"
        rows = [
            ["problems", str(len(runs))],
            ["with a fixed point", str(len(some))],
            ["starts that end at one, where there is one", ended],
            ["gap of Proposition 1, rows at random", f"{runs['gap'].mean():.2f}"],
            ["gap of Proposition 1, orthogonal rows", f"{runs['gap of orthogonal rows'].max():.1e} at most"],
        ]
        return Section(list(_NOTES), [Table(["", "found"], rows, "Random logistic regressions")])


def _every() -> Tensor:  # (n, 2^n)
    bits = torch.arange(2**SPINS) >> torch.arange(SPINS)[:, None]
    return ((bits & 1) * 2 - 1).double()


def _projected(X: Tensor, y: Tensor, spins: Tensor) -> Tensor:  # (n, k) -> (n, k)
    """The published projection of the gradient at each of some points."""
    Z = X / X.square().sum(1, keepdim=True)
    V = -y[:, None] * torch.sigmoid(-y[:, None] * (X @ spins))
    return ExactSolver().solve(BinaryQuadratic.least_squares(Z, V)).spins


def _ends(X: Tensor, y: Tensor, x: Tensor) -> Tensor:  # (n, k) -> (n, k)
    """Spins of the published steps from each start, with rates whose sum diverges."""
    moves = _projected(X, y, _every())  # of every point, to be looked up
    weights = 2 ** torch.arange(SPINS)
    for step in range(STEPS):
        place = (weights[:, None] * (sign(x) > 0)).sum(0)
        x = x - moves[:, place] / (1 + step) ** 0.5
    return sign(x)


def _gap(X: Tensor, v: Tensor) -> float:
    """The relaxed projection of ``v`` against the gradient ``Xᵀv``, as a share of its length."""
    Z = X / X.square().sum(1, keepdim=True)
    relaxed, gradient = torch.linalg.pinv(Z) @ v, X.T @ v
    return float((relaxed - gradient).norm() / gradient.norm())


_NOTES = (
    "Proposition 1 says that the relaxed projection is the gradient with regard to the weights. Its proof "
    "takes each row on its own. The gap is the distance of the two (of all minima, that of least norm), as a "
    "share of the gradient's length: zero if rows are orthogonal, and not else.",
    "Theorem 1 says which points are fixed. The abstract says more: *if a fixed point exists in the binary "
    "variable space, the updates will converge to it*. All 64 points of each problem are tried, and the step "
    f"is taken {STEPS} times from a start in each of 64 places, with rates 1/√t, whose sum diverges.",
)
THEORY = Theory()
