"""The paper's Rosenbrock runs, of which it tells only the QPU time: projected steps on a function."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from spingrad import BinaryQuadratic, sign
from spingrad.solvers import BlockDescentSolver, ExactSolver, Solver
from spingrad_lab.posed import scaled
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import significant
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.trials import TUNING_SEED, Choice, Score, as_settings, best_trial

PUBLISHED, OURS = "QP-SBGD as published", "QP-SBGD, all directions"
SIGN_OF_ROWS, SIGN_SGD = "signSGD, normalised rows", "signSGD"
SGD, ADAM = "gradient descent", "Adam"
SPIN_METHODS = (PUBLISHED, OURS, SIGN_OF_ROWS, SIGN_SGD)
# A step in spins covers exactly its learning rate: 500 steps of less than 0.012 cannot cross from −2 to 1.
RATES = {
    **{method: (0.02, 0.05, 0.1, 0.3, 1.0, 3.0) for method in SPIN_METHODS},
    SGD: (1e-5, 3e-5, 1e-4, 2e-4, 4e-4, 1e-3),
    ADAM: (0.02, 0.05, 0.1, 0.3, 1.0, 3.0),
}
"""Every method by name, with the learning rates that are tried."""
STYLES = {
    PUBLISHED: (figures.PURPLE, "-"),
    OURS: (figures.VERMILION, "-"),
    SIGN_OF_ROWS: (figures.ORANGE, "-."),
    SIGN_SGD: (figures.BLUE, "-"),
    SGD: (figures.SKY, "--"),
    ADAM: (figures.GREEN, "--"),
}
FINAL_SEED = 100  # starts 0 to 5 were seen while the rates above were chosen
REACHED = 1e-2
LEAST, RUNAWAY = 1e-16, 1e9
EXACT_UP_TO = 10

Mover = Callable[[Tensor, Tensor], Tensor]
"""A function of the residuals and their Jacobian that returns the direction of a step."""


def residuals(x: Tensor) -> Tensor:  # (d,) -> (2 d - 2,)
    """``10 (x_{i+1} - x_i²)`` and ``1 - x_i``: the Rosenbrock function is their squared norm."""
    return torch.cat([10 * (x[1:] - x[:-1].square()), 1 - x[:-1]])


def residual_jacobian(x: Tensor) -> Tensor:  # (d,) -> (2 d - 2, d)
    """Derivative of :func:`residuals`.

    Example:
        >>> residual_jacobian(torch.tensor([2.0, 0.0]))
        tensor([[-40.,  10.],
                [ -1.,   0.]])
    """
    last = len(x) - 1
    J = x.new_zeros(2 * last, last + 1)
    J.diagonal()[:last] = -20 * x[:-1]
    J.diagonal(1)[:last] = 10
    J.diagonal(-last)[:last] = -1
    return J


def projected_problem(y: Tensor, J: Tensor, published: bool) -> BinaryQuadratic:
    """Which spins move ``x`` so that the residuals follow their own gradient, ``∂E/∂y = 2 y``?"""
    V = 2 * y[:, None]
    return BinaryQuadratic.least_squares(normalized(J), V) if published else scaled(J, V)


def normalized(J: Tensor) -> Tensor:
    """The paper's rows, ``x / ‖x‖²``."""
    return J / J.square().sum(1, keepdim=True)


def mover(method: str, dimension: int) -> Mover:
    """The direction ``G`` of a method's step ``x ← x - lr · G``."""
    if method in (OURS, PUBLISHED):
        published = method == PUBLISHED
        solver: Solver = ExactSolver() if dimension <= EXACT_UP_TO else BlockDescentSolver()

        def project(y: Tensor, J: Tensor) -> Tensor:
            if not published and not y.any():
                return torch.zeros_like(J[0])  # as QPSBGD without a gradient
            return solver.solve(projected_problem(y, J, published)).spins[:, 0]

        return project
    if method == SIGN_OF_ROWS:
        return lambda y, J: sign(normalized(J).T @ y)
    if method == SIGN_SGD:
        return lambda y, J: sign(J.T @ y)
    return lambda y, J: 2 * (J.T @ y)


