"""Photographs of CIFAR-10 in a small convolutional network."""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from spingrad import BinaryConv2d, BinaryLinear
from spingrad_lab.data import Split, cifar10
from spingrad_lab.tasks.training import VectorTask, loss_of


@cache
def photographs(split: Split) -> tuple[Tensor, Tensor]:
    """Images centred and with a variance of one in each colour over the training set, and their classes."""
    train = cifar10("train").images.float()
    mean, deviation = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    data = cifar10(split)
    return (data.images.float() - mean) / deviation, data.labels


class Photographs(VectorTask):
    """Photographs, half of them mirrored in each epoch."""

    exact = False

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        x, y = self.train
        for rows in torch.randperm(len(x)).split(self.batch):
            mirrored = torch.rand(len(rows), 1, 1, 1) < 0.5
            images = torch.where(mirrored, x[rows].flip(3), x[rows])
            yield lambda model, images=images, rows=rows: loss_of(model(images), y[rows])  # type: ignore[misc]

    def scores(self, model: nn.Module) -> dict[str, float]:
        x, y = self.test
        out = torch.cat([model(images) for images in x.split(500)])
        return {
            "test_loss": float(loss_of(out, y)),
            "test_accuracy": float((out.argmax(1) == y).float().mean()),
        }


class SmallCifar(Photographs):
    """Three convolutions with BatchNorm, the first of them real, on 10,000 images; half are mirrored.

    For tuning, 5,000 other training images are held out.
    """

    epochs, batch, channels = 4, 100, 32

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        x, y = photographs("train")
        order = torch.randperm(len(x))[: 600 if quick else 15_000]
        fit, held_out = order.split(len(order) * 2 // 3)
        self.train = x[fit], y[fit]
        self.test = (x[held_out], y[held_out]) if tuning or quick else photographs("test")
        if quick:
            self.epochs, self.channels = 1, 8

    def network(self) -> nn.Module:
        c = self.channels
        return nn.Sequential(
            nn.Conv2d(3, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.Hardtanh(),
            BinaryConv2d(c, 2 * c, 3, stride=2, padding=1), nn.BatchNorm2d(2 * c), nn.Hardtanh(),
            BinaryConv2d(2 * c, 4 * c, 3, stride=2, padding=1), nn.BatchNorm2d(4 * c), nn.Hardtanh(),
            nn.AvgPool2d(2), nn.Flatten(), BinaryLinear(64 * c, 10), nn.BatchNorm1d(10),
        )  # fmt: skip
