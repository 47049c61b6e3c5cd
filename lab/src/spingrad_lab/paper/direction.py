"""The appendix's Z test: does a step taken on a batch point along the gradient of the whole training set?"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from spingrad import BinaryLinear, binary_parameters
from spingrad.solvers import derive_seed
from spingrad_lab.analysis import same_direction, z_value
from spingrad_lab.methods import ALL_DIRECTIONS, DEFAULT, METHODS
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded
from spingrad_lab.tasks.small import Digits02, Digits12, Digits17, pair_points
from spingrad_lab.tasks.training import endless_batches, loss_of, take_step
from spingrad_lab.trials import ahead

PUBLISHED, SIGN_SGD = "QP-SBGD as published, exact", "BinaryConnect signSGD"
RANDOM = "random spins, drawn once"
TASKS = {"0/2": Digits02, "1/2": Digits12, "1/7": Digits17}
PAPER = {PUBLISHED: (10.4, 12.4, 11.8, 10.8, 11.4), SIGN_SGD: (0.61, 8.39, 1.91, 6.06, -6.9)}
ACCEPTED = 1.96

Loss = Callable[[Any], Tensor]
"""A loss of a network, or of a function that computes as one."""


class Variant(NamedTuple):
    """A method, whether outputs are divided by √fan-in, and how the loss of a batch adds up."""

    method: str
    scale: bool
    reduction: str

    def __str__(self) -> str:
        name = self.method.replace(", exact", "").replace("BinaryConnect ", "")
        summed = ", summed loss" if self.reduction == "sum" else ""
        return f"{name}{summed}"


def variants() -> list[Variant]:
    """All that the reduction of the loss changes is the size of the target, which only the paper's keeps."""
    methods = [(PUBLISHED, "mean"), (PUBLISHED, "sum")]
    methods += [(method, "mean") for method in (DEFAULT, ALL_DIRECTIONS, SIGN_SGD)]
    return [Variant(method, scale, reduction) for scale in (False, True) for method, reduction in methods]


class DirectionTest(Experiment):
    """Each weight's move at each of 55 steps against the sign of the gradient on all training images."""

    title = "Do the steps point along the gradient?"
    source = "appendix, hypothesis test, tables 3 and 4"
    lr = 3e-3
    steps = 55

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        seeds = lab.seeds or (1 if lab.quick else 10)
        jobs = []
        for task, variant, seed in itertools.product(TASKS, variants(), range(seeds)):
            solver = lab.solver_for(METHODS[variant.method].solver)
            jobs.append({"task": task, **variant._asdict(), "solver": solver, "seed": seed})
        lab.run(jobs)

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            task = TASKS[job["task"]](job["seed"], False, job["quick"])
            network = unscaled_network() if not job["scale"] else task.network()
            other = torch.Generator().manual_seed(derive_seed(job["seed"], list(TASKS).index(job["task"])))
            arbitrary = [torch.randint(2, p.shape, generator=other) * 2.0 - 1 for p in network.parameters()]
            settings: dict[str, Any] = {"lr": self.lr}
            if job["method"] == SIGN_SGD:
                settings["momentum"] = 0
            if job["solver"] is not None:
                settings["solver"] = job["solver"]
            optimizer = METHODS[job["method"]].make(binary_parameters(network), seed=job["seed"], **settings)
            factor = task.batch if job["reduction"] == "sum" else 1
            counts = np.zeros((4, 2), dtype=int)
            for loss in itertools.islice(endless_batches(task), 6 if job["quick"] else self.steps):
                counts += self._step(network, optimizer, loss, factor, task.train, arbitrary)
        names = ("all", "batch", "arbitrary", "live")
        return {name: [int(same), int(total)] for name, (same, total) in zip(names, counts, strict=True)}

    def _step(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        factor: int,
        data: tuple[Tensor, Tensor],
        arbitrary: list[Tensor],
    ) -> "np.ndarray[Any, Any]":  # (4, 2)
        """Take a step; same directions and totals against all images, the batch, and two controls."""
        x, y = data
        whole = gradients(network, lambda model: loss_of(model(x), y))
        batch = gradients(network, loss)
        moves = movement(network, optimizer, lambda model: factor * loss(model))
        counts = np.zeros((4, 2), dtype=int)
        for move, all_, own, spins in zip(moves, whole, batch, arbitrary, strict=True):
            moved = all_ * (move != 0)  # an idle unit, without a gradient, does not move in ours
            pairs = ((move, moved), (move, own * (move != 0)), (spins, all_), (move, moved * (own != 0)))
            counts += np.array([same_direction(*pair) for pair in pairs])
        return counts

    def show(self, runs: pd.DataFrame) -> Section:
        ordered = runs.sort_values(["task", "seed"])
        found = {Variant(*key): own for key, own in groups(ordered, list(Variant._fields))}
        rows = []
        for variant in variants():
            if (own := found.get(variant)) is not None:
                rows.append(_row(str(variant), variant, own, "all"))
        for scale in (False, True):
            if (walks := found.get(Variant(SIGN_SGD, scale, "mean"))) is not None:
                rows.append(_row(RANDOM, Variant(RANDOM, scale, "mean"), walks, "arbitrary"))
        header = ["method", "layers", "agrees with all", "Z", "range of Z", "beyond ±1.96", "compared"]
        header += ["agrees with its batch", "paper's Z"]
        count = len(next(iter(found.values())))
        caption = (
            "Share of the entries in which a step has the sign of the gradient on all training images, and "
            f"its Z; mean ± 95 % interval over {count} runs (three pairs of digits)."
        )
        drawn = Figure(
            "z", "Z of every run (dots), of the paper's (hollow), and the band of ±1.96.", _strip(found)
        )
        return Section([*_NOTES, *_verdict(found)], [Table(header, rows, caption)], [drawn])


