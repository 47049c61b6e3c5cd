"""Converts a trained torch network to stages of bits and integers; biases and BatchNorm become thresholds.

A bias or BatchNorm followed by a sign compares an integer with a constant. Over the finitely many integers
that a unit can reach, torch's result is monotonic, so bisection with torch's own float32 arithmetic finds
where the sign changes. The threshold then agrees with torch on every one of these integers, rounding
included.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor, nn

from spingrad.export.packed import PackedModel
from spingrad.export.stages import (
    EXACT,
    Array,
    Convolution,
    Flatten,
    Flow,
    Kind,
    Linear,
    Pool,
    Rescale,
    Shape,
    Stage,
    Threshold,
    bits_of_spins,
)
from spingrad.nn.conv import BinaryConv2d
from spingrad.nn.gain import Gain
from spingrad.nn.linear import BinaryLayer, BinaryLinear
from spingrad.nn.sign import Sign

Norm = nn.BatchNorm1d | nn.BatchNorm2d
FINEST = 2**14  # the largest integer that may stand for hardtanh's 1: a resolution of 6e-5


def pack(
    model: nn.Module,
    shape: Shape | None = None,
    *,
    kind: Kind = "pixels",
    scale: float = 1 / 255,
    shift: float = 0.0,
) -> PackedModel:
    """Convert a trained network to bits and integers.

    Supported, in ``nn.Sequential``: ``BinaryLinear``, ``BinaryConv2d``, ``Sign``, ``Hardtanh``,
    ``BatchNorm`` or ``Gain`` after a binary layer, max and average pooling, ``Flatten``, ``Unflatten``
    of the input, ``Dropout`` and ``Identity``.

    Args:
        model: The network, on any device. It is packed as it behaves in evaluation, and is not changed.
        shape: Shape of one example, such as ``(1, 28, 28)``; not needed if the network begins with a linear
            layer or ``Unflatten``.
        kind: ``"pixels"`` if the deployed network reads bytes, 0 to 255, and the torch network was trained on
            ``scale * pixel + shift``; ``"spins"`` if inputs are -1 and +1.
        scale: Factor on the pixels in training, positive. With a power of two, torch's own sums are exact.
        shift: What was added to all pixels in training, such as ``-mean / std``.

    Raises:
        ValueError: The network holds a module, or an order of modules, that cannot be packed.

    Example:
        >>> model = nn.Sequential(BinaryLinear(784, 128), Sign(), BinaryLinear(128, 10))
        >>> packed = pack(model)
        >>> packed.num_weights, packed.classes(np.zeros((1, 784), np.uint8)).shape
        (101632, (1,))
    """
    modules = list(_modules(model))
    if kind == "spins":
        scale, shift = 1.0, 0.0
    if not (scale > 0 and math.isfinite(scale) and math.isfinite(shift)):
        raise ValueError(f"scale must be positive and shift finite, got {scale} and {shift}")
    if modules and isinstance(first := modules[0], nn.Unflatten):
        shape, modules = tuple(first.unflattened_size), modules[1:]
    if shape is None:
        if not modules or not isinstance(modules[0], BinaryLinear):
            raise ValueError("pass the shape of one example: pack(model, (channels, height, width), …)")
        shape = (modules[0].in_features,)
    with torch.no_grad():
        stages = _Folding(kind, shape, scale, shift).run(modules)
    return PackedModel(kind, shape, stages)


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    if isinstance(model, nn.Sequential):
        for module in model:
            yield from _modules(module)
    elif not isinstance(model, nn.Identity | nn.Dropout | nn.Dropout2d):
        yield model


class _Folding:
    """Translates module by module. At each point an integer k stands for torch's ``scale * k + shift``."""

    def __init__(self, kind: Kind, shape: Shape, scale: float, shift: float) -> None:
        bound = 255 if kind == "pixels" else 1
        self.flow = Flow(kind, (), bound).then(shape, bound, kind)
        self.scale, self.shift = scale, shift
        self.stages: list[Stage] = []
        self.layer: BinaryLayer | None = None  # the last layer, until its activation comes
        self.factor: float | Array = 1.0  # on the layer's sums: the layer's scale, one number or one per unit
        self.constant: Array = np.zeros(1)  # part of each unit's sum in torch that comes from ``shift``
        self.bias: Array = np.zeros(1)  # added after the factor
        self.gain = 1.0  # on the layer's output; a sign does not depend on it
        self.norm: Norm | None = None  # of the layer
        self.postponed: list[Pool] = []  # max pooling after BatchNorm is moved behind the activation

    def run(self, modules: Sequence[nn.Module]) -> tuple[Stage, ...]:
        for place, module in enumerate(modules):
            try:
                self._visit(module, modules[place + 1 :])
            except ValueError as error:
                raise ValueError(f"{module}: {error}") from None
        if self.layer is None:
            raise ValueError("a network must end in a binary layer, optionally followed by BatchNorm or Gain")
        if self.postponed:
            raise ValueError("pooling after the last BatchNorm cannot be exported")
        if self.norm is not None or self.constant.any() or self.bias.any() or np.ndim(self.factor):
            self._rescale(None)
        return tuple(self.stages)

    def _visit(self, module: nn.Module, rest: Sequence[nn.Module]) -> None:
        match module:
            case BinaryLinear() | BinaryConv2d():
                self._product(module)
            case nn.BatchNorm1d() | nn.BatchNorm2d():
                self._batch_norm(module)
            case Gain():
                self._gain(module)
            case Sign():
                self._sign()
            case nn.Hardtanh(min_val=-1.0, max_val=1.0):
                self._rescale(_next_fan_in(rest))
            case nn.MaxPool2d() | nn.AvgPool2d():
                self._pool(module)
            case nn.Flatten(start_dim=1, end_dim=-1):
                self._append(Flatten())
            case _:
                raise ValueError(
                    "cannot be exported. Supported, in nn.Sequential: BinaryLinear, BinaryConv2d, Sign, "
                    "Hardtanh of ±1, BatchNorm1d, BatchNorm2d, Gain, MaxPool2d, AvgPool2d, Flatten"
                )

    def _append(self, stage: Stage) -> None:
        self.flow = stage.flow(self.flow)
        self.stages.append(stage)

    def _product(self, layer: BinaryLinear | BinaryConv2d) -> None:
        if self.layer is not None:
            raise ValueError("needs a Sign or Hardtanh between this layer and the one before")
        if getattr(layer.weight, "relaxed", False):
            raise ValueError("its weights are still real numbers; its optimizer has not finished training")
        if not layer.weight.isfinite().all():
            raise ValueError("some of its latent weights are not finite")
        spins = layer.binary_weight.cpu().flatten(1).numpy().astype(np.int8)
        self.constant = self.shift * spins.sum(1, dtype=np.float64)
        if isinstance(layer, BinaryLinear):
            self._append(Linear(bits_of_spins(spins), layer.in_features))
        else:
            if layer.sides:
                raise ValueError(
                    f"padding={layer.padding!r} with padding_mode={layer.padding_mode!r} cannot be exported: "
                    "use as many zeros on both sides"
                )
            if self.shift and any(layer.border):
                raise ValueError(
                    "shift is added to the pixels but not to the zeros around the image: use padding=0 in "
                    "the first layer, or shift=0"
                )
            kernel, stride, border, dilation = map(
                _pair, (layer.kernel_size, layer.stride, layer.border, layer.dilation)
            )
            geometry = kernel, stride, border, dilation, layer.groups
            self._append(Convolution(bits_of_spins(spins), layer.in_channels, *geometry))
        self.layer, self.shift, self.gain = layer, 0.0, 1.0
        self.factor = _factor(layer)
        if layer.bias is not None:
            if not layer.bias.isfinite().all():
                raise ValueError("some of its biases are not finite")
            self.bias = layer.bias.detach().cpu().double().numpy()

    def _batch_norm(self, norm: Norm) -> None:
        if self.layer is None or self.norm is not None:
            raise ValueError("BatchNorm must follow a binary layer, and only once")
        if self.gain != 1:
            raise ValueError("a layer may be followed by BatchNorm or Gain, not both")
        if norm.running_mean is None:
            raise ValueError("needs a running mean and variance (track_running_stats=True)")
        if norm.num_features != self.flow.shape[0]:
            raise ValueError(f"has {norm.num_features} features after a layer of {self.flow.shape[0]} units")
        self.norm = norm

    def _gain(self, gain: Gain) -> None:
        if self.layer is None or self.norm is not None:
            raise ValueError("Gain must follow a binary layer, and not BatchNorm")
        factor = float(gain.factor)
        if not 0 < factor < math.inf:
            raise ValueError(f"has a factor of {factor}: run the network in training mode on a batch first")
        self.gain *= factor

    def _pool(self, pool: nn.MaxPool2d | nn.AvgPool2d) -> None:
        size, stride = _pair(pool.kernel_size), _pair(pool.stride or pool.kernel_size)
        plain = _pair(pool.padding) == (0, 0) and not pool.ceil_mode
        if not plain or _pair(getattr(pool, "dilation", 1)) != (1, 1):
            raise ValueError("pooling needs padding=0, dilation=1 and ceil_mode=False to be exported")
        if isinstance(pool, nn.MaxPool2d):
            stage = Pool("max", size, stride)
            if self.norm is not None:
                stage.flow(self.flow)
                self.postponed.append(stage)
            else:
                self._append(stage)
            return
        if self.norm is not None or pool.divisor_override is not None:
            raise ValueError("average pooling must come before BatchNorm or after the activation")
        self._append(Pool("sum", size, stride))
        self.scale /= math.prod(size)  # the average is the sum in smaller units

    def _sign(self) -> None:
        self._need_sums()
        if self.norm is not None or self.bias.any():
            self._append(self._folded_sign())
        elif self.constant.any():
            # scale * sum + constant >= 0, solved for the sum in exact fractions
            exact = [-Fraction(float(c)) / Fraction(self.scale) for c in self.constant]
            thresholds = np.array([min(max(math.ceil(t), -EXACT), EXACT) for t in exact], np.int32)
            self._append(Threshold(thresholds, np.ones(len(thresholds), np.int8)))
        else:
            self._append(Threshold())
        self._finish(1.0)

    def _folded_sign(self) -> Threshold:
        """For each unit, the integer at which torch's sign changes, and in which direction it changes."""
        bound = self.flow.bound
        units = self.flow.shape[0]
        low, high = np.full(units, -bound - 1), np.full(units, bound + 1)
        first, last = self._torch_signs(low + 1), self._torch_signs(high - 1)
        rises = last | ~first  # if both ends have the same sign, it never changes and any direction is right
        while (high - low > 1).any():
            middle = (low + high) // 2
            beyond = self._torch_signs(middle) == rises  # at the change or after it
            low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)
        # Rising: +1 where sum >= high. Falling: +1 where sum <= high - 1, which is -sum >= 1 - high.
        thresholds = np.where(rises, high, 1 - high)
        thresholds = np.where(first & last, -bound - 1, thresholds)
        thresholds = np.where(~first & ~last, bound + 1, thresholds)
        return Threshold(thresholds.astype(np.int32), np.where(rises, 1, -1).astype(np.int8))

    def _torch_signs(self, sums: Array) -> Array:
        """For which of these sums, one per unit, torch computes +1."""
        return (self._torch_values(sums) >= 0).numpy()

    def _torch_values(self, sums: Array) -> Tensor:
        """What torch computes for these sums, one per unit: scale, bias and BatchNorm."""
        x = torch.from_numpy(self.scale * sums + self.constant).float()
        x = x * (self.factor if isinstance(self.factor, float) else torch.from_numpy(self.factor).float())
        x = x + torch.from_numpy(self.bias).float()
        if self.norm is None:
            return x
        mean, variance, weight, bias = _norm_tensors(self.norm)
        return nn.functional.batch_norm(x[None], mean, variance, weight, bias, eps=self.norm.eps)[0]

    def _rescale(self, next_fan_in: int | None) -> None:
        """Hardtanh in fixed point, or the scores after the last BatchNorm if no layer follows (``None``)."""
        self._need_sums()
        slope = np.full(self.flow.shape[0], self.scale * self.factor * self.gain)
        offset = np.broadcast_to((self.constant * self.factor + self.bias) * self.gain, slope.shape)
        if self.norm is not None:
            mean, variance, weight, bias = (t.double().numpy() for t in _norm_tensors(self.norm))
            gain = weight / np.sqrt(variance + self.norm.eps)
            slope, offset = slope * gain, (offset - mean) * gain + bias
        if not (np.isfinite(slope).all() and np.isfinite(offset).all()):
            raise ValueError("some parameters of BatchNorm are not finite")
        if next_fan_in is None:
            largest = float((np.abs(slope) * self.flow.bound + np.abs(offset)).max())
            self._append(_line(slope, offset, (EXACT // 2) / max(largest, 1e-30), EXACT // 2))
            return
        one = min(FINEST, (EXACT - 1) // next_fan_in)  # the integer that stands for hardtanh's 1
        inverse = round(1 / max(slope[0], 1e-9))
        if not offset.any() and np.allclose(slope * inverse, 1, rtol=1e-9) and inverse <= one:
            one, slope = inverse, np.full(len(slope), 1 / inverse)  # sums are only clipped, not rounded
        self._append(_line(slope, offset, one, one))
        self._finish(1 / one)

    def _need_sums(self) -> None:
        if self.layer is None:
            raise ValueError("an activation must follow a binary layer")

    def _finish(self, scale: float) -> None:
        for pool in self.postponed:
            self._append(pool)
        self.layer, self.norm, self.postponed = None, None, []
        self.scale, self.constant, self.bias = scale, np.zeros(1), np.zeros(1)


def _factor(layer: BinaryLayer) -> float | Array:
    """What a layer's sums are multiplied by, one number or one per unit."""
    if isinstance(layer.scale, float):
        return layer.scale
    if not (layer.scale > 0).all():
        raise ValueError("a scale per unit must be positive to be exported, one of its units has zero")
    return layer.scale.cpu().double().numpy()


def _norm_tensors(norm: Norm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance, weight and bias of BatchNorm on the CPU; without ``affine``, weight 1 and bias 0."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, variance = norm.running_mean.cpu(), norm.running_var.cpu()
    if not norm.affine:
        return mean, variance, torch.ones_like(mean), torch.zeros_like(mean)
    return mean, variance, norm.weight.detach().cpu(), norm.bias.detach().cpu()


def _line(slope: Array, offset: Array, units: float, limit: int) -> Rescale:
    """``units * (slope * k + offset)``, rounded to nearest, with as many binary digits as fit."""
    slope, offset = slope * units, offset * units
    if (slope == 1).all() and not offset.any():  # exact also for 1 / i * i: both operations round to nearest
        shift = 0
    else:
        room = min(
            31 - math.frexp(float(np.abs(slope).max()))[1], 60 - math.frexp(float(np.abs(offset).max()))[1]
        )
        shift = max(0, min(room - 1, 40))
    half = 2.0 ** (shift - 1) if shift else 0.0
    multipliers = np.round(slope * 2.0**shift)
    if np.abs(multipliers).max() >= 2**31:
        raise ValueError("the slope of BatchNorm is too steep for 32-bit integers")
    offsets = np.round(offset * 2.0**shift + half)
    return Rescale(multipliers.astype(np.int32), offsets.astype(np.int64), shift, limit)


def _next_fan_in(rest: Sequence[nn.Module]) -> int:
    """How many hardtanh outputs each unit of the next layer adds, counting those that pooling has summed."""
    pooled = 1
    for module in rest:
        if isinstance(module, nn.AvgPool2d):
            pooled *= math.prod(_pair(module.kernel_size))
        if isinstance(module, BinaryLayer):
            return pooled * module.fan_in
    raise ValueError("a network must end in a binary layer, optionally followed by BatchNorm or Gain")


def _pair(size: int | tuple[int, ...]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
