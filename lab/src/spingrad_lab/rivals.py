"""Optimizers that QP-SBGD is compared with and that are not part of the library."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spingrad import BinaryQuadratic
from spingrad.nn.sign import spins_of
from spingrad.recording import stop_recording
from spingrad.solvers import Solution, Solver
from spingrad_lab.methods import Params


class Muon(Optimizer):
    """:class:`torch.optim.Muon` for weights of any shape: a convolution's are a matrix of units by fan-in."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.flat = {w: nn.Parameter(w.detach().flatten(1)) for w in self._weights()}  # the same memory
        self.inner = torch.optim.Muon(list(self.flat.values()), lr=lr, weight_decay=0)

    def _weights(self) -> list[Tensor]:
        return [w for group in self.param_groups for w in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for weight, flat in self.flat.items():
            flat.grad = None if weight.grad is None else weight.grad.flatten(1)
        return self.inner.step(closure)


class SignOfMuon(Optimizer):
    """Every latent weight moves by ``lr`` against the sign of Muon's update, as in signSGD."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.update = {w: nn.Parameter(torch.zeros_like(w)) for g in self.param_groups for w in g["params"]}
        self.inner = Muon(list(self.update.items()), lr=1.0)
        for weight in self.update:
            stop_recording(weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for weight, update in self.update.items():
            update.grad = weight.grad
            update.zero_()
        self.inner.step()
        for weight, update in self.update.items():
            weight.add_(spins_of(update), alpha=self.param_groups[0]["lr"]).clamp_(-1, 1)


class FOOF(Solver):
    """The signs of ``(ZᵀZ + damping)⁻¹ H``: the same second-order step as QP-SBGD, rounded without feedback.

    Benzing, *Gradient descent on neurons and its link to approximate second-order optimization*, 2022.

    Args:
        damping: In units of the mean eigenvalue of ``ZᵀZ``.
    """

    def __init__(self, damping: float = 1.0) -> None:
        self.damping = damping

    def solve(self, problem: BinaryQuadratic, *, seed: int = 0) -> Solution:
        gram = problem.rows.gram()
        gram.diagonal().add_(self.damping * gram.diagonal().mean())
        return Solution(problem, spins_of(torch.cholesky_solve(problem.H, torch.linalg.cholesky(gram))))


class Windowed(torch.optim.Adam):
    """Adam with gradients that pass only where a latent weight is within ±1, in place of a clamp."""

    def __init__(self, params: Params, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for weight in group["params"]:
                stop_recording(weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.mul_(weight.abs() <= 1)
        return super().step(closure)
