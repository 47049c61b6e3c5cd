"""What several test files share: settings, and MNIST read from the data folder."""

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

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
