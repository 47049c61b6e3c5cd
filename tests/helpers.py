"""What several test files share: settings, and MNIST read from the data folder."""

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spingrad import BinaryQuadratic, LayerRecord
from spingrad.optim.functional import problem_of
from spingrad.rows import DenseRows

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


def dense_record(x: Tensor, grad: Tensor) -> LayerRecord:
    return LayerRecord(DenseRows(x), grad)


def posed(record: LayerRecord, **settings) -> BinaryQuadratic:
    """The problem of one batch alone."""
    return problem_of(record, **{"target_rms": 1.0, **settings})


def random_target(r, n, m, seed, rank=None, dtype=torch.float32):
    """``Z`` and ``V`` of ``spingrad.testing.random_problem``."""
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randn(r, n, generator=generator, dtype=torch.float64)
    if rank is not None:
        Z = torch.randn(r, rank, generator=generator, dtype=torch.float64) @ Z[:rank]
    V = torch.randn(r, m, generator=generator, dtype=torch.float64)
    return Z.to(dtype) / n**0.5, V.to(dtype)
