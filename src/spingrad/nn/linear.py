"""Binary layers: a linear map by weights in {-1, +1}."""

import math
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spingrad.nn.sign import spins_of
from spingrad.recording import noted, record_of


class _StraightThrough(torch.autograd.Function):
    """The sign of the latent weights; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return spins_of(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class BinaryLayer(nn.Module):
    """What binary layers share: a latent weight, its sign in the forward pass, and the record.

    A subclass gives the linear map (:meth:`product`) and, unless it is a matrix product, the geometry that
    turns its inputs into rows.
    """

    def __init__(self, weight_shape: tuple[int, ...], scale: bool) -> None:
        super().__init__()
        self.fan_in = math.prod(weight_shape[1:])
        self.scale = self.fan_in**-0.5 if scale else 1.0
        self.scaled = scale
        self.weight = nn.Parameter(torch.empty(weight_shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw latent weights uniformly from [-0.01, 0.01]: few steps of the usual lr from a flip."""
        nn.init.uniform_(self.weight, -0.01, 0.01)

    @property
    def binary_weight(self) -> Tensor:
        """The signs of the latent weights, each exactly -1 or +1: what a trained network deploys."""
        return spins_of(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        # The record is taken before the scale: it holds the gradient of x · sign(Ω).
        product = self.product(x, self._spins())
        return noted(product, x, self.weight, self.geometry, self.training) * self.scale

    def _spins(self) -> Tensor:
        if getattr(self.weight, "relaxed", False):
            return self.weight
        record = record_of(self.weight)
        if record is not None and not record.keep_grad:
            return self.binary_weight  # the record takes the place of the weight's gradient
        spins: Tensor = _StraightThrough.apply(self.weight)  # type: ignore[no-untyped-call]
        return spins

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The linear map."""

    @property
    def geometry(self) -> tuple[int, ...]:
        """What turns inputs into rows (:func:`spingrad.rows.to_rows`); empty for a matrix product."""
        return ()


class BinaryLinear(BinaryLayer):
    """``x · sign(Ω)ᵀ / √in_features``, a linear layer whose weights are -1 or +1.

    The scale keeps signals in range without BatchNorm; ``scale=False`` is the paper's layer. There is
    no bias: what deploys is bits and integer sums.

    Args:
        in_features: Size of each input, the fan-in n.
        out_features: Size of each output, the number of units m.
        scale: Divide the output by ``√in_features``.

    Example:
        >>> layer = BinaryLinear(4, 1)
        >>> _ = layer.weight.data.copy_(torch.tensor([[0.3, -0.2, 0.0, 0.7]]))
        >>> layer(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        tensor([[3.]], grad_fn=<MulBackward0>)
    """

    def __init__(self, in_features: int, out_features: int, scale: bool = True) -> None:
        super().__init__((out_features, in_features), scale)
        self.in_features, self.out_features = in_features, out_features

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, scale={self.scaled}"


def binary_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and latent weight of every binary layer, as ``named_parameters`` gives them.

    A weight shared by several layers is listed once.

    Example:
        >>> model = nn.Sequential(BinaryLinear(784, 512), nn.Hardtanh(), nn.Linear(512, 10))
        >>> [name for name, weight in binary_parameters(model)]
        ['0.weight']
    """
    binary = {id(m.weight) for m in model.modules() if isinstance(m, BinaryLayer)}
    return [(name, p) for name, p in model.named_parameters() if id(p) in binary]


def real_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and value of every other parameter, for an ordinary torch optimizer.

    Example:
        >>> model = nn.Sequential(BinaryLinear(784, 512), nn.BatchNorm1d(512))
        >>> [name for name, parameter in real_parameters(model)]
        ['1.weight', '1.bias']
    """
    binary = {id(p) for _, p in binary_parameters(model)}
    return [(name, p) for name, p in model.named_parameters() if id(p) not in binary]
