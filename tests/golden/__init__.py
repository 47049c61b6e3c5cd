"""Four small networks trained for 50 steps, whose weights must not change when the code is rearranged.

``weights.npz`` holds the latent weights that commit 6c3b125 (version 0.1.0) ended with, as published, on one
thread.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters
from spingrad.nn.gcn import BinaryGCNConv

STEPS = 50


class Graph(nn.Module):
    """Two graph convolutions on a ring of 60 nodes, of which every third has a label."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = BinaryGCNConv(34, 12), BinaryGCNConv(12, 4)
        ring = torch.eye(60) + torch.eye(60).roll(1, 0) + torch.eye(60).roll(-1, 0)
        self.register_buffer("ring", (ring / 3).to_sparse(), persistent=False)

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


def train(
    network: str,
    make_optimizer: Callable[..., QPSBGD] = QPSBGD.as_published,
    steps: int = STEPS,
    device: str = "cpu",
) -> list[Tensor]:
    """The latent weights of every layer after some steps."""
    make, shape = NETWORKS[network]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make().to(device)
    optimizer = make_optimizer(binary_parameters(model), lr=3e-3)
    for x, y in islice(batches(shape), steps):
        out, y = model(x.to(device)), y.to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(out, y[:: len(y) // len(out)]).backward()
        optimizer.step()
    return [weight.detach().clone() for _, weight in binary_parameters(model)]
