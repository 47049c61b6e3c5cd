"""A trained real network, rounded to ±1 by the projection, and trained on from there."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryQuadratic, binary_parameters, convert, real_parameters
from spingrad.rounding import round_model
from spingrad.solvers import AnnealingSolver, Solution, Solver
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded
from spingrad_lab.tasks.images import pixels

SEEDS, BATCH, CALIBRATION, HELD_OUT = 5, 200, 2_000, 5_000
REAL_EPOCHS, RATES = 3, (1e-4, 5e-4)
Data = tuple[Tensor, Tensor]


class Start(Solver):
    """The start itself: Babai's spins."""

    keeps_starts = True

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        assert initial is not None
        return Solution(problem, initial)


ROUNDED: dict[str, Callable[[], Solver | None]] = {
    "Babai": Start,
    "Babai, then descent": lambda: None,
    "Babai, then annealing": lambda: AnnealingSolver(num_reads=5),
}

LABELS = (
    "real", "scaled sign", *ROUNDED, "rounded, then QP-SBGD, 1 epoch", "rounded, then Adam, 1 epoch",
    "from scratch, QP-SBGD, 1 epoch", "from scratch, QP-SBGD, 5 epochs",
)  # fmt: skip


def _network(name: str) -> nn.Sequential:
    if name == "784-256-256-10":
        sizes = nn.Linear(784, 256), nn.Hardtanh(), nn.Linear(256, 256), nn.Hardtanh(), nn.Linear(256, 10)
        return nn.Sequential(*sizes)
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 5, stride=2), nn.Hardtanh(),
        nn.Conv2d(16, 32, 5, stride=2), nn.Hardtanh(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


class Rounding(Experiment):
    """Rounded accuracy by three ways to round, then one epoch from there beside training from scratch."""

    title = "Rounding a trained network"
    source = "beyond the paper"
    revision = 2  # a convolution's directions come from patches of all images

    def plan(self, lab: Lab) -> None:
        networks = ("784-256-256-10", "convolutional")
        seeds = range(lab.seeds or (1 if lab.quick else SEEDS))
        lab.run([{"network": name, "seed": seed} for name in networks for seed in seeds])

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            return _compute(job["network"], job["quick"])

    def show(self, runs: pd.DataFrame) -> Section:
        tables = []
        for name, own in groups(runs, "network"):
            rows = []
            for label in LABELS:
                score = str(estimate(own[f"accuracy, {label}"].astype(float)))
                rows.append([label, score, _rates(run.get(label) for run in own["rates"])])
            header = ["network", "test accuracy", "chosen rates"]
            tables.append(Table(header, rows, f"{name}; seeds: {len(own)}"))
        return Section(list(_NOTES), tables)


def _rates(chosen: Iterable[float | None]) -> str:
    """How often each learning rate was chosen."""
    counts = Counter(lr for lr in chosen if lr is not None)
    return ", ".join(f"{lr:g} ({count} ×)" for lr, count in sorted(counts.items())) or "–"


def _compute(name: str, quick: bool) -> dict[str, Any]:
    x, y = pixels("mnist", "train")
    test = pixels("mnist", "test")
    count = 1_000 if quick else len(x) - HELD_OUT
    train, held_out = (x[:count], y[:count]), (x[-HELD_OUT:], y[-HELD_OUT:])
    real: nn.Module = _network(name)
    optimizer = torch.optim.Adam(real.parameters(), 1e-3)
    for _ in range(1 if quick else REAL_EPOCHS):
        _epoch(real, train, [optimizer])
    fresh = convert(_network(name))
    found = {"real": _accuracy(real, test)}
    found["scaled sign"] = _accuracy(convert(copy.deepcopy(real), scale="mean"), test)
    rounded = real
    for label, make in ROUNDED.items():
        model, layers = round_model(real, x[:CALIBRATION], solver=make())
        found[label] = _accuracy(model, test)
        if label == "Babai, then descent":
            rounded, errors = model, [layer.error for layer in layers]
    rates = RATES[:1] if quick else RATES
    trained: dict[str, tuple[nn.Module, Callable[..., list[Any]]]] = {
        "rounded, then QP-SBGD, 1 epoch": (rounded, _qpsbgd),
        "rounded, then Adam, 1 epoch": (rounded, _adam),
        "from scratch, QP-SBGD, 1 epoch": (fresh, _qpsbgd),
    }
    chosen: dict[str, float] = {}
    for label, (start, make_optimizers) in trained.items():
        models = {lr: _trained(start, make_optimizers, lr, 1, train) for lr in rates}
        chosen[label] = max(models, key=lambda lr: _accuracy(models[lr], held_out))
        found[label] = _accuracy(models[chosen[label]], test)
    long = _trained(fresh, _qpsbgd, chosen["from scratch, QP-SBGD, 1 epoch"], 1 if quick else 5, train)
    found["from scratch, QP-SBGD, 5 epochs"] = _accuracy(long, test)
    metrics: dict[str, Any] = {f"accuracy, {label}": round(value, 5) for label, value in found.items()}
    return metrics | {"errors": [round(own, 6) for own in errors], "rates": chosen}


def _trained(
    start: nn.Module, make: Callable[..., list[Any]], lr: float, epochs: int, data: Data
) -> nn.Module:
    model = copy.deepcopy(start).train()
    optimizers = make(model, lr)
    for _ in range(epochs):
        _epoch(model, data, optimizers)
    return model


def _qpsbgd(model: nn.Module, lr: float) -> list[Any]:
    return [QPSBGD(binary_parameters(model), lr=lr), _for_biases(model)]


def _adam(model: nn.Module, lr: float) -> list[Any]:
    return [torch.optim.Adam([own for _, own in binary_parameters(model)], lr), _for_biases(model)]


def _for_biases(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([own for _, own in real_parameters(model)], 1e-3)


def _epoch(model: nn.Module, data: Data, optimizers: list[Any]) -> None:
    x, y = data
    for rows in torch.randperm(len(x)).split(BATCH):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        for optimizer in optimizers:
            optimizer.step()


@torch.no_grad()
def _accuracy(model: nn.Module, data: Data) -> float:
    training = model.training
    out = torch.cat([model.eval()(rows) for rows in data[0].split(5_000)])
    model.train(training)
    return float((out.argmax(1) == data[1]).float().mean())


_NOTES = (
    "A real network trains for three epochs with Adam on MNIST, in batches of 200; 5,000 training images are "
    "held out. It is rounded on 2,000 training images, every layer included. Then it trains on for one epoch "
    "by QP-SBGD, or by Adam with straight-through gradients; Adam trains the biases in both. Learning rates "
    "are chosen among two for each method on the held-out images; five epochs take the rate of one. Networks "
    "from scratch have the default scale of binary layers.",
)
