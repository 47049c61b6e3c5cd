"""Trains a binary network on scikit-learn's digits with QP-SBGD and three baselines.

    pip install . scikit-learn
    python examples/quickstart.py

Each method tries four learning rates on held-out images; the best then trains with three fresh seeds.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad.baselines import BinaryConnect, SignSGD

Data = tuple[Tensor, Tensor]
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
METHODS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[float, ...]]] = {
    "BinaryConnect SGD": (
        partial(BinaryConnect, optimizer=torch.optim.SGD, momentum=0.9),
        (0.03, 0.1, 0.3, 1),
    ),
    "BinaryConnect signSGD": (partial(SignSGD, momentum=0.9), (1e-4, 3e-4, 1e-3, 3e-3)),
    "BinaryConnect Adam": (partial(BinaryConnect, optimizer=torch.optim.Adam), (3e-4, 1e-3, 3e-3, 1e-2)),
    "QP-SBGD": (QPSBGD, RATES),
}


def network() -> nn.Module:
    return nn.Sequential(
        BinaryLinear(64, 128), nn.Hardtanh(), BinaryLinear(128, 128), nn.Hardtanh(), BinaryLinear(128, 10)
    )


def train(method: Callable[..., torch.optim.Optimizer], lr: float, seed: int, data: Data) -> nn.Module:
    torch.manual_seed(seed)
    x, y = data
    model = network()
    optimizer = method(binary_parameters(model), lr=lr)
    epochs, batch = 6, 50
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * -(-len(x) // batch))
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            scheduler.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    x, y = data
    return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    begin = time.perf_counter()
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings
    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 8 - 1  # grey values 0 to 16
    y = torch.tensor(digits.target)[order]
    fit, held_out, test = [(x[part], y[part]) for part in (slice(1000), slice(1000, 1300), slice(1300, None))]
    both = (x[:1300], y[:1300])

    print("digits, 64-128-128-10, every weight -1 or +1, no BatchNorm; mean of 3 seeds")
    print(f"{'method':24} {'lr':>6} {'test accuracy':>14} {'lowest':>8} {'highest':>8}")
    for name, (method, rates) in METHODS.items():
        lr = max(rates, key=lambda rate: accuracy(train(method, rate, seed=0, data=fit), held_out))
        scores = [accuracy(train(method, lr, seed, both), test) for seed in (1, 2, 3)]
        print(f"{name:24} {lr:6g} {statistics.mean(scores):14.3f} {min(scores):8.3f} {max(scores):8.3f}")
    print(f"{time.perf_counter() - begin:.0f} seconds")


if __name__ == "__main__":
    main()
