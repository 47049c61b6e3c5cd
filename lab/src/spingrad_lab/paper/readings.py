"""Four readings of the published step: is the loss a mean or a sum, are outputs divided by √fan-in?"""

import itertools
from typing import Any, NamedTuple

import pandas as pd
from torch import nn
from torch.optim import Optimizer

from spingrad import QPSBGD
from spingrad.baselines import SignSGD
from spingrad.solvers import BlockDescentSolver
from spingrad_lab.methods import PAPER_READING, Method, Params, Reading, Settings
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, table_of, to_svg
from spingrad_lab.report.statistics import Duel, estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.images import pixels
from spingrad_lab.tasks.small import (
    AdultTenLayers,
    AdultTwoLayers,
    Digits02,
    Digits12,
    Digits17,
    mlp,
    pair_points,
)
from spingrad_lab.tasks.training import Task, VectorTask, train
from spingrad_lab.trials import TUNING_SEED, best_trial, current_finals, matched


class TenThousandImages(VectorTask):
    """784-256-256-10 on the first 10,000 images of MNIST; settings are chosen on 2,000 of them."""

    epochs, batch = 2, 100
    images, held_out = 10_000, 2_000

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        x, y = pixels("mnist", "train")
        count = self.images - self.held_out if tuning else self.images
        self.test = (x[count : self.images], y[count : self.images]) if tuning else pixels("mnist", "test")
        count = 1_000 if quick else count
        self.train = x[:count], y[:count]

    def network(self) -> nn.Module:
        return mlp(784, 256, 256, 10)


class Network(NamedTuple):
    """A network on its data, and the lowest of its learning rates, as a power of ten."""

    task: type[Task]
    lowest: int = -5

    def rates(self) -> list[Settings]:
        """Two learning rates per decade, over five decades."""
        return [{"lr": float(f"{10 ** (self.lowest + k / 2):.2g}")} for k in range(11)]


NETWORKS = {
    "MNIST, 784-256-256-10": Network(TenThousandImages),
    "Adult, 15-10-1": Network(AdultTwoLayers),
    "digits 1/2, 16-4-2": Network(Digits12),
    "digits 1/7, 16-4-2": Network(Digits17),
    "digits 0/2, 16-4-2": Network(Digits02),
    "Adult, ten layers": Network(AdultTenLayers, -6),
}


def _published(params: Params, seed: int, lr: float) -> Optimizer:
    return QPSBGD.as_published(params, lr, solver=BlockDescentSolver(num_sweeps=5), seed=seed)


def _sign_sgd(params: Params, seed: int, lr: float) -> Optimizer:
    return SignSGD(params, lr=lr)


def _sign_sgd_with_momentum(params: Params, seed: int, lr: float) -> Optimizer:
    return SignSGD(params, lr=lr, momentum=0.9)


def _methods() -> dict[str, Method]:
    readings = [Reading(reduction, scale) for reduction in ("mean", "sum") for scale in (True, False)]
    found = {
        f"as published: {reading}": Method(_published, [], "ours", reading=reading) for reading in readings
    }
    for scale in (True, False):  # the sign of a gradient is the same for mean and sum
        layers = "scaled" if scale else "unscaled"
        found[f"signSGD: {layers}"] = Method(_sign_sgd, [], reading=Reading(scale=scale))
        found[f"signSGD, momentum 0.9: {layers}"] = Method(
            _sign_sgd_with_momentum, [], reading=Reading(scale=scale)
        )
    return found


METHODS = _methods()
PAPER = f"as published: {PAPER_READING}"
RIVALS = ("signSGD: unscaled", "signSGD, momentum 0.9: unscaled")
SIGN_SGD = (*RIVALS, "signSGD: scaled", "signSGD, momentum 0.9: scaled")
STYLES = {
    "as published: mean, scaled": (figures.GREY, ":"),
    "as published: mean, unscaled": (figures.ORANGE, "-."),
    "as published: sum, scaled": (figures.PURPLE, "--"),
    PAPER: (figures.VERMILION, "-"),
    RIVALS[0]: (figures.SKY, "--"),
    RIVALS[1]: (figures.BLUE, "-"),
}


