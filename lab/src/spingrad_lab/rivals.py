"""Optimizers that QP-SBGD is compared with and that are not part of the library."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spingrad import BinaryQuadratic
from spingrad.nn.sign import spins_of
from spingrad.solvers import Solution, Solver
from spingrad_lab.methods import Params

MOMENTUM, QUINTIC = 0.95, (3.4445, -4.775, 2.0315)  # as in torch.optim.Muon


class Muon(Optimizer):
    """As :class:`torch.optim.Muon`, for weights of any shape; a convolution's are a row for each unit.

    It computes in single precision. Torch's own takes bfloat16, which many processors only emulate: wide
    layers then take more than three times as long.
    """

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _loss(closure)
        for weight, update, lr in self._updates():
            weight.sub_(update, alpha=lr)
        return loss

    def _updates(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Each weight that has a gradient, its update and the learning rate."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                    average.lerp_(weight.grad, 1 - MOMENTUM)
                    update = _orthogonal(weight.grad.lerp(average, MOMENTUM).flatten(1))
                    yield weight, update.view_as(weight), group["lr"]


def _orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of Newton and Schulz towards the nearest orthogonal matrix, larger if it is tall."""
    rows, columns = matrix.shape
    X = matrix.T if rows > columns else matrix
    X = X / X.norm().clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        gram = X @ X.T
        X = torch.addmm(X, torch.addmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return (X.T if rows > columns else X) * math.sqrt(max(1, rows / columns))


class SignOfMuon(Muon):
    """Every latent weight moves by ``lr`` against the sign of Muon's update, as in signSGD."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _loss(closure)
        for weight, update, lr in self._updates():
            weight.sub_(spins_of(update), alpha=lr).clamp_(-1, 1)
        return loss


def _loss(closure: Callable[[], Any] | None) -> Any:
    with torch.enable_grad():
        return None if closure is None else closure()


class FOOF(Solver):
    """The signs of ``(ZᵀZ + damping)⁻¹ H``: the same second-order step as QP-SBGD, rounded without feedback.

    Benzing, *Gradient descent on neurons and its link to approximate second-order optimization*, 2022.

    Args:
        damping: In units of the mean eigenvalue of ``ZᵀZ``.
    """

    def __init__(self, damping: float = 1.0) -> None:
        self.damping = damping

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        gram = problem.gram()
        gram.diagonal().add_(self.damping * gram.diagonal().mean())
        return Solution(problem, spins_of(torch.cholesky_solve(problem.H, torch.linalg.cholesky(gram))))


class Windowed(torch.optim.Adam):
    """Adam with gradients that pass only where a latent weight is within ±1, in place of a clamp."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _loss(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.mul_(weight.abs() <= 1)
        super().step()
        return loss
