"""Two looks at the digits: how an image becomes 16 bits, and which images a network gets right."""

import base64
import zlib
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from spingrad_lab.data import key_points, line_features, mnist
from spingrad_lab.methods import PUBLISHED
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.small import DEFINITIONS, DigitPair, Digits12, Stroke12, pair_points
from spingrad_lab.tasks.training import train

SIDE = 28


class FeatureExtraction(Experiment):
    """An image, its key points, and the lines that turn them into bits."""

    title = "From an image to 16 bits"
    source = "appendix, MNIST feature extraction"
    digits = (1, 2, 7, 0)

    def plan(self, lab: Lab) -> None:
        lab.run([{"digit": digit} for digit in (self.digits[:2] if lab.quick else self.digits)])

    def compute(self, job: Job) -> dict[str, Any]:
        data = mnist("train")
        image = data.images[data.labels == job["digit"]][:1]
        points = key_points(image)
        found = points[0][~points[0, :, 0].isnan()]
        bits = {name: line_features(points, keep=k, centre=c)[0] for name, (k, c) in DEFINITIONS.items()}
        return {
            "image": pack(image),
            "points": [[round(float(v), 3) for v in point] for point in found],
            "bits": {name: own.int().tolist() for name, own in bits.items()},
        }

    def show(self, runs: pd.DataFrame) -> Section:
        rows = [
            [str(digit), name, " ".join("+" if bit > 0 else "−" for bit in own)]
            for digit, bits in zip(runs["digit"], runs["bits"], strict=True)
            for name, own in bits.items()
        ]
        header = ["digit", "key points, lines through", "bits, line by line"]
        table = Table(header, rows, "The 16 bits of the first image of each digit, by the definition")
        drawn = runs.iloc[[list(runs["digit"]).index(2)]].iloc[0]
        return Section(list(_FEATURE_NOTES), [table], [_extraction(drawn)])


