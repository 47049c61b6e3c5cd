"""Every comparison of the paper on equal terms: all methods in one reading of loss and layers at a time."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import nn
from torch.optim import Optimizer

from spingrad import QPSBGD
from spingrad.baselines import BinaryConnect, ProxQuant, SignSGD
from spingrad.solvers import BlockDescentSolver
from spingrad_lab.beyond.controlled import EnumeratingSolver
from spingrad_lab.methods import Method, Params, Reading, Settings, grid
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import Estimate, estimate, simultaneous
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.graphs import Cora, Karate, PubMed
from spingrad_lab.tasks.small import (
    AdultTenLayers,
    AdultThreeFeatures,
    AdultTwoLayers,
    OffsetBlobs,
    RandomBlobs,
    Stroke02,
    Stroke12,
    Stroke17,
    SymmetricBlobs,
    mlp,
    pair_points,
)
from spingrad_lab.tasks.training import Task, train
from spingrad_lab.trials import ACCURACY, TUNING_SEED, Score, best_trial, current_finals, matched

PUBLISHED, SGD, SIGN_SGD, PROXQUANT, DEFAULT = "as published", "SGD", "signSGD", "ProxQuant", "default"
RIVALS = (SGD, SIGN_SGD, PROXQUANT)
READINGS = tuple(Reading(reduction, scale) for reduction in ("sum", "mean") for scale in (False, True))
"""The first is the one in which the paper's claims hold best, as far as was known before these runs."""
WITHOUT_SIZE = (SIGN_SGD, DEFAULT)
"""Methods to which a sum and a mean of the loss are the same: run once, and shown in both."""
LOSS = Score("train_loss", "training loss", higher_is_better=False)
HELD_OUT_LOSS = Score("test_loss", "validation loss", higher_is_better=False)
HELD_OUT = Score("test_accuracy", "validation accuracy")
TRAINING = Score("train_accuracy", "training accuracy")


class Deep02(Stroke02):
    def network(self) -> nn.Module:
        return mlp(16, 4, 4, 2)


class Deep12(Stroke12):
    def network(self) -> nn.Module:
        return mlp(16, 4, 4, 2)


class Deep17(Stroke17):
    def network(self) -> nn.Module:
        return mlp(16, 4, 4, 2)


class Item(NamedTuple):
    """A comparison of the paper: its task, what it shows, and what chooses the settings."""

    task: type[Task]
    score: Score
    choose: Score
    lowest: int = -4
    """Of the learning rates of methods that move by spins or signs, as a power of ten."""
    rivals: Sequence[str] = RIVALS
    """Those of the paper's own comparison."""


BINARY_CONNECT = (SGD, SIGN_SGD)
ITEMS: dict[str, Item] = {
    "Fig. 2, symmetric blobs": Item(SymmetricBlobs, LOSS, LOSS, rivals=BINARY_CONNECT),
    "Fig. 2, offset blobs": Item(OffsetBlobs, LOSS, LOSS, rivals=BINARY_CONNECT),
    "Fig. 2, random blobs": Item(RandomBlobs, LOSS, LOSS, rivals=BINARY_CONNECT),
    "Fig. 3 left, Adult 15-10-1": Item(AdultTwoLayers, LOSS, LOSS),
    "Fig. 3 right, Adult, ten layers": Item(AdultTenLayers, LOSS, LOSS, -6, BINARY_CONNECT),
    "Tab. 1, 0/2, 16-4-2": Item(Stroke02, ACCURACY, HELD_OUT_LOSS),
    "Tab. 1, 1/2, 16-4-2": Item(Stroke12, ACCURACY, HELD_OUT_LOSS),
    "Tab. 1, 1/7, 16-4-2": Item(Stroke17, ACCURACY, HELD_OUT_LOSS),
    "Tab. 1, 0/2, 16-4-4-2": Item(Deep02, ACCURACY, HELD_OUT_LOSS),
    "Tab. 1, 1/2, 16-4-4-2": Item(Deep12, ACCURACY, HELD_OUT_LOSS),
    "Tab. 1, 1/7, 16-4-4-2": Item(Deep17, ACCURACY, HELD_OUT_LOSS),
    "Fig. 4, Karate": Item(Karate, ACCURACY, HELD_OUT_LOSS),
    "Fig. 4, Cora": Item(Cora, ACCURACY, HELD_OUT),
    "Fig. 4, PubMed": Item(PubMed, ACCURACY, HELD_OUT),
    "Fig. 6, Adult 3-5-2": Item(AdultThreeFeatures, TRAINING, HELD_OUT),
}
"""Each comparison by its name; the digits have the features of the stroke."""

PAPER_RATES: dict[str, Settings] = {PUBLISHED: {"lr": 0.05}, SIGN_SGD: {"lr": 0.05}, SGD: {"lr": 5e-5}}
"""Of Fig. 2, the only ones that the paper gives."""


def _solver(task: str) -> Any:
    """Exact where the fan-ins are small; five sweeps of descent in the ten layers."""
    return EnumeratingSolver() if ITEMS[task].task.exact else BlockDescentSolver(num_sweeps=5)


