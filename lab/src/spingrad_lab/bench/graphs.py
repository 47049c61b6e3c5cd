"""Networks with branches, signals and real ends, each trained a little, for the comparison of exports."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spingrad import BinaryConv1d, BinaryConv2d, BinaryLinear, Sign, sign
from spingrad_lab.data import Images, cifar10, fashion_mnist, mnist
from spingrad_lab.tasks.networks import BANDS, spectra

SCALE = 1 / 128  # a power of two: torch's sums of pixels are exact, ties included


class Case(NamedTuple):
    """A network and its data: bytes to train on, bytes to test on, and how torch's inputs come from them."""

    network: Callable[[], nn.Module]
    data: Callable[[], tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]
    scale: float = SCALE
    shift: float = 0.0
    exact: bool = True  # signs only: the sums of every layer are torch's


class Block(nn.Module):
    """Two layers of 3 × 3 beside a shortcut, and a sign of their sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = BinaryConv2d(channels, channels, 3, padding=1)
        self.second = BinaryConv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return sign(self.second(sign(self.first(x))) + x)


def residual() -> nn.Module:
    """All weights and activations are binary; a fan-in of 576 makes the sums of a block whole 24ths.

    The last layer reads spins, so that equal scores are equal in torch too. A mean over pixels would be
    rounded there, which then decides between equal scores.
    """
    return nn.Sequential(
        BinaryConv2d(3, 64, 3, stride=2), Sign(), Block(64), nn.MaxPool2d(2), Block(64),
        nn.Flatten(), BinaryLinear(64 * 49, 10),
    )  # fmt: skip


class Stream(nn.Module):
    """Real ends, and between them blocks that add the normed output of a binary layer to a real stream."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        self.layers = nn.ModuleList(BinaryConv2d(channels, channels, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(4))
        self.last, self.head = nn.BatchNorm2d(channels), nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(layer(sign(x)))
        return self.head(F.relu(self.last(x)).mean((2, 3)))  # type: ignore[no-any-return]


def depthwise() -> nn.Module:
    """Depthwise layers and layers of 1 × 1 in turns, with BatchNorm and signs."""
    layers: list[nn.Module] = [BinaryConv2d(1, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), Sign()]
    for fan_in, units in ((32, 64), (64, 64)):
        layers += [BinaryConv2d(fan_in, fan_in, 3, padding=1, groups=fan_in), nn.BatchNorm2d(fan_in), Sign()]
        layers += [BinaryConv2d(fan_in, units, 1), nn.BatchNorm2d(units), Sign()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), BinaryLinear(64 * 49, 10))


def signal() -> nn.Module:
    return nn.Sequential(
        BinaryConv1d(BANDS, 64, 5, padding=2), nn.BatchNorm1d(64), Sign(), nn.MaxPool1d(2),
        BinaryConv1d(64, 64, 5, padding=2), nn.BatchNorm1d(64), Sign(), nn.MaxPool1d(2),
        nn.Flatten(), BinaryLinear(64 * 16, 10),
    )  # fmt: skip


def with_biases() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), BinaryLinear(784, 256, bias=True), Sign(), BinaryLinear(256, 128, bias=True), Sign(),
        BinaryLinear(128, 10, bias=True),
    )  # fmt: skip


def _images(load: Callable[..., Images]) -> Callable[[], tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        parts = load("train"), load("test")
        x = [part.images if part.images.ndim == 4 else part.images[:, None] for part in parts]
        return (x[0], parts[0].labels), (x[1], parts[1].labels)

    return data


def sounds() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Mel bands of spoken digits as bytes; tested on takes 0 to 4, as is custom."""
    bands, digits, takes = spectra()
    low, high = bands[takes >= 5].quantile(torch.tensor([0.01, 0.99]))
    x = ((bands - low) / (high - low) * 255).clamp(0, 255).round().to(torch.uint8)
    return (x[takes >= 5], digits[takes >= 5]), (x[takes < 5], digits[takes < 5])


CASES = {
    "residual, CIFAR-10, all signs": Case(residual, _images(cifar10)),
    "residual, Fashion-MNIST, real ends": Case(
        Stream, _images(fashion_mnist), scale=1 / 90, shift=-0.8, exact=False
    ),
    "depthwise, Fashion-MNIST, sign": Case(depthwise, _images(fashion_mnist)),
    "1-d convolutions, spoken digits, sign": Case(signal, sounds),
    "biases, MNIST, sign": Case(with_biases, _images(mnist)),
}