def unscaled_network() -> nn.Sequential:
    """The paper's 16-4-2: sums that nothing divides."""
    return nn.Sequential(BinaryLinear(16, 4, scale=False), nn.Hardtanh(), BinaryLinear(4, 2, scale=False))


def gradients(network: nn.Module, loss: Loss) -> list[Tensor]:
    """Gradient of a loss by each weight of a network, whose own gradients and records stay as they are."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    value = loss(lambda x: functional_call(network, weights, (x,)))
    return list(torch.autograd.grad(value, list(weights.values())))


def movement(network: nn.Module, optimizer: Optimizer, loss: Loss) -> list[Tensor]:
    """Take a step; the spins that it moved each weight by (zero where a weight stayed)."""
    before = [p.detach().clone() for p in network.parameters()]
    take_step(network, loss, [optimizer])
    lr = optimizer.param_groups[0]["lr"]
    return [((old - p.detach()) / lr).round() for old, p in zip(before, network.parameters(), strict=True)]


def z_values(runs: pd.DataFrame, against: str = "all") -> list[float]:
    """Z of each run; a run in which nothing could be compared has none."""
    return [z_value(same, total) for same, total in runs[against] if total]


def share(runs: pd.DataFrame, against: str) -> list[float]:
    return [same / total for same, total in runs[against] if total]


def _row(name: str, variant: Variant, own: pd.DataFrame, against: str) -> list[str]:
    z = z_values(own, against)
    mean, half = estimate(z)
    outside = float(np.mean(np.abs(z) > ACCEPTED))
    totals = [total for _, total in own[against]]
    paper = PAPER.get(variant.method, ()) if not variant.scale else ()
    return [
        name,
        "divided by √fan-in" if variant.scale else "the paper's",
        str(estimate(share(own, against))),
        f"{mean:.1f} ± {half:.1f}".replace("-", "−"),
        f"{min(z):.1f} to {max(z):.1f}".replace("-", "−"),
        f"{outside:.0%}",
        f"{min(totals):,} to {max(totals):,}",
        f"{np.mean(share(own, 'batch')):.3f}" if against == "all" else "–",
        " ".join(f"{value:g}".replace("-", "−") for value in paper) or "–",
    ]


def _strip(runs: dict[Variant, pd.DataFrame]) -> str:
    """Runs as dots beside one another, a panel for each kind of layer."""
    canvas, axes = figures.new(8.4, 4.4, columns=2)
    for column, (panel, scale) in enumerate(zip(axes[0], (False, True), strict=True)):
        shown: list[tuple[str, str, list[float], str]] = []
        for variant in variants():
            if variant.scale == scale and variant in runs:
                colour = figures.STYLES[variant.method][0]
                shown.append((str(variant), variant.method, z_values(runs[variant]), colour))
                if variant.method == SIGN_SGD:
                    shown.append((RANDOM, RANDOM, z_values(runs[variant], "arbitrary"), figures.GREY))
        panel.axhspan(-ACCEPTED, ACCEPTED, color=figures.GREY, alpha=0.2, linewidth=0)
        for place, (_, method, z, colour) in enumerate(shown):
            jitter = np.random.default_rng(0).uniform(-0.22, 0.22, len(z))
            panel.plot(place + jitter, z, "o", color=colour, markersize=3, alpha=0.55, markeredgewidth=0)
            panel.plot([place - 0.3, place + 0.3], [np.mean(z)] * 2, color=colour, linewidth=2)
            published = PAPER.get(method, ()) if not scale else ()
            beside = [place + 0.36] * len(published)
            panel.plot(beside, published, "D", color=figures.BLACK, markersize=5, fillstyle="none")
        labels = [name.replace(" as published", "\nas published").replace(", ", ",\n") for name, *_ in shown]
        panel.set_xticks(range(len(shown)), labels, rotation=35, ha="right", rotation_mode="anchor")
        panel.set_title(_layers(scale))
        panel.set_ylabel("" if column else "Z of a run")
        panel.grid(axis="x", visible=False)
    low = min(panel.get_ylim()[0] for panel in axes[0])
    high = max(panel.get_ylim()[1] for panel in axes[0])
    for panel in axes[0]:
        panel.set_ylim(low, high)
    return to_svg(canvas)


_NOTES = (
    "The 16-4-2 networks of the pairs of MNIST digits, 55 steps with batches of 20, a learning rate of 0.003 "
    "for every method (the paper gives none). At each step the spins by which it moves the 72 weights are "
    "compared with the sign of the gradient on all training images. Entries without a gradient are left out, "
    "as are those of a unit that is idle because its batch has none (ours only), so totals differ; in "
    "the paper they do too. The paper says neither whether its loss is a mean over the batch or a sum, which "
    "sets the size of its target, nor which pair of digits it took.",
    "The band of ±1.96 belongs to independent comparisons. Those of one run are not, as successive gradients "
    "resemble one another. The row *random spins, drawn once* compares the gradients along signSGD's path "
    "with one direction drawn before it: what it does beyond the band is what chance does.",
)


def _verdict(runs: dict[Variant, pd.DataFrame]) -> list[str]:
    """Whether the paper's order appears, which reading meets its values, and what the band is worth."""
    notes = []
    means = {variant: float(np.mean(z_values(own))) for variant, own in runs.items()}
    if published := [variant for variant in means if variant.method == PUBLISHED]:
        target = float(np.mean(PAPER[PUBLISHED]))
        nearest = min(published, key=lambda variant: abs(means[variant] - target))
        notes.append(
            f"Nearest to the paper's QP-SBGD (mean Z {target:.1f}) comes {nearest} with "
            f"{_layers(nearest.scale)}: mean Z {means[nearest]:.1f}."
        )
    for scale in (False, True):
        if (rival := runs.get(Variant(SIGN_SGD, scale, "mean"))) is not None:
            own = [v for v in variants() if v.scale == scale and v.method != SIGN_SGD and v in runs]
            orders = "; ".join(f"{variant} {_order(runs[variant], rival)}" for variant in own)
            chance = float(np.mean(np.abs(z_values(rival, "arbitrary")) > ACCEPTED))
            every, live = (float(np.mean(share(rival, against))) for against in ("all", "live"))
            notes.append(
                f"**With {_layers(scale)}**, Z minus that of signSGD over the same runs: {orders}. A random "
                f"direction leaves the band in {chance:.0%} of the runs. signSGD agrees with all images in "
                f"{every:.1%} of the entries, and in {live:.1%} of those to which its batch gives a gradient "
                "(it moves the others all the same, as the sign of zero is +1)."
            )
    return notes


def _order(own: pd.DataFrame, rival: pd.DataFrame) -> str:
    """The difference of Z, and whether QP-SBGD is above signSGD as in the paper."""
    compared = pd.concat([own, rival])
    compared = compared[[total > 0 for _, total in compared["all"]]]
    compared = compared.assign(z=z_values(compared))
    first, second = own["method"].iloc[0], rival["method"].iloc[0]
    mean, half = ahead(compared, first, second, score="z", run=("task", "seed")).difference
    reversed_ = "the reverse of the paper's order" if mean < -half else "no order"
    order = "the paper's order" if mean > half else reversed_
    return f"{_signed(mean)} ± {half:.1f} ({order})"


def _layers(scale: bool) -> str:
    return "layers divided by √fan-in" if scale else "the paper's layers"


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


DIRECTION_TEST = DirectionTest()