class Readings(Experiment):
    """The published step in each reading beside signSGD, at learning rates over five decades."""

    title = "The published step in four readings"
    source = "sections 3.4 and 4.2: what the paper leaves open"
    seeds = 5

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        seeds = range(lab.seeds or (1 if lab.quick else self.seeds))
        for name, network in NETWORKS.items():
            rates = network.rates()[4:6] if lab.quick else network.rates()
            tried = itertools.product(METHODS, rates)
            trials = lab.run([_job("trial", name, *own, TUNING_SEED) for own in tried], f"{name}, trials")
            best = {method: best_trial(where(trials, method=method)).settings for method in METHODS}
            finals = [_job("final", name, method, best[method], seed) for method in METHODS for seed in seeds]
            lab.run(finals, f"{name}, finals")

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            task = NETWORKS[job["task"]].task(job["seed"], job["stage"] == "trial", job["quick"])
            return train(task, METHODS[job["method"]], job["settings"], job["seed"])

    def show(self, runs: pd.DataFrame) -> Section:
        tables, shown, duels = [], {}, []
        for name in NETWORKS:
            own = where(runs, task=name)
            finals = current_finals(own, ["method"]) if len(own) else own
            if len(finals):
                shown[name] = where(own, stage="trial")
                tables.append(_table(name, shown[name], finals))
                duels += _duels(name, finals)
        if duels:
            tables.insert(0, table_of(duels, "signSGD", _CLAIM))
        caption = (
            "Accuracy on validation data by learning rate, one run each. signSGD is drawn only for unscaled "
            "layers; the tables have both."
        )
        return Section(list(_NOTES), tables, [Figure("rates", caption, to_svg(_picture(shown)))])


def _job(stage: str, task: str, method: str, settings: Settings, seed: int) -> Job:
    return {"stage": stage, "task": task, "method": method, "settings": settings, "seed": seed}


def _table(name: str, trials: pd.DataFrame, finals: pd.DataFrame) -> Table:
    rows = []
    for method in (method for method in METHODS if method in set(finals["method"])):
        own, chosen = where(finals, method=method), best_trial(where(trials, method=method))
        row = [method, str(estimate(own["test_accuracy"])), str(estimate(own["train_accuracy"]))]
        rows.append([*row, str(len(own)), str(chosen)])
    header = ["method: loss, layers", "test accuracy", "training accuracy", "seeds", "chosen"]
    caption = f"{name}. Mean ± 95 % interval over seeds; † the learning rate is the first or last of eleven."
    return Table(header, rows, caption)


def _duels(name: str, finals: pd.DataFrame) -> list[Duel]:
    """The paper's reading against signSGD on the same layers, which is the paper's claim, and on others."""
    if not {PAPER, *SIGN_SGD} <= set(finals["method"]):
        return []
    return [Duel(name, "test accuracy", (PAPER, rival), matched(finals, PAPER, rival)) for rival in SIGN_SGD]


def _picture(trials: dict[str, pd.DataFrame]) -> Any:
    canvas, axes = figures.new(10, 5.6, rows=2, columns=3)
    for panel, (name, own) in zip(axes.flat, trials.items(), strict=False):
        for method, runs in groups(own, "method"):
            if method in STYLES:
                colour, dash = STYLES[method]
                points = sorted(
                    (settings["lr"], accuracy)
                    for settings, accuracy in zip(runs["settings"], runs["test_accuracy"], strict=True)
                )
                panel.plot(*zip(*points, strict=True), dash, color=colour, label=method, linewidth=1.4)
        panel.set(xscale="log", title=name)
    for panel in axes.flat[len(trials) :]:  # networks that are not run yet
        panel.set_axis_off()
    for panel in axes.flat:
        panel.set_xlabel("learning rate")
    for panel in axes[:, 0]:
        panel.set_ylabel("validation accuracy")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return canvas


_CLAIM = "The published step in the paper's reading minus signSGD, in test accuracy."
_NOTES = (
    "The paper does not say whether its loss is a mean or a sum over the batch, which sets the size of the "
    "target that the spins are to reach, and it writes its layers without a factor. A loss that is a mean, "
    "and outputs divided by √fan-in, make that target small, and the spins then follow the inputs more than "
    "the gradient. All four readings are run here with the published step (normalised rows, the gradient as "
    "target, no clamp), each solved by five sweeps of descent (best of eight starts where a layer has at "
    "most 32 inputs).",
    "Eleven learning rates over five decades with one seed on validation data; the best then trains with "
    "five fresh seeds and is scored on test data. Digits and Adult as in their own experiments; MNIST: the "
    "first 10,000 images, 2 epochs of batches of 100. The learning rate follows a cosine. Of Adult's rows "
    "0.76 belong to one class: an accuracy near that is no success.",
)

READINGS = Readings()
