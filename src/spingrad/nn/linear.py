"""Binary layers: a forward pass through weights in {-1, +1} that notes what the step needs."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spingrad.nn.sign import spins_of
from spingrad.rows import Patches


class _BinaryProduct(torch.autograd.Function):
    """A layer's linear map at binary weights, whose backward pass leaves ``(x, grad)`` on the weight.

    Recording happens here and not in module hooks, which trainers and wrappers lose.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "BinaryLayer") -> Tensor:
        spins = weight if getattr(weight, "relaxed", False) else spins_of(weight)
        ctx.save_for_backward(x, spins)
        ctx.weight, ctx.layer, ctx.training = weight, layer, layer.training
        return layer.product(x, spins)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, spins = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        record = getattr(ctx.weight, "record", None)
        if needs_weight and record is not None:
            if ctx.training:
                record.add(x.detach(), grad, ctx.layer.to_rows)
            needs_weight = ctx.training and record.keep_grad
        grad_x, grad_weight = ctx.layer.product_backward(x, spins, grad, needs_x, needs_weight)
        return grad_x, grad_weight, None


class BinaryLayer(nn.Module):
    """What binary layers share: a latent weight, its sign in the forward pass, and the record.

    A subclass gives the linear map (``product``), its two gradients (``product_backward``), and
    ``to_rows``, which turns an input and an output gradient into matrices.
    """

    def __init__(self, weight_shape: tuple[int, ...], scale: bool) -> None:
        super().__init__()
        self.fan_in = math.prod(weight_shape[1:])
        self.scale = self.fan_in**-0.5 if scale else 1.0
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
        # The record is taken before the scale: V is the gradient of x · sign(Ω).
        product: Tensor = _BinaryProduct.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return product * self.scale

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def product_backward(
        self, x: Tensor, weight: Tensor, grad: Tensor, needs_x: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        raise NotImplementedError

    def to_rows(self, x: Tensor, grad: Tensor) -> Iterator[tuple[Tensor | Patches, Tensor]]:
        """One pair of matrices ``(r, n)`` and ``(r, m)`` for each group of channels."""
        raise NotImplementedError


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

    def product_backward(
        self, x: Tensor, weight: Tensor, grad: Tensor, needs_x: bool, needs_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_x = grad @ weight.to(grad.dtype) if needs_x else None
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2).to(grad.dtype) if needs_weight else None
        return grad_x, grad_weight

    def to_rows(self, x: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield x.reshape(-1, self.in_features), grad.reshape(-1, self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, scale={self.scale != 1.0}"


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
