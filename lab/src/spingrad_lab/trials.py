"""Choosing among trials: the best settings, the final runs that have them, and who is ahead of whom."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from spingrad_lab.methods import Settings
from spingrad_lab.report.statistics import MARGIN, Paired, paired
from spingrad_lab.runs import groups, where

TUNING_SEED = 1_000
"""Seeds of trials begin here, those of final runs at 0."""


@dataclass(frozen=True)
class Score:
    """A metric that trials are chosen by or that a table shows."""

    name: str
    label: str
    higher_is_better: bool = True
    margin: float = MARGIN
    """By how much two methods may differ and still be level."""

    @property
    def sign(self) -> int:
        return 1 if self.higher_is_better else -1


ACCURACY = Score("test_accuracy", "test accuracy")


@dataclass(frozen=True)
class Choice:
    """The best settings of some trials and their score; the worst score if there were several settings."""

    settings: Settings = field(default_factory=dict)
    score: float = math.nan
    worst: float | None = None
    at_edge: frozenset[str] = frozenset()
    """Names of the settings whose best value is the first or last of more than two that were tried."""

    def __str__(self) -> str:
        values = {k: v if isinstance(v, str) else f"{v:g}" for k, v in self.settings.items()}
        return ", ".join(f"{k} {v}{'†' if k in self.at_edge else ''}" for k, v in values.items()) or "–"


def best_trial(trials: pd.DataFrame, score: Score = ACCURACY) -> Choice:
    """The settings with the best mean over their runs; the lower learning rate of equally good ones.

    Example:
        >>> trials = pd.DataFrame({"settings": [{"lr": 1}, {"lr": 2}], "test_accuracy": [0.5, 0.7]})
        >>> best_trial(trials)
        Choice(settings={'lr': 2}, score=0.7, worst=0.5, at_edge=frozenset())
    """
    if trials.empty:
        return Choice()
    key = trials["settings"].map(lambda own: json.dumps(own, sort_keys=True))
    means = {str(k): float(own.mean()) for k, own in trials[score.name].groupby(key, sort=False)}
    tried: dict[str, Settings] = {name: json.loads(name) for name in means}
    best = max(means, key=lambda name: (score.sign * means[name], -tried[name].get("lr", 0)))
    values = {name: {own[name] for own in tried.values()} for name in tried[best]}
    edges = (n for n, own in values.items() if len(own) > 2 and tried[best][n] in (min(own), max(own)))
    worst = min(means.values(), key=lambda value: score.sign * value) if len(means) > 1 else None
    settings = next(own for own, name in zip(trials["settings"], key, strict=True) if name == best)
    return Choice(settings, means[best], worst, frozenset(edges))


def as_settings(trials: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Trials whose settings are columns of their own, with these as ``settings``."""
    found = [
        dict(zip(columns, values, strict=True)) for values in zip(*(trials[c] for c in columns), strict=True)
    ]
    return trials.assign(settings=pd.Series(found, index=trials.index, dtype=object))


def current_finals(runs: pd.DataFrame, by: Sequence[str], score: Score = ACCURACY) -> pd.DataFrame:
    """Final runs with the settings that their trials choose now, sorted by seed; older ones are left out.

    Args:
        runs: Trials and final runs, told apart by their ``stage``.
        by: Columns of which trials and final runs that belong together have equal values.
        score: What the trials are chosen by.
    """
    trials, finals = where(runs, stage="trial"), where(runs, stage="final")
    kept = [finals[:0]]
    for place, own in groups(finals, list(by)):
        chosen = best_trial(where(trials, **dict(zip(by, place, strict=True))), score).settings
        kept.append(own[[settings == chosen for settings in own["settings"]]])
    return pd.concat(kept).sort_values("seed", kind="stable")


def ahead(
    runs: pd.DataFrame,
    first: Any,
    second: Any,
    column: str = "method",
    score: str = ACCURACY.name,
    run: Sequence[str] = ("seed",),
) -> Paired:
    """``first`` minus ``second``, two values of a column, over the runs (as a rule: seeds) that both have."""
    return paired(*matched(runs, first, second, column, score, run))


def matched(
    runs: pd.DataFrame,
    first: Any,
    second: Any,
    column: str = "method",
    score: str = ACCURACY.name,
    run: Sequence[str] = ("seed",),
) -> tuple[list[float], list[float]]:
    """The scores of two values of a column, over the runs (as a rule: seeds) that both have."""
    table = runs.pivot(index=list(run), columns=column, values=score)
    both = table.reindex(columns=[first, second]).dropna().astype(float)
    return both[first].to_list(), both[second].to_list()
