"""Which step is best: every candidate against the default, chosen on validation data, judged at full size."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, Gain, Sign, binary_parameters
from spingrad_lab.beyond.candidates import (
    Adapting,
    AgainstCouplings,
    AgainstOverlap,
    Flipping,
    Growing,
    Remembering,
)
from spingrad_lab.methods import DEFAULT, METHODS, ONE_BATCH, Method, OneSweep, Params, Settings, grid
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import Paired, estimate, family, paired
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where
from spingrad_lab.tasks.images import Images, Name
from spingrad_lab.tasks.training import train
from spingrad_lab.trials import TUNING_SEED, best_trial, current_finals

SHAPES = ("784-512-512-10", "convolutional", "8 layers of 256")
ACTIVATIONS: dict[str, type[nn.Module]] = {"hardtanh": nn.Hardtanh, "sign": Sign}
DATA: tuple[Name, ...] = ("mnist", "fashion")


@dataclass(frozen=True)
class Candidate:
    """A step to try: how its optimizer is made, its trials, and what changes in the network."""

    what: str
    make: Callable[..., Optimizer]
    trials: list[Settings]
    start: float = 1.0
    """Factor of the initial latent weights."""
    batch_norm: bool = False
    output_norm: bool = False
    centred: bool = False
    skip: bool = False
    gains: bool = False
    """Fixed gains where BatchNorm would stand."""
    rival: bool = False


def _step(kind: type[QPSBGD] = QPSBGD, **fixed: Any) -> Callable[..., Optimizer]:
    def make(params: Params, seed: int, **settings: float) -> Optimizer:
        return kind(params, seed=seed, **{**ONE_BATCH, **fixed, **settings})

    return make


def _trials(*targets: float) -> list[Settings]:
    return grid(lr=(1e-3, 3e-3), target_rms=targets)


def _beside_gains(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """``loudness`` is the network's: the strength of its outputs."""
    return lambda *args, loudness, **settings: make(*args, **settings)


