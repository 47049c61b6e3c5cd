"""Every method on the same tasks, tuned alike: trials on validation data, then fresh seeds."""

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from spingrad_lab.methods import DEFAULT, LOGISTIC, METHODS, USUAL_GCN, Settings
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import Paired, estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.training import Task, train
from spingrad_lab.trials import TUNING_SEED, Choice, Score, ahead, best_trial, current_finals

OURS, CEILINGS = DEFAULT, (USUAL_GCN, "real weights, Adam")


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
        for task in self.tasks:
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
        tables, drawn, notes = [], [], list(self.notes)
        for task in self.tasks:
            trials, finals = self._current(runs, task)
            if finals.empty:
                continue
            tables.append(self._table(task, trials, finals))
            if self.finalists is not None:
                tables.append(self._heats(task, trials))
            notes += self._verdicts(task, finals)
            drawn.append(self._figure(task, finals))
        return Section(notes, tables, drawn)

    def _current(self, runs: pd.DataFrame, task: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Trials of today's grids, and the final runs with the settings that these choose, by method."""
        own = where(runs, task=task)
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

    def _table(self, task: str, trials: pd.DataFrame, finals: pd.DataFrame) -> Table:
        paper = self.paper.get(task, {})
        header = ["method", *(score.label for score in self.scores)]
        header += (["paper"] if paper else []) + ["seeds", "seconds", "worst trial", "chosen"]
        rows = []
        for method, own in groups(finals, "method"):
            row = [method, *(str(estimate(own[score.name])) for score in self.scores)]
            row += [f"{paper[method]:.2f}" if method in paper else "–"] if paper else []
            chosen = self._chosen(trials, method)
            worst = "–" if chosen.worst is None else f"{chosen.worst:.3f}"
            rows.append([*row, str(len(own)), f"{own['run_seconds'].median():.1f}", worst, str(chosen)])
        caption = f"{task}. Mean ± 95 % interval over seeds; † a chosen value at the end of its grid."
        return Table(header, rows, caption)

    def _heats(self, task: str, trials: pd.DataFrame) -> Table:
        """The best trial of every method, also of those without final runs."""
        rows = []
        for method in (m for m in METHODS if m in set(trials["method"])):
            own = self._chosen(trials, method)
            worst = "–" if own.worst is None else f"{own.worst:.4f}"
            rows.append([method, f"{own.score:.4f}", worst, str(own).replace("†", "")])
        header = ["method", "best trial", "worst trial", "chosen"]
        return Table(header, rows, f"{task}, {self.choose.label} in trials")

    def _duels(self, finals: pd.DataFrame) -> dict[tuple[str, str], Paired]:
        """QP-SBGD against the best baseline over the same seeds, by their names."""
        score = self.scores[0]
        means = finals.groupby("method", sort=False)[score.name].mean() if len(finals) else pd.Series()
        kinds = {m: METHODS[m].kind for m in means.index if m in METHODS}
        baselines = [m for m, kind in kinds.items() if kind == "baseline"]
        if not baselines:
            return {}
        rival = max(baselines, key=lambda m: score.sign * means[m])
        ours = [m for m, kind in kinds.items() if kind == "ours" and "published" not in m]
        return {(m, rival): ahead(finals, m, rival, score=score.name) for m in ours}

    def _verdicts(self, task: str, finals: pd.DataFrame) -> list[str]:
        label = self.scores[0].label
        return [
            f"**{task}**, {label}: {method} minus {rival}, the best baseline: {result}."
            for (method, rival), result in self._duels(finals).items()
        ]

    def summary(self, runs: pd.DataFrame) -> list[list[str]]:
        """One row for each task: QP-SBGD, the best baseline, their difference and the ceiling."""
        rows = []
        score = self.scores[0]
        for task in self.tasks:
            _, finals = self._current(runs, task)
            for (method, rival), result in self._duels(finals).items():
                if method == OURS:
                    top = next((m for m in CEILINGS if m in set(finals["method"])), "")
                    runs_of = (where(finals, method=m)[score.name] for m in (method, rival, top))
                    mean, other, ceiling = (str(estimate(own)) if len(own) else "–" for own in runs_of)
                    versus = f"{other} ({rival.removeprefix('BinaryConnect ')})"
                    rows.append([task, score.label, mean, versus, str(result), ceiling])
        return rows

    def _figure(self, task: str, finals: pd.DataFrame) -> Figure:
        score = self.scores[0]
        series: dict[str, figures.Curves] = {}
        flat: dict[str, float] = {}
        for method, own in groups(finals, "method"):
            curves = list(own.get(f"{score.name} curve", pd.Series()).dropna())
            if curves:
                series[method] = curves[0]["x"], [curve["y"] for curve in curves]
            else:
                flat[method] = float(own[score.name].mean())
        canvas = figures.curves(series, flat, "epoch", score.label, score.higher_is_better)
        caption = (
            f"{task}: {score.label} during training, mean and 95 % interval over seeds. Curves far worse "
            "than the others leave the picture; ProxQuant's weights are real until training ends."
        )
        return Figure(task, caption, to_svg(canvas))


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
