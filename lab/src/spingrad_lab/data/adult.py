"""Adult in its LIBSVM form "a1a": 123 binary features, income above or below 50K."""

from typing import NamedTuple

import torch
from torch import Tensor

from spingrad_lab.data.files import Known, fetch
from spingrad_lab.data.mnist import Split

_FILE = {"train": "a1a", "test": "a1a.t"}
_SOURCE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_KNOWN = {
    "a1a": Known(114_818, "eb54c45f1bdb51286f803dd092eb8202b44637a858fc6c4e533a2d64a0d94b4e"),
    "a1a.t": Known(2_215_057, "0212d0c4a3996fe6fb6a0ab54033d9f4fa4b60369b6e3bb141821d9ffc40c04d"),
}


class Table(NamedTuple):
    """Features as bits, shape ``(count, width)``, and classes, shape ``(count,)``."""

    features: Tensor
    labels: Tensor


def adult(split: Split) -> Table:
    """Census incomes, 1,605 to train and 30,956 to test; class 1 earns above 50K (Platt's encoding)."""
    if split not in _FILE:
        raise ValueError(f'split is "train" or "test", got {split!r}')
    file = _FILE[split]
    text = fetch(f"adult/{file}", _KNOWN[file], _SOURCE + file).decode("ascii")
    lines = [line.split() for line in text.splitlines()]  # "-1 3:1 11:1 ...", every value is 1
    ones = [(i, int(entry.split(":")[0]) - 1) for i, line in enumerate(lines) for entry in line[1:]]
    features = torch.zeros(len(lines), 123)
    features[torch.tensor(ones).unbind(1)] = 1
    return Table(features, torch.tensor([int(line[0]) > 0 for line in lines]).long())
