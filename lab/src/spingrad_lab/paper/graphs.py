"""Graphs: Karate club, the citation graphs behind an encoder, and the same without one."""

import itertools
from typing import Any, ClassVar

import pandas as pd

from spingrad_lab.comparison import Comparison
from spingrad_lab.methods import ALL_DIRECTIONS, DEFAULT, PUBLISHED, Settings
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded
from spingrad_lab.tasks.graphs import (
    Citations,
    CiteSeer,
    Cora,
    CoraRaw,
    Karate,
    KarateWide,
    PubMed,
    PubMedRaw,
)
from spingrad_lab.tasks.training import train
from spingrad_lab.trials import ACCURACY as TEST_ACCURACY
from spingrad_lab.trials import Score

TRAIN_ACCURACY = Score("train_accuracy", "training accuracy")


_READING = (
    "*QP-SBGD as published* has the paper's reading: a loss that is summed over the batch, and binary layers "
    "whose outputs nothing divides."
)
KARATE = Comparison(
    title="Karate club",
    source="section 4.3, figure 4 left",
    tasks={"6-10-4": Karate, "6-128-4": KarateWide},
    scores=[TEST_ACCURACY, TRAIN_ACCURACY],
    choose=Score("test_loss", "validation loss", higher_is_better=False),
    tuning_seeds=5,
    paper={
        "6-10-4": {
            "QP-SBGD as published, exact": 0.56,
            "BinaryConnect SGD": 0.46,
            "BinaryConnect signSGD": 0.465,
            "ProxQuant": 0.375,
        }
    },
    notes=(
        _READING,
        "Binary graph convolutions 6-10-4 and 6-128-4 (the paper does not give the width), 150 epochs, full"
        " batch. The classes have 13, 12, 4 and 5 nodes, so that the paper's split, five training nodes of "
        "each and 14 to test, cannot be: we train on five of each class or all of the class of four, and "
        "test on the other 15, which are all of the two large classes; drawn anew for each seed. Settings "
        "are chosen with one training node of each class held out, over five seeds. The paper's numbers are"
        " read off its figure (± 0.02).",
    ),
)

_ENCODED = (
    _READING,
    "Features go through a real-valued encoder (F-32-10, ReLU) trained by Adam at 0.01, then through binary"
    " graph convolutions 10-10-C; each of 200 epochs is one batch of 1/16 of the training nodes, as in the "
    "paper. Outputs are divided by √fan-in, except in the rows as published; the paper gives "
    "neither the encoder's width nor the number of epochs. Its numbers are read off its figure (± 0.02).",
    "**Read the row *binary layers frozen* first:** the encoder does the work. What the binary layers add by "
    "training is the distance to that row.",
)


def _citation_comparison(title: str, task: type[Citations], paper: dict[str, float]) -> Comparison:
    name = title.split(",")[0]
    return Comparison(
        title=title,
        source="section 4.3, figure 4" if paper else "beyond the paper",
        tasks={name: task},
        scores=[TEST_ACCURACY, TRAIN_ACCURACY],
        choose=Score("test_accuracy", "validation accuracy"),
        paper={name: paper} if paper else {},
        usual_gcn=True,
        notes=(*(_ENCODED if task.encoded else _RAW), _USUAL),
    )


_USUAL = (
    "*real weights, Adam* is the network of the other rows with real weights. It has neither dropout nor "
    "weight decay, fits the few training nodes exactly, and is therefore no ceiling. *usual GCN, real "
    "weights* is the network that people use: features whose rows sum to one, 16 hidden units, ReLU, dropout "
    "0.5, weight decay 5e-4 on the first layer, Adam at 0.01, 200 epochs of all training nodes."
)
_RAW = (
    _READING,
    "No encoder: binary graph convolutions F-64-C take the features as they are, scaled as a whole to a "
    "root mean square of one; full batches of the training nodes, 200 epochs. So here the binary layers do "
    "the work.",
)
CORA = _citation_comparison(
    "Cora, with encoder",
    Cora,
    {
        "QP-SBGD as published, exact": 0.57,
        "BinaryConnect signSGD": 0.57,
        "ProxQuant": 0.54,
        "BinaryConnect SGD": 0.36,
    },
)
PUBMED = _citation_comparison(
    "PubMed, with encoder",
    PubMed,
    {
        "QP-SBGD as published, exact": 0.66,
        "ProxQuant": 0.67,
        "BinaryConnect signSGD": 0.54,
        "BinaryConnect SGD": 0.33,
    },
)
CITESEER = _citation_comparison("CiteSeer, with encoder", CiteSeer, {})
CORA_RAW = _citation_comparison("Cora, raw features", CoraRaw, {})
PUBMED_RAW = _citation_comparison("PubMed, raw features", PubMedRaw, {})


