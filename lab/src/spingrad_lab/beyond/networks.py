"""The default against its rivals on networks that people build: tuned alike, judged with fresh seeds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
from torch.optim import Optimizer

from spingrad import QPSBGD
from spingrad.baselines import BinaryConnect
from spingrad_lab.methods import DEFAULT, METHODS, PUBLISHED, USUAL, Method, Params, Reading, Settings
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import Duel, estimate, judged, shown
from spingrad_lab.rivals import FOOF, Muon, SignOfMuon, Windowed
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.networks import (
    CIFAR,
    FULLY_CONNECTED,
    LONG,
    SPEECH,
    TEXT,
    Built,
    Norm,
    with_long_trials,
)
from spingrad_lab.tasks.training import train
from spingrad_lab.trials import ACCURACY, TUNING_SEED, Choice, Score, best_trial, current_finals, matched

RATES = tuple(float(f"{10 ** (2 * k / 3 - 5):.3g}") for k in range(7))
"""Learning rates over four decades, for steps that move a weight by about the learning rate."""
PROMISING = 3
"""Of the learning rates of a method, how many are tried again in longer trials."""
BETA2 = 0.99  # of Adam
WHITENED = f"{DEFAULT}, whitening 0.125"
STRONGER = f"{DEFAULT}, whitening 1"


def whitened(params: Params, seed: int, lr: float, strength: float) -> Optimizer:
    """The default with a linear term that is weaker where the units of a layer agree."""
    return QPSBGD(params, lr, whitening=strength, seed=seed)


def _muon(params: Params, seed: int, lr: float) -> Optimizer:
    return BinaryConnect(params, Muon, lr=30 * lr)  # an entry of its update is that much smaller than one


def _windowed(params: Params, seed: int, lr: float) -> Optimizer:
    return Windowed(params, lr=lr, betas=(0.9, BETA2))


def _sign_of_muon(params: Params, seed: int, lr: float) -> Optimizer:
    return SignOfMuon(params, lr)


def _sign_of_foof(params: Params, seed: int, lr: float) -> Optimizer:
    return QPSBGD(params, lr, rank=None, solver=FOOF(), seed=seed)


@dataclass(frozen=True)
class Entrant:
    """How the binary weights are trained, and what stands behind each binary layer."""

    make: Callable[..., Optimizer]
    colour: str
    norm: Norm = "none"
    reading: Reading = USUAL


_OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], str]] = {
    DEFAULT: (METHODS[DEFAULT].make, figures.VERMILION),
    WHITENED: (partial(whitened, strength=0.125), figures.VERMILION),  # thinner than the default
    STRONGER: (partial(whitened, strength=1.0), "#6b2900"),  # dark vermilion
    "Adam": (partial(METHODS["BinaryConnect Adam"].make, beta2=BETA2), figures.BLUE),
    "Adam, window": (_windowed, figures.GREY),
    "signSGD": (partial(METHODS["BinaryConnect signSGD"].make, momentum=0.9), figures.GREEN),
    "Muon": (_muon, figures.PURPLE),
    "sign of Muon": (_sign_of_muon, figures.SKY),
    "sign of FOOF": (_sign_of_foof, figures.ORANGE),
}
_NORMS: tuple[Norm, ...] = ("none", "Gain", "BatchNorm")
ENTRANTS = {
    name if norm == "none" else f"{name}, {norm}": Entrant(make, colour, norm)
    for norm in _NORMS
    for name, (make, colour) in _OPTIMIZERS.items()
} | {PUBLISHED: Entrant(METHODS[PUBLISHED].make, figures.BLACK, reading=METHODS[PUBLISHED].reading)}
WITHOUT = (*_OPTIMIZERS, PUBLISHED)
WITH = tuple(f"{name}, BatchNorm" for name in _OPTIMIZERS)
TASKS: dict[str, type[Built]] = {**FULLY_CONNECTED, **LONG, **CIFAR, **TEXT, **SPEECH}
STAGES = ("trial", "longer trial", "final")
LOSS = Score("test_loss", "test loss", higher_is_better=False, margin=0.01)


@dataclass(frozen=True)
class Contest(Experiment):
    """Some entrants on some networks.

    Args:
        title: What the report calls it.
        tasks: Names of networks, in ``TASKS``.
        entrants: Names of entrants, in ``ENTRANTS``.
        seeds: Number of final runs of each.
        score: What is compared, in trials on data held out of the training set.
        ours: The entrant that all others are compared with.
        longer: Names of networks with a second round of trials, as long as final runs: of each entrant that
            has the normalisation of ``ours``, its three best learning rates. This round then decides.
        notes: Sizes, and what the literature has.
    """

    title: str
    tasks: tuple[str, ...]
    entrants: tuple[str, ...]
    seeds: int
    score: Score = ACCURACY
    ours: str = DEFAULT
    longer: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = "beyond the paper"

    def plan(self, lab: Lab) -> None:
        rates = RATES[3:4] if lab.quick else RATES
        for task in self.tasks[:1] if lab.quick else self.tasks:
            trials = lab.run(
                [
                    _job("trial", task, name, {"lr": lr}, TUNING_SEED)
                    for name in self.entrants
                    for lr in rates
                ],
                f"{task}, trials",
            )
            if task in self.longer:
                again = [
                    _job("longer trial", task, name, settings, TUNING_SEED)
                    for name in self.entrants
                    if ENTRANTS[name].norm == ENTRANTS[self.ours].norm
                    for settings in self._promising(where(trials, method=name))
                ]
                trials = self._deciding(pd.concat([trials, lab.run(again, f"{task}, longer trials")]))
            finals = []
            for seed in range(2 if lab.quick else lab.seeds or self.seeds):  # by seed: all have some early
                for name in self.entrants[: 3 if lab.quick else None]:
                    settings = best_trial(where(trials, method=name), self.score).settings
                    finals.append(_job("final", task, name, settings, seed))
            lab.run(finals, f"{task}, finals")

    def compute(self, job: Job) -> dict[str, Any]:
        entrant = ENTRANTS[job["method"]]
        with seeded(job["seed"]):
            kind = TASKS[job["task"]]
            if job["stage"] == "longer trial":
                kind = with_long_trials(kind)
            task = kind(job["seed"], job["stage"] != "final", job["quick"])
            task.normalisation = entrant.norm
            scores = train(
                task, Method(entrant.make, [], reading=entrant.reading), job["settings"], job["seed"]
            )
            return {name: value for name, value in scores.items() if name.startswith("test")}

    def show(self, runs: pd.DataFrame) -> Section:
        tables = [self._table(task, where(runs, task=task)) for task in self.tasks]
        found = [table for table in [*tables, self._whitening(runs)] if table]
        robust = Figure("learning-rates", _ROBUST, to_svg(self._rates(where(runs, stage="trial"))))
        return Section([_NOTE, *self.notes], found, [robust])

    def summary(self, runs: pd.DataFrame) -> list[Duel]:
        """Our entrant against the best of the rivals, on each network."""
        duels = []
        for task in self.tasks:
            finals = self._finals(where(runs, task=task))
            best = self._best_rival(finals)
            if best and len(where(finals, method=self.ours)):
                duels.append(self._duel(task, finals, self.ours, best))
        return duels

    def _promising(self, trials: pd.DataFrame) -> list[Settings]:
        """The best settings of one method, the lower learning rate of equally good ones first."""
        tried = zip(trials[self.score.name], trials["settings"], strict=True)
        ranked = sorted(tried, key=lambda own: (-self.score.sign * own[0], own[1]["lr"]))
        return [settings for _, settings in ranked[:PROMISING]]

    def _deciding(self, runs: pd.DataFrame) -> pd.DataFrame:
        """Runs on one network, of the trials only those that choose: a method's longer ones if it has any."""
        kept = []
        for _, own in groups(runs, "method"):
            first, longer, finals = (where(own, stage=stage) for stage in STAGES)
            again = self._promising(first) if len(first) and len(longer) else []
            longer = longer[[settings in again for settings in longer.get("settings", [])]]
            kept += [first if longer.empty else longer.assign(stage="trial"), finals]
        return pd.concat(kept) if kept else runs

    def _chosen(self, runs: pd.DataFrame) -> Choice:
        """What was chosen for one method on one network, marked if it is the first or last of all rates."""
        every = [settings["lr"] for settings in where(runs, stage="trial")["settings"]]
        choice = best_trial(where(self._deciding(runs), stage="trial"), self.score)
        at_edge = len(every) > 2 and choice.settings["lr"] in (min(every), max(every))
        return replace(choice, at_edge=frozenset(["lr"] * at_edge))

    def _finals(self, runs: pd.DataFrame) -> pd.DataFrame:
        """Final runs on one network with the settings that trials choose."""
        return runs if runs.empty else current_finals(self._deciding(runs), ["method"], self.score)

    def _best_rival(self, finals: pd.DataFrame) -> str | None:
        means = {name: float(own[self.score.name].mean()) for name, own in groups(finals, "method")}
        rivals = [name for name in means if not name.startswith(DEFAULT)]
        return max(rivals, key=lambda name: self.score.sign * means[name], default=None)

    def _duel(self, task: str, finals: pd.DataFrame, ours: str, rival: str) -> Duel:
        values = matched(finals, ours, rival, score=self.score.name)
        better = self.score.higher_is_better
        return Duel(task, self.score.label, (ours, rival), values, better, self.score.margin)

    def _whitening(self, runs: pd.DataFrame) -> Table | None:
        """With whitening, against the default and the best rival on each network: one family of tests."""
        duels = []
        for task in self.tasks:
            finals = self._finals(where(runs, task=task))
            best = self._best_rival(finals)
            for ours in (self.ours.replace(DEFAULT, name) for name in (WHITENED, STRONGER)):
                if best and len(where(finals, method=ours)):
                    duels += [self._duel(task, finals, ours, rival) for rival in (self.ours, best)]
        if not duels:
            return None
        found = judged(duels)
        rows = [
            [
                own.task,
                own.names[0].removeprefix(f"{DEFAULT}, "),
                str(estimate(own.values[0])),
                f"{test}, {shown(what, own.margin)}",
                f"{rival_test}, {shown(rival_what, own.margin)}",
                rival.names[1],
            ]
            for (own, test, what), (rival, rival_test, rival_what) in zip(
                found[::2], found[1::2], strict=True
            )
        ]
        differences = [f"minus {self.ours}", "minus the best rival", "which it is"]
        header = ["network", DEFAULT, self.score.label, *differences]
        caption = "With whitening. Mean ± 95 % interval; Holm over the table."
        return Table(header, rows, caption)

    def _table(self, task: str, runs: pd.DataFrame) -> Table | None:
        finals = self._finals(runs)
        names = [name for name, _ in groups(finals, "method")]
        if self.ours not in names:
            return None
        rivals = [name for name in names if name != self.ours and not name.startswith((WHITENED, STRONGER))]
        duels = judged([self._duel(task, finals, self.ours, name) for name in rivals])
        found = {duel.names[1]: (str(test), shown(what, duel.margin)) for duel, test, what in duels}
        rows = []
        for name in (name for name in self.entrants if name in names):
            own = where(finals, method=name)[self.score.name]
            compared = found.get(name, ("–", "–"))
            chosen = self._chosen(where(runs, method=name))
            rows.append([name, str(estimate(own)), *compared, str(chosen), str(len(own))])
        header = [
            "method",
            self.score.label,
            f"{self.ours} minus this one",
            f"{self.ours} is",
            "chosen",
            "seeds",
        ]
        edge = " † The first or last of all rates." if any("†" in row[-2] for row in rows) else ""
        return Table(header, rows, f"{task}. Mean ± 95 % interval; Holm over the table.{edge}")

    def _rates(self, trials: pd.DataFrame) -> Any:
        """A panel for each network: the error or loss over the learning rate, a curve for each method."""
        from matplotlib import ticker

        tasks = [task for task in self.tasks if len(where(trials, task=task))]
        columns = min(2, len(tasks))
        rows = -(-len(tasks) // columns)
        canvas, axes = figures.new(4.2 * columns + 1.8, 2.9 * rows, rows, columns)
        for panel, task in zip(axes.flat, tasks, strict=False):
            for name in self.entrants:
                own = where(trials, task=task, method=name)
                if len(own):
                    scores = own[self.score.name]
                    errors = 1 - scores if self.score.higher_is_better else scores
                    _draw(panel, name, [s["lr"] for s in own["settings"]], list(errors))
            panel.set(xscale="log", title=task, xlabel="learning rate")
            if self.score.higher_is_better:  # on a linear axis all good methods are one line
                panel.set(yscale="log", ylabel="error on held-out data")
                panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
                panel.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0, symbol=" %"))
                panel.yaxis.set_minor_formatter(ticker.NullFormatter())
            else:
                panel.set(ylabel=f"{self.score.label.removeprefix('test ')} on held-out data")
        drawn = {line.get_label(): line for panel in axes.flat for line in panel.get_lines()}
        legend = [drawn[name] for name in self.entrants if name in drawn]
        axes[0, -1].legend(handles=legend, loc="upper left", bbox_to_anchor=(1, 1))
        for panel in axes.flat[len(tasks) :]:
            panel.set_visible(False)
        return canvas