@torch.no_grad()
def descend(method: str, x: Tensor, lr: float, steps: int, binary: bool = False) -> list[float]:
    """Values of the function before every step and after the last, with a learning rate under a cosine.

    With ``binary`` the function sees ``sign(x)``, as in the paper's definition of its algorithm.
    """
    point, move = x.clone(), mover(method, len(x))
    values: list[float] = []
    adam = torch.optim.Adam([point], lr=lr)
    for step in range(steps + 1):
        seen = sign(point) if binary else point
        y = residuals(seen)
        values.append(float(y.square().sum()))
        if not values[-1] < RUNAWAY:
            return values[:-1] + [RUNAWAY] * (steps + 1 - step)
        if step < steps:
            rate = lr * (1 + math.cos(math.pi * step / steps)) / 2
            G = move(y, residual_jacobian(seen))
            if method == ADAM:
                point.grad, adam.param_groups[0]["lr"] = G, rate
                adam.step()
            else:
                point.sub_(G, alpha=rate)
    return values


class Rosenbrock(Experiment):
    """Steps in spins beside gradient descent and Adam, in 2, 10 and 50 dimensions; then on spins."""

    title = "The Rosenbrock function"
    source = "appendix, runtime analysis (five runs, of which it tells only the QPU time)"
    dimensions = (2, 10, 50)
    steps, starts, tuning_starts = 500, 20, 4
    spin_lr, spin_steps = 0.1, 100
    moments = 100

    def plan(self, lab: Lab) -> None:
        starts = lab.seeds or (2 if lab.quick else self.starts)
        seeds = range(TUNING_SEED, TUNING_SEED + (1 if lab.quick else self.tuning_starts))
        trials = lab.run(
            [
                _job("trial", dimension, method, lr, seed)
                for dimension, (method, rates) in itertools.product(self.dimensions, RATES.items())
                for lr, seed in itertools.product(rates[2:4] if lab.quick else rates, seeds)
            ],
            "trials",
        )
        finals = []
        for dimension, seed in itertools.product(self.dimensions, range(FINAL_SEED, FINAL_SEED + starts)):
            for method in RATES:
                lr = chosen(trials, dimension, method).settings["lr"]
                finals.append(_job("final", dimension, method, lr, seed))
            finals += [_job("spins", dimension, method, self.spin_lr, seed) for method in SPIN_METHODS]
        lab.run(finals, "finals")

    def compute(self, job: Job) -> dict[str, Any]:
        binary = job["stage"] == "spins"
        steps = 40 if job["quick"] else self.spin_steps if binary else self.steps
        with seeded(job["seed"]):
            start = torch.rand(job["dimension"], dtype=torch.float64) * 4 - 2
        values = descend(job["method"], start, job["lr"], steps, binary)
        metrics: dict[str, Any] = {"value": significant(values[-1], 4), "best": significant(min(values), 4)}
        if job["stage"] == "final":
            moments = sorted({round(k * steps / self.moments) for k in range(self.moments + 1)})
            metrics["value curve"] = {"x": moments, "y": [significant(values[k], 4) for k in moments]}
        return metrics

    def show(self, runs: pd.DataFrame) -> Section:
        finals, spins = _by(runs, "final"), _by(runs, "spins")
        trials = where(runs, stage="trial")
        steps = max(curve["x"][-1] for curve in where(runs, stage="final")["value curve"])
        rows = [
            [str(d), method, *_spread(own["value"]), str(chosen(trials, d, method)).removeprefix("lr ")]
            for (d, method), own in finals.items()
        ]
        header = ["dimension", "method", "median E", "quartiles", f"E < {REACHED:g}", "learning rate"]
        starts = len(next(iter(finals.values())))
        caption = f"Value after {steps} steps from {starts} starts in [−2, 2]ᵈ; † first or last of the rates."
        tables = [Table(header, rows, caption), _spin_table(spins)]
        return Section([*_NOTES, *_verdict(finals, spins)], tables, [_figure(finals)])


def chosen(trials: pd.DataFrame, dimension: int, method: str) -> Choice:
    """The learning rate with the least mean logarithm of the last values: one start left behind counts."""
    own = as_settings(where(trials, dimension=dimension, method=method), "lr")
    own = own.assign(logarithm=np.log10(own["value"].clip(lower=LEAST)))
    return best_trial(own, Score("logarithm", "logarithm of the last value", higher_is_better=False))


def _by(runs: pd.DataFrame, stage: str) -> dict[tuple[int, str], pd.DataFrame]:
    """The runs of a stage by dimension and method, each sorted by start."""
    own = where(runs, stage=stage).sort_values("seed")
    found = dict(groups(own, ["dimension", "method"]))
    return {
        key: found[key] for key in itertools.product(sorted(set(own["dimension"])), RATES) if key in found
    }


