"""MNIST and Fashion-MNIST from their original files."""

import gzip
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spingrad_lab.data.files import Known, fetch

Split = Literal["train", "test"]

_PREFIX = {"train": "train", "test": "t10k"}
_SOURCE = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
}
_KNOWN = {
    "mnist/train-images": Known(
        9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
    ),
    "mnist/train-labels": Known(28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    "mnist/t10k-images": Known(1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    "mnist/t10k-labels": Known(4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    "fashion-mnist/train-images": Known(
        26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
    ),
    "fashion-mnist/train-labels": Known(
        29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
    ),
    "fashion-mnist/t10k-images": Known(
        4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
    ),
    "fashion-mnist/t10k-labels": Known(
        5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
    ),
}


class Images(NamedTuple):
    """Images as bytes, shape ``(count, …)``, and their classes, shape ``(count,)``."""

    images: Tensor
    labels: Tensor

    def pixels(self) -> Tensor:
        """Images as floats in [0, 1], flattened to one row each."""
        return self.images.flatten(1).float() / 255


def mnist(split: Split) -> Images:
    """Handwritten digits, 60,000 to train and 10,000 to test (LeCun, Cortes and Burges)."""
    return _load("mnist", split)


def fashion_mnist(split: Split) -> Images:
    """Articles of clothing, 60,000 to train and 10,000 to test (Xiao, Rasul and Vollgraf)."""
    return _load("fashion-mnist", split)


def _load(name: str, split: Split) -> Images:
    if split not in _PREFIX:
        raise ValueError(f'split is "train" or "test", got {split!r}')
    images = _read(name, f"{_PREFIX[split]}-images", dimensions=3)
    labels = _read(name, f"{_PREFIX[split]}-labels", dimensions=1)
    return Images(images, labels.long())


def _read(name: str, part: str, dimensions: int) -> Tensor:
    """Parse an IDX file: magic number, sizes, bytes."""
    file = f"{part}-idx{dimensions}-ubyte.gz"
    raw = gzip.decompress(fetch(f"{name}/{file}", _KNOWN[f"{name}/{part}"], _SOURCE[name] + file))
    shape = np.frombuffer(raw, ">u4", count=dimensions, offset=4).tolist()
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).copy()).view(shape)
