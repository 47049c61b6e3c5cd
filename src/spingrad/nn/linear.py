"""Binary layers: a linear map by weights in {-1, +1}."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spingrad._numbers import is_whole
from spingrad.nn.sign import spins_of, spins_or_nan, spins_with_gradient_of
from spingrad.sketch import Companion, Geometry, in_transform, sketched

Scale = bool | float | Tensor
Device = torch.device | str | int | None
COMPUTED = (
    "its weight is computed from other parameters (torch.nn.utils.prune, weight_norm or a parametrization), "
    "but spins follow the latent weight itself. Remove that, as by prune.remove(module, 'weight')"
)


class _StraightThrough(torch.autograd.Function):
    """The sign of the latent weights; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return spins_or_nan(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _ = ctx.saved_tensors  # torch checks that no step has moved the weight since
        return grad


class BinaryLayer(nn.Module):
    """What binary layers share: a latent weight, its sign in the forward pass, and the companion.

    A subclass gives a map that is linear in its input (:meth:`product`). If that is not a matrix product, it
    also gives the :attr:`geometry` that turns inputs into rows. Whatever else is done to the input, such as
    padding it, belongs in :meth:`inputs`: the sketch is made from what :meth:`inputs` returns, and a
    ``product`` that changes its input would leave wrong rows without an error.

    The backward pass leaves torch's own gradient on the latent weight (that of its sign, straight through)
    and, if a :class:`~spingrad.QPSBGD` trains it, a sketch of the inputs on the companion.

    Latent weights are float32 or float64. With ``dtype=torch.bfloat16``, ``model.half()`` and the like they
    stay as they are, and the layer multiplies in the dtype of its input: in bfloat16 a step of 1e-4 rounds
    away beside a latent weight of 0.9.

    Args:
        weight_shape: Shape of the weight, the units first.
        bias: Add a real number per unit, after the scale; it trains with the real parameters.
        device: As in torch's layers.
        dtype: As in torch's layers.
        scale: Factor of the output: ``True`` for ``1 / √fan_in``, ``False`` for 1, a number, or a tensor of
            one number per unit, which is part of ``state_dict()``.

    Example:
        >>> class Mixed(BinaryLayer):  # mixes the tokens of a sequence, not their features
        ...     def inputs(self, x):
        ...         return x.transpose(-1, -2)
        ...     def product(self, x, weight):
        ...         return x @ weight.T
        >>> Mixed((3, 8))(torch.ones(2, 8, 5)).shape
        torch.Size([2, 5, 3])
    """

    trailing: ClassVar[int] = 0
    """How many dimensions of the output follow that of the units."""
    groups: int = 1
    """Groups of channels, each a linear map of its own."""

    bias: nn.Parameter | None
    scale: float | Tensor

    def __init__(
        self,
        weight_shape: tuple[int, ...],
        bias: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        scale: Scale = True,
    ) -> None:
        super().__init__()
        if not all(is_whole(size, 1) for size in weight_shape):
            raise ValueError(
                f"{type(self).__name__}: sizes are whole numbers of at least 1, got weights of {weight_shape}"
            )
        weight_shape = tuple(int(size) for size in weight_shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"{type(self).__name__}: dtype is a floating-point torch.dtype, got {dtype!r}")
        self.fan_in = math.prod(weight_shape[1:])
        latent = torch.float32 if _is_low(dtype) else dtype
        self.weight = nn.Parameter(torch.empty(weight_shape, device=device, dtype=latent))
        own = nn.Parameter(torch.empty(weight_shape[0], device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own)
        self.companion = Companion()
        self._set_scale(scale, weight_shape[0])
        if isinstance(self.scale, Tensor):
            self.scale = self.scale.to(device, dtype)
        self.reset_parameters()

    def _set_scale(self, scale: Scale, units: int) -> None:
        if isinstance(scale, nn.Parameter):
            raise TypeError(
                "scale is fixed and does not train, got a Parameter; pass scale.detach() or scale the output"
            )
        if isinstance(scale, Tensor):
            if scale.shape != (units,) or not (scale.isfinite() & (scale >= 0)).all():
                raise ValueError(
                    f"a scale per unit has shape ({units},) and is finite and not negative, got {scale}"
                )
            self.register_buffer("scale", scale.detach().clone())
            return
        if isinstance(scale, bool):
            scale = self.fan_in**-0.5 if scale else 1.0
        if not 0 < scale < math.inf:
            raise ValueError(f"scale is True, False, a positive number or a tensor, got {scale}")
        self.scale = float(scale)

    def reset_parameters(self) -> None:
        """Draw latent weights uniformly from [-0.01, 0.01], few steps from a flip; the bias is zero."""
        nn.init.uniform_(self.weight, -0.01, 0.01)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def binary_weight(self) -> Tensor:
        """The signs of the latent weights, each exactly -1 or +1: what a trained network deploys."""
        return spins_of(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        if "weight" not in self._parameters:
            raise RuntimeError(f"{type(self).__name__}: {COMPUTED}")
        x, weight, bias = self.inputs(x), self.weight, self.bias
        product = self.product(x, _spins(weight, x))
        out = sketched(product, x, self.companion, weight, self.geometry)
        out = out * self._per_unit(self.scale, product)
        return out if bias is None else out + self._per_unit(bias, product)

    def _per_unit(self, values: float | Tensor, out: Tensor) -> float | Tensor:
        """Numbers of the units in a shape and dtype that the output can be multiplied by."""
        if isinstance(values, float):
            return values
        return values.to(out.dtype).view(-1, *[1] * self.trailing)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        own = [self.weight] if self.weight.grad is None else [self.weight, self.weight.grad]

        def applied(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            if _is_low(new.dtype) and any(tensor is latent for latent in own):
                return tensor.to(new.device)
            return new

        weight, attributes = self.weight, dict(vars(self.weight))
        super()._apply(applied, recurse)  # type: ignore[no-untyped-call]
        if self.weight is weight:
            vars(weight).update(attributes)  # torch may have swapped them away with the data
        self.companion.follow(self.weight)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"relaxed": getattr(self.weight, "relaxed", False)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        relaxed = state.pop("relaxed", False)  # a copied Parameter has lost it
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.companion.layers.add(self)
        if relaxed:
            self.weight.relaxed = True  # type: ignore[attr-defined]

    def inputs(self, x: Tensor) -> Tensor:
        """What enters the linear map, and from which the rows are made: ``x`` itself, or padded and so on."""
        return x

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The linear map, of what :meth:`inputs` returns."""

    @property
    def geometry(self) -> Geometry:
        """What turns inputs into rows (:mod:`spingrad.sketch`); empty for a matrix product."""
        return ()

    def _options(self) -> str:
        """How bias and scale are shown."""
        scale = "per unit" if isinstance(self.scale, Tensor) else f"{self.scale:.4g}"
        return f"bias={self.bias is not None}, scale={scale}"


class BinaryLinear(BinaryLayer):
    """``x · sign(Ω)ᵀ / √in_features``, a linear layer whose weights are -1 or +1.

    Arguments as in :class:`torch.nn.Linear`, but without a bias by default. The scale keeps signals in range
    without BatchNorm; ``scale=False`` is the paper's layer.

    Args:
        in_features: Size of each input, the fan-in n.
        out_features: Size of each output, the number of units m.
        bias: Add a real number per unit, zero at first, which trains with the real parameters.
        device: As in torch.
        dtype: As in torch; latent weights are never below float32 (:class:`BinaryLayer`).
        scale: Factor of the output, before the bias: ``True`` for ``1 / √in_features``, ``False`` for 1, a
            number, or a tensor of one number per unit.

    Example:
        >>> layer = BinaryLinear(4, 1)
        >>> _ = layer.weight.data.copy_(torch.tensor([[0.3, -0.2, 0.0, 0.7]]))
        >>> layer(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        tensor([[3.]], grad_fn=<MulBackward0>)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        scale: Scale = True,
    ) -> None:
        super().__init__((out_features, in_features), bias, device, dtype, scale=scale)
        self.in_features, self.out_features = in_features, out_features
        self.register_forward_pre_hook(_no_shortcut)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self._options()}"


def _no_shortcut(layer: nn.Module, inputs: Any) -> None:
    """A hook that does nothing, so that ``nn.TransformerEncoderLayer`` calls the layer.

    In evaluation, torch's transformer does not call its linear layers. It multiplies by their weights itself,
    here by the latent weights, unless one of the layers has a hook.
    """


def _spins(weight: Tensor, x: Tensor) -> Tensor:
    """What the layer multiplies its input with: the signs of the weights, in the dtype of ``x``."""
    if getattr(weight, "relaxed", False):
        spins = weight
    elif in_transform():
        spins = spins_with_gradient_of(weight)
    else:
        spins = _StraightThrough.apply(weight)  # type: ignore[no-untyped-call]
    return spins if spins.dtype == x.dtype or not x.is_floating_point() else spins.to(x.dtype)


def _is_low(dtype: torch.dtype) -> bool:
    """Whether it is a real dtype of less than single precision."""
    return dtype.is_floating_point and dtype.itemsize < 4


def binary_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and latent weight of every binary layer, as ``named_parameters`` gives them.

    A weight shared by several layers is listed once. The call also ties each weight to its layers, as a
    :class:`~spingrad.QPSBGD` needs it; so call it after whatever replaces weights (``convert``,
    ``fully_shard``, ``load_state_dict(…, assign=True)``).

    Example:
        >>> model = nn.Sequential(BinaryLinear(784, 512), nn.Hardtanh(), nn.Linear(512, 10))
        >>> [name for name, weight in binary_parameters(model)]
        ['0.weight']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    binary: dict[int, list[BinaryLayer]] = {}
    for name, module in model.named_modules():
        if isinstance(module, BinaryLayer):
            if not isinstance(module._parameters.get("weight"), nn.Parameter):
                raise ValueError(f"layer {name!r}: {COMPUTED}")
            binary.setdefault(id(module.weight), []).append(module)
    found = [(name, p) for name, p in model.named_parameters() if id(p) in binary]
    for _, weight in found:
        _tie(weight, binary[id(weight)])
    return found


def _tie(weight: nn.Parameter, layers: list[BinaryLayer]) -> None:
    """Give all layers of a weight, and the weight itself, one companion: an optimizer's if there is one."""
    if len({layer.groups for layer in layers}) > 1:
        raise ValueError("layers that share a weight have different groups; give each a weight of its own")
    known = [getattr(weight, "companion", None), *(layer.companion for layer in layers)]
    companion = next((own for own in known if own is not None and own.leaf is not None), layers[0].companion)
    companion.groups = layers[0].groups
    companion.layers.update(layers)
    weight.companion = companion  # type: ignore[attr-defined]
    for layer in layers:
        layer.companion = companion


def real_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and value of every other parameter, for an ordinary torch optimizer.

    Example:
        >>> model = nn.Sequential(BinaryLinear(784, 512), nn.BatchNorm1d(512))
        >>> [name for name, parameter in real_parameters(model)]
        ['1.weight', '1.bias']
    """
    binary = {id(p) for _, p in binary_parameters(model)}
    return [(name, p) for name, p in model.named_parameters() if id(p) not in binary]
