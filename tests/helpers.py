"""What several test files share: settings, and MNIST read from the data folder."""

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from spingrad import BinaryQuadratic
from spingrad.kernels import plain
from spingrad.kernels.passes import lengths
from spingrad.optim import functional
from spingrad.optim.qpsbgd import kind_of
from spingrad.scaling import size_of
from spingrad.sketch import SLOTS, Kind, sketch_of

ONE_BATCH = {"target_rms": 1.0, "momentum": 0.0, "rank": None}
"""A step without memory, by all rows of the batch."""


def mnist(split: str) -> tuple[Tensor, Tensor]:
    """Bytes of shape (count, 28, 28), and labels."""
    prefix = {"train": "train", "test": "t10k"}[split]
    return _idx(f"{prefix}-images-idx3-ubyte.gz"), _idx(f"{prefix}-labels-idx1-ubyte.gz").long()


def _idx(name: str) -> Tensor:
    raw = gzip.decompress((Path(os.environ["SPINGRAD_DATA"]) / "mnist" / name).read_bytes())
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">u4", count=dimensions, offset=4).tolist()
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).copy()).view(shape)


def sketch_shape(kind: Kind, n: int, units: int, groups: int = 1) -> torch.Size:
    """Of a layer of ``n`` inputs, and of ``units`` in each group."""
    rows = min(SLOTS, 4 * n) if kind == "rows" else n
    return torch.Size([groups, rows + 1, n + 2 * units if kind == "published" else n])


def posed(x: Tensor, grad: Tensor, **settings) -> BinaryQuadratic:
    """The problem of one batch alone, of inputs ``(r, n)`` and output gradients ``(r, m)``.

    Settings are those of ``QPSBGD``, by default :data:`ONE_BATCH`.
    """
    settings = {**ONE_BATCH, "rows": "uniform", "whitening": 0.0, **settings}
    kind, target_rms = kind_of(settings), settings["target_rms"]
    sketch = sketch_of(x, grad, sketch_shape(kind, x.shape[1], grad.shape[1]), x.dtype, kind, ())
    scaled = functional.scale(sketch, kind, grad.shape[1], settings["rank"], target_rms)
    linear = grad.T @ x
    if kind == "published":
        linear, _ = functional.published(sketch, linear)
    length, reach = lengths(linear), scaled.reach.expand(len(linear))
    size = reach if target_rms is None else size_of(length, reach.double())
    H = (linear * size[:, None]).to(x)
    scaled = functional.Quadratic(*(own.to(x) for own in scaled))
    idle = (length == 0).all().expand(len(linear)) if target_rms is None else size == 0
    [problem] = functional.pose(scaled, H, idle, settings["whitening"])
    return problem


def random_target(r, n, m, seed, rank=None, dtype=torch.float32):
    """``Z`` and ``V`` of ``spingrad.testing.random_problem``."""
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randn(r, n, generator=generator, dtype=torch.float64)
    if rank is not None:
        Z = torch.randn(r, rank, generator=generator, dtype=torch.float64) @ Z[:rank]
    V = torch.randn(r, m, generator=generator, dtype=torch.float64)
    return Z.to(dtype) / n**0.5, V.to(dtype)


@contextmanager
def computed_by(module=plain) -> Iterator[None]:
    """The operators that solvers call, computed by this module of ``spingrad.kernels``."""
    with (
        patch("spingrad.solvers.block_descent.descend_", module.descend_),
        patch("spingrad.solvers.annealing.anneal_", module.anneal_),
    ):
        yield