_ADAM, _SIGN = METHODS["BinaryConnect Adam"].make, METHODS["BinaryConnect signSGD"].make
_ADAM_TRIALS = grid(lr=(1e-4, 3e-4, 1e-3, 2e-3, 4e-3), beta2=(0.99,))
_LEADING = _step(momentum=0.9, target_rms="auto", rank=8, solver=OneSweep())
_LEADING_TRIALS = grid(lr=(1e-4, 3e-4, 1e-3, 2e-3, 3e-3))
_GAIN_TRIALS = grid(lr=(1e-3, 2e-3), loudness=(1.5, 3))
GAINS = f"{DEFAULT}, gains"
CANDIDATES = {
    DEFAULT: Candidate("the class's default of today", METHODS[DEFAULT].make, _LEADING_TRIALS),
    "one batch alone": Candidate("no memory of earlier batches", _step(), _trials(1, 2)),
    "momentum": Candidate("linear term averaged, 0.9", _step(momentum=0.9), _trials(2, 4)),
    "larger target": Candidate("momentum 0.9, targets of 4 and 8", _step(momentum=0.9), _trials(4, 8)),
    "long momentum": Candidate("linear term averaged, 0.97", _step(momentum=0.97), _trials(2, 4)),
    "rows remembered": Candidate(
        "quadratic term over three batches, momentum 0.9", _step(Remembering, momentum=0.9), _trials(2, 4)
    ),
    "against couplings": Candidate(
        "linear term measured by the couplings, momentum 0.9",
        _step(AgainstCouplings, momentum=0.9), _trials(1, 4),
    ),
    "against overlap": Candidate(
        "target by how many rows resemble each other, momentum 0.9",
        _step(AgainstOverlap, momentum=0.9), _trials(0.5, 0.7),
    ),
    "leading directions": Candidate(
        "against overlap, quadratic term of 8 directions, solved spin by spin",
        _LEADING, _LEADING_TRIALS,
    ),
    "target by lr": Candidate(
        "against overlap, growing as the learning rate falls", _step(Growing, momentum=0.9), _trials(0.5, 0.7)
    ),
    "adapted target": Candidate(
        "against overlap, adapted to what the last flips would do now",
        _step(Adapting, momentum=0.9), _trials(0.5, 0.7),
    ),
    "flips chosen": Candidate(
        "against overlap, spins are the next weights themselves",
        _step(Flipping, momentum=0.9, target_rms=0.7), grid(lr=(1e-3, 3e-3), clamp=(0.02, 0.1)),
    ),
    "centred inputs": Candidate(
        "against overlap, the mean image taken off", _step(AgainstOverlap, momentum=0.9), _trials(0.5, 0.7),
        centred=True,
    ),
    "output BatchNorm": Candidate(
        "against overlap, BatchNorm of only the ten outputs", _step(AgainstOverlap, momentum=0.9),
        _trials(0.5, 0.7), output_norm=True,
    ),
    "centred, output BatchNorm": Candidate(
        "the two above together", _step(AgainstOverlap, momentum=0.9), _trials(0.5, 0.7),
        centred=True, output_norm=True,
    ),
    "tight clamp": Candidate(
        "momentum 0.9, latent weights within 0.1", _step(momentum=0.9, clamp=0.1), _trials(2, 4)
    ),
    "wide start": Candidate(
        "momentum 0.9, latent weights from ±0.1", _step(momentum=0.9), _trials(2, 4), start=10
    ),
    "skip connections": Candidate(
        "momentum 0.9, layers added to their input where they can be", _step(momentum=0.9), _trials(2, 4),
        skip=True,
    ),
    "gains": Candidate(
        "leading directions, each layer brought in range once, by the first batch",
        _beside_gains(_LEADING), _GAIN_TRIALS, gains=True,
    ),
    GAINS: Candidate(
        "the class's default of today, the same gains",
        _beside_gains(METHODS[DEFAULT].make), _GAIN_TRIALS, gains=True,
    ),
    "signSGD": Candidate(
        "BinaryConnect, momentum 0.9", _SIGN, grid(lr=(3e-5, 1e-4, 3e-4, 6e-4, 1e-3), momentum=(0.9,)),
        rival=True,
    ),
    "Adam": Candidate("BinaryConnect", _ADAM, _ADAM_TRIALS, rival=True),
    "Adam, centred inputs": Candidate(
        "BinaryConnect, the mean image taken off", _ADAM, _ADAM_TRIALS,
        centred=True, rival=True,
    ),
    "Adam, gains": Candidate(
        "BinaryConnect, the same gains", _beside_gains(_ADAM),
        [{**trial, "beta2": 0.99} for trial in _GAIN_TRIALS], gains=True, rival=True,
    ),
    "BatchNorm, Adam": Candidate(
        "the same network with BatchNorm", _ADAM, _ADAM_TRIALS,
        batch_norm=True, rival=True,
    ),
}  # fmt: skip
JUDGED = (DEFAULT, "one batch alone", "leading directions", "signSGD", "Adam", "BatchNorm, Adam")
"""Those that get final runs whatever the trials say, beside the best of the other candidates."""
LATE = (GAINS, "gains", "Adam, gains")
"""Found when convolutions were looked at; tried and judged only on those."""


class Centred(nn.Module):
    """Takes the mean image off; of whole numbers, one whole number per unit in the first layer's sums."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


class Skip(nn.Module):
    """A layer whose output is added to its input, at unchanged variance."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        sum_: Tensor = (x + self.layer(x)) * 0.5**0.5
        return sum_


