"""The paper's small networks: logistic regression on blobs, Adult, and pairs of MNIST digits."""

import itertools
from typing import Any

import pandas as pd

from spingrad_lab.comparison import Comparison
from spingrad_lab.methods import ALL_DIRECTIONS, DEFAULT, NUM_TRIALS, PUBLISHED, SCALED_MEAN, grid
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Job, Lab, groups, seeded, where
from spingrad_lab.tasks.small import (
    DEFINITIONS,
    PAIRS,
    AdultTenLayers,
    AdultThreeFeatures,
    AdultTwoLayers,
    DigitPair,
    Digits02,
    Digits12,
    Digits17,
    OffsetBlobs,
    RandomBlobs,
    Stroke02,
    Stroke12,
    Stroke17,
    SymmetricBlobs,
    pair_points,
)
from spingrad_lab.tasks.training import logistic_scores
from spingrad_lab.trials import ACCURACY as TEST_ACCURACY
from spingrad_lab.trials import Score

TRAIN_LOSS = Score("train_loss", "training loss", higher_is_better=False)
TRAIN_ACCURACY = Score("train_accuracy", "training accuracy")
CHOOSE_BY_LOSS = Score("test_loss", "validation loss", higher_is_better=False)
CHOOSE_BY_ACCURACY = Score("test_accuracy", "validation accuracy")


_CONVERGENCE = (
    "The claim is about convergence, so settings are chosen by the training loss of the tuning seeds, for "
    "every method, and not by validation.",
)
_READING = (
    "*QP-SBGD as published* has the paper's reading: a loss that is summed over the batch, and outputs that "
    "nothing divides. Its losses are those of unscaled outputs and not comparable with the other rows'; its "
    "accuracies are.",
)
LOGISTIC_REGRESSION = Comparison(
    title="Binary logistic regression",
    source="section 4.1, figure 2",
    tasks={"symmetric": SymmetricBlobs, "offset": OffsetBlobs, "random": RandomBlobs},
    scores=[TRAIN_LOSS, Score("excess", "above the best of 8", higher_is_better=False)],
    choose=TRAIN_LOSS,
    tuning_seeds=2,
    notes=(
        "The paper does not say where its two blobs lie, so three placements are shown: mirror images about"
        " the origin, shifted off it, and at random. Three binary weights have eight values: the column "
        "*above the best of 8* is the distance to the best of them, by enumeration.",
        *_CONVERGENCE,
        *_READING,
        "Departure: the output is divided by √3, the learning rate follows a cosine, and settings are tuned "
        "(the paper gives one learning rate for each method).",
    ),
)


_ADULT = (
    *_READING,
    "Departures: 1,605 training rows are drawn anew for each seed, features are spins (−1, +1), outputs are "
    "divided by √fan-in (without it the ten-layer network learns with no method), the learning rate follows "
    "a cosine over 10 epochs. The paper does not say how many epochs it trained.",
)

ADULT_TWO_LAYERS = Comparison(
    title="Adult, two layers 15-10-1",
    source="section 4.2.1, figure 3 left",
    tasks={"15-10-1": AdultTwoLayers},
    scores=[TRAIN_LOSS, TEST_ACCURACY],
    choose=TRAIN_LOSS,
    tuning_seeds=2,
    notes=(*_CONVERGENCE, *_ADULT),
)

ADULT_TEN_LAYERS = Comparison(
    title="Adult, ten layers 123-128-…-128-1",
    source="section 4.2.1, figure 3 right",
    tasks={"ten layers": AdultTenLayers},
    scores=[TRAIN_LOSS, TEST_ACCURACY],
    choose=TRAIN_LOSS,
    trials={
        DEFAULT: [{"lr": float(f"{10 ** (k / 2 - 6):.1g}")} for k in range(NUM_TRIALS)],
        ALL_DIRECTIONS: grid(lr=(1e-5, 3e-5, 1e-4, 3e-4), target_rms=(1,), momentum=(0, 0.9)),
        PUBLISHED: [{"lr": 10 ** (k / 2 - 6)} for k in range(NUM_TRIALS)],
        SCALED_MEAN: [{"lr": 10 ** (k / 2 - 6)} for k in range(NUM_TRIALS)],
        "BinaryConnect SGD": grid(lr=(3e-3, 0.01, 0.03, 0.1), momentum=(0, 0.9)),
        "BinaryConnect signSGD": grid(lr=(1e-5, 3e-5, 1e-4, 3e-4), momentum=(0, 0.9)),
        "BinaryConnect Adam": grid(lr=(1e-5, 3e-5, 1e-4, 3e-4), beta2=(0.999, 0.99)),
        "ProxQuant": grid(lr=(3e-3, 0.01), regularization=(1e-4, 3e-4, 1e-3, 3e-3)),
    },
    notes=(
        *_CONVERGENCE,
        *_ADULT,
        "Ten narrow layers collapse to a constant output at the learning rates that suit the other "
        "networks, with every method: all learning rates here are lower by a factor of 10 to 100. A first "
        "pass with the usual ones, read on validation rows, showed it.",
    ),
)