class Ablation(Experiment):
    """Learning rate and batch size on Cora, everything else fixed."""

    title = "Learning rate and batch size on Cora"
    source = "appendix, ablation studies"
    rates = (1e-4, 1e-3, 1e-2, 1e-1)
    fractions = (1 / 16, 1 / 8, 1 / 4, 1.0)
    methods = (DEFAULT, PUBLISHED, ALL_DIRECTIONS, "BinaryConnect signSGD")
    fixed: ClassVar[dict[str, Settings]] = {
        ALL_DIRECTIONS: {"target_rms": 1.0},
        "BinaryConnect signSGD": {"momentum": 0},
    }

    def plan(self, lab: Lab) -> None:
        seeds = lab.seeds or (2 if lab.quick else 6)
        rates, fractions = (self.rates[:2], self.fractions[:2]) if lab.quick else (self.rates, self.fractions)
        points = itertools.product(self.methods, rates, fractions, range(seeds))
        lab.run([{"method": m, "lr": lr, "fraction": f, "seed": seed} for m, lr, f, seed in points])

    def compute(self, job: Job) -> dict[str, Any]:
        settings = {"lr": job["lr"], **self.fixed.get(job["method"], {})}
        with seeded(job["seed"]):
            task = Cora(job["seed"], False, job["quick"])
            task.fraction = job["fraction"]
            return train(task, job["method"], settings, job["seed"])

    def show(self, runs: pd.DataFrame) -> Section:
        found = groups(runs, ["method", "lr", "fraction"])
        cells = {place: estimate(own["test_accuracy"]) for place, own in found}
        rates, fractions = sorted(set(runs["lr"])), sorted(set(runs["fraction"]))
        methods = [method for method in self.methods if method in set(runs["method"])]
        tables = [
            Table(
                ["learning rate", *(f"{f:.1%}" for f in fractions)],
                [[f"{lr:g}", *(str(cells[method, lr, f]) for f in fractions)] for lr in rates],
                f"{method}: test accuracy by the share of the training nodes in a batch",
            )
            for method in methods
        ]
        canvas, axes = figures.new(1 + 3.1 * len(methods), 3.2, columns=len(methods))
        kinds = [(figures.VERMILION, "-"), (figures.BLUE, "--"), (figures.GREEN, "-."), (figures.BLACK, ":")]
        for method, panel in zip(methods, axes[0], strict=True):
            for place, (fraction, (colour, dash)) in enumerate(zip(fractions, kinds, strict=False)):
                means = [cells[method, lr, fraction] for lr in rates]
                style = {"color": colour, "linestyle": dash, "marker": "o", "markersize": 4, "capsize": 3}
                shifted = [lr * 1.12 ** (place - 1.5) for lr in rates]  # or the intervals hide each other
                label = f"{fraction:.1%} of the nodes"
                panel.errorbar(
                    shifted, [m.mean for m in means], [m.half for m in means], **style, label=label
                )
            panel.sharey(axes[0, 0])
            panel.set(xscale="log", xlabel="learning rate", title=method)
        axes[0, 0].set_ylabel("test accuracy")
        figures.legend_below(canvas, axes[0, 0])
        caption = (
            "Cora, test accuracy by learning rate and batch size: mean and 95 % interval over six seeds."
        )
        notes = [
            "Cora with encoder, as above, 200 batches; *QP-SBGD, all directions* at `target_rms` 1 and "
            "signSGD without momentum, so that only the learning rate differs. The paper shows only "
            "its own method."
        ]
        return Section(notes, tables, [Figure("ablation", caption, to_svg(canvas))])


ABLATION = Ablation()
