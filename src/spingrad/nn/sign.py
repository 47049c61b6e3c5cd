"""The sign, of weights and of activations: zero counts as +1."""

from typing import Any

import torch
from torch import Tensor, nn

from spingrad.sketch import in_transform


def spins_of(x: Tensor) -> Tensor:
    """The sign of every entry in the dtype of ``x``; the sign of zero (also of -0.0) is +1."""
    # torch.sign has a zero and torch.copysign a negative zero; torch.where costs several times this.
    return x.sign().add_(0.5).sign_()


def spins_or_nan(x: Tensor) -> Tensor:
    """As :func:`spins_of`, but what is not finite becomes NaN: a network that diverges must show it."""
    return spins_of(x).add_(x, alpha=0)  # in one pass; masking would cost several


def spins_with_gradient_of(surrogate: Tensor) -> Tensor:
    """The signs, differentiated as ``surrogate`` itself, in operations that all of torch.func knows."""
    return spins_or_nan(surrogate.detach()) + (surrogate - surrogate.detach())


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return spins_or_nan(x.clamp(-1, 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        inside: Tensor = x.abs() <= 1
        return grad * inside


def sign(x: Tensor) -> Tensor:
    """The sign of every entry, differentiated straight through.

    The sign of zero is +1, and NaN stays NaN. Backward, the gradient passes where ``|x| <= 1`` and stops
    elsewhere.

    Example:
        >>> x = torch.tensor([-2.0, -0.5, 0.0, 3.0], requires_grad=True)
        >>> sign(x)
        tensor([-1., -1.,  1.,  1.], grad_fn=<_SignBackward>)
        >>> sign(x).sum().backward()
        >>> x.grad
        tensor([0., 1., 1., 0.])
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(x).__name__}")
    if in_transform():
        return spins_with_gradient_of(x.clamp(-1, 1))
    return _Sign.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Sign(nn.Module):
    """:func:`sign` as a module, for use in ``nn.Sequential``.

    Example:
        >>> Sign()(torch.tensor([-0.5, 0.0, 2.0]))
        tensor([-1.,  1.,  1.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return sign(x)