def _optimizer(method: str, task: str, params: Params, seed: int, settings: Settings) -> Optimizer:
    match method:
        case "as published":
            return QPSBGD.as_published(params, settings["lr"], solver=_solver(task), seed=seed)
        case "default":
            return QPSBGD(params, settings["lr"], seed=seed)
        case "SGD":
            return BinaryConnect(params, torch.optim.SGD, **settings)
        case "signSGD":
            return SignSGD(params, **settings)
        case "ProxQuant":
            for _, weight in params:  # real weights begin where binary ones are: at magnitude one
                nn.init.uniform_(weight, -1, 1)
            return ProxQuant(params, **settings)
    raise ValueError(f"no method {method!r}")


def tried(method: str, item: Item, reading: Reading) -> list[Settings]:
    """Eight settings of each method; rates of SGD follow the size of the gradient, which a sum multiplies."""
    lowest, summed = item.lowest, reading.reduction == "sum"
    by_spins = [float(f"{10 ** (lowest + k / 2):.2g}") for k in range(8)]
    match method:
        case "SGD":
            highest = 0 if item.lowest == -4 else -1
            rates = [float(f"{10 ** (highest - k / 2 - summed):.2g}") for k in range(4)]
            return grid(lr=rates, momentum=(0, 0.9))
        case "ProxQuant":
            rates = [0.01, 0.03] if item.lowest == -4 else [3e-3, 0.01]
            return grid(lr=rates, regularization=(3e-4, 1e-3, 3e-3, 1e-2))
        case "signSGD":
            return grid(lr=by_spins[1:8:2], momentum=(0, 0.9))
    return grid(lr=by_spins)


class EqualTerms(Experiment):
    """The published step, the paper's rivals and our default in each of four readings.

    Decided before the runs. Within a reading all methods have the same layers, loss, data, starts and number
    of trials; so losses can be compared. Settings are chosen by training loss where the paper's claim is
    about convergence, else on held-out data; then twenty fresh seeds, paired. The claim of an item is that
    the published step is ahead of each of the paper's rivals. In a reading it is *reproduced* where the 95 %
    interval of the difference from the best rival lies above zero, *contradicted* where it lies below zero,
    and *undecided* otherwise. An item has the verdict of the reading in which the claim holds best: the one
    with the largest lower end of its interval, as a share of the score, since the losses of scaled and of
    unscaled layers differ in size. The other three are shown. The default has no part in a verdict.
    """

    title = "The paper's comparisons on equal terms"
    source = "sections 4.1 to 4.3 and appendix: figures 2, 3, 4 and 6, table 1"
    seeds, tuning_seeds = 20, 2

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        seeds = range(lab.seeds or (2 if lab.quick else self.seeds))
        names = list(ITEMS)[:9:8] if lab.quick else list(ITEMS)
        for name in names:
            settings = {
                place: tried(place[0], ITEMS[name], place[1])[:: 8 if lab.quick else 1] for place in places()
            }
            tuning = range(TUNING_SEED, TUNING_SEED + (1 if lab.quick else self.tuning_seeds))
            trials = lab.run(
                [
                    _job("trial", name, *place, one, seed)
                    for place, own in settings.items()
                    for one, seed in itertools.product(own, tuning)
                ],
                f"{name}, trials",
            )
            finals = []
            for method, reading in settings:
                own = where(trials, method=method, reading=str(reading))
                chosen = best_trial(own, ITEMS[name].choose).settings
                finals += [_job("final", name, method, reading, chosen, seed) for seed in seeds]
            if name.startswith("Fig. 2"):
                given = itertools.product(PAPER_RATES, READINGS[:1] if lab.quick else READINGS, seeds)
                finals += [_job("paper", name, m, reading, PAPER_RATES[m], s) for m, reading, s in given]
            lab.run(finals, f"{name}, finals")

    def compute(self, job: Job) -> dict[str, Any]:
        item, reading = ITEMS[job["task"]], reading_of(job["reading"])

        def make(params: Params, seed: int, **settings: Any) -> Optimizer:
            return _optimizer(job["method"], job["task"], params, seed, settings)

        with seeded(job["seed"]):
            task = item.task(job["seed"], job["stage"] == "trial", job["quick"])
            return train(task, Method(make, [], reading=reading), job["settings"], job["seed"])

    def show(self, runs: pd.DataFrame) -> Section:
        tables = []
        for name in ITEMS:
            own = finals_of(runs, name)
            if len(own):
                tables += [_table(name, own), _settings(name, own)]
        if len(paper := where(runs, stage="paper")):
            tables.append(_paper_rates(paper))
        return Section([" ".join(str(EqualTerms.__doc__).split()[14:]), *_NOTES], tables)


def places() -> list[tuple[str, Reading]]:
    """Every method in every reading that makes a difference to it."""
    methods = (PUBLISHED, *RIVALS, DEFAULT)
    pairs = itertools.product(methods, READINGS)
    return [(m, reading) for m, reading in pairs if m not in WITHOUT_SIZE or reading.reduction == "mean"]


