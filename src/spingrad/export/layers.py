"""Layers and pooling of torch as stages."""

from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor, nn

from spingrad.export.stages import Array, Convolution, Linear, Pool, Product, bits_of_spins
from spingrad.nn.conv import BinaryConv1d, BinaryConv2d
from spingrad.nn.linear import BinaryLayer, BinaryLinear

LAYERS = BinaryLinear, BinaryConv1d, BinaryConv2d, nn.Linear, nn.Conv1d, nn.Conv2d


class Layer(NamedTuple):
    """A layer as a stage, the factor on its sums, and its bias."""

    stage: Product
    factor: Array
    bias: Array


def layer_of(module: nn.Module) -> Layer:
    """The weights as bits, or rounded to int8 with a scale for each unit."""
    assert isinstance(module, LAYERS)
    if isinstance(module, BinaryLayer):
        if not module.weight.isfinite().all():
            raise ValueError("some of its latent weights are not finite")
        weight = bits_of_spins(module.binary_weight.flatten(1).numpy().astype(np.int8))
        factor = _factor(module)
    else:
        weight, factor = int8_weights(module.weight)
    bias = np.zeros(()) if module.bias is None else module.bias.detach().double().numpy()
    if not np.isfinite(bias).all():
        raise ValueError("some of its biases are not finite")
    if isinstance(module, BinaryLinear | nn.Linear):
        return Layer(Linear(weight, module.in_features), factor, bias)
    border = module.border if isinstance(module, BinaryLayer) else _border(module)
    if border is None or module.padding_mode != "zeros" or getattr(module, "sides", False):
        raise ValueError(
            f"padding={module.padding!r} with padding_mode={module.padding_mode!r} cannot be packed: use as "
            "many zeros on both sides"
        )
    kernel, stride, dilation = (_pair(size) for size in (module.kernel_size, module.stride, module.dilation))
    geometry = kernel, stride, _pair(border, row=0), dilation, module.groups
    return Layer(Convolution(weight, module.in_channels, *geometry), factor, bias)


def _border(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, ...] | None:
    """Zeros on both sides of each dimension; nothing if they are not the same on both sides."""
    if not isinstance(layer.padding, str):
        return layer.padding
    total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    if layer.padding == "valid":
        return (0,) * len(total)
    return None if any(size % 2 for size in total) else tuple(size // 2 for size in total)


def int8_weights(weight: Tensor) -> tuple[Array, Array]:
    """Whole numbers from -127 to 127, shape ``(units, fan-in)``, and what one stands for, by unit."""
    real = weight.detach().cpu().double().flatten(1).numpy()
    if not np.isfinite(real).all():
        raise ValueError("some of its weights are not finite")
    factor = np.maximum(np.abs(real).max(1), 1e-30) / 127
    return np.round(real / factor[:, None]).astype(np.int8), factor


def _factor(layer: BinaryLayer) -> Array:
    """What a layer's sums are multiplied by, one number or one per unit."""
    if isinstance(layer.scale, float):
        return np.array(layer.scale)
    if not (layer.scale > 0).all():
        raise ValueError("a scale per unit must be positive to be packed, one of its units has zero")
    return layer.scale.double().numpy()


def window_of(module: Any, take: Literal["max", "sum"] = "max") -> Pool:
    """The windows of a pooling module."""
    trailing = 1 if isinstance(module, nn.MaxPool1d | nn.AvgPool1d) else 2
    size = _pair(module.kernel_size, trailing)
    stride = _pair(module.stride or module.kernel_size, trailing)
    plain = not any(_pair(module.padding, trailing, 0)) and not module.ceil_mode
    whole = getattr(module, "divisor_override", None) is None
    if not plain or not whole or _pair(getattr(module, "dilation", 1)) != (1, 1):
        raise ValueError("pooling needs padding=0, dilation=1 and ceil_mode=False to be packed")
    return Pool(take, size, stride)


def _pair(size: Any, trailing: int = 2, row: int = 1) -> tuple[int, int]:
    """Height and width; a signal has one row."""
    sizes = (size,) * trailing if isinstance(size, int) else tuple(size)
    return (row, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])