def _draw(panel: Any, name: str, rates: list[float], scores: list[float]) -> None:
    entrant, points = ENTRANTS[name], sorted(zip(rates, scores, strict=True))
    line = {"none": "-", "Gain": "--", "BatchNorm": ":"}[entrant.norm]
    ours = entrant.make is METHODS[DEFAULT].make
    look = {"marker": ".", "color": entrant.colour, "linewidth": 2.4 if ours else 1.1, "zorder": 2 + ours}
    panel.plot(*zip(*points, strict=True), line, label=name, **look)


def _job(stage: str, task: str, method: str, settings: Settings, seed: int) -> Job:
    return {"stage": stage, "task": task, "method": method, "settings": settings, "seed": seed}


_NOTE = (
    "Every method has the same seven trials (more where it says so): learning rates over four decades, on "
    "data held out of the training set, with the batch size of the final runs (Muon's are 30 times as large,"
    " since an entry of its update is that much smaller). Learning rates follow a cosine. *QP-SBGD* is the "
    "class's default. It is ahead or behind where the difference is significant after Holm's correction, "
    "level where an equivalence test says so, and undecided otherwise."
)
_ROBUST = (
    "One trial for each learning rate: how much does each method depend on it? Lower is better. Dashed: with "
    "`Gain`; dotted: with BatchNorm. Muon's learning rates are 30 times those shown."
)
FULLY = Contest(
    title="Fully connected networks",
    tasks=tuple(FULLY_CONNECTED),
    entrants=(*WITHOUT, "QP-SBGD, Gain", "Adam, Gain", "signSGD, Gain", "Adam, BatchNorm"),
    seeds=10,
    notes=(
        "20,000 of the 60,000 images (8,000 in trials), 3 epochs of batches of 200, shifted by up to one "
        "pixel each way. With all images, five seeds and fewer rivals: see the step.",
    ),
)
TWENTY_EPOCHS = Contest(
    title="Twenty epochs",
    tasks=tuple(LONG),
    entrants=FULLY.entrants,
    seeds=5,
    notes=("The first of the fully connected networks, trained for 20 epochs; trials have 10.",),
)
PHOTOGRAPHS = Contest(
    title="CIFAR-10",
    tasks=tuple(CIFAR),
    entrants=(*WITH, "QP-SBGD, Gain", "Adam, Gain", "QP-SBGD", "Adam", PUBLISHED),
    seeds=3,
    ours="QP-SBGD, BatchNorm",
    longer=tuple(CIFAR),
    notes=(
        "10,000 of the 50,000 photographs, 6 epochs (in trials 5,000 and 2), 16 to 64 channels; the first "
        "layer is real. With BatchNorm, the three best learning rates of each method had a second trial as "
        "long as a final run, with 10,000 photographs and 6 epochs, which then decided: in trials of a sixth"
        " of the steps other rates are best. Networks of the literature are far larger and train far longer:"
        " binary weights reach 0.917 there with BinaryConnect (Courbariaux et al., 2015), 0.913 with Bop "
        "(Helwegen et al., 2019), both VGG-like.",
        "The sign of FOOF's step on the VGG-like network is older than the sample of patches from all "
        "images, on which its targets depend, and than the longer trials: its directions came from the left "
        "edges of the images, and only the short trials chose its learning rate.",
    ),
)
TRANSFORMER = Contest(
    title="A transformer on tiny Shakespeare",
    tasks=tuple(TEXT),
    entrants=tuple(name for name in WITHOUT if name != "Adam, window"),
    seeds=5,
    score=LOSS,
    notes=(
        "Four layers of width 128, texts of 64 characters, batches of 12, 2,000 steps (1,000 in trials): "
        "nanoGPT's setting for a CPU, where real weights reach 1.88 (its documentation). Here embeddings, "
        "LayerNorm and the last layer are real and trained by Adam beside every method; attention and "
        "feed-forward layers are binary.",
        "Adam with a window is left out: a step of Adam is at most about as long as its learning rate, and "
        "at the one that trials chose, no weight gets to ±1 in so few steps. Its runs would be Adam's; in "
        "trials they were, to the last digit, up to a rate of 0.00464.",
    ),
)
SPOKEN_DIGITS = Contest(
    title="Spoken digits",
    tasks=tuple(SPEECH),
    entrants=(
        *WITHOUT,
        "QP-SBGD, Gain",
        "Adam, Gain",
        "signSGD, Gain",
        "QP-SBGD, BatchNorm",
        "Adam, BatchNorm",
    ),
    seeds=5,
    score=replace(ACCURACY, margin=0.01),  # 300 recordings to test: one is a third of a point
    notes=(
        "Free Spoken Digit Dataset, six speakers: 2,700 recordings to train, 300 to test (the customary "
        "split).",
    ),
)
