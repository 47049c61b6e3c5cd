"""The stages of a deployed network: bits, integers, and what flows between them.

Every export is written from this one description. A stage checks its own fields when it is created, and
its method ``flow`` checks that it accepts what arrives. A network that is read from a file passes the same
checks as one that is packed from torch.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Pair = tuple[int, int]
Kind = Literal["pixels", "spins", "integers"]

EXACT = 2**24  # float32 represents every integer below it, so that all runtimes compute the same sums
LARGEST = 2**24  # most values per example between two stages


class Flow(NamedTuple):
    """What flows between two stages: its kind, the shape of one example, and the largest magnitude."""

    kind: Kind
    shape: Shape
    bound: int

    def then(self, shape: Shape, bound: int, kind: Kind = "integers") -> "Flow":
        if min(shape) < 1 or math.prod(shape) > LARGEST:
            raise ValueError(
                f"an example has 1 to {LARGEST:,} values between two stages, got the shape {shape}"
            )
        if bound >= EXACT:
            raise ValueError(f"sums must stay below 2^24 to be exact in float32, these can reach {bound:,}")
        return Flow(kind, shape, bound)


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer: each unit adds its inputs, multiplied by weights of -1 and +1.

    Args:
        bits: The weights, a one for +1, packed along the inputs, lowest bit first; shape
            ``(units, ⌈inputs / 8⌉)``.
        inputs: Number of inputs.
    """

    bits: Array
    inputs: int

    def __post_init__(self) -> None:
        _check_sizes(inputs=self.inputs)
        _check_bits(self.bits, self.inputs)

    @property
    def fan_in(self) -> int:
        return self.inputs

    def flow(self, flow: Flow) -> Flow:
        if flow.shape != (self.inputs,):
            raise ValueError(f"a linear layer of {self.inputs} inputs got examples of shape {flow.shape}")
        return flow.then((len(self.bits),), flow.bound * self.fan_in)


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution with weights of -1 and +1; the image is padded with zeros.

    Args:
        bits: The weights, packed along channel, height and width of the kernel; shape
            ``(units, ⌈fan-in / 8⌉)``.
        channels: Channels of the image.
        kernel, stride, padding, dilation, groups: As in :class:`torch.nn.Conv2d`, height before width.
    """

    bits: Array
    channels: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def __post_init__(self) -> None:
        _check_sizes(channels=self.channels, groups=self.groups)
        for name in ("kernel", "stride", "dilation"):
            _check_pair(name, getattr(self, name), 1)
        _check_pair("padding", self.padding, 0)
        if self.channels % self.groups or len(self.bits) % self.groups:
            raise ValueError(
                f"groups must divide channels and units, got {self.groups}, {self.channels}, {len(self.bits)}"
            )
        _check_bits(self.bits, self.fan_in)

    @property
    def fan_in(self) -> int:
        return self.channels // self.groups * math.prod(self.kernel)

    def flow(self, flow: Flow) -> Flow:
        if len(flow.shape) != 3 or flow.shape[0] != self.channels:
            raise ValueError(
                f"a convolution of {self.channels} channels needs examples (channels, height, width), "
                f"got {flow.shape}"
            )
        geometry = zip(flow.shape[1:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        sizes = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in geometry]
        return flow.then((len(self.bits), *sizes), flow.bound * self.fan_in)


@dataclass(frozen=True, eq=False)
class Threshold:
    """The sign activation: +1 where ``direction · sum >= threshold``, else -1.

    Args:
        thresholds: One per unit, shape ``(units,)``, int32; none stands for zero.
        directions: -1 or +1, shape ``(units,)``, int8; none stands for +1.
    """

    thresholds: Array | None = None
    directions: Array | None = None

    def __post_init__(self) -> None:
        if (self.thresholds is None) != (self.directions is None):
            raise ValueError("thresholds and directions are given together, or neither of them")
        if self.thresholds is not None and self.directions is not None:
            _check_array("thresholds", self.thresholds, np.int32, 1)
            _check_array("directions", self.directions, np.int8, 1)
            if (np.abs(self.thresholds.astype(np.int64)) > EXACT).any():
                raise ValueError("thresholds must be at most 2^24 in magnitude")
            if (np.abs(self.directions) != 1).any():
                raise ValueError("directions must be -1 or +1")

    def flow(self, flow: Flow) -> Flow:
        _check_numbers(self, flow)
        for values in (self.thresholds, self.directions):
            _check_units(values, flow.shape)
        return flow.then(flow.shape, 1, "spins")


@dataclass(frozen=True, eq=False)
class Rescale:
    """An affine function in fixed point: ``⌊(multiplier · sum + offset) / 2^shift⌋``, clipped to ``±limit``.

    Args:
        multipliers: Shape ``(units,)``, int32.
        offsets: Shape ``(units,)``, int64.
        shift: Binary digits after the point, 0 to 48.
        limit: The integer that stands for hardtanh's 1.
    """

    multipliers: Array
    offsets: Array
    shift: int
    limit: int

    def __post_init__(self) -> None:
        _check_array("multipliers", self.multipliers, np.int32, 1)
        _check_array("offsets", self.offsets, np.int64, 1)
        _check_sizes(limit=self.limit)
        if not _is_integer(self.shift) or not 0 <= self.shift <= 48:
            raise ValueError(f"shift must be an integer from 0 to 48, got {self.shift!r}")
        if (self.offsets > 2**61).any() or (self.offsets < -(2**61)).any():
            raise ValueError("offsets must be at most 2^61 in magnitude")

    def flow(self, flow: Flow) -> Flow:
        _check_numbers(self, flow)
        for values in (self.multipliers, self.offsets):
            _check_units(values, flow.shape)
        return flow.then(flow.shape, self.limit)


@dataclass(frozen=True, eq=False)
class Pool:
    """The largest value or the sum of each window; every window lies completely inside the image."""

    take: Literal["max", "sum"]
    size: Pair
    stride: Pair

    def __post_init__(self) -> None:
        if self.take not in ("max", "sum"):
            raise ValueError(f'take must be "max" or "sum", got {self.take!r}')
        _check_pair("size", self.size, 1)
        _check_pair("stride", self.stride, 1)

    def flow(self, flow: Flow) -> Flow:
        if len(flow.shape) != 3 or flow.kind == "pixels":
            raise ValueError(
                f"pooling needs the output (channels, height, width) of a layer, "
                f"got {flow.kind} of shape {flow.shape}"
            )
        geometry = zip(flow.shape[1:], self.size, self.stride, strict=True)
        shape = flow.shape[0], *[(size - k) // s + 1 for size, k, s in geometry]
        if self.take == "max":
            return flow.then(shape, flow.bound, flow.kind)
        return flow.then(shape, flow.bound * math.prod(self.size))


@dataclass(frozen=True, eq=False)
class Flatten:
    """Reshape (channels, height, width) to one dimension, in that order."""

    def flow(self, flow: Flow) -> Flow:
        return Flow(flow.kind, (math.prod(flow.shape),), flow.bound)


Product = Linear | Convolution
Stage = Product | Threshold | Rescale | Pool | Flatten


def flows(kind: Kind, shape: Shape, stages: tuple[Stage, ...]) -> list[Flow]:
    """The input of the first stage and the output of every stage.

    Raises:
        ValueError: A stage does not accept the output of the one before it.
    """
    if kind not in ("pixels", "spins"):
        raise ValueError(f'inputs must be "pixels" or "spins", got {kind!r}')
    if not 1 <= len(shape) <= 3 or not all(_is_integer(size) and size > 0 for size in shape):
        raise ValueError(f"the shape of one example must be one to three positive integers, got {shape}")
    largest = 255 if kind == "pixels" else 1
    along = [Flow(kind, (), largest).then(shape, largest, kind)]
    for place, stage in enumerate(stages):
        follows = place and isinstance(stages[place - 1], Linear | Convolution | Pool)
        if isinstance(stage, Threshold | Rescale) and not follows:
            raise ValueError(
                f"stage {place}, {type(stage).__name__}, must directly follow a layer or pooling"
            )
        try:
            along.append(stage.flow(along[-1]))
        except ValueError as error:
            raise ValueError(f"stage {place}, {type(stage).__name__}: {error}") from None
    if not any(isinstance(stage, Linear | Convolution) for stage in stages):
        raise ValueError("a network needs at least one linear layer or convolution")
    if along[-1].kind != "integers" or len(along[-1].shape) != 1:
        raise ValueError(f"a network must end in one integer per class, got {along[-1]}")
    return along


def spins_of_bits(bits: Array, count: int) -> Array:  # (m, bytes) -> (m, count), int8
    """Packed bits as -1 and +1."""
    ones = np.unpackbits(bits, axis=1, count=count, bitorder="little")
    return ones.astype(np.int8) * 2 - 1


def bits_of_spins(spins: Array) -> Array:  # (m, n) -> (m, ⌈n / 8⌉), uint8
    """One bit per weight; the unused bits of the last byte are zero."""
    return np.packbits(spins > 0, axis=1, bitorder="little")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not _is_integer(size) or not 1 <= size <= LARGEST:
            raise ValueError(f"{name} must be an integer from 1 to {LARGEST:,}, got {size!r}")


def _check_pair(name: str, pair: Pair, least: int) -> None:
    integers = isinstance(pair, tuple) and len(pair) == 2 and all(_is_integer(size) for size in pair)
    if not integers or not all(least <= size <= 4096 for size in pair):
        raise ValueError(f"{name} must be a pair of integers from {least} to 4096, got {pair!r}")


def _check_array(name: str, values: Array, dtype: Any, dimensions: int) -> None:
    if values.dtype != dtype or values.ndim != dimensions or not values.size:
        raise ValueError(
            f"{name} must have {dimensions} dimensions and dtype {np.dtype(dtype)}, "
            f"got shape {values.shape} and dtype {values.dtype}"
        )


def _check_bits(bits: Array, count: int) -> None:
    _check_array("bits", bits, np.uint8, 2)
    if bits.shape[1] != -(-count // 8):
        raise ValueError(f"{count} weights per unit take {-(-count // 8)} bytes, got {bits.shape[1]}")
    if count % 8 and (bits[:, -1] >> (count % 8)).any():
        raise ValueError("the unused bits after a unit's weights must be zero")


def _check_units(values: Array | None, shape: Shape) -> None:
    if values is not None and len(values) != shape[0]:
        raise ValueError(f"expected one value for each of {shape[0]} units, got {len(values)}")


def _check_numbers(stage: Stage, flow: Flow) -> None:
    if flow.kind != "integers":
        raise ValueError(f"expected the sums of a layer, got {flow.kind}")
