"""Four small networks trained for 50 steps, whose weights must not change when the code is rearranged.

``weights.npz`` holds the latent weights that commit 6c3b125 (version 0.1.0) ended with, on one thread.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, BinaryQuadratic, binary_parameters
from spingrad.nn.gcn import BinaryGCNConv
from spingrad.rows import Patches
from spingrad.solvers import BlockDescentSolver


class FormerSolver(BlockDescentSolver):
    """One sweep in layers of more than 32 inputs."""

    def _effort(self, problem: BinaryQuadratic) -> tuple[int, int]:
        return (8, 8) if problem.num_spins <= 32 else (1, 1)


def former_sample(patches: Patches, count: int) -> Tensor:
    """Every so many of the patches of the first images."""
    rows = patches.dense()
    each = len(rows) // len(patches.images[0])
    first = rows[: 16 * count if patches.index is not None else max(1, 16 * count // each) * each]
    return first[:: -(-len(first) // count)]


STEPS = 50
SETTINGS: dict[str, Callable[[Any], QPSBGD]] = {
    "default": lambda params: QPSBGD(params, lr=3e-3, rank=8, solver=FormerSolver()),
    # In blocks: version 0.1.0 did not set spin after spin in a step without momentum.
    "momentum=0": lambda params: QPSBGD(
        params, lr=3e-3, momentum=0.0, rank=None, target_rms=1.0, solver=BlockDescentSolver(backend="torch")
    ),
    "as_published": lambda params: QPSBGD.as_published(params, lr=3e-3),
}


class Graph(nn.Module):
    """Two graph convolutions on a ring of 60 nodes, of which every third has a label."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = BinaryGCNConv(34, 12), BinaryGCNConv(12, 4)
        ring = torch.eye(60) + torch.eye(60).roll(1, 0) + torch.eye(60).roll(-1, 0)
        self.ring = (ring / 3).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.hardtanh(self.first(x, self.ring))
        return self.second(hidden, self.ring)[::3]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(
            BinaryLinear(34, 16), nn.Hardtanh(), BinaryLinear(16, 12), nn.Hardtanh(), BinaryLinear(12, 4)
        ),
        (60, 34),
    ),
    "convolutional": (
        lambda: nn.Sequential(
            BinaryConv2d(1, 4, 3, stride=2, padding=1), nn.Hardtanh(),
            BinaryConv2d(4, 2, 3, stride=2, padding=1), nn.Hardtanh(),
            nn.Flatten(), BinaryLinear(2 * 9, 4),
        ),
        (20, 1, 12, 12),
    ),
    "grouped": (
        lambda: nn.Sequential(
            BinaryConv2d(4, 8, 3, padding=1, groups=2), nn.Hardtanh(),
            BinaryConv2d(8, 4, 3, stride=2, groups=2, dilation=2), nn.Hardtanh(),
            nn.Flatten(), BinaryLinear(4 * 4, 4),
        ),
        (20, 4, 8, 8),
    ),
    "graph": (Graph, (60, 34)),
}  # fmt: skip


def batches(shape: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Random inputs, and the class that a fixed linear map finds in them."""
    generator = torch.Generator().manual_seed(7)
    teacher = torch.randn(4, int(np.prod(shape[1:])), generator=generator)
    for _ in range(STEPS):
        x = torch.randn(shape, generator=generator) + 0.3
        yield x, (x.flatten(1) @ teacher.T).argmax(1)


def train(network: str, settings: str) -> list[Tensor]:
    """The latent weights of every layer after ``STEPS`` steps."""
    make, shape = NETWORKS[network]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make()
    optimizer = SETTINGS[settings](binary_parameters(model))
    for x, y in batches(shape):
        out = model(x)
        optimizer.zero_grad()
        nn.functional.cross_entropy(out, y[:: len(y) // len(out)]).backward()
        with patch.object(Patches, "sample", former_sample):
            optimizer.step()
    return [weight.detach().clone() for _, weight in binary_parameters(model)]