@dataclass
class StepTask(Images):
    """One network on one data set, as a candidate wants it."""

    name: Name
    shape: str
    activation: str
    candidate: Candidate
    settings: Settings
    seed: int
    tuning: bool
    quick: bool

    def __post_init__(self) -> None:
        self.epochs, self.batch = 3, 100 if self.shape == "convolutional" else 200
        self.batch_norm = self.candidate.batch_norm
        Images.__init__(self, self.seed, self.tuning, self.quick)

    def network(self) -> nn.Module:
        centre = [Centred(self.train[0].mean(0))] if self.candidate.centred else []
        model = nn.Sequential(*centre, *self._layers())
        with torch.no_grad():
            for _, weight in binary_parameters(model):
                weight.mul_(self.candidate.start)
        return model

    def norm(self, layer: type[nn.Module], size: int) -> list[nn.Module]:
        return [Gain()] if self.candidate.gains else super().norm(layer, size)

    def output_norm(self) -> list[nn.Module]:
        if self.candidate.gains:
            return [Gain(self.settings["loudness"])]
        return [nn.BatchNorm1d(10)] if self.batch_norm or self.candidate.output_norm else []

    def _layers(self) -> list[nn.Module]:
        act = ACTIVATIONS[self.activation]
        if self.shape == "convolutional":
            norm = nn.BatchNorm2d
            return [
                nn.Unflatten(1, (1, 28, 28)),
                BinaryConv2d(1, 16, 3, stride=2, padding=1), *self.norm(norm, 16), act(),
                BinaryConv2d(16, 32, 3, stride=2, padding=1), *self.norm(norm, 32), act(),
                nn.Flatten(), BinaryLinear(32 * 49, 10), *self.output_norm(),
            ]  # fmt: skip
        widths = [512, 512] if self.shape == SHAPES[0] else [256] * 7
        layers: list[nn.Module] = []
        for fan_in, width in itertools.pairwise([784, *widths]):
            layer = nn.Sequential(BinaryLinear(fan_in, width), *self.norm(nn.BatchNorm1d, width), act())
            layers.append(Skip(layer) if self.candidate.skip and fan_in == width else layer)
        return [*layers, BinaryLinear(widths[-1], 10), *self.output_norm()]


class StepExperiment(Experiment):
    """Trials of all candidates, then the best and its rivals with fresh seeds.

    All are tried on the networks of three layers; those that come to the finals there, on the others too.
    Gains are for convolutions.
    """

    title = "A better step than the published one"
    source = "beyond the paper"
    seeds = 5

    def plan(self, lab: Lab) -> None:
        first = [(data, SHAPES[0], act) for act, data in itertools.product(ACTIVATIONS, DATA)]
        others = [(data, shape, act) for act, data, shape in itertools.product(ACTIVATIONS, DATA, SHAPES[1:])]
        if lab.quick:
            first, others = [("fashion", "convolutional", "sign")], []
        proven = self._judge(lab, first, set(CANDIDATES))
        self._judge(lab, others, proven)

    def _judge(self, lab: Lab, tasks: list[tuple[Name, str, str]], tried: set[str]) -> set[str]:
        """Trials and final runs on some networks; the candidates that got final runs on any of them."""
        chosen: set[str] = set()
        for data, shape, activation in tasks:
            late = LATE if shape == "convolutional" else ()
            place = {"data": data, "shape": shape, "activation": activation}
            label = f"{data}, {shape}, {activation}"
            trials = lab.run(
                [
                    {**place, "stage": "trial", "candidate": name, "settings": trial, "seed": TUNING_SEED}
                    for name in CANDIDATES
                    if name in late or (name in tried and name not in LATE)
                    for trial in CANDIDATES[name].trials[-1 if lab.quick else 0 :]
                ],
                f"{label}, trials",
            )
            finals, names = [], finalists(trials)
            chosen.update(names)
            for name in names:
                settings = best_trial(where(trials, candidate=name)).settings
                finals += [
                    {**place, "stage": "final", "candidate": name, "settings": settings, "seed": seed}
                    for seed in range(lab.seeds or (2 if lab.quick else self.seeds))
                ]
            lab.run(finals, f"{label}, finals")
        return chosen

    def compute(self, job: Job) -> dict[str, Any]:
        candidate, tuning = CANDIDATES[job["candidate"]], job["stage"] == "trial"
        with seeded(job["seed"]):
            place = job["data"], job["shape"], job["activation"]
            task = StepTask(*place, candidate, job["settings"], job["seed"], tuning, job["quick"])
            method = Method(candidate.make, candidate.trials)
            return train(task, method, job["settings"], job["seed"])

    def show(self, runs: pd.DataFrame) -> Section:
        what = [[name, candidate.what] for name, candidate in CANDIDATES.items()]
        tables = [Table(["candidate", "what"], what)]
        judged: dict[str, dict[str, Finals]] = {}
        heats: dict[str, Table] = {}
        for shape in SHAPES:
            trials: dict[str, pd.DataFrame] = {}
            finals: dict[str, Finals] = {}
            for data, activation in itertools.product(DATA, ACTIVATIONS):
                own = where(runs, data=data, shape=shape, activation=activation)
                tried = where(own, stage="trial")
                if len(tried):
                    trials[f"{data}, {activation}"] = tried
                if found := _finals(own):
                    finals[f"{data}, {activation}"] = found
            if trials:
                heats[shape] = _heats(shape, trials)
            if finals:
                judged[shape] = finals
        verdicts = _verdicts(judged)
        for shape, heat in heats.items():
            tables += [heat, verdicts[shape]] if shape in verdicts else [heat]
        total = len(DATA) * len(SHAPES) * len(ACTIVATIONS)
        notes = [
            *_NOTES,
            f"Judged so far: {sum(map(len, judged.values()))} of {total} networks. {_durations(runs)}",
        ]
        return Section(notes, tables, [Figure("verdict", _CAPTION, _figure(judged))] if judged else [])


