"""The stages of a deployed network: bits, whole numbers, and what flows between them.

Every export is written from this one description. A stage checks its own fields when it is made, and
``flow`` checks that it fits to what arrives; a file goes through the same two doors as a model.
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

EXACT = 2**24  # below it, float32 holds every whole number: sums are the same in every runtime
LARGEST = 2**24  # numbers in one sample between two stages


class Flow(NamedTuple):
    """What flows between two stages: its kind, the shape of one sample, and the largest magnitude."""

    kind: Kind
    shape: Shape
    bound: int

    def then(self, shape: Shape, bound: int, kind: Kind = "integers") -> "Flow":
        if min(shape) < 1 or math.prod(shape) > LARGEST:
            raise ValueError(
                f"a sample has 1 to {LARGEST:,} numbers between two stages, got the shape {shape}"
            )
        if bound >= EXACT:
            raise ValueError(f"sums must stay below 2^24 to be exact everywhere, these reach {bound:,}")
        return Flow(kind, shape, bound)


@dataclass(frozen=True, eq=False)
class Linear:
    """Sums of the inputs with the signs of the weights.

    Args:
        bits: The weights, +1 as one, packed along the inputs, lowest bit first: ``(units, ⌈inputs / 8⌉)``.
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
            raise ValueError(f"a linear layer of {self.inputs} inputs got samples of shape {flow.shape}")
        return flow.then((len(self.bits),), flow.bound * self.fan_in)