def reading_of(name: str) -> Reading:
    """The reading of this name."""
    return next(reading for reading in READINGS if str(reading) == name)


def finals_of(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Final runs of an item, with the settings that their trials choose; nothing before all readings ran."""
    own = where(runs, task=name)
    if own.empty or "final" not in set(own["stage"]):
        return own[:0]
    return current_finals(own, ["method", "reading"], ITEMS[name].choose)


def within(finals: pd.DataFrame, reading: Reading) -> pd.DataFrame:
    """The runs of one reading; those to which a sum and a mean are the same stand in both."""
    same = str(Reading("mean", reading.scale))
    kept = [
        r == (same if m in WITHOUT_SIZE else str(reading))
        for m, r in zip(finals["method"], finals["reading"], strict=True)
    ]
    return finals[kept]


class Lead(NamedTuple):
    """The published step against the best of the paper's rivals in one reading; a positive lead is ours."""

    reading: Reading
    ours: float
    rival: str
    theirs: float
    lead: Estimate
    seeds: int

    def __str__(self) -> str:
        mean, half = f"{self.lead.mean:+.3f}".replace("-", "−"), f"{self.lead.half:.3f}"
        return f"{self.ours:.3f}, {self.rival} {self.theirs:.3f} ({mean} ± {half})"


def leads(runs: pd.DataFrame, name: str) -> list[Lead]:
    """The published step in each reading, that in which its claim holds best first."""
    finals, item, found = finals_of(runs, name), ITEMS[name], []
    for reading in READINGS if len(finals) else ():
        own = within(finals, reading).astype({item.score.name: float})
        means = own.groupby("method")[item.score.name].mean()
        if not {PUBLISHED, *item.rivals} <= set(means.index):
            continue
        rival = max(item.rivals, key=lambda method: item.score.sign * means[method])
        first, second = matched(own, PUBLISHED, rival, score=item.score.name)
        mean, half = simultaneous(first, second, count=1)
        lead = Estimate(item.score.sign * mean, half)
        found.append(Lead(reading, means[PUBLISHED], rival, means[rival], lead, len(first)))
    return sorted(found, key=strength, reverse=True)


def difference(finals: pd.DataFrame, rival: str, score: str) -> Estimate:
    """The published step minus a rival, in the runs of one reading."""
    return simultaneous(*matched(finals, PUBLISHED, rival, score=score), count=1)


def strength(own: Lead) -> float:
    """How well the claim holds: losses of scaled and unscaled layers have different sizes."""
    return (own.lead.mean - own.lead.half) / max(abs(own.ours), abs(own.theirs), 1e-9)


def _job(stage: str, task: str, method: str, reading: Reading, settings: Settings, seed: int) -> Job:
    named = {"stage": stage, "task": task, "method": method, "reading": str(reading)}
    return {**named, "settings": settings, "seed": seed}


def _table(name: str, finals: pd.DataFrame) -> Table:
    """A row for each method, a column for each reading."""
    score, rows = ITEMS[name].score, []
    for method in (PUBLISHED, *RIVALS, DEFAULT):
        found = [where(within(finals, reading), method=method) for reading in READINGS]
        rows.append([method, *(str(estimate(own[score.name])) if len(own) else "–" for own in found)])
    header = ["method", *(str(reading) for reading in READINGS)]
    return Table(header, rows, f"{name}: {score.label}, mean ± 95 % interval over seeds, by reading")


def _settings(name: str, finals: pd.DataFrame) -> Table:
    rows = []
    for (method, reading), own in groups(finals, ["method", "reading"]):
        chosen = ", ".join(f"{key} {value:g}" for key, value in own["settings"].iloc[0].items())
        rows.append([method, reading, chosen, str(len(own)), f"{own['run_seconds'].median():.1f}"])
    header = ["method", "reading", "chosen", "seeds", "seconds of a run"]
    return Table(header, rows, f"{name}: settings, chosen by {ITEMS[name].choose.label}", folded=True)


def _paper_rates(runs: pd.DataFrame) -> Table:
    rows = []
    for (task, reading), own in groups(runs, ["task", "reading"]):
        cells = [str(estimate(where(own, method=method)["train_loss"])) for method in PAPER_RATES]
        rows.append([task, reading, *cells])
    rates = ", ".join(f"{method} {settings['lr']:g}" for method, settings in PAPER_RATES.items())
    caption = f"Fig. 2 with the paper's own learning rates ({rates}): training loss"
    return Table(["task", "reading", *PAPER_RATES], rows, caption)


_NOTES = (
    "The paper does not say whether a loss is summed or averaged over a batch, and writes its layers without "
    "a factor. A method to which a factor of the loss makes no difference (signSGD, the default) is run once "
    "and shown in both. The published step is solved exactly, by enumeration up to 16 inputs; in the ten "
    "layers of Adult by five sweeps of descent. The learning rate follows a cosine. Each method has eight "
    "settings with two seeds in each reading.",
)
EQUAL_TERMS = EqualTerms()
