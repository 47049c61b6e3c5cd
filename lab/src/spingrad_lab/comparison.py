"""Every method on the same tasks, tuned alike: trials on validation data, then fresh seeds."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from spingrad_lab.methods import DEFAULT, LOGISTIC, METHODS, PUBLISHED, USUAL_GCN, Settings
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, table_of, to_svg
from spingrad_lab.report.statistics import Duel, estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.training import Task, train
from spingrad_lab.trials import TUNING_SEED, Choice, Score, best_trial, current_finals, matched

OURS, CONTROLS = DEFAULT, (USUAL_GCN, "real weights, Adam")
MIN_POINTS = 4
"""Of a curve; fewer would be joined by straight lines that nobody has measured."""


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
        usual_gcn: Whether the usual GCN with real weights is a control.
        trials: Settings to try, in place of those in ``METHODS``.
        finalists: If given, only QP-SBGD and this many of the best baselines by validation get final runs.
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
    usual_gcn: bool = False
    trials: dict[str, list[Settings]] = field(default_factory=dict)
    finalists: int | None = None
    paper: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def plan(self, lab: Lab) -> None:
        seeds = lab.seeds or (2 if lab.quick else self.seeds)
        for task in list(self.tasks)[: 2 if lab.quick else None]:
            trials = lab.run(self._trials(task, lab), f"{task}, trials")
            finals = []
            for method in self._finalists(task, trials):
                settings = self._chosen(trials, method).settings
                solver = lab.solver_for(METHODS[method].solver)
                finals += [_job("final", task, method, solver, settings, seed) for seed in range(seeds)]
            controls = [LOGISTIC] * self.logistic + [USUAL_GCN] * self.usual_gcn
            finals += [
                _job("final", task, name, None, {}, seed) for name in controls for seed in range(seeds)
            ]
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

    def _finalists(self, task: str, trials: pd.DataFrame) -> list[str]:
        if self.finalists is None:
            exact = self.tasks[task].exact
            return [m for m in self.methods if exact or METHODS[m].solver != "exact"]
        baselines = [m for m in self.methods if METHODS[m].kind == "baseline"]
        baselines.sort(key=lambda m: -self.choose.sign * self._chosen(trials, m).score)
        return [m for m in self.methods if m == OURS or m in baselines[: self.finalists]]

    @property
    def grids(self) -> dict[str, list[Settings]]:
        """The settings that are tried, by method."""
        return {method: self._grid(method) for method in self.methods}

    def _grid(self, method: str) -> list[Settings]:
        return self.trials.get(method, METHODS[method].trials)

    def _chosen(self, trials: pd.DataFrame, method: str) -> Choice:
        return best_trial(where(trials, method=_tuned(method)), self.choose)

    def compute(self, job: Job) -> dict[str, Any]:
        tuning = job["stage"] == "trial"
        with seeded(job["seed"]):
            task = self.tasks[job["task"]](job["seed"], tuning, job["quick"])
            if job["method"] == LOGISTIC:
                return task.logistic()
            if job["method"] == USUAL_GCN:
                return task.usual_gcn()
            solver = {} if job["solver"] is None else {"solver": job["solver"]}
            settings = job["settings"] | solver
            return train(task, job["method"], settings, job["seed"], watch=0 if tuning else self.watch)

    def show(self, runs: pd.DataFrame) -> Section:
        tables, panels, duels = [], {}, []
        for task in self.tasks:
            trials, finals = self._current(runs, task)
            if finals.empty:
                continue
            tables += [self._table(task, finals), self._settings(task, trials, finals)]
            duels += self._duels(task, finals)
            if panel := self._panel(finals):
                panels[task] = panel
        drawn = [self._figure(panels)] if panels else []
        if duels:
            caption = f"Forms of QP-SBGD minus the best baseline, in {self.scores[0].label}."
            tables.insert(0, table_of(duels, "best baseline", caption))
        return Section(list(self.notes), tables, drawn)

    def _current(self, runs: pd.DataFrame, task: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Trials of today's grids, and the final runs with the settings that these choose, by method."""
        own = where(runs, task=task)
        own = own[[stage in ("trial", "final") for stage in own.get("stage", [])]]  # others have no method
        if own.empty:
            return own, own
        own = own.assign(tuned=own["method"].map(_tuned))
        trial = own["stage"] == "trial"
        known = [
            s in self._grid(m) if t else True
            for s, m, t in zip(own["settings"], own["method"], trial, strict=True)
        ]
        own = own[known]
        finals = current_finals(own, ["tuned"], self.choose)
        order = {method: place for place, method in enumerate((*METHODS, LOGISTIC, USUAL_GCN))}
        return where(own, stage="trial"), finals.sort_values(
            "method", key=lambda m: m.map(order), kind="stable"
        )

    def finals(self, runs: pd.DataFrame, task: str) -> pd.DataFrame:
        """Final runs of a task, each method with the settings that its trials choose."""
        return self._current(runs, task)[1]

    def _table(self, task: str, finals: pd.DataFrame) -> Table:
        paper = self.paper.get(task, {})
        header = ["method", *(score.label for score in self.scores), *(["paper"] if paper else []), "seeds"]
        rows = []
        for method, own in groups(finals, "method"):
            row = [method, *(str(estimate(own[score.name])) for score in self.scores)]
            row += [f"{paper[method]:.2f}" if method in paper else "–"] if paper else []
            rows.append([*row, str(len(own))])
        return Table(header, rows, f"{task}. Mean ± 95 % interval over seeds.")

    def _settings(self, task: str, trials: pd.DataFrame, finals: pd.DataFrame) -> Table:
        """What was chosen for each method, also for those without final runs."""
        seconds = finals.groupby("method")["run_seconds"].median()
        rows = []
        for method in (m for m in METHODS if m in {*trials["method"], *finals["method"]}):
            own = self._chosen(trials, method)
            best, worst = (
                "–" if value is None or math.isnan(value) else f"{value:.4f}"
                for value in (own.score, own.worst)
            )
            time = f"{seconds[method]:.1f}" if method in seconds else "–"
            rows.append([method, str(own), best, worst, time])
        header = ["method", "chosen", "best trial", "worst trial", "seconds of a final run"]
        caption = (
            f"{task}: settings and trials, by {self.choose.label}. † A chosen value at the end of its grid."
        )
        return Table(header, rows, caption, folded=True)

    def _duels(self, task: str, finals: pd.DataFrame) -> list[Duel]:
        """Each form of QP-SBGD, except as published, against the best baseline over the same seeds."""
        score = self.scores[0]
        means = finals.groupby("method", sort=False)[score.name].mean() if len(finals) else pd.Series()
        kinds = {m: METHODS[m].kind for m in means.index if m in METHODS}
        baselines = [m for m, kind in kinds.items() if kind == "baseline"]
        if not baselines:
            return []
        rival = max(baselines, key=lambda m: score.sign * means[m])
        control = next((list(where(finals, method=m)[score.name]) for m in CONTROLS if m in means.index), [])
        return [
            Duel(
                task,
                score.label,
                (method, rival),
                matched(finals, method, rival, score=score.name),
                score.higher_is_better,
                score.margin,
                control,
            )
            for method, kind in kinds.items()
            if kind == "ours" and "published" not in method
        ]

    def summary(self, runs: pd.DataFrame) -> list[Duel]:
        """The default against the best baseline, on each task."""
        duels = [duel for task in self.tasks for duel in self._duels(task, self._current(runs, task)[1])]
        return [duel for duel in duels if duel.names[0] == OURS]

    def _panel(self, finals: pd.DataFrame) -> figures.Panel | None:
        """Curves of the final runs, or nothing if they were looked at too rarely for curves."""
        score = self.scores[0]
        series: dict[str, figures.Curves] = {}
        levels: dict[str, float] = {}
        for method, own in groups(finals, "method"):
            curves = list(own.get(f"{score.name} curve", pd.Series()).dropna())
            # The weights of ProxQuant are real until training ends, so that only its end can be compared.
            if curves and method != "ProxQuant":
                series[method] = curves[0]["x"], [curve["y"] for curve in curves]
            else:
                levels[method] = float(own[score.name].mean())
        if not series or min(len(x) for x, _ in series.values()) < MIN_POINTS:
            return None
        ends = {m: score.sign * float(np.mean([run[-1] for run in runs])) for m, (_, runs) in series.items()}
        baselines = [m for m in series if m in METHODS and METHODS[m].kind == "baseline"]
        best = sorted(baselines, key=lambda m: -ends[m])[:2]
        named = [m for m in (OURS, PUBLISHED, *best, *CONTROLS) if m in series]
        return figures.Panel(series, levels, named, score.higher_is_better)

    def _figure(self, panels: dict[str, figures.Panel]) -> Figure:
        label = self.scores[0].label
        caption = (
            f"{label.capitalize()} during training, means over seeds: with 95 % intervals for the default, "
            "the published step, the two best baselines and real weights (a control); thin and grey for the "
            "others. Levels without a curve: methods that have none, and ProxQuant, whose weights are binary "
            "only at the end. What ends outside of a panel is named at its edge."
        )
        return Figure("curves", caption, to_svg(figures.curves(panels, "epoch", label)))


def _tuned(method: str) -> str:
    """The method whose trials choose this one's settings: itself, as a rule."""
    return (METHODS[method].like if method in METHODS else None) or method


def _job(stage: str, task: str, method: str, solver: str | None, settings: Settings, seed: int) -> Job:
    return {
        "stage": stage,
        "task": task,
        "method": method,
        "solver": solver,
        "settings": settings,
        "seed": seed,
    }