def _spread(values: pd.Series) -> list[str]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return [f"{middle:.2g}", f"{low:.2g} to {high:.2g}", f"{np.mean(values < REACHED):.0%}"]


def _spin_table(spins: dict[tuple[int, str], pd.DataFrame]) -> Table:
    rows = []
    for (dimension, method), own in spins.items():
        ended, visited = ((own[value] == 0).mean() for value in ("value", "best"))
        median = own["value"].median()
        rows.append([str(dimension), method, f"{ended:.0%}", f"{visited:.0%}", f"{median:,.0f}"])
    header = ["dimension", "method", "ended at the optimum", "visited it", "median E at the end"]
    caption = "Where the function sees sign(x), and its optimum is one of 2ᵈ points: share of the starts."
    return Table(header, rows, caption)


def _figure(finals: dict[tuple[int, str], pd.DataFrame]) -> Figure:
    dimensions = sorted({dimension for dimension, _ in finals})
    canvas, axes = figures.new(9.6, 3.6, columns=len(dimensions))
    for (dimension, method), own in finals.items():
        panel = axes[0, dimensions.index(dimension)]
        colour, dash = STYLES[method]
        x = own["value curve"].iloc[0]["x"]
        curves = np.maximum([curve["y"] for curve in own["value curve"]], LEAST)
        low, middle, high = np.quantile(curves, [0.25, 0.5, 0.75], axis=0)
        panel.plot(x, middle, dash, color=colour, label=method, linewidth=1.6)
        panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        panel.set(yscale="log", xlabel="step", title=f"dimension {dimension}")
    axes[0, 0].set_ylabel("value of the function")
    figures.legend_below(canvas, axes[0, 0])
    caption = "Value of the Rosenbrock function along the way: median and quartiles over starts."
    return Figure("descent", caption, to_svg(canvas))


_NOTES = (
    "The paper gives neither the dimension of its Rosenbrock runs nor how their variables are read. Our "
    "reading: the residuals `y` of the function (`10 (x_{i+1} − x_i²)` and `1 − x_i`, with `E = ‖y‖²`) are "
    "the outputs, their Jacobian gives the rows of `Z`, and `x ← x − α G` takes the spins `G` nearest to "
    "`∂E/∂y`, with real variables. *As published* has normalised rows and the gradient as it is; *all "
    f"directions* is ours, with uniform rows and the target in reach (both solved exactly up to "
    f"d = {EXACT_UP_TO}). "
    "*signSGD, normalised rows* is the sign of the linear term of the published problem: its rows without "
    "the projection.",
    "Every method had six learning rates on starts of their own, chosen by the mean logarithm of the last "
    f"value, and a cosine; a run that ran away counts as {RUNAWAY:.0e}. Gradient descent "
    "and Adam are there for scale: they know the gradient's size.",
    "In the second table the function sees `sign(x)`, with a learning rate of 0.1 and a cosine for every "
    "method. There `x_i²` is the same at −1 and +1, which its derivative does not know.",
)


def _verdict(
    finals: dict[tuple[int, str], pd.DataFrame], spins: dict[tuple[int, str], pd.DataFrame]
) -> list[str]:
    """Which method ends lowest, and what the rows and the projection have to do with it."""
    notes = []
    for dimension in sorted({d for d, _ in finals}):
        ends = {m: own["value"] for (d, m), own in finals.items() if d == dimension}
        medians = {method: values.median() for method, values in ends.items()}
        ranked = ", ".join(f"{m} {medians[m]:.2g}" for m in sorted(medians, key=medians.__getitem__))
        lower = np.mean([a < b for a, b in zip(ends[PUBLISHED], ends[SIGN_OF_ROWS], strict=True)])
        notes.append(
            f"**Dimension {dimension}**, median of the last value: {ranked}. The published projection ends "
            f"below the sign of its own linear term from {lower:.0%} of the starts."
        )
    ended = {key: (own["value"] == 0).mean() for key, own in spins.items()}
    reached = [f"{method} in dimension {d} ({share:.0%})" for (d, method), share in ended.items() if share]
    notes.append(f"On spins, these end at the optimum from some starts: {', '.join(reached) or 'none'}.")
    return notes


def _job(stage: str, dimension: int, method: str, lr: float, seed: int) -> Job:
    return {"stage": stage, "dimension": dimension, "method": method, "lr": lr, "seed": seed}


ROSENBROCK = Rosenbrock()