def _durations(runs: pd.DataFrame) -> str:
    """How long all runs took, and how long at the pace of the quickest of each candidate and shape."""
    minutes = runs["run_seconds"].astype(float).div(60)
    kinds = minutes.groupby([runs["stage"], runs["shape"], runs["candidate"]])
    total = kinds.sum().groupby(level="stage").sum()
    quickest = (kinds.min() * kinds.size()).groupby(level="stage").sum()
    trials, finals, quick_trials, quick_finals = (
        f"{own.get(stage, 0):.0f}" for own in (total, quickest) for stage in ("trial", "final")
    )
    return (
        f"In all, trials took {trials} minutes of one processor and final runs {finals}; at the pace of the "
        f"quickest run of each candidate on each shape, when nobody shares the machine, {quick_trials} and "
        f"{quick_finals}."
    )


def finalists(trials: pd.DataFrame) -> list[str]:
    """The judged ones, the late ones where they were tried, and the best of the other candidates."""
    tried = list(trials["candidate"].unique())
    rest = [name for name in tried if name not in (*JUDGED, *LATE) and not CANDIDATES[name].rival]
    best = max(rest, key=lambda name: best_trial(where(trials, candidate=name)).score)
    return [*JUDGED, *(name for name in LATE if name in tried), best]


def _heats(shape: str, trials: dict[str, pd.DataFrame]) -> Table:
    rows = []
    for name in CANDIDATES:
        best = [best_trial(where(own, candidate=name)).score for own in trials.values()]
        if not all(map(math.isnan, best)):
            rows.append([name, *("–" if math.isnan(score) else f"{score:.4f}" for score in best)])
    title = f"{shape}: best of the trials, accuracy on 2,000 images held out"
    return Table(["candidate", *trials], rows, title)


Finals = dict[str, list[float]]
"""Test accuracies by candidate, seed by seed; the last is the best of the trials."""


def _finals(runs: pd.DataFrame) -> Finals | None:
    """What was judged, without candidates whose runs are missing; nothing while others have more seeds."""
    finals = current_finals(runs, ["candidate"])
    if finals.empty:
        return None
    names = finalists(where(runs, stage="trial"))
    found = {name: where(finals, candidate=name)["test_accuracy"].to_list() for name in names}
    found = {name: own for name, own in found.items() if own}
    return found if len({len(own) for own in found.values()}) == 1 else None


_HOLM = "Holm over the tables of all networks."
_LANES = (*JUDGED, *LATE, "best of the others")


Test = tuple[str, str, str]
"""Shape, network and candidate of a comparison with BatchNorm and Adam."""


def _verdicts(judged: dict[str, dict[str, Finals]]) -> dict[str, Table]:
    """The final runs of each shape; its tests are corrected for those of all shapes."""
    tests = {
        (shape, network, name): paired(finals[name], finals["BatchNorm, Adam"])
        for shape, networks in judged.items()
        for network, finals in networks.items()
        for name in (DEFAULT, GAINS)
        if name in finals
    }
    corrected = dict(zip(tests, family(list(tests.values())), strict=True))
    return {shape: _verdict(shape, networks, corrected) for shape, networks in judged.items()}


