"""Real projection problems: captured while a network trains on MNIST with the default optimizer."""

from functools import cache

from torch import Tensor, nn

from spingrad import QPSBGD, BinaryQuadratic, binary_parameters
from spingrad.optim import capture
from spingrad_lab.bench.timing import batch, network
from spingrad_lab.posed import moving

WIDE = (784, 512, 512, 10)
NARROW = (784, 64, 48, 32, 24, 16, 10)
BATCH = 100


@cache
def captured(sizes: tuple[int, ...], steps: tuple[int, ...]) -> list[BinaryQuadratic]:
    """The problems of all layers in some steps, without idle units, in the order of steps and layers."""
    model = network(sizes)
    optimizer = QPSBGD(binary_parameters(model))
    with capture(optimizer, steps) as problems:
        for step in range(max(steps) + 1):
            x, y = batch(BATCH, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return [moving(problem) for problem in problems]


def energy(problem: BinaryQuadratic, spins: Tensor) -> Tensor:
    """The energy of each unit, in double precision."""
    return problem.double().energy(spins.double())
