"""Networks that people build, each with BatchNorm, with fixed gains, or with neither."""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from spingrad import BinaryConv1d, BinaryConv2d, BinaryLinear, Gain, Sign
from spingrad_lab.data import spoken_digits
from spingrad_lab.tasks.cifar import Photographs, photographs
from spingrad_lab.tasks.images import Images, pixels
from spingrad_lab.tasks.text import Shakespeare
from spingrad_lab.tasks.training import Task, VectorTask, loss_of

Norm = Literal["none", "BatchNorm", "Gain"]
LOUD = 3.0  # root mean square of the outputs behind a last gain


class Built(Task):
    """A task whose network may have a normalisation behind every binary layer."""

    normalisation: Norm = "none"
    final_images: int
    final_epochs: int
    trial_images: int
    trial_epochs: int

    def behind(self, batch_norm: type[nn.Module], size: int, last: bool = False) -> list[nn.Module]:
        """What stands behind a binary layer."""
        if self.normalisation == "Gain":
            return [Gain(LOUD if last else 1.0)]
        return [batch_norm(size)] if self.normalisation == "BatchNorm" else []


def with_long_trials(kind: type[Built]) -> type[Built]:
    """The same task, with as many images and epochs in trials as in final runs."""
    return type(
        kind.__name__, (kind,), {"trial_images": kind.final_images, "trial_epochs": kind.final_epochs}
    )


class FullyConnected(Built, Images):
    """20,000 images of one data set, three epochs of batches of 200; in trials 8,000, and 4,000 held out."""

    widths: tuple[int, ...]
    activation: type[nn.Module] = nn.Hardtanh
    final_epochs, trial_epochs, batch = 3, 3, 200
    final_images, trial_images, held_out = 20_000, 8_000, 4_000

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        x, y = pixels(self.name, "train")
        order = torch.randperm(len(x))
        count = 2_000 if quick else self.trial_images if tuning else self.final_images
        fit, held_out = order[:count], order[-self.held_out :]
        self.train = x[fit], y[fit]
        self.test = (x[held_out], y[held_out]) if tuning or quick else pixels(self.name, "test")
        self.epochs = 1 if quick else self.trial_epochs if tuning else self.final_epochs

    def network(self) -> nn.Module:
        layers: list[nn.Module] = []
        for fan_in, width in itertools.pairwise([784, *self.widths]):
            layers += [BinaryLinear(fan_in, width), *self.behind(nn.BatchNorm1d, width), self.activation()]
        return nn.Sequential(
            *layers, BinaryLinear(self.widths[-1], 10), *self.behind(nn.BatchNorm1d, 10, last=True)
        )


def _fully_connected() -> dict[str, type[Built]]:
    shapes = {"784-512-512-10": (512, 512), "8 layers of 256": (256,) * 7}
    activations = {"hardtanh": nn.Hardtanh, "sign": Sign}
    return {
        f"{data}, {shape}, {activation}": type(
            "FullyConnected",
            (FullyConnected,),
            {"name": data, "widths": shapes[shape], "activation": activations[activation]},
        )
        for data, shape, activation in itertools.product(("mnist", "fashion"), shapes, activations)
    }


FULLY_CONNECTED = _fully_connected()
LONG: dict[str, type[Built]] = {
    f"{data}, 784-512-512-10, hardtanh, 20 epochs": type(
        "FullyConnected",
        (FullyConnected,),
        {"name": data, "widths": (512, 512), "final_epochs": 20, "trial_epochs": 10},
    )
    for data in ("mnist", "fashion")
}


class Cifar(Built, Photographs):
    """10,000 photographs of CIFAR-10, six epochs of batches of 100, half of them mirrored.

    In trials: 5,000 photographs, two epochs, 5,000 others held out.
    """

    batch, channels = 100, 16
    final_epochs, trial_epochs = 6, 2
    final_images, trial_images, held_out = 10_000, 5_000, 5_000

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        x, y = photographs("train")
        order = torch.randperm(len(x))
        count = 400 if quick else self.trial_images if tuning else self.final_images
        fit, held_out = order[:count], order[-(200 if quick else self.held_out) :]
        self.train = x[fit], y[fit]
        self.test = (x[held_out], y[held_out]) if tuning or quick else photographs("test")
        self.epochs = 1 if quick else self.trial_epochs if tuning else self.final_epochs
        if quick:
            self.channels = 4

    def _block(self, fan_in: int, fan_out: int, stride: int = 1) -> list[nn.Module]:
        convolution = BinaryConv2d(fan_in, fan_out, 3, stride=stride, padding=1)
        return [convolution, *self.behind(nn.BatchNorm2d, fan_out)]


class VGG(Cifar):
    """Three pairs of 3 × 3 convolutions with pooling between, the first of them real, and a linear layer."""

    def network(self) -> nn.Module:
        c = self.channels
        return nn.Sequential(
            nn.Conv2d(3, c, 3, padding=1, bias=False), *self.behind(nn.BatchNorm2d, c), nn.Hardtanh(),
            *self._block(c, c), nn.MaxPool2d(2), nn.Hardtanh(),
            *self._block(c, 2 * c), nn.Hardtanh(), *self._block(2 * c, 2 * c), nn.MaxPool2d(2), nn.Hardtanh(),
            *self._block(2 * c, 4 * c), nn.Hardtanh(),
            *self._block(4 * c, 4 * c), nn.MaxPool2d(2), nn.Hardtanh(),
            nn.Flatten(), BinaryLinear(64 * c, 10), *self.behind(nn.BatchNorm1d, 10, last=True),
        )  # fmt: skip


