"""CIFAR-10, from the binary version's archive or from lossless mosaics of its images."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spingrad_lab.data.files import Known, fetch
from spingrad_lab.data.mnist import Images, Split

_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_ARCHIVE = Known(170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd")
_KNOWN = {
    "data_batch_1.labels.u8": Known(
        10_000, "d829dbdf32167c9d7b3687cee66d92d80d46c441308b5aca0d11e8b69e27dac9"
    ),
    "data_batch_1.webp": Known(
        17_112_262, "7d659541ed95237ea4e04e2d33389e1104c1953861748ff53d660d6c8d6654f9"
    ),
    "data_batch_2.labels.u8": Known(
        10_000, "5d18f7371ed35ea9ade77952fe958b0660a45cd6c8b8a8970030f21612cfd7e3"
    ),
    "data_batch_2.webp": Known(
        17_153_410, "51af9519a93c50876c6e10004965e1e5959387da1f8d7b96f16f7ca26219af79"
    ),
    "data_batch_3.labels.u8": Known(
        10_000, "32cf77b0ee2e790b1c4384d2d82e42dc1571b87e67f6da8f444b2725b2973f65"
    ),
    "data_batch_3.webp": Known(
        17_163_420, "3c724790d972e645054d7cc995e1535ee05064097410e5a14c537c7145a70db8"
    ),
    "data_batch_4.labels.u8": Known(
        10_000, "d2815e3f8f656272864920fc0edde56b04ec9cf81bf397c0dd3069f4aea51aeb"
    ),
    "data_batch_4.webp": Known(
        17_134_122, "7e1e0d309a2ac32bb67831184e997f88a9e74324a01f95cc481819c6955db2b3"
    ),
    "data_batch_5.labels.u8": Known(
        10_000, "2ddf3ab27d5d04409c94ce7b56849c243129c10de1058ae0bfe14c77e934800c"
    ),
    "data_batch_5.webp": Known(
        17_114_608, "1d3f867bf1d6f975111042b2a5f839fd80c93de1c03f75c667d7840bd55da85c"
    ),
    "test_batch.labels.u8": Known(10_000, "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"),
    "test_batch.webp": Known(17_144_124, "df199aec7516a004a23ad02816a63a368d2208347ff1c4011eaa91a2503201fc"),
}
_SIDE, _BYTES = 100, 3 * 32 * 32  # images along a side of a mosaic, bytes of one image


def cifar10(split: Split) -> Images:
    """Colour images of ten kinds of things, 50,000 to train and 10,000 to test (Krizhevsky).

    Read from ``$SPINGRAD_DATA/cifar10`` if it has the mosaics (100 × 100 images per WebP file, and a file of
    labels), otherwise from the archive of the binary version.

    Returns:
        Bytes of shape ``(count, 3, 32, 32)`` and classes.
    """
    if split not in _BATCHES:
        raise ValueError(f'split is "train" or "test", got {split!r}')
    folder = Path(os.environ.get("SPINGRAD_DATA", "")) / "cifar10"
    read = _mosaic if (folder / "test_batch.webp").is_file() else _binary
    batches = [read(name) for name in _BATCHES[split]]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return Images(images, labels.long())


def _mosaic(name: str) -> tuple[Tensor, Tensor]:
    from PIL import Image

    files = [f"cifar10/{name}.webp", f"cifar10/{name}.labels.u8"]
    image, labels = (fetch(file, _KNOWN[file.removeprefix("cifar10/")], _SOURCE) for file in files)
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
    tiles = pixels.reshape(_SIDE, 32, _SIDE, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)
    return torch.from_numpy(tiles.copy()), torch.from_numpy(np.frombuffer(labels, np.uint8).copy())


def _binary(name: str) -> tuple[Tensor, Tensor]:
    archive = fetch("cifar10/cifar-10-binary.tar.gz", _ARCHIVE, _SOURCE)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile(f"cifar-10-batches-bin/{name}.bin")
        assert member is not None, f"the archive has no {name}.bin"
        records = np.frombuffer(member.read(), np.uint8).reshape(-1, 1 + _BYTES)
    images, labels = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
    return torch.from_numpy(images.copy()), torch.from_numpy(labels.copy())
