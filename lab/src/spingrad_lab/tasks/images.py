"""Images of MNIST and Fashion-MNIST: all of them in wide and convolutional networks, or 5,000 in any."""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spingrad import BinaryConv2d, BinaryLinear
from spingrad_lab.data import Split, fashion_mnist, mnist
from spingrad_lab.tasks.training import VectorTask, loss_of

Name = Literal["mnist", "fashion"]


@cache
def pixels(name: Name, split: Split) -> tuple[Tensor, Tensor]:
    """Images with a root mean square of one over the training set; zero stays zero."""
    load = {"mnist": mnist, "fashion": fashion_mnist}[name]
    scale = load("train").pixels().square().mean().sqrt()
    data = load(split)
    return data.pixels() / scale, data.labels


class Images(VectorTask):
    """All images; settings are chosen on 14,000 of the training images, 2,000 of them held out."""

    name: Name
    epochs, batch = 6, 200
    batch_norm = False

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        x, y = pixels(self.name, "train")
        self.train, self.test = (x, y), pixels(self.name, "test")
        if tuning:
            order = torch.randperm(len(x))[:14_000]
            fit, held_out = order[:12_000], order[12_000:]
            self.train, self.test = (x[fit], y[fit]), (x[held_out], y[held_out])
            self.epochs, self.batch = 3, 100
        if quick:
            self.train, self.test = (x[:2_000], y[:2_000]), (x[2_000:3_000], y[2_000:3_000])
            self.epochs = 1

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        x, y = self.train
        for rows in torch.randperm(len(x)).split(self.batch):
            shift = torch.randint(-1, 2, (2,)).tolist()
            moved = x[rows].view(-1, 28, 28).roll(shift, (1, 2)).flatten(1)
            yield lambda model, moved=moved, rows=rows: loss_of(model(moved), y[rows])  # type: ignore[misc]

    def watched(self, model: nn.Module) -> dict[str, float]:
        x, y = self.test
        out = torch.cat([model(rows) for rows in x.split(10_000)])
        return {"test_accuracy": float((out.argmax(1) == y).float().mean())}

    def norm(self, layer: type[nn.Module], size: int) -> list[nn.Module]:
        return [layer(size)] if self.batch_norm else []


class Wide(Images):
    """784-1024-1024-10 with hardtanh."""

    width = 1_024

    def network(self) -> nn.Module:
        norm = nn.BatchNorm1d
        return nn.Sequential(
            BinaryLinear(784, self.width), *self.norm(norm, self.width), nn.Hardtanh(),
            BinaryLinear(self.width, self.width), *self.norm(norm, self.width), nn.Hardtanh(),
            BinaryLinear(self.width, 10), *self.norm(norm, 10),
        )  # fmt: skip


class Convolutional(Images):
    """Two 3 × 3 convolutions of stride 2 with 16 and 32 channels, and a linear layer."""

    epochs, batch = 2, 100

    def network(self) -> nn.Module:
        norm = nn.BatchNorm2d
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            BinaryConv2d(1, 16, 3, stride=2, padding=1), *self.norm(norm, 16), nn.Hardtanh(),
            BinaryConv2d(16, 32, 3, stride=2, padding=1), *self.norm(norm, 32), nn.Hardtanh(),
            nn.Flatten(),
            BinaryLinear(32 * 49, 10), *self.norm(nn.BatchNorm1d, 10),
        )  # fmt: skip


class MnistWide(Wide):
    name = "mnist"


class MnistWideNorm(MnistWide):
    batch_norm = True


class MnistConvolutional(Convolutional):
    name = "mnist"


class MnistConvolutionalNorm(MnistConvolutional):
    batch_norm = True


class FashionWide(Wide):
    name = "fashion"


class FashionWideNorm(FashionWide):
    batch_norm = True


class FashionConvolutional(Convolutional):
    name = "fashion"


class FashionConvolutionalNorm(FashionConvolutional):
    batch_norm = True


@cache
def _digits(split: Split) -> tuple[Tensor, Tensor]:
    data = mnist(split)
    return data.pixels(), data.labels


class Digits(VectorTask):
    """5,000 images of MNIST and 4 epochs, in a network of any width and depth.

    Args:
        cell: Width, number of hidden layers, batch size, side of the image, inputs and BatchNorm.
    """

    epochs = 4

    def __init__(self, seed: int, tuning: bool, quick: bool, cell: dict[str, Any]) -> None:
        self.cell = cell
        self.batch = cell["batch"]
        x, y = _digits("train")
        order = torch.randperm(len(x))[: 400 if quick else 5_000]
        count = 4 * len(order) // 5 if tuning else len(order)
        fit, held_out = order[:count], order[count:]
        features = self._features(x[order])
        self.train = features(x[fit]), y[fit]
        x, y = (x[held_out], y[held_out]) if tuning else _digits("test")
        self.test = features(x), y
        if quick:
            self.epochs = 1

    def _features(self, x: Tensor) -> Any:
        """Pixels of the side asked for with a root mean square of one, centred or whitened if asked."""
        side = self.cell["side"]

        def shrunk(x: Tensor) -> Tensor:
            return nn.functional.adaptive_avg_pool2d(x.view(-1, 28, 28), side).flatten(1)

        own = shrunk(x)
        mean = own.mean(0) if self.cell["inputs"] != "pixels" else torch.zeros(side * side)
        turn = torch.eye(side * side)
        if self.cell["inputs"] == "whitened":
            values, vectors = torch.linalg.eigh(torch.cov(own.T))
            turn = vectors / (values.clamp(min=0) + 1e-2 * values[-1]).sqrt()
        scale = ((own - mean) @ turn).square().mean().sqrt()
        return lambda x: (shrunk(x) - mean) @ turn / scale

    def network(self) -> nn.Module:
        width, depth = self.cell["width"], self.cell["depth"]
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise([self.cell["side"] ** 2, *[width] * depth, 10]):
            layers.append(BinaryLinear(fan_in, fan_out))
            if self.cell["norm"]:
                layers.append(nn.BatchNorm1d(fan_out))
            layers.append(nn.Hardtanh())
        return nn.Sequential(*layers[:-1])

    def watched(self, model: nn.Module) -> dict[str, float]:
        return {}