def _verdict(shape: str, judged: dict[str, Finals], tests: dict[Test, Paired]) -> Table:
    rows = []
    for lane in _LANES:
        own = [_lanes(finals).get(lane) for finals in judged.values()]
        if any(own):
            rows.append([lane, *(str(estimate(scores)) if scores else "–" for scores in own)])
    rows.append(["which they are", *(list(finals)[-1] for finals in judged.values())])
    for name in (DEFAULT, GAINS):
        less = [str(tests.get((shape, network, name), "–")) for network in judged]
        if set(less) != {"–"}:
            rows.append([f"{name} minus BatchNorm, Adam", *less])
    return Table(
        ["candidate", *judged], rows, f"{shape}: test accuracy, fresh seeds, all training images. {_HOLM}"
    )


def _lanes(finals: Finals) -> Finals:
    return {**finals, _LANES[-1]: list(finals.values())[-1]}


_DRAWN = {
    DEFAULT: (DEFAULT, figures.VERMILION),
    "signSGD": ("signSGD", figures.BLUE),
    "Adam": ("Adam", figures.GREEN),
    GAINS: (f"{DEFAULT}, Gain", figures.ORANGE),
    "Adam, gains": ("Adam, Gain", figures.SKY),
    "BatchNorm, Adam": ("Adam, BatchNorm", figures.BLACK),
}
"""What each candidate is called in the figure, and its colour."""


def _figure(judged: dict[str, dict[str, Finals]]) -> str:
    """A panel for each shape: the methods on its networks, one below the other."""
    canvas, axes = figures.new(10, 3.6, 1, len(judged))
    for panel, (shape, networks) in zip(axes[0], judged.items(), strict=True):
        for place, finals in enumerate(networks.values()):
            rival = sum(finals["BatchNorm, Adam"]) / len(finals["BatchNorm, Adam"])
            for lane, (name, (label, colour)) in enumerate(_DRAWN.items()):
                points = [100 * (accuracy - rival) for accuracy in finals.get(name, [])]
                height = place + 0.13 * (lane - 2.5)
                panel.plot(points, [height] * len(points), "|", color=colour, markersize=5, alpha=0.6)
                mean = [sum(points) / len(points)] if points else []
                panel.plot(mean, [height] * len(mean), "o", color=colour, markersize=4.5, label=label)
        panel.axvline(0, color=figures.GREY, linewidth=1)
        panel.set_yticks(range(len(networks)), [name.replace(", ", "\n") for name in networks])
        panel.set(title=shape, ylim=(len(networks) - 0.5, -0.5))
    handles = axes[0, 0].get_legend_handles_labels()[0][: len(_DRAWN)]
    canvas.supxlabel("points of test accuracy above BatchNorm and Adam", fontsize=9)
    canvas.legend(handles=handles, loc="outside upper center", ncols=len(_DRAWN))
    return to_svg(canvas)


_CAPTION = (
    "Test accuracy minus the mean of BatchNorm and Adam on the same network: seeds and their mean. *Gain* "
    "stands where BatchNorm would."
)
_NOTES = (
    "Networks without BatchNorm unless it says so. Every candidate has four trials (QP-SBGD, leading "
    "directions and the baselines five: of four learning rates the best was often the lowest) on 12,000 "
    "training images with 2,000 held out, 3 epochs (on the networks of three layers; on the others, those "
    "that came to the finals there, and gains on convolutions). Then today's default (*QP-SBGD*), that of "
    "version 0.1.0 (*leading directions*), that before it (*one batch alone*), gains, the best of the others "
    "and the baselines train on all images for 3 epochs with five fresh seeds; – where this has not been run "
    "yet. Batches are shifted by up to one pixel each way. On convolutions, all candidates but today's "
    "default, with and without gains, took their directions from the left edges of the first images, as "
    "versions up to 0.2.0 did.",
)
