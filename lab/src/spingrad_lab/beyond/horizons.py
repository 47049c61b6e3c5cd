"""When does an annealer help? Distance, correlation of errors and number of steps, each on its own."""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spingrad import QPSBGD, BinaryQuadratic
from spingrad.solvers import BlockDescentSolver, SignSolver, Solver
from spingrad_lab.beyond.controlled import KEPT, Checked, DisturbedSolver, Kept, Measured
from spingrad_lab.beyond.solve_quality import PixelPair, Shrunk, SmallDigits
from spingrad_lab.methods import PAPER_READING, USUAL, Method, Params
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import Estimate, estimate, simultaneous
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.training import train
from spingrad_lab.trials import ACCURACY, TUNING_SEED, as_settings, best_trial, matched

STEPS = (1, 16, 256)
DISTANCES = (0.05, 0.2)
RATES = {
    1: (0.03, 0.1, 0.3, 1.0, 2.0),
    16: (0.003, 0.01, 0.03, 0.1, 0.3),
    256: (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
}
"""Learning rates that are tried, by number of steps; a weight crosses its range of 2 in one step of 2."""
NOISE = (0.05, 0.02)
"""Errors that the emulated chip keeps, on biases and couplings of the scaled problem."""
NUM_READS = 50
LOOKS = 16
"""Steps of a run at which the distance of a solver that has no dial is measured."""
HELPS, WIDEST = 0.003, 0.006
"""Of accuracy: an annealer helps by more than this; an interval with a larger half width decides nothing."""

EXACT, DEFAULT, SIGN = "exact", "default solver", "sign of the field"
QPU, TURNED_QPU = "emulated QPU, errors kept", "emulated QPU, errors kept, a gauge per step"
COARSE = tuple(f"20 %, {kept}" for kept in KEPT)

Outcome = Literal["an annealer helps", "level", "the default is ahead", "undecided"]


class Shortened(Shrunk):
    """A network on shrunk digits that trains for a number of steps; the learning rate follows a cosine."""

    epochs = 1
    steps: int

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        epochs = itertools.chain.from_iterable(Shrunk.batches(self) for _ in itertools.count())
        return itertools.islice(epochs, self.steps)


class Digits25(Shortened, SmallDigits):
    """Ten digits of 5 × 5 pixels."""


class Pair64(Shortened, PixelPair):
    """The digits 3 and 5, of 8 × 8 pixels."""


class Digits48(Shortened):
    """Ten digits of 8 × 6 pixels."""

    shape, hidden = (8, 6), 32


NETWORKS: dict[str, type[Shortened]] = {
    "digits, 25-16-10": Digits25,
    "MNIST 3/5, 64-16-2": Pair64,
    "digits, 48-32-10": Digits48,
}
CONTROL = "binary regression, one shot"


def _default(params: Params, seed: int, lr: float, solver: Solver) -> Optimizer:
    return QPSBGD(params, lr, solver=solver, seed=seed)


def _published(params: Params, seed: int, lr: float, solver: Solver) -> Optimizer:
    return QPSBGD.as_published(params, lr, solver=solver, seed=seed)


KINDS = {"default": (_default, USUAL), "as published": (_published, PAPER_READING)}
"""The two steps, each with the reading in which its networks train."""


class Cell(NamedTuple):
    """Where solvers are compared: a network, a step, and how many steps are taken."""

    task: str
    kind: str
    steps: int

    def of(self, runs: pd.DataFrame) -> pd.DataFrame:
        return where(runs, **self._asdict())


CELLS = [Cell(*own) for own in itertools.product(NETWORKS, KINDS, STEPS)]


def _disturbed(distance: float, kept: Kept, steps: int) -> DisturbedSolver:
    return DisturbedSolver(distance, kept)


def _measured(inner: Solver, steps: int) -> Measured:
    return Measured(inner, max(steps // LOOKS, 1))


SOLVERS: dict[str, Callable[[int], Any]] = {
    EXACT: lambda steps: Checked(steps),
    **{f"{100 * d:g} %, {k}": partial(_disturbed, d, k) for d in DISTANCES for k in KEPT},
    DEFAULT: lambda steps: _measured(BlockDescentSolver(), steps),
    SIGN: lambda steps: _measured(SignSolver(), steps),
}
"""What solves the problems of a run, by its name in tables; made from the number of steps."""
METHODS = (*SOLVERS, QPU, TURNED_QPU)


class Horizons(Experiment):
    """Distance × correlation × horizon.

    Decided before the runs. In each cell, which is a network (25-16-10, 64-16-2, 48-32-10), a step (default,
    as published) and a number of steps (1, 16, 256), the same steps are taken from the same weights on the
    same batches, and only the solver differs: exact; the exact solution of a problem whose fields have
    errors, at a mean distance of 5 % or 20 % from the optimum, with errors that are redrawn at every step,
    kept, or kept with a gauge per step; the default solver; the sign; the emulated QPU with errors that its
    chip keeps, without and with gauges (these at 256 steps in the smallest network only, since emulation is
    slow). The learning rate of a cell is the one with the best accuracy on
    held-out images in the mean over the exact and the default solver and three seeds. Twenty fresh seeds,
    paired; the score is test accuracy.

    The interval of exact minus default is corrected for all 18 cells (Bonferroni). A cell in which its half
    width is above 0.6 points is undecided. An annealer *helps* in a cell where the interval lies above zero
    and its estimate above 0.3 points; the default *is ahead* where the interval lies below zero; the cell is
    *level* where the interval lies within 0.6 points of zero; any other cell is undecided. An annealer
    *cannot help at these sizes* if in every cell it does not help and none is undecided, while at least one
    of the 20 % rows is behind exact solutions (its interval, corrected for all such rows, lies below zero).
    If an annealer helps nowhere and any cell is undecided, so is the question.

    The positive control is a problem in which lower energy is lower loss by definition: binary weights on
    frozen random features, fitted in one shot to the classes by least squares. If exact solutions are not
    ahead of those at 20 % there, in test accuracy, the experiment can show nothing.
    """

    title = "When does an annealer help? Distance, lasting errors, and number of steps"
    source = "beyond the paper"
    seeds, tuning_seeds = 20, 3

    def plan(self, lab: Lab) -> None:
        cells = [CELLS[0], CELLS[-2]] if lab.quick else CELLS
        methods = [EXACT, COARSE[2], DEFAULT, TURNED_QPU] if lab.quick else METHODS
        seeds = range(2 if lab.quick else lab.seeds or self.seeds)
        tuning = range(TUNING_SEED, TUNING_SEED + (1 if lab.quick else self.tuning_seeds))
        control = [name for name in methods if name in SOLVERS]
        lab.run(
            [{"stage": "control", "task": CONTROL, "method": n, "seed": s} for s in seeds for n in control],
            "control",
        )
        for cell in cells:
            name = f"{cell.task}, {cell.kind}, {cell.steps} steps"
            rates = RATES[cell.steps][2:3] if lab.quick else RATES[cell.steps]
            tried = itertools.product(rates, (EXACT, DEFAULT), tuning)
            trials = lab.run([_job("trial", cell, *own) for own in tried], f"{name}, trials")
            lr = chosen_rate(trials)
            own = [n for n in methods if n in SOLVERS or is_emulated(cell)]
            lab.run([_job("final", cell, lr, n, seed) for seed in seeds for n in own], f"{name}, finals")

    def compute(self, job: Job) -> dict[str, Any]:
        if job["stage"] == "control":
            return _regression(job["method"], job["seed"], job["quick"])
        steps, (make, reading) = 2 if job["quick"] else job["steps"], KINDS[job["kind"]]
        with seeded(job["seed"]), _solver(job["method"], steps, job["seed"]) as (solver, spent):
            task = NETWORKS[job["task"]](job["seed"], job["stage"] == "trial", job["quick"])
            task.steps, task.epochs = steps, 1
            method = Method(partial(make, solver=solver), [], reading=reading)
            metrics = train(task, method, {"lr": job["lr"]}, job["seed"])
            metrics |= {"reached": round(float(np.mean(solver.reached)), 7), **spent()}
        if isinstance(solver, Checked):
            metrics["above"] = {str(n): [round(v, 7) for v in own] for n, own in solver.above.items()}
        return metrics

    def show(self, runs: pd.DataFrame) -> Section:
        finals = {cell: finals_of(runs, cell) for cell in CELLS}
        finals = {cell: own for cell, own in finals.items() if len(own)}
        control = where(runs, stage="control")
        found = decisions(finals)
        tables = [_decided(found), *(_rows(finals, kind) for kind in KINDS), _control_table(control)]
        tables += [_reached(finals, kind) for kind in KINDS]
        drawn = Figure("horizons", _CAPTION, to_svg(_figure(finals)))
        conclusion = concluded(found, finals, control)
        return Section([f"**{conclusion}**", *_NOTES], [t for t in tables if t.rows], [drawn])


def is_emulated(cell: Cell) -> bool:
    """Whether the emulated QPU takes the steps of a cell: not many of them in a large network."""
    return cell.steps <= 16 or cell.task == "digits, 25-16-10"


def chosen_rate(trials: pd.DataFrame) -> float:
    """The learning rate with the best accuracy in the mean over the exact and the default solver."""
    return float(best_trial(as_settings(trials, "lr"), ACCURACY).settings["lr"])


def finals_of(runs: pd.DataFrame, cell: Cell) -> pd.DataFrame:
    """Final runs of a cell with the learning rate that its trials choose."""
    own = cell.of(runs)
    if own.empty or "trial" not in set(own["stage"]):
        return own[:0]
    return where(own, stage="final", lr=chosen_rate(where(own, stage="trial")))


def decisions(finals: dict[Cell, pd.DataFrame]) -> dict[Cell, tuple[Estimate, Outcome]]:
    """Exact minus default in each cell, corrected for all of them, and what it means."""
    found = {}
    for cell, own in finals.items():
        difference = simultaneous(*matched(own, EXACT, DEFAULT), count=len(CELLS))
        found[cell] = difference, outcome(difference)
    return found


def outcome(difference: Estimate) -> Outcome:
    """What the corrected interval of exact minus default says about a cell.

    Example:
        >>> [outcome(Estimate(mean, half)) for mean, half in ((0.006, 0.005), (0.001, 0.004), (0.0, 0.02))]
        ['an annealer helps', 'level', 'undecided']
    """
    mean, half = difference
    if not half <= WIDEST:
        return "undecided"
    if mean - half > 0 and mean > HELPS:
        return "an annealer helps"
    if mean + half < 0:
        return "the default is ahead"
    return "level" if abs(mean) + half < WIDEST else "undecided"


def behind(finals: dict[Cell, pd.DataFrame]) -> list[tuple[Cell, str]]:
    """The 20 % rows whose corrected interval lies below exact solutions."""
    rows = [(cell, name) for cell in finals for name in COARSE if name in set(finals[cell]["method"])]
    pairs = {row: simultaneous(*matched(finals[row[0]], row[1], EXACT), count=len(rows)) for row in rows}
    return [row for row, difference in pairs.items() if difference.mean + difference.half < 0]


def concluded(
    found: dict[Cell, tuple[Estimate, Outcome]], finals: dict[Cell, pd.DataFrame], control: pd.DataFrame
) -> str:
    """The sentence that the rule of :class:`Horizons` gives."""
    if not _control_holds(control):
        return "The positive control shows no effect, so the experiment can show nothing."
    helps = [cell for cell, (_, what) in found.items() if what == "an annealer helps"]
    open_ = [cell for cell, (_, what) in found.items() if what == "undecided"]
    coarse = behind(finals)
    if helps:
        names = "; ".join(f"{cell.task}, {cell.kind}, {cell.steps} steps" for cell in helps)
        return f"An annealer helps in {len(helps)} of {len(found)} cells: {names}."
    if len(found) == len(CELLS) and not open_ and coarse:
        return "An annealer cannot help at these sizes."
    why = (
        f"{len(open_)} of {len(found)} cells are too wide" if open_ else "no distance of 20 % costs accuracy"
    )
    if len(found) < len(CELLS):
        why = f"{len(CELLS) - len(found)} of {len(CELLS)} cells have not run"
    return f"Undecided whether an annealer helps at these sizes: {why}."


def _control_holds(control: pd.DataFrame) -> bool:
    names = [name for name in COARSE if len(control) and name in set(control["method"])]
    ahead = [simultaneous(*matched(control, EXACT, name), count=len(names)) for name in names]
    return bool(ahead) and all(difference.mean - difference.half > 0 for difference in ahead)


def _regression(name: str, seed: int, quick: bool) -> dict[str, Any]:
    """Binary weights on 64 frozen random features, fitted to the ten classes in one shot."""
    features = 16 if quick else 64
    with seeded(seed):
        task = Pixels(seed, False, quick)
        mixing = torch.randn(64, features) / 8
        solver = SOLVERS[name](1)

        def lifted(x: Tensor) -> Tensor:
            return torch.relu(x @ mixing)

        x = task.train[0]
        centre = lifted(x).mean(0)
        parts = {"train": task.train, "test": task.test}
        X = {part: lifted(own) - centre for part, (own, _) in parts.items()}
        Y = {part: nn.functional.one_hot(own, 10) - 0.1 for part, (_, own) in parts.items()}
        real = torch.linalg.lstsq(X["train"], Y["train"].to(x)).solution
        size, rows = float(real.abs().mean()), len(x) ** 0.5
        problem = BinaryQuadratic.least_squares(size * X["train"] / rows, Y["train"].to(x) / rows)
        spins = solver.solve(problem, seed=seed).spins
    metrics: dict[str, Any] = {"reached": round(float(np.mean(solver.reached)), 7)}
    for part, own in X.items():
        out = size * own @ spins
        metrics[f"{part}_loss"] = round(float((out - Y[part]).square().sum(1).mean()), 6)
        metrics[f"{part}_accuracy"] = round(float((out.argmax(1) == parts[part][1]).float().mean()), 6)
    return metrics


class Pixels(Shrunk):
    """Ten digits of 8 × 8 pixels."""

    shape, hidden = (8, 8), 0


@contextlib.contextmanager
def _solver(name: str, steps: int, seed: int) -> Iterator[tuple[Any, Callable[[], dict[str, float]]]]:
    """A solver, and a function that says what it has spent."""
    if name not in (QPU, TURNED_QPU):
        yield SOLVERS[name](steps), dict
        return
    with emulated(seed, NUM_READS, spin_reversal=name == TURNED_QPU) as qpu:
        yield _measured(qpu, steps), lambda: {"qpu_seconds": qpu.qpu_seconds}


@contextlib.contextmanager
def emulated(
    seed: int,
    num_reads: int,
    *,
    spin_reversal: bool,
    noise: tuple[float, float] = NOISE,
    size: int | None = None,
) -> Iterator[Any]:
    """A QPU solver on an emulated chip whose qubits and couplers keep errors that this seed draws."""
    from spingrad.qpu import QPUService, QPUSolver
    from spingrad.testing.sapi import Sapi

    # All qubits work, so that every seed has the same working graph, whose layout is searched once.
    chip = Sapi(size=size, broken=0.0, seed=seed, persistent_noise=noise)
    with tempfile.TemporaryDirectory() as folder, chip as sapi, sapi.configured():
        service = QPUService(sapi.solver_name)
        journal = Path(folder, "journal")
        with QPUSolver(
            journal, 1e6, service=service, num_reads=num_reads, spin_reversal=spin_reversal
        ) as solver:
            yield solver


def _job(stage: str, cell: Cell, lr: float, method: str, seed: int) -> Job:
    return {"stage": stage, **cell._asdict(), "method": method, "lr": lr, "seed": seed}


def _points(difference: Estimate) -> str:
    mean, half = 100 * difference.mean, 100 * difference.half
    return "–" if np.isnan(mean) else f"{mean:+.2f}" + ("" if np.isnan(half) else f" ± {half:.2f}")


def _decided(found: dict[Cell, tuple[Estimate, Outcome]]) -> Table:
    rows = [
        [cell.task, cell.kind, str(cell.steps), _points(difference), f"**{what}**"]
        for cell, (difference, what) in found.items()
    ]
    caption = f"Test accuracy of exact minus default, in points; intervals corrected for {len(CELLS)} cells."
    return Table(["network", "step", "steps", "exact minus default", "so"], rows, caption)


def _rows(finals: dict[Cell, pd.DataFrame], kind: str) -> Table:
    """Each solver minus exact, in every cell of one step."""
    own = {cell: runs for cell, runs in finals.items() if cell.kind == kind}
    rows = []
    for name in METHODS[1:]:
        pairs = [matched(runs, name, EXACT) for runs in own.values()]
        if any(first for first, _ in pairs):
            rows.append([name, *(_points(simultaneous(*pair, count=1)) for pair in pairs)])
    header = ["solver", *(f"{cell.task}, {cell.steps}" for cell in own)]
    caption = (
        f"{kind}: test accuracy minus that of exact solutions, in points, by network and number of steps; "
    )
    return Table(header, rows, caption + "95 % intervals, uncorrected.")


def _reached(finals: dict[Cell, pd.DataFrame], kind: str) -> Table:
    own = {cell: runs for cell, runs in finals.items() if cell.kind == kind}
    rows = []
    for name in METHODS:
        found = [where(runs, method=name) for runs in own.values()]
        if any(len(runs) for runs in found):
            rows.append(
                [name, *(f"{100 * runs['reached'].mean():.2f} %" if len(runs) else "–" for runs in found)]
            )
    rows.append(["learning rate", *(f"{runs['lr'].iloc[0]:g}" for runs in own.values())])
    exact = [where(runs, method=EXACT) for runs in own.values()]
    rows.append(["accuracy, exact", *(str(estimate(runs["test_accuracy"])) for runs in exact)])
    rows.append(["seeds", *(str(len(runs)) for runs in exact)])
    header = ["solver", *(f"{cell.task}, {cell.steps}" for cell in own)]
    return Table(header, rows, f"{kind}: mean distance from the optimum that was reached.", folded=True)


def _control_table(control: pd.DataFrame) -> Table:
    rows = []
    for name, own in groups(control, "method"):
        less = ["–", "–"]
        if name != EXACT:
            scores = [matched(control, name, EXACT, score=score) for score in ("train_loss", ACCURACY.name)]
            loss, accuracy = (simultaneous(*pair, count=1) for pair in scores)
            less = [f"{loss.mean:+.4f} ± {loss.half:.4f}", _points(accuracy)]
        reached = f"{100 * own['reached'].mean():.2f} %"
        rows.append([name, reached, *less, str(estimate(own["test_accuracy"])), str(len(own))])
    header = ["solver", "distance", "training loss minus exact", "points of accuracy minus exact"]
    caption = f"Positive control, {CONTROL}: the energy is the training loss. 95 % intervals, uncorrected."
    return Table([*header, "test accuracy", "seeds"], rows, caption)


_STYLES = {
    **dict(zip(COARSE, ((figures.BLUE, "-"), (figures.VERMILION, "-"), (figures.ORANGE, "--")), strict=True)),
    DEFAULT: (figures.BLACK, "-"),
    SIGN: (figures.GREY, ":"),
    QPU: (figures.PURPLE, "-"),
    TURNED_QPU: (figures.PURPLE, "--"),
}


def _figure(finals: dict[Cell, pd.DataFrame]) -> Any:
    """A panel for each network and step: accuracy minus exact, over the number of steps."""
    canvas, axes = figures.new(3.4 * len(NETWORKS), 2.6 * len(KINDS), len(KINDS), len(NETWORKS))
    for panel, (kind, task) in zip(axes.flat, itertools.product(KINDS, NETWORKS), strict=True):
        panel.axhline(0, color=figures.GREY, linewidth=0.8)
        cells = [Cell(task, kind, steps) for steps in STEPS if Cell(task, kind, steps) in finals]
        for place, (name, (colour, dash)) in enumerate(_STYLES.items()):
            pairs = {cell.steps: matched(finals[cell], name, EXACT) for cell in cells}
            found = {steps: simultaneous(*pair, count=1) for steps, pair in pairs.items() if pair[0]}
            if found:
                x = [steps * 1.06 ** (place - 3) for steps in found]  # or the intervals hide each other
                y, half = (100 * np.nan_to_num(part) for part in zip(*found.values(), strict=True))
                panel.errorbar(x, y, yerr=half, color=colour, linestyle=dash, capsize=2, label=name)
        panel.set(xscale="log", title=f"{task}, {kind}", xlabel="steps", ylabel="points minus exact")
        panel.set_xticks(STEPS, [str(steps) for steps in STEPS])
    figures.legend_below(canvas, axes.flat[0])
    return canvas


_CAPTION = "Test accuracy minus that of exact solutions, over the number of steps; 95 % intervals over seeds."
_NOTES = (
    " ".join(str(Horizons.__doc__).split()[5:]),
    "A distance is (E − E*) / (E_random − E*). Up to 16 inputs the optimum is enumerated; for wider units it "
    "is the best of ten anneals of 20 sweeps, compared at some steps of each run with a proof (up to 32 "
    "inputs) or with annealing of ten times as many reads. Errors of the fields are normal, and as large "
    "as the distance asks for in each layer, which follows the steps before. 2,000 images of MNIST, in "
    "batches of 50. The "
    f"emulated chip keeps errors of {NOISE[0]} on biases and {NOISE[1]} on couplings of the scaled "
    f"problem, drawn anew for each seed; {NUM_READS} samples of each unit.",
)
HORIZONS = Horizons()
