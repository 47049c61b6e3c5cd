"""What accuracy costs on a chip that keeps its errors: reads, gauges and copies, by QPU seconds."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from spingrad import QPSBGD
from spingrad_lab.beyond.annealers import Pair
from spingrad_lab.beyond.controlled import EnumeratingSolver
from spingrad_lab.beyond.horizons import NOISE, emulated
from spingrad_lab.methods import Method
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import estimate, simultaneous
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where
from spingrad_lab.tasks.training import train
from spingrad_lab.trials import ACCURACY, TUNING_SEED, as_settings, best_trial, matched

EXACT = "exact, no chip"
READS = (1, 10, 100, 300)
FULL, SMALL = "full chip", "chip without room for copies"
SIZES = {FULL: None, SMALL: 6}
"""Chips, by the grid parameter of their lattice: the smaller one holds each unit of the network once."""
HOUR = 3600.0


class Arm(NamedTuple):
    """A way of using the chip."""

    chip: str
    num_reads: int
    gauges: bool

    def __str__(self) -> str:
        return f"{self.chip}, {self.num_reads} samples, {'a gauge per call' if self.gauges else 'no gauges'}"


ARMS = {str(arm): arm for arm in (Arm(*own) for own in itertools.product(SIZES, READS, (False, True)))}
STANDARD = Arm(FULL, 100, gauges=False), Arm(FULL, 100, gauges=True)


class QPUTime(Experiment):
    """The paper's network 16-4-4-2 on an emulated chip that keeps its errors.

    Decided before the runs. Gauges pay if, at 100 samples of each unit on the full chip, the network trained
    with a gauge per call is ahead of the one without in test accuracy: the 95 % interval of the difference
    over ten paired seeds lies above zero. They cost accuracy if it lies below; otherwise it is undecided.
    The other comparisons (1, 10 and 300 samples, a chip without room for copies) are shown with intervals
    and decide nothing. Learning rate as the exact solver chooses it on validation data, the same for all.
    """

    title = "Accuracy against QPU time"
    source = "beyond the paper"
    seeds, tuning_seeds = 10, 3
    rates = (1e-3, 3e-3, 1e-2, 3e-2)

    def plan(self, lab: Lab) -> None:
        seeds = range(2 if lab.quick else lab.seeds or self.seeds)
        tuning = range(TUNING_SEED, TUNING_SEED + (1 if lab.quick else self.tuning_seeds))
        rates = self.rates[2:3] if lab.quick else self.rates
        tried = itertools.product(rates, tuning)
        trials = lab.run([_job("trial", EXACT, lr, seed) for lr, seed in tried], "learning rate")
        lr = _chosen(trials)
        arms = [str(arm) for arm in STANDARD] if lab.quick else ARMS
        lab.run([_job("final", name, lr, seed) for seed in seeds for name in (EXACT, *arms)], "finals")

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            task = Pair(job["seed"], job["stage"] == "trial", job["quick"])
            if job["quick"]:
                task.epochs, task.train = 1, tuple(part[:60] for part in task.train)  # type: ignore[assignment]
            if job["method"] == EXACT:
                return _trained(task, EnumeratingSolver(), job)
            arm = ARMS[job["method"]]
            with emulated(
                job["seed"], arm.num_reads, spin_reversal=arm.gauges, size=SIZES[arm.chip]
            ) as solver:
                return _trained(task, solver, job) | {"qpu_seconds": round(solver.qpu_seconds, 4)}

    def show(self, runs: pd.DataFrame) -> Section:
        lr = _chosen(where(runs, stage="trial"))
        finals = where(runs, stage="final", lr=lr)
        tables = [_arms(finals), _gauges(finals)]
        drawn = Figure("qpu-time", _CAPTION, to_svg(_figure(finals)))
        return Section([f"**{_concluded(finals)}**", *_NOTES], [t for t in tables if t.rows], [drawn])


def _trained(task: Pair, solver: Any, job: Job) -> dict[str, Any]:
    method = Method(lambda params, seed, lr: QPSBGD(params, lr, solver=solver, seed=seed), [])
    return train(task, method, {"lr": job["lr"]}, job["seed"])


def _chosen(trials: pd.DataFrame) -> float:
    return float(best_trial(as_settings(trials, "lr"), ACCURACY).settings["lr"])


def _job(stage: str, method: str, lr: float, seed: int) -> Job:
    return {"stage": stage, "method": method, "lr": lr, "seed": seed}


def _concluded(finals: pd.DataFrame) -> str:
    plain, turned = (str(arm) for arm in STANDARD)
    difference = simultaneous(*matched(finals, turned, plain), count=1)
    mean, half = difference
    said = f"{100 * mean:+.2f} ± {100 * half:.2f} points over {len(where(finals, method=turned))} seeds"
    if mean - half > 0:
        return f"Gauges pay: {said}."
    if mean + half < 0:
        return f"Gauges cost accuracy: {said}."
    return f"Undecided whether gauges pay: {said}."


def _arms(finals: pd.DataFrame) -> Table:
    rows = []
    for name in (EXACT, *ARMS):
        own = where(finals, method=name)
        if own.empty:
            continue
        seconds = float(own["qpu_seconds"].mean()) if "qpu_seconds" in own else 0.0
        cells, points = ["–", "–"], "–"
        if name != EXACT:
            mean, half = simultaneous(*matched(finals, name, EXACT), count=1)
            cells, points = (
                [f"{seconds:.2f}", f"{HOUR / seconds:,.0f}"],
                f"{100 * mean:+.2f} ± {100 * half:.2f}",
            )
        rows.append([name, *cells, str(estimate(own["test_accuracy"])), points, str(len(own))])
    header = ["solver", "QPU seconds of a run", "runs in an hour of QPU time", "test accuracy"]
    caption = "QPU time as the client's own model estimates and the emulator charges it; points of accuracy."
    return Table([*header, "minus exact", "seeds"], rows, caption)


def _gauges(finals: pd.DataFrame) -> Table:
    rows = []
    for chip, num_reads in itertools.product(SIZES, READS):
        pair = matched(finals, *(str(Arm(chip, num_reads, gauges)) for gauges in (True, False)))
        if len(pair[0]) > 1:
            mean, half = simultaneous(*pair, count=1)
            rows.append([chip, str(num_reads), f"{100 * mean:+.2f} ± {100 * half:.2f}", str(len(pair[0]))])
    caption = "A gauge per call minus none, in points of test accuracy; 95 % intervals over paired seeds."
    return Table(["chip", "samples of each unit", "difference", "seeds"], rows, caption)


def _figure(finals: pd.DataFrame) -> Any:
    canvas, axes = figures.new(6.4, 3.8)
    panel = axes[0, 0]
    exact = estimate(where(finals, method=EXACT)["test_accuracy"])
    panel.axhline(exact.mean, color=figures.GREY, linewidth=0.8, label=EXACT)
    colours = dict(zip(SIZES, (figures.VERMILION, figures.BLUE), strict=True))
    for chip, gauges in itertools.product(SIZES, (False, True)):
        arms = [where(finals, method=str(Arm(chip, reads, gauges))) for reads in READS]
        arms = [own for own in arms if len(own)]
        if arms:
            found = [estimate(own["test_accuracy"]) for own in arms]
            x = [float(own["qpu_seconds"].mean()) for own in arms]
            y, half = zip(*found, strict=True)
            label = f"{chip}, {'gauges' if gauges else 'no gauges'}"
            style = {"color": colours[chip], "linestyle": "--" if gauges else "-", "marker": "o"}
            panel.errorbar(x, y, yerr=np.nan_to_num(half), capsize=2, markersize=4, label=label, **style)
    panel.set(xscale="log", xlabel="QPU seconds of a training run", ylabel="test accuracy")
    above = panel.secondary_xaxis("top", functions=(_per_hour, _per_hour))
    above.set_xlabel("training runs in an hour of QPU time")
    figures.legend_below(canvas, panel)
    return canvas


def _per_hour(seconds: Any) -> Any:
    return HOUR / np.maximum(seconds, 1e-9)


_CAPTION = (
    "Test accuracy of 16-4-4-2 over the QPU time of its training (1, 10, 100 and 300 samples of each "
    "unit), with and without a gauge per call; means and 95 % intervals over seeds. What an hour costs is a "
    "matter of the contract, so the upper axis says what it buys."
)
_NOTES = (
    " ".join(str(QPUTime.__doc__).split()[12:]),
    "The pair of digits 1 and 2, 500 steps of batches of 20, the default step. The emulated chip keeps "
    f"errors of {NOISE[0]} on biases and {NOISE[1]} on couplings of the scaled problem, drawn anew for each "
    "seed. On the full chip each unit is placed up to 16 times, on other qubits each time, so that its "
    "copies have different errors: several embeddings for the price of one call.",
)
QPU_TIME = QPUTime()