class Classified(DigitPair):
    """A pair of digits that keeps its trained network and says which images it was tested on."""

    network_: nn.Module

    def scores(self, model: nn.Module) -> dict[str, float]:
        self.network_ = model
        return super().scores(model)

    @torch.no_grad()
    def shown(self, label: int, count: int) -> tuple[Tensor, list[int]]:
        """Test images of a class, and the classes that the network gives them."""
        x, y = self.test
        rows = (y == label).nonzero()[:count, 0]
        data = mnist("train")
        images = data.images[data.labels == self.digits[label]]
        places = self.test_rows[rows] - label * (self.num_images // 2)
        return images[places], self.network_(x[rows]).argmax(1).tolist()


class ClassifiedImage(Classified, Digits12):
    """All key points, lines through the middle of the image."""


class ClassifiedStroke(Classified, Stroke12):
    """Key points on the stroke, lines through their centre."""


CLASSIFIED: dict[str, type[Classified]] = {
    "all superpixels, centre of the image": ClassifiedImage,
    "those on the stroke, centre of the points": ClassifiedStroke,
}


class ClassifiedDigits(Experiment):
    """Which ones and twos a network 16-4-2 tells apart."""

    title = "Ones and twos, right and wrong"
    source = "appendix, qualitative results of MNIST classification"
    seeds, count = 10, 20
    lr = 1e-2
    paper = 0.725

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        seeds = range(lab.seeds or (2 if lab.quick else self.seeds))
        lab.run([{"features": name, "seed": seed} for name in CLASSIFIED for seed in seeds])

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            task = CLASSIFIED[job["features"]](job["seed"], False, job["quick"])
            metrics = train(task, PUBLISHED, {"lr": self.lr}, job["seed"])
        for label, digit in enumerate(task.digits):
            images, classes = task.shown(label, self.count)
            metrics |= {f"{digit}s": pack(images), f"{digit}s as": [task.digits[c] for c in classes]}
        return metrics

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for name, own in groups(runs, "features"):
            right = [float(np.mean(_right(run))) for _, run in own.iterrows()]
            shares = (np.mean([np.mean(_right(run, digit)) for _, run in own.iterrows()]) for digit in (1, 2))
            cells = [str(estimate(own["test_accuracy"])), str(estimate(right)), *(f"{s:.2f}" for s in shares)]
            rows.append([name, *cells, str(len(own)), f"{self.paper:.3f}"])
        header = [
            "key points, lines through",
            "test accuracy",
            "of the images shown",
            "of the 1s",
            "of the 2s",
        ]
        header += ["seeds", "paper, images shown"]
        table = Table(header, rows, "Accuracy of networks 16-4-2 trained by QP-SBGD as published")
        own = where(runs, features=list(CLASSIFIED)[-1])
        middle = own.sort_values(["test_accuracy", "seed"]).iloc[len(own) // 2]
        return Section([self._note(middle)], [table], [_classified(middle, digit) for digit in (1, 2)])

    def _note(self, run: pd.Series) -> str:
        right = _right(run)
        return (
            f"Networks 16-4-2 on the digits 1 and 2, trained by the published step in the paper's reading "
            f"(summed loss, unscaled layers, learning rate {self.lr:g}), solved by five sweeps of descent "
            "from eight starts in place of D-Wave. Drawn are the first test images of the network whose test "
            f"accuracy is the median: it has {sum(right)} of {len(right)} right ({np.mean(right):.1%}). "
            f"The paper selects one of its networks, which has {self.paper:.1%} right."
        )


def pack(images: Tensor) -> str:
    """Grey images as text."""
    return base64.b64encode(zlib.compress(images.to(torch.uint8).numpy().tobytes(), 9)).decode()


def unpack(text: str) -> "np.ndarray":  # (count, 28, 28)
    """The images of :func:`pack`."""
    content = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(content, np.uint8).reshape(-1, SIDE, SIDE)


def _right(run: pd.Series, *digits: int) -> list[bool]:
    """Whether each image that is shown, of both digits or one, was classified as what it is."""
    return [given == digit for digit in digits or (1, 2) for given in run[f"{digit}s as"]]


def _extraction(run: pd.Series) -> Figure:
    """As the paper draws it: the image, its key points, and four of the sixteen lines."""
    canvas, axes = figures.new(8.4, 3.2, columns=3)
    points, image = np.asarray(run["points"]), unpack(run["image"])[0]
    stroke = points[:, 2] > 0.2
    titles = ("image", "key points", "four of the 16 lines")
    for panel, title in zip(axes[0], titles, strict=True):
        panel.imshow(image, cmap="gray_r")
        panel.set(title=title, xticks=(), yticks=())
        panel.grid(visible=False)
    for panel in axes[0, 1:]:
        panel.plot(*points[~stroke, 1::-1].T, "o", color=figures.SKY, markersize=3, fillstyle="none")
        panel.plot(*points[stroke, 1::-1].T, "o", color=figures.BLUE, markersize=4)
    row, column = points[stroke, :2].mean(0)
    for angle in np.arange(4) * np.pi / 4:
        axes[0, 2].axline((column, row), (column - np.sin(angle), row + np.cos(angle)), color=figures.GREEN)
    caption = (
        f"The first {run['digit']} of MNIST. Middle: the centres of its superpixels, filled where they lie "
        "on the stroke. Right: lines through the centre of the filled points; a bit says on which side of "
        "its line most points lie."
    )
    return Figure("feature-extraction", caption, to_svg(canvas))


def _classified(run: pd.Series, digit: int) -> Figure:
    images, given = unpack(run[f"{digit}s"]), run[f"{digit}s as"]
    canvas, axes = figures.new(6.4, 5.6, rows=-(-len(given) // 5), columns=5)
    for panel, image, own in zip(axes.flat, images, given, strict=False):
        colour = figures.BLUE if own == digit else figures.VERMILION
        panel.imshow(image, cmap="gray_r")
        panel.set(xticks=(), yticks=())
        panel.grid(visible=False)
        panel.set_title(f"{own}" if own == digit else f"{own}, wrong", color=colour, fontsize=9)
        for spine in panel.spines.values():
            spine.set(visible=True, color=colour, linewidth=2)
    right = sum(own == digit for own in given)
    caption = (
        f"Test images of the digit {digit}, each under the class it was given: {right} of {len(given)} right."
    )
    return Figure(f"classified-{digit}s", caption, to_svg(canvas))


_FEATURE_NOTES = (
    "The paper takes key points from Monti et al. (2017), draws 16 lines through the *centroid of the image* "
    "and counts the points on each side. Ours are the centres of SLIC superpixels, 75 asked for. Two things "
    "are open: whether all points count or only those on the stroke, and whether the centroid "
    "is the middle of the image or the mean of the points. Points that cover the whole image lie on both "
    "sides alike, and their bits say little about the digit.",
)

FEATURE_EXTRACTION = FeatureExtraction()
CLASSIFIED_DIGITS = ClassifiedDigits()
