"""What QP-SBGD is measured against: other ways to train the same binary layers."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spingrad.nn.sign import spins_of
from spingrad.optim.qpsbgd import Params, evaluate


class _Wrapped(Optimizer):
    """A torch optimizer whose step is followed by a map of the weights."""

    def __init__(self, params: Params, optimizer: type[Optimizer], **kwargs: Any) -> None:
        self.inner = optimizer(params, **kwargs)
        self._share()
        for group in self.param_groups:
            self._begin(group)

    def _share(self) -> None:
        """Share groups and state with the inner optimizer, so that schedulers and checkpoints see them."""
        state = {k: getattr(self.inner, k) for k in ("defaults", "state", "param_groups")}
        Optimizer.__setstate__(self, state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        self._begin(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = self.inner.step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self._map_(weight, group)
        return loss

    def _begin(self, group: dict[str, Any]) -> None:
        _make_binary(group)

    def _map_(self, weight: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in self._kept}

    _kept: tuple[str, ...] = ("inner",)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share()


class BinaryConnect(_Wrapped):
    """Straight-through gradients to any torch optimizer, latent weights clamped to [-1, 1].

    Courbariaux et al., *BinaryConnect*, 2015.

    Args:
        params: Latent weights, as for :class:`~spingrad.QPSBGD`.
        optimizer: A torch optimizer class.
        **kwargs: Passed on to it.

    Example:
        >>> from spingrad import BinaryLinear, binary_parameters
        >>> model = BinaryLinear(4, 2)
        >>> optimizer = BinaryConnect(binary_parameters(model), torch.optim.Adam, lr=1e-3)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    def _map_(self, weight: Tensor, group: dict[str, Any]) -> None:
        weight.clamp_(-1, 1)


