"""Networks and layer problems to time, and clocks that give all candidates the same conditions."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, BinaryQuadratic, binary_parameters
from spingrad.optim.functional import problem_of
from spingrad.recording import record_of
from spingrad_lab.data import mnist
from spingrad_lab.methods import ONE_BATCH


def processor_seconds(call: Callable[[], object], at_least: float = 0.3, calls: int = 5) -> float:
    """Median processor time of a call, over some calls and some time, after one that warms up."""
    call()
    taken: list[float] = []
    deadline = time.process_time() + at_least
    while len(taken) < calls or time.process_time() < deadline:
        begin = time.process_time()
        call()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def exponent(points: pd.Series) -> float:
    """Slope of a straight line through points on log-log axes; the sizes are their index.

    Example:
        >>> sizes = (256, 512, 1024)
        >>> round(exponent(pd.Series([5e-9 * size**1.5 for size in sizes], sizes)), 3)
        1.5
    """
    return float(np.polyfit(np.log(points.index), np.log(points), 1)[0])


def larger_half(points: pd.Series) -> pd.Series:
    """The larger half of the sizes, at least two: there the work dominates what every call costs."""
    points = points.sort_index()
    return points.iloc[min(len(points) // 2, len(points) - 2) :]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """All training images of MNIST with a root mean square of one, and their labels."""
    data = mnist("train")
    return data.pixels() / data.pixels().square().mean().sqrt(), data.labels


def batch(size: int, step: int) -> tuple[Tensor, Tensor]:
    """The images and labels of one step, the same for every candidate."""
    x, y = digits()
    rows = torch.randint(len(x), (size,), generator=torch.Generator().manual_seed(step))
    return x[rows], y[rows]


def network(sizes: Sequence[int]) -> nn.Sequential:
    """A network of binary layers with hardtanh between them, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(sizes):
            layers += [BinaryLinear(fan_in, fan_out), nn.Hardtanh()]
    return nn.Sequential(*layers[:-1])


@cache
def recorded_problems(sizes: tuple[int, ...], batch_size: int, steps: int) -> list[BinaryQuadratic]:
    """The problems of all layers except the last after some steps; units without a target are left out."""
    model = network(sizes)
    optimizer = QPSBGD(binary_parameters(model), **ONE_BATCH)
    for step in range(steps + 1):
        x, y = batch(batch_size, step)
        nn.functional.cross_entropy(model(x), y).backward()
        if step < steps:
            optimizer.step()
    problems = []
    for _, weight in binary_parameters(model)[:-1]:
        record = record_of(weight)
        assert record is not None
        problem = problem_of(record.layers()[0], target_rms=1.0)
        moving = ~problem.idle
        problems.append(BinaryQuadratic.of(problem.rows, problem.H[:, moving], problem.offset[moving]))
    return problems