ADULT_SMALL = Comparison(
    title="Adult, three features 3-5-2",
    source="appendix, training accuracy on a subset of Adult",
    tasks={"3-5-2": AdultThreeFeatures},
    scores=[TRAIN_ACCURACY, TEST_ACCURACY],
    choose=CHOOSE_BY_ACCURACY,
    tuning_seeds=2,
    notes=(
        *_ADULT,
        "The three features are those that the authors' notebook names (6, 22, 36). A network without biases "
        "computes an odd function of its inputs, which these three bits and the majority class do not fit: "
        "logistic regression *with* its intercept shows what that costs.",
    ),
)


class DigitPairs(Comparison):
    """The comparison, and how far the definition of the features moves its ceiling."""

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        super().plan(lab)
        definitions = itertools.product(PAIRS, ("all", "stroke"), ("image", "points"), range(lab.seeds or 5))
        lab.run(
            [
                {"stage": "ceiling", "task": task, "keep": keep, "centre": centre, "seed": seed}
                for task, keep, centre, seed in definitions
            ],
            "ceilings",
        )

    def compute(self, job: Job) -> dict[str, Any]:
        if job["stage"] != "ceiling":
            return super().compute(job)
        pair = type(
            "Pair", (DigitPair,), {"digits": PAIRS[job["task"]], "keep": job["keep"], "centre": job["centre"]}
        )
        with seeded(job["seed"]):
            task = pair(job["seed"], False, job["quick"])
            return logistic_scores(task.train, task.test)

    def show(self, runs: pd.DataFrame) -> Section:
        section = super().show(runs[runs["stage"] != "ceiling"])
        names = {definition: name for name, definition in DEFINITIONS.items()}
        rows = []
        for (keep, centre), own in groups(
            where(runs, stage="ceiling").sort_values(["keep", "centre"]), ["keep", "centre"]
        ):
            cells = (str(estimate(where(own, task=task)["test_accuracy"])) for task in PAIRS)
            rows.append([names[keep, centre], *cells])
        caption = "The ceiling moves with the definition: logistic regression on the 16 bits of each"
        table = Table(["key points, lines through", *PAIRS], rows, caption)
        return Section(section.notes, [*section.tables, table], section.figures)


TABLE_1 = {
    "0/2": {
        "ProxQuant": 0.65,
        "BinaryConnect SGD": 0.64,
        "BinaryConnect signSGD": 0.71,
        "QP-SBGD as published, exact": 0.66,
    },
    "1/2": {
        "ProxQuant": 0.67,
        "BinaryConnect SGD": 0.72,
        "BinaryConnect signSGD": 0.66,
        "QP-SBGD as published, exact": 0.73,
    },
    "1/7": {
        "ProxQuant": 0.64,
        "BinaryConnect SGD": 0.74,
        "BinaryConnect signSGD": 0.68,
        "QP-SBGD as published, exact": 0.75,
    },
}
"""The paper's accuracies, by pair and method."""
_STROKE = ", stroke, centre of the points"
MNIST_PAIRS = DigitPairs(
    title="Pairs of MNIST digits, 16-4-2",
    source="section 4.2.2, table 1",
    tasks={
        "0/2": Digits02,
        "1/2": Digits12,
        "1/7": Digits17,
        "0/2, stroke, centre of the points": Stroke02,
        "1/2, stroke, centre of the points": Stroke12,
        "1/7, stroke, centre of the points": Stroke17,
    },
    scores=[TEST_ACCURACY, TRAIN_ACCURACY],
    choose=CHOOSE_BY_LOSS,
    tuning_seeds=2,
    paper={f"{pair}{features}": own for pair, own in TABLE_1.items() for features in ("", _STROKE)},
    notes=(
        "The paper's key points are those of Monti et al. (2017), whose superpixel files are not to be had: "
        "ours are SLIC superpixels of the same images. The paper says neither which key points count nor "
        "which centroid the lines run through; the last table shows how much that moves what *any* method "
        "can reach, so that our numbers and the paper's are not to be compared to the second digit. With all "
        "superpixels and the centre of the image, logistic regression stays below the paper's networks; with "
        "the superpixels on the stroke and the centre of these, it is above them. So both are run.",
        "The paper's QP-SBGD (Gurobi) stands beside our row as published and solved exactly; with D-Wave it "
        "reports 0.62, 0.70 and 0.74.",
        *_READING,
        "Departures: outputs divided by √fan-in, cosine learning rate, 20 epochs of batches of 20 (the "
        "paper gives neither).",
    ),
)
