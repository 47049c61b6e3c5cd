"""Every method on the same tasks, tuned alike: trials on validation data, then fresh seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spingrad_lab.methods import LOGISTIC, METHODS, Settings
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import Paired, estimate, paired
from spingrad_lab.runs import Experiment, Job, Lab, Line, seeded
from spingrad_lab.tasks.training import Task, train

TUNING_SEED = 1_000  # seeds of trials begin here, those of final runs at 0


@dataclass(frozen=True)
class Score:
    """A figure of merit that a table shows."""

    name: str
    label: str
    higher_is_better: bool = True

    def best(self, values: dict[str, float]) -> str:
        choose = max if self.higher_is_better else min
        return choose(values, key=values.__getitem__)


@dataclass(frozen=True)
class Comparison(Experiment):
    """Every method on every task.

    Each method gets the same number of trials; each trial is scored by ``choose`` on validation data,
    averaged over ``tuning_seeds`` seeds. The best settings are then trained with fresh seeds.

    Args:
        title: What the report calls it.
        source: Where it is in the paper.
        tasks: Task classes by the name that the table shows.
        methods: Names of methods; all by default.
        choose: The score that chooses settings, on validation data.
        scores: What the table shows; the first is the headline.
        seeds: Number of final runs of each method.
        tuning_seeds: Number of runs of each trial.
        watch: Points of the curve that final runs keep.
        logistic: Whether logistic regression is a control.
        trials: Settings to try, in place of those in ``METHODS``.
        finalists: Only QP-SBGD and so many of the best baselines by validation get final runs.
        paper: The paper's numbers, by task and method.
        notes: Departures from the paper, and what its text leaves open.
    """

    title: str
    source: str
    tasks: dict[str, type[Task]]
    scores: list[Score]
    choose: Score
    methods: tuple[str, ...] = tuple(METHODS)
    seeds: int = 20
    tuning_seeds: int = 1
    watch: int = 20
    logistic: bool = True
    trials: dict[str, list[Settings]] = field(default_factory=dict)
    finalists: int | None = None
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def plan(self, lab: Lab) -> None:
        seeds = lab.seeds or (2 if lab.quick else self.seeds)
        for task in self.tasks:
            trials = lab.run(self._trials(task, lab), f"{task}, trials")
            finals = []
            for method in self._finalists(task, trials):
                settings = chosen(trials, _tuned(method), self.choose)[0]
                solver = lab.solver_for(METHODS[method].solver)
                finals += [_job("final", task, method, solver, settings, seed) for seed in range(seeds)]
            if self.logistic:
                finals += [_job("final", task, LOGISTIC, None, {}, seed) for seed in range(seeds)]
            lab.run(finals, f"{task}, finals")

    def _trials(self, task: str, lab: Lab) -> list[Job]:
        jobs = []
        for method in self.methods:
            settings = self._grid(method)
            if lab.quick:
                settings = settings[len(settings) // 2 :][:1]
            for trial in settings:
                for seed in range(1 if lab.quick else self.tuning_seeds):
                    solver = lab.solver_for(METHODS[method].solver)
                    jobs.append(_job("trial", task, method, solver, trial, TUNING_SEED + seed))
        return jobs

    def _finalists(self, task: str, trials: list[Line]) -> list[str]:
        if self.finalists is None:
            exact = self.tasks[task].exact
            return [m for m in self.methods if exact or METHODS[m].solver != "exact"]
        kinds = {method: METHODS[method].kind for method in self.methods}
        value = {
            m: self._sign() * chosen(trials, m, self.choose)[1] for m, k in kinds.items() if k == "baseline"
        }
        best = sorted(value, key=lambda m: -value[m])[: self.finalists]
        return [m for m in self.methods if m == "QP-SBGD" or m in best]

    def _sign(self) -> int:
        return 1 if self.choose.higher_is_better else -1

    def compute(self, job: Job) -> dict[str, Any]:
        tuning = job["stage"] == "trial"
        with seeded(job["seed"]):
            task = self.tasks[job["task"]](job["seed"], tuning, job["quick"])
            if job["method"] == LOGISTIC:
                return task.logistic()
            settings = (
                job["settings"] if job["solver"] is None else job["settings"] | {"solver": job["solver"]}
            )
            return train(task, job["method"], settings, job["seed"], watch=0 if tuning else self.watch)

    def show(self, lines: Sequence[Line]) -> Section:
        tables, drawn, notes = [], [], list(self.notes)
        for task in self.tasks:
            trials, finals = self._current([line for line in lines if line.job["task"] == task])
            if not finals:
                continue
            tables.append(self._table(task, trials, finals))
            if self.finalists is not None:
                tables.append(self._heats(task, trials))
            notes += self._verdicts(task, finals)
            drawn.append(self._figure(task, finals))
        return Section(notes, tables, drawn)

    def _current(self, lines: list[Line]) -> tuple[list[Line], list[Line]]:
        """Trials of today's grids and final runs with the settings that these choose; not older ones."""
        stages: dict[str, list[Line]] = {"trial": [], "final": []}
        for line in lines:
            stages.setdefault(line.job["stage"], []).append(line)
        trials = [line for line in stages["trial"] if line.job["settings"] in self._grid(line.job["method"])]
        methods = {line.job["method"] for line in stages["final"]}
        best = {method: chosen(trials, _tuned(method), self.choose)[0] for method in methods}
        return trials, [line for line in stages["final"] if line.job["settings"] == best[line.job["method"]]]

    def _grid(self, method: str) -> list[Settings]:
        return self.trials.get(method, METHODS[method].trials)

    def _table(self, task: str, trials: list[Line], finals: list[Line]) -> Table:
        paper = self.paper.get(task, {})
        header = ["method", *(score.label for score in self.scores)]
        header += (["paper"] if paper else []) + ["seeds", "seconds", "worst trial", "chosen"]
        rows = []
        for method, own in by_method(finals).items():
            row = [method, *(str(estimate([line.metrics[s.name] for line in own])) for s in self.scores)]
            row += [f"{paper[method]:.2f}" if method in paper else "–"] if paper else []
            seconds = float(np.median([line.seconds for line in own]))
            settings, _, worst, at_edge = chosen(trials, _tuned(method), self.choose)
            row += [str(len(own)), f"{seconds:.1f}", "–" if worst is None else f"{worst:.3f}"]
            row.append(
                ", ".join(f"{k} {v:g}{'†' if k in at_edge else ''}" for k, v in settings.items()) or "–"
            )
            rows.append(row)
        caption = f"{task}. Mean ± 95 % interval over seeds; † a chosen value at the end of its grid."
        return Table(header, rows, caption)

    def _heats(self, task: str, trials: list[Line]) -> Table:
        """The best trial of every method, those without final runs too."""
        rows = []
        for method in by_method(trials):
            settings, best, worst, _ = chosen(trials, method, self.choose)
            described = ", ".join(f"{k} {v:g}" for k, v in settings.items())
            rows.append([method, f"{best:.4f}", f"{worst:.4f}" if worst is not None else "–", described])
        return Table(
            ["method", "best trial", "worst trial", "chosen"], rows, f"{task}, {self.choose.label} in trials"
        )

    def _duels(self, finals: list[Line]) -> dict[tuple[str, str], Paired]:
        """QP-SBGD against the best baseline over the same seeds, by their names."""
        score = self.scores[0]
        values = {
            m: {line.job["seed"]: line.metrics[score.name] for line in own}
            for m, own in by_method(finals).items()
        }
        kinds = {m: METHODS[m].kind for m in values if m in METHODS}
        baselines = {m: float(np.mean(list(values[m].values()))) for m, k in kinds.items() if k == "baseline"}
        if not baselines:
            return {}
        rival = score.best(baselines)
        duels = {}
        for method in (m for m, kind in kinds.items() if kind == "ours" and "published" not in m):
            seeds = sorted(values[method].keys() & values[rival].keys())
            duels[method, rival] = paired(
                [values[method][s] for s in seeds], [values[rival][s] for s in seeds]
            )
        return duels

    def _verdicts(self, task: str, finals: list[Line]) -> list[str]:
        label = self.scores[0].label
        return [
            f"**{task}**, {label}: {method} minus {rival}, the best baseline: {result}."
            for (method, rival), result in self._duels(finals).items()
        ]

    def summary(self, lines: Sequence[Line]) -> list[list[str]]:
        """One row for each task: QP-SBGD, the best baseline, their difference and the ceiling."""
        rows = []
        score = self.scores[0]
        for task in self.tasks:
            _, finals = self._current([line for line in lines if line.job["task"] == task])
            means = {
                m: estimate([line.metrics[score.name] for line in own])
                for m, own in by_method(finals).items()
            }
            for (method, rival), result in self._duels(finals).items():
                if method == "QP-SBGD":
                    ceiling = str(means.get("real weights, Adam", "–"))
                    versus = f"{means[rival]} ({rival.removeprefix('BinaryConnect ')})"
                    rows.append([task, score.label, str(means[method]), versus, str(result), ceiling])
        return rows

    def _figure(self, task: str, finals: list[Line]) -> Figure:
        score = self.scores[0]
        curve = f"{score.name} curve"
        series: dict[str, figures.Curves] = {
            method: (own[0].metrics[curve]["x"], [line.metrics[curve]["y"] for line in own])
            for method, own in by_method(finals).items()
            if curve in own[0].metrics
        }
        flat = {
            method: float(np.mean([line.metrics[score.name] for line in own]))
            for method, own in by_method(finals).items()
            if curve not in own[0].metrics
        }
        canvas = figures.curves(series, flat, "epoch", score.label, score.higher_is_better)
        caption = (
            f"{task}: {score.label} during training, mean and 95 % interval over seeds. Curves far worse "
            "than the others leave the picture; ProxQuant's weights are real until training ends."
        )
        return Figure(task, caption, to_svg(canvas))


