"""A network and its data, and how any method trains it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spingrad import BinaryLayer, binary_parameters, real_parameters
from spingrad.baselines import ProxQuant
from spingrad_lab.methods import METHODS, Method, Reading, Settings

Loss = Callable[[Any], Tensor]
"""The loss of a batch, as a function of a network or of a function that computes as one."""


class Task(ABC):
    """A network and its data.

    An instance holds the data of one seed. ``tuning`` keeps validation data out of the training set;
    otherwise all of it is trained on, and the test set is scored.
    """

    epochs: int
    exact = True
    """Whether the fan-ins are small enough for the exact solver."""
    encoder_lr = 0.01
    """Learning rate of Adam for real-valued parameters, the same beside every method."""

    @abstractmethod
    def __init__(self, seed: int, tuning: bool, quick: bool) -> None: ...

    @abstractmethod
    def network(self) -> nn.Module: ...

    @abstractmethod
    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        """The losses of one epoch, each a function of the network."""

    @abstractmethod
    def scores(self, model: nn.Module) -> dict[str, float]:
        """Figures of merit of a network, among them the one that chooses settings."""

    def watched(self, model: nn.Module) -> dict[str, float]:
        """The scores that a curve shows; fewer than all where scoring is slow."""
        return self.scores(model)

    def logistic(self) -> dict[str, float]:
        """Scores of logistic regression on the same features."""
        raise NotImplementedError

    def usual_gcn(self) -> dict[str, float]:
        """Scores of the usual graph network with real weights, for tasks on citation graphs."""
        raise NotImplementedError


class VectorTask(Task):
    """A task whose data are vectors: ``train`` and ``test`` (or validation) pairs of inputs and classes."""

    batch: int
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        x, y = self.train
        for rows in torch.randperm(len(x)).split(self.batch):
            yield lambda model, rows=rows: loss_of(model(x[rows]), y[rows])  # type: ignore[misc]

    def scores(self, model: nn.Module) -> dict[str, float]:
        scores = {}
        for part, (x, y) in {"train": self.train, "test": self.test}.items():
            out = torch.cat([model(rows) for rows in x.split(10_000)])
            scores[f"{part}_loss"] = float(loss_of(out, y))
            scores[f"{part}_accuracy"] = accuracy_of(out, y)
        return scores

    def logistic(self) -> dict[str, float]:
        return logistic_scores(self.train, self.test)


def logistic_scores(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """scikit-learn's logistic regression, with an intercept and next to no regularization."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    model = LogisticRegression(C=10.0, max_iter=2_000).fit(*(t.numpy() for t in train))
    scores = {}
    for part, (x, y) in {"train": train, "test": test}.items():
        likely = model.predict_proba(x.numpy())
        scores[f"{part}_loss"] = float(log_loss(y.numpy(), likely, labels=model.classes_))
        scores[f"{part}_accuracy"] = float((model.classes_[likely.argmax(1)] == y.numpy()).mean())
    return scores


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Cross entropy; a single output is the logit of class 1, as in the paper."""
    if out.shape[1] == 1:
        return nn.functional.binary_cross_entropy_with_logits(out[:, 0], y.to(out.dtype))
    return nn.functional.cross_entropy(out, y)


def accuracy_of(out: Tensor, y: Tensor) -> float:
    predicted = (out[:, 0] > 0).long() if out.shape[1] == 1 else out.argmax(1)
    return float((predicted == y).float().mean())


def as_read(network: nn.Module, reading: Reading) -> nn.Module:
    """The network, with layers that divide their outputs by √fan-in or do not."""
    if not reading.scale:
        for layer in network.modules():
            if isinstance(layer, BinaryLayer):
                layer.scale = 1.0
    return network


def loss_as_read(loss: Loss, reading: Reading) -> Loss:
    """The loss of a batch: as it is, which is a mean over rows, or their sum."""

    def total(network: nn.Module) -> Tensor:
        counts = []

        def counted(*inputs: Tensor) -> Tensor:
            out: Tensor = network(*inputs)
            counts.append(len(out))
            return out

        return loss(counted) * sum(counts)

    return loss if reading.reduction == "mean" else total


def endless_batches(task: Task) -> Iterator[Callable[[nn.Module], Tensor]]:
    """The losses of one epoch after another."""
    while True:
        yield from task.batches()


def known(method: str | Method) -> Method:
    """A method by its name, or as it is."""
    return METHODS[method] if isinstance(method, str) else method


def optimizers(
    network: nn.Module, task: Task, method: str | Method, settings: Settings, seed: int
) -> list[torch.optim.Optimizer]:
    """The method's for the binary weights, and Adam for the real-valued parameters if there are any."""
    found = [known(method).make(binary_parameters(network), seed=seed, **settings)]
    if real := [p for _, p in real_parameters(network)]:
        found.append(torch.optim.Adam(real, lr=task.encoder_lr))
    return found


def take_step(
    network: nn.Module, loss: Callable[[nn.Module], Tensor], steppers: Sequence[torch.optim.Optimizer]
) -> None:
    for stepper in steppers:
        stepper.zero_grad()
    loss(network).backward()
    for stepper in steppers:
        stepper.step()


def train(task: Task, method: str | Method, settings: Settings, seed: int, watch: int = 0) -> dict[str, Any]:
    """Train a network from scratch; the scores at the end and, if asked, along the way.

    Binary weights go to the method, real-valued parameters to Adam; both learning rates follow a cosine. The
    scores are those of the network in the method's reading: a loss of unscaled layers is not comparable with
    that of scaled ones, an accuracy is.
    """
    reading = known(method).reading
    network = as_read(task.network(), reading)
    steppers = optimizers(network, task, method, settings, seed)
    total = task.epochs * sum(1 for _ in task.batches())
    cosine = [torch.optim.lr_scheduler.CosineAnnealingLR(s, T_max=total) for s in steppers]
    moments = set(np.linspace(0, task.epochs, watch + 1).astype(int)[1:]) if watch else set()
    curves: dict[str, list[float]] = {}
    steps: list[int] = []
    for epoch in range(1, task.epochs + 1):
        network.train()
        for loss in task.batches():
            take_step(network, loss_as_read(loss, reading), steppers)
            for schedule in cosine:
                schedule.step()
        if epoch in moments:
            steps.append(epoch)
            for name, value in _finite(task.watched, network).items():
                curves.setdefault(name, []).append(round(value, 5))
    if isinstance(steppers[0], ProxQuant) and steppers[0].regularization:
        steppers[0].project()
    metrics: dict[str, Any] = dict(_finite(task.scores, network))
    return metrics | {f"{name} curve": {"x": steps, "y": curve} for name, curve in curves.items()}


@torch.no_grad()
def _finite(scores: Callable[[nn.Module], dict[str, float]], network: nn.Module) -> dict[str, float]:
    """Scores of a network in evaluation mode; a loss that is not finite becomes 1e9, which JSON can hold."""
    return {k: round(v, 6) if math.isfinite(v) else 1e9 for k, v in scores(network.eval()).items()}