class ProxQuant(_Wrapped):
    """Real weights that a growing regulariser pulls to -1 and +1, with a projection at the end.

    After each step of the inner optimizer, every weight moves towards its sign by at most
    ``lr · regularization · t`` at step ``t`` (the proximal map of the W-shaped regulariser). The network
    computes with the real weights until :meth:`project` makes them binary, which ends the training.
    Bai et al., *ProxQuant*, 2019.

    Args:
        params: Latent weights.
        regularization: Growth of the regulariser per step.
        optimizer: A torch optimizer class.
        **kwargs: Passed on to it.

    Example:
        >>> from spingrad import BinaryLinear, binary_parameters
        >>> model = BinaryLinear(4, 2)
        >>> optimizer = ProxQuant(binary_parameters(model), regularization=1e-3, lr=1e-2)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.project()  # after the last step
        >>> model.weight.abs().unique()
        tensor([1.], grad_fn=<Unique2Backward0>)
    """

    _kept = ("inner", "regularization")

    def __init__(
        self,
        params: Params,
        regularization: float = 1e-3,
        optimizer: type[Optimizer] = torch.optim.Adam,
        **kwargs: Any,
    ) -> None:
        if not 0 <= (regularization := float(regularization)) < math.inf:
            raise ValueError(f"regularization is a finite number of at least 0, got {regularization}")
        self.regularization = regularization
        super().__init__(params, optimizer, **kwargs)

    def _begin(self, group: dict[str, Any]) -> None:
        super()._begin(group)
        group.update(steps=0, projected=False)
        _relax(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["steps"] += 1
        return super().step(closure)

    def _map_(self, weight: Tensor, group: dict[str, Any]) -> None:
        strength = float(group["lr"]) * self.regularization * group["steps"]
        target = spins_of(weight)
        distance = weight - target
        weight.copy_(target + distance.sign() * (distance.abs() - strength).clamp_(min=0))

    @torch.no_grad()
    def project(self) -> None:
        """Replace every weight by its sign; from here on the layers are binary."""
        for group in self.param_groups:
            group["projected"] = True
            for weight in group["params"]:
                weight.copy_(spins_of(weight))
            _make_binary(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if not group["projected"]:
                _relax(group)


def _make_binary(group: dict[str, Any]) -> None:
    for weight in group["params"]:
        weight.__dict__.pop("relaxed", None)


def _relax(group: dict[str, Any]) -> None:
    for weight in group["params"]:
        weight.relaxed = True  # read by the layers: compute with the real weights


class SignSGD(Optimizer):
    """``Ω ← clamp(Ω - lr · sign(grad))``: BinaryConnect with signSGD, the paper's nearest rival.

    The sign of zero is +1, also where an input is always zero. Bernstein et al., *signSGD*, 2018.

    Args:
        params: Latent weights.
        lr: Learning rate.
        momentum: Weight of the past in the average of gradients whose sign is taken (Signum).

    Example:
        >>> from spingrad import BinaryLinear, binary_parameters
        >>> model = BinaryLinear(4, 1)
        >>> _ = torch.nn.init.constant_(model.weight, 0.5)
        >>> optimizer = SignSGD(binary_parameters(model), lr=0.1)
        >>> model(torch.ones(8, 4)).mean().backward()
        >>> optimizer.step()
        >>> model.weight.data
        tensor([[0.4000, 0.4000, 0.4000, 0.4000]])
    """

    def __init__(self, params: Params, lr: float = 1e-3, momentum: float = 0.0) -> None:
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr is a finite number of at least 0, got {lr}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is in [0, 1), got {momentum}")
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        _make_binary(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    grad = weight.grad
                    if group["momentum"]:
                        grad = _average(self.state[weight], grad, 1 - group["momentum"])
                    spins = torch.copysign(grad.new_ones(()), grad).add_(grad, alpha=0)  # NaN stays NaN
                    weight.add_(spins, alpha=-float(group["lr"])).clamp_(-1, 1)
        return loss


class Bop(Optimizer):
    """Flip a weight when its average gradient exceeds a threshold; there are no latent weights.

    ``m ← (1 - lr) m + lr · grad``, and ``w ← -w`` where ``|m| > threshold`` and ``m`` has the sign of
    ``w``. Helwegen et al., *Latent weights do not exist*, 2019.

    Args:
        params: Weights; made -1 or +1 at once.
        lr: The adaptivity rate γ of the average (called ``lr`` so that schedulers find it).
        threshold: The threshold τ.

    Example:
        >>> from spingrad import BinaryLinear, binary_parameters
        >>> model = BinaryLinear(4, 1)
        >>> _ = torch.nn.init.constant_(model.weight, 0.5)
        >>> optimizer = Bop(binary_parameters(model), lr=0.1, threshold=1e-3)
        >>> model(torch.ones(8, 4)).mean().backward()
        >>> optimizer.step()  # flips all four
        >>> model.weight.data
        tensor([[-1., -1., -1., -1.]])
    """

    def __init__(self, params: Params, lr: float = 1e-3, threshold: float = 1e-7) -> None:
        if not 0 <= lr <= 1:
            raise ValueError(f"lr, the adaptivity rate, is in [0, 1], got {lr}")
        if not 0 <= (threshold := float(threshold)) < math.inf:
            raise ValueError(f"threshold is a finite number of at least 0, got {threshold}")
        super().__init__(params, {"lr": lr, "threshold": threshold})

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        _make_binary(self.param_groups[-1])
        for weight in self.param_groups[-1]["params"]:
            weight.copy_(spins_of(weight))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    average = _average(self.state[weight], weight.grad, float(group["lr"]))
                    flip = average * weight > group["threshold"]
                    weight.copy_(torch.where(flip, -weight, weight).add_(average, alpha=0))  # NaN stays NaN
        return loss


def _average(state: dict[str, Tensor], grad: Tensor, rate: float) -> Tensor:
    if "average" not in state:
        state["average"] = torch.zeros_like(grad)
    return state["average"].lerp_(grad, rate)