def _tuned(method: str) -> str:
    """The method whose trials choose this one's settings: itself, as a rule."""
    return (METHODS[method].like if method in METHODS else None) or method


def by_method(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines of each method in the order of ``METHODS``, sorted by seed."""
    found: dict[str, list[Line]] = {}
    order = [*METHODS, LOGISTIC]
    for line in sorted(lines, key=lambda line: (order.index(line.job["method"]), line.job["seed"])):
        found.setdefault(line.job["method"], []).append(line)
    return found


def chosen(
    trials: Sequence[Line], method: str, score: Score
) -> tuple[Settings, float, float | None, set[str]]:
    """A method's best settings, their validation score, the worst trial's, and settings at a grid's edge."""
    by_settings: dict[str, list[Line]] = {}
    for line in trials:
        if line.job["method"] == method:
            by_settings.setdefault(str(sorted(line.job["settings"].items())), []).append(line)
    if not by_settings:
        return {}, math.nan, None, set()
    means = {k: float(np.mean([line.metrics[score.name] for line in own])) for k, own in by_settings.items()}
    best = score.best(means)
    settings = by_settings[best][0].job["settings"]
    others = [own[0].job["settings"] for own in by_settings.values()]
    edges = set()
    for name, value in settings.items():
        values = sorted({other[name] for other in others})
        if len(values) > 2 and value in (values[0], values[-1]):
            edges.add(name)
    worst = min(means.values()) if score.higher_is_better else max(means.values())
    return settings, means[best], worst if len(means) > 1 else None, edges


def _job(stage: str, task: str, method: str, solver: str | None, settings: Settings, seed: int) -> Job:
    return {
        "stage": stage,
        "task": task,
        "method": method,
        "solver": solver,
        "settings": settings,
        "seed": seed,
    }
