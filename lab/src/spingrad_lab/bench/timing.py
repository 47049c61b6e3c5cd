"""Networks and layer problems to time, and clocks that give all candidates the same conditions."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, BinaryQuadratic, binary_parameters
from spingrad.optim import capture
from spingrad_lab.data import mnist
from spingrad_lab.methods import ONE_BATCH
from spingrad_lab.posed import moving, target_squares


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
    """The problems of all layers except the last after some steps, without idle units; offset ``‖V‖²``."""
    model = network(sizes)
    optimizer = QPSBGD(binary_parameters(model), **ONE_BATCH)
    with capture(optimizer, steps=[steps]) as problems:
        for step in range(steps + 1):
            x, y = batch(batch_size, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return [moving(replace(own, offset=target_squares(own))) for own in problems[:-1]]