class Residual(nn.Module):
    """Two layers whose output is added to their input, which is pooled and doubled where sizes change."""

    def __init__(self, first: list[nn.Module], second: list[nn.Module], grows: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(*first, nn.Hardtanh(), *second)
        self.grows, self.activation = grows, nn.Hardtanh()

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        if self.grows:
            x = nn.functional.avg_pool2d(x, 2).repeat(1, 2, 1, 1)
        y: Tensor = self.activation(out + x)
        return y


class ResNet(Cifar):
    """A real convolution, three residual blocks of two binary ones, and a linear layer over the mean."""

    def network(self) -> nn.Module:
        c = self.channels
        stem = [nn.Conv2d(3, c, 3, padding=1, bias=False), *self.behind(nn.BatchNorm2d, c), nn.Hardtanh()]
        blocks = [
            Residual(self._block(c, c), self._block(c, c), grows=False),
            Residual(self._block(c, 2 * c, stride=2), self._block(2 * c, 2 * c), grows=True),
            Residual(self._block(2 * c, 4 * c, stride=2), self._block(4 * c, 4 * c), grows=True),
        ]
        last = [BinaryLinear(16 * c, 10), *self.behind(nn.BatchNorm1d, 10, last=True)]
        return nn.Sequential(*stem, *blocks, nn.AvgPool2d(4), nn.Flatten(), *last)


CIFAR: dict[str, type[Built]] = {"CIFAR-10, VGG": VGG, "CIFAR-10, residual": ResNet}


class Text(Built, Shakespeare):
    """The transformer has its own LayerNorm, whatever is asked for."""


TEXT: dict[str, type[Built]] = {"tiny Shakespeare, transformer": Text}

FRAMES, BANDS = 64, 32  # of 16 ms each; on the mel scale


@cache
def spectra() -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of mel bands, shape ``(3000, bands, frames)``, the digits, and the numbers of the takes."""
    recordings = spoken_digits()
    sounds = torch.zeros(len(recordings), 128 * FRAMES + 128)
    for row, recording in zip(sounds, recordings, strict=True):
        sound = torch.from_numpy(recording.sound[: len(row)])
        start = (len(row) - len(sound)) // 2
        row[start : start + len(sound)] = sound
    window = torch.hann_window(256)
    spectrum = torch.stft(sounds, 256, 128, window=window, center=False, return_complex=True)
    power = spectrum[:, :, :FRAMES].abs().square()
    bands = (torch.einsum("bf,nft->nbt", _mel(power.shape[1]), power) + 1e-6).log()
    digits, takes = (
        torch.tensor([getattr(recording, name) for recording in recordings]) for name in ("digit", "take")
    )
    return bands, digits, takes


def _mel(bins: int) -> Tensor:  # (bands, bins)
    """Triangles that overlap by half, evenly spaced on the mel scale up to 4 kHz."""
    mel = torch.linspace(0, 2595 * torch.tensor(1 + 4000 / 700).log10(), BANDS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1) / 4000 * (bins - 1)
    at = torch.arange(bins, dtype=edges.dtype)
    rising = (at - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - at) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)


class Speech(Built, VectorTask):
    """Three 1-d convolutions over mel bands of spoken digits, 10 epochs of batches of 50.

    Tested on takes 0 to 4 of each digit and speaker, as is custom; in trials on takes 5 to 9.
    """

    epochs, batch, channels = 10, 50, 32
    exact = False

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        x, y, takes = spectra()
        tested = (takes >= 5) & (takes < 10) if tuning else takes < 5
        fit = takes >= (10 if tuning else 5)
        mean, deviation = (f(x[fit], (0, 2), keepdim=True) for f in (torch.mean, torch.std))
        x = (x - mean) / deviation
        self.train, self.test = (x[fit], y[fit]), (x[tested], y[tested])
        if quick:
            self.train, self.epochs, self.channels = (x[fit][:400], y[fit][:400]), 1, 8

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        x, y = self.train
        for rows in torch.randperm(len(x)).split(self.batch):
            moved = x[rows].roll(int(torch.randint(-4, 5, ())), 2)  # up to 64 ms earlier or later
            yield lambda model, moved=moved, rows=rows: loss_of(model(moved), y[rows])  # type: ignore[misc]

    def network(self) -> nn.Module:
        c, norm = self.channels, nn.BatchNorm1d
        return nn.Sequential(
            BinaryConv1d(BANDS, c, 5, padding=2), *self.behind(norm, c), nn.Hardtanh(), nn.MaxPool1d(2),
            BinaryConv1d(c, 2 * c, 5, padding=2), *self.behind(norm, 2 * c), nn.Hardtanh(), nn.MaxPool1d(2),
            BinaryConv1d(2 * c, 2 * c, 3, padding=1), *self.behind(norm, 2 * c), nn.Hardtanh(),
            nn.AvgPool1d(4), nn.Flatten(), BinaryLinear(8 * c, 10), *self.behind(norm, 10, last=True),
        )  # fmt: skip


SPEECH: dict[str, type[Built]] = {"spoken digits, 1-d convolutions": Speech}