@dataclass(frozen=True, eq=False)
class Convolution:
    """Sums over patches with the signs of the weights; what lies outside the image counts as zero.

    Args:
        bits: The weights, packed along channel, row and column of the patch: ``(units, ⌈fan-in / 8⌉)``.
        channels: Channels of the image.
        kernel, stride, padding, dilation, groups: As in :class:`torch.nn.Conv2d`, rows before columns.
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
                f"a convolution of {self.channels} channels needs samples (channels, height, width), "
                f"got {flow.shape}"
            )
        geometry = zip(flow.shape[1:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        sizes = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in geometry]
        return flow.then((len(self.bits), *sizes), flow.bound * self.fan_in)


@dataclass(frozen=True, eq=False)
class Threshold:
    """The sign: +1 where ``direction · sum >= threshold``; one of each a unit, or none for ``sum >= 0``.

    Args:
        thresholds: Shape ``(units,)``, int32.
        directions: -1 or +1, shape ``(units,)``, int8.
    """

    thresholds: Array | None = None
    directions: Array | None = None

    def __post_init__(self) -> None:
        if (self.thresholds is None) != (self.directions is None):
            raise ValueError("thresholds and directions come together")
        if self.thresholds is not None and self.directions is not None:
            _check_array("thresholds", self.thresholds, np.int32, 1)
            _check_array("directions", self.directions, np.int8, 1)
            if (np.abs(self.thresholds.astype(np.int64)) > EXACT).any():
                raise ValueError("thresholds are at most 2^24 in magnitude")
            if (np.abs(self.directions) != 1).any():
                raise ValueError("directions are -1 or +1")

    def flow(self, flow: Flow) -> Flow:
        _check_numbers(self, flow)
        for values in (self.thresholds, self.directions):
            _check_units(values, flow.shape)
        return flow.then(flow.shape, 1, "spins")


@dataclass(frozen=True, eq=False)
class Rescale:
    """``⌊(multiplier · sum + offset) / 2^shift⌋``, clipped to ``±limit``: a line in fixed point.

    Args:
        multipliers: Shape ``(units,)``, int32.
        offsets: Shape ``(units,)``, int64.
        shift: Bits behind the point, 0 to 48.
        limit: Hardtanh's ±1 in whole numbers.
    """

    multipliers: Array
    offsets: Array
    shift: int
    limit: int

    def __post_init__(self) -> None:
        _check_array("multipliers", self.multipliers, np.int32, 1)
        _check_array("offsets", self.offsets, np.int64, 1)
        _check_sizes(limit=self.limit)
        if not _is_whole(self.shift) or not 0 <= self.shift <= 48:
            raise ValueError(f"shift is 0 to 48, got {self.shift!r}")
        if (self.offsets > 2**61).any() or (self.offsets < -(2**61)).any():
            raise ValueError("offsets are at most 2^61 in magnitude")

    def flow(self, flow: Flow) -> Flow:
        _check_numbers(self, flow)
        for values in (self.multipliers, self.offsets):
            _check_units(values, flow.shape)
        return flow.then(flow.shape, self.limit)


@dataclass(frozen=True, eq=False)
class Pool:
    """The largest number of a window, or the sum of them; windows lie wholly inside the image."""

    take: Literal["max", "sum"]
    size: Pair
    stride: Pair

    def __post_init__(self) -> None:
        if self.take not in ("max", "sum"):
            raise ValueError(f'a pool takes the "max" or the "sum", got {self.take!r}')
        _check_pair("size", self.size, 1)
        _check_pair("stride", self.stride, 1)

    def flow(self, flow: Flow) -> Flow:
        if len(flow.shape) != 3 or flow.kind == "pixels":
            raise ValueError(
                f"pooling needs a layer's (channels, height, width), got {flow.kind} of {flow.shape}"
            )
        geometry = zip(flow.shape[1:], self.size, self.stride, strict=True)
        shape = flow.shape[0], *[(size - k) // s + 1 for size, k, s in geometry]
        if self.take == "max":
            return flow.then(shape, flow.bound, flow.kind)
        return flow.then(shape, flow.bound * math.prod(self.size))


@dataclass(frozen=True, eq=False)
class Flatten:
    """(channels, height, width) as one row, in that order."""

    def flow(self, flow: Flow) -> Flow:
        return Flow(flow.kind, (math.prod(flow.shape),), flow.bound)


Product = Linear | Convolution
Stage = Product | Threshold | Rescale | Pool | Flatten


def flows(kind: Kind, shape: Shape, stages: tuple[Stage, ...]) -> list[Flow]:
    """What enters the first stage, and what leaves each; raises where they do not fit together."""
    if kind not in ("pixels", "spins"):
        raise ValueError(f'inputs are "pixels" or "spins", got {kind!r}')
    if not 1 <= len(shape) <= 3 or not all(_is_whole(size) and size > 0 for size in shape):
        raise ValueError(f"the shape of a sample is one to three positive numbers, got {shape}")
    along = [Flow(kind, (), 255 if kind == "pixels" else 1).then(shape, 255 if kind == "pixels" else 1, kind)]
    for place, stage in enumerate(stages):
        follows = place and isinstance(stages[place - 1], Linear | Convolution | Pool)
        if isinstance(stage, Threshold | Rescale) and not follows:
            raise ValueError(
                f"stage {place}, {type(stage).__name__}, stands directly behind a layer or a pool"
            )
        try:
            along.append(stage.flow(along[-1]))
        except ValueError as error:
            raise ValueError(f"stage {place}, {type(stage).__name__}: {error}") from None
    if not any(isinstance(stage, Linear | Convolution) for stage in stages):
        raise ValueError("a network has at least one linear layer or convolution")
    if along[-1].kind != "integers" or len(along[-1].shape) != 1:
        raise ValueError(f"a network ends in one whole number a class, got {along[-1]}")
    return along


def spins_of_bits(bits: Array, count: int) -> Array:  # (m, bytes) -> (m, count), int8
    """Packed bits as -1 and +1."""
    ones = np.unpackbits(bits, axis=1, count=count, bitorder="little")
    return ones.astype(np.int8) * 2 - 1


def bits_of_spins(spins: Array) -> Array:  # (m, n) -> (m, ⌈n / 8⌉), uint8
    """One bit a weight; spare bits are zero."""
    return np.packbits(spins > 0, axis=1, bitorder="little")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not _is_whole(size) or not 1 <= size <= LARGEST:
            raise ValueError(f"{name} is a whole number from 1 to {LARGEST:,}, got {size!r}")


def _check_pair(name: str, pair: Pair, least: int) -> None:
    whole = isinstance(pair, tuple) and len(pair) == 2 and all(_is_whole(size) for size in pair)
    if not whole or not all(least <= size <= 4096 for size in pair):
        raise ValueError(f"{name} is a pair of whole numbers from {least} to 4096, got {pair!r}")


def _check_array(name: str, values: Array, dtype: Any, dimensions: int) -> None:
    if values.dtype != dtype or values.ndim != dimensions or not values.size:
        raise ValueError(
            f"{name} has {dimensions} dimensions of {np.dtype(dtype)}, "
            f"got {values.dtype} of shape {values.shape}"
        )


def _check_bits(bits: Array, count: int) -> None:
    _check_array("bits", bits, np.uint8, 2)
    if bits.shape[1] != -(-count // 8):
        raise ValueError(f"{count} weights a unit take {-(-count // 8)} bytes, got {bits.shape[1]}")
    if count % 8 and (bits[:, -1] >> (count % 8)).any():
        raise ValueError("the spare bits behind a unit's weights are not zero")


def _check_units(values: Array | None, shape: Shape) -> None:
    if values is not None and len(values) != shape[0]:
        raise ValueError(f"there are {shape[0]} units, but numbers for {len(values)}")


def _check_numbers(stage: Stage, flow: Flow) -> None:
    if flow.kind != "integers":
        raise ValueError(f"expected the sums of a layer, got {flow.kind}")
