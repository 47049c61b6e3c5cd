"""Small networks and their data: blobs in the plane, Adult, and pairs of MNIST digits."""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from spingrad import BinaryLinear
from spingrad._files import cache_folder, check_own, write_atomically
from spingrad_lab.data import adult, key_points, line_features, mnist
from spingrad_lab.tasks.training import VectorTask, loss_of


def mlp(*sizes: int) -> nn.Sequential:
    """Binary linear layers with hardtanh between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [BinaryLinear(fan_in, fan_out), nn.Hardtanh()]
    return nn.Sequential(*layers[:-1])


class Blobs(VectorTask):
    """Two blobs in the plane with a third coordinate of one; a subclass says where they are."""

    epochs, batch = 10, 20
    spread = 0.5

    def centres(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        first, second = self.centres()
        self.train, self.test = self._draw(first, second), self._draw(first, second)

    def _draw(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.arange(200) % 2
        plane = torch.where(y[:, None] == 1, second, first) + self.spread * torch.randn(200, 2)
        return torch.cat([plane, torch.ones(200, 1)], 1), y

    def network(self) -> nn.Module:
        return mlp(3, 1)

    def scores(self, model: nn.Module) -> dict[str, float]:
        x, y = self.train
        scale = next(layer.scale for layer in model.modules() if isinstance(layer, BinaryLinear))
        spins = itertools.product((-1.0, 1.0), repeat=3)
        best = min(float(loss_of((x @ torch.tensor(own))[:, None] * scale, y)) for own in spins)
        scores = super().scores(model)
        return scores | {"excess": scores["train_loss"] - best}

    def logistic(self) -> dict[str, float]:
        return super().logistic() | {"excess": float("nan")}


class SymmetricBlobs(Blobs):
    def centres(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([-2.0, -2.0]), torch.tensor([2.0, 2.0])


class OffsetBlobs(Blobs):
    def centres(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([-0.5, -0.5]), torch.tensor([2.5, 2.5])


class RandomBlobs(Blobs):
    def centres(self) -> tuple[Tensor, Tensor]:
        middle, angle = torch.randn(2), torch.rand(1) * 6.2832
        arm = 2 * torch.cat([angle.cos(), angle.sin()])
        return middle - arm, middle + arm


@cache
def adult_rows() -> tuple[Tensor, Tensor]:
    """All 32,561 rows of both files, bits as spins."""
    parts = adult("train"), adult("test")
    features = torch.cat([part.features for part in parts])
    return 2 * features - 1, torch.cat([part.labels for part in parts])


class Adult(VectorTask):
    """1,605 rows drawn at random to train, the other 30,956 to test."""

    epochs, batch, num_batches = 10, 16, 32

    def columns(self) -> Tensor:
        return torch.arange(123)

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        x, y = adult_rows()
        order = torch.randperm(len(x))
        columns = self.columns()
        count = 1_205 if tuning else 1_605
        train, test = order[:count], order[count:1_605] if tuning else order[1_605:]
        self.train, self.test = (x[train][:, columns], y[train]), (x[test][:, columns], y[test])
        if quick:
            self.epochs = 2

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        return itertools.islice(super().batches(), self.num_batches)


class AdultTwoLayers(Adult):
    def columns(self) -> Tensor:
        return torch.randperm(123)[:15]

    def network(self) -> nn.Module:
        return mlp(15, 10, 1)


class AdultTenLayers(Adult):
    exact = False

    def network(self) -> nn.Module:
        return mlp(123, *[128] * 9, 1)

    def watched(self, model: nn.Module) -> dict[str, float]:
        return {"train_loss": float(loss_of(model(self.train[0]), self.train[1]))}


class AdultThreeFeatures(Adult):
    batch, num_batches = 20, 30

    def columns(self) -> Tensor:
        return torch.tensor([5, 21, 35])  # features 6, 22 and 36 of the LIBSVM file

    def network(self) -> nn.Module:
        return mlp(3, 5, 2)


DIGITS = (0, 1, 2, 7)
KEY_POINTS = b"spingrad key points 1\n"
PAIRS = {"0/2": (0, 2), "1/2": (1, 2), "1/7": (1, 7)}
Keep = Literal["all", "stroke"]
Centre = Literal["image", "points"]
DEFINITIONS: dict[str, tuple[Keep, Centre]] = {
    "all superpixels, centre of the image": ("all", "image"),
    "all superpixels, centre of the points": ("all", "points"),
    "those on the stroke, centre of the image": ("stroke", "image"),
    "those on the stroke, centre of the points": ("stroke", "points"),
}
"""What the paper leaves open about its features: which key points count, and what the lines run through."""


@cache
def pair_points(quick: bool) -> dict[int, Tensor]:
    """Superpixel key points of the first images of digits 0, 1, 2 and 7; computed once and kept."""
    count = 400 if quick else 2_000
    path = cache_folder() / f"key-points-{count}"
    check_own(path, KEY_POINTS)
    shape = 4, count, 75, 3
    kept = _kept(path, math.prod(shape))
    if kept is None:
        data = mnist("train")
        kept = torch.stack([key_points(data.images[data.labels == digit][:count]) for digit in DIGITS])
        content = kept.numpy().astype("<f4").tobytes()
        write_atomically(path, KEY_POINTS + hashlib.sha256(content).digest() + content)
    return dict(zip(DIGITS, kept.view(shape), strict=True))


def _kept(path: Path, count: int) -> Tensor | None:
    """The numbers on file, or ``None`` if there are none or they are damaged."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        head = file.read(len(KEY_POINTS) + 32)
        content = file.read(4 * count + 1)
    if head != KEY_POINTS + hashlib.sha256(content).digest() or len(content) != 4 * count:
        return None
    return torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float32))


class DigitPair(VectorTask):
    """500 images to train and 3,000 to test, 16 bits each."""

    epochs, batch = 20, 20
    digits: tuple[int, int]
    keep: Keep = "all"
    centre: Centre = "image"
    num_images: int
    """How many images there are of both digits, those of the first digit first."""
    test_rows: Tensor
    """Which of these are tested on."""

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        points = pair_points(quick)
        own = [line_features(points[d], keep=self.keep, centre=self.centre) for d in self.digits]
        x, y = torch.cat(own), torch.arange(2).repeat_interleave(len(own[0]))
        order = torch.randperm(len(x))
        train, test = order[:500], order[500:3_500]
        if tuning:
            train, test = order[:350], order[350:500]
        self.train, self.test = (x[train], y[train]), (x[test], y[test])
        self.num_images, self.test_rows = len(x), test
        if quick:
            self.epochs = 2

    def network(self) -> nn.Module:
        return mlp(16, 4, 2)


class Digits02(DigitPair):
    digits = 0, 2


class Digits12(DigitPair):
    digits = 1, 2


class Digits17(DigitPair):
    digits = 1, 7


class Stroke02(Digits02):
    keep, centre = "stroke", "points"


class Stroke12(Digits12):
    keep, centre = "stroke", "points"


class Stroke17(Digits17):
    keep, centre = "stroke", "points"
