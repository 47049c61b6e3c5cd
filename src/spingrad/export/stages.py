"""The stages of a deployed network: bits, integers, and what flows between them.

Every export is written from this one description. A stage checks its own fields when it is created, and
its method ``flow`` checks that it accepts what arrives. A network that is read from a file passes the same
checks as one that is packed from torch.

Values have numbers: 0 is the network's input, ``i + 1`` is what stage ``i`` computes. Each stage reads one
value or, if it joins branches, several.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Pair = tuple[int, int]
Kind = Literal["pixels", "int8", "spins", "integers"]
Reads = tuple[tuple[int, ...], ...]

EXACT = 2**24  # float32 represents every integer below it, so that all runtimes compute the same sums
WIDEST = 2**31 - 1  # of other integers, such as the sum of two branches
LARGEST = 2**24  # most values per example between two stages
INPUTS: dict[Kind, int] = {"pixels": 255, "int8": 128, "spins": 1}
"""What a network can read, and the largest magnitude of it."""


class Flow(NamedTuple):
    """What flows between two stages: its kind, the shape of one example, and the largest magnitude."""

    kind: Kind
    shape: Shape
    bound: int

    def then(self, shape: Shape, bound: int, kind: Kind = "integers", below: int = WIDEST) -> "Flow":
        if min(shape) < 1 or math.prod(shape) > LARGEST:
            raise ValueError(
                f"an example has 1 to {LARGEST:,} values between two stages, got the shape {shape}"
            )
        if bound >= below:
            why = "the sums of a layer" if below == EXACT else "integers"
            power = (below + 1).bit_length() - 1
            raise ValueError(f"{why} must stay below 2^{power}, these can reach {bound:,}")
        return Flow(kind, shape, bound)


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer: each unit adds its inputs, multiplied by its weights.

    Args:
        weight: Weights of -1 and +1 as bits, a one for +1, packed along the inputs, lowest bit first: uint8,
            shape ``(units, ⌈inputs / 8⌉)``. Or whole numbers: int8, shape ``(units, inputs)``.
        inputs: Number of inputs.
    """

    weight: Array
    inputs: int

    def __post_init__(self) -> None:
        self.check_form()
        _check_weight(self.weight, self.inputs)

    def check_form(self) -> None:
        """Check all but the values of tensors, which may not have been read yet."""
        _check_sizes(inputs=self.inputs)
        _check_weight_form(self.weight, self.inputs)

    @property
    def fan_in(self) -> int:
        return self.inputs

    def flow(self, flow: Flow) -> Flow:
        if flow.shape != (self.inputs,):
            raise ValueError(f"a linear layer of {self.inputs} inputs got examples of shape {flow.shape}")
        return flow.then((len(self.weight),), flow.bound * reach(self), below=EXACT)


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution; the image is padded with zeros.

    Args:
        weight: As in :class:`Linear`, with the inputs ordered by channel, height and width of the kernel.
        channels: Channels of the image.
        kernel, stride, padding, dilation, groups: As in :class:`torch.nn.Conv2d`, height before width.
    """

    weight: Array
    channels: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def __post_init__(self) -> None:
        self.check_form()
        _check_weight(self.weight, self.fan_in)

    def check_form(self) -> None:
        """Check all but the values of tensors, which may not have been read yet."""
        _check_sizes(channels=self.channels, groups=self.groups)
        for name in ("kernel", "stride", "dilation"):
            _check_pair(name, getattr(self, name), 1)
        _check_pair("padding", self.padding, 0)
        if self.channels % self.groups or len(self.weight) % self.groups:
            raise ValueError(
                "groups must divide channels and units, got "
                f"{self.groups}, {self.channels}, {len(self.weight)}"
            )
        _check_weight_form(self.weight, self.fan_in)

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
        return flow.then((len(self.weight), *sizes), flow.bound * reach(self), below=EXACT)


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
        self.check_form()
        if self.thresholds is not None and self.directions is not None:
            if self.thresholds.min() < -WIDEST:
                raise ValueError("thresholds must be below 2^31 in magnitude")
            if self.directions.min() < -1 or self.directions.max() > 1 or not self.directions.all():
                raise ValueError("directions must be -1 or +1")

    def check_form(self) -> None:
        """Check all but the values of tensors, which may not have been read yet."""
        if (self.thresholds is None) != (self.directions is None):
            raise ValueError("thresholds and directions are given together, or neither of them")
        if self.thresholds is not None and self.directions is not None:
            _check_array("thresholds", self.thresholds, np.int32, 1)
            _check_array("directions", self.directions, np.int8, 1)

    def flow(self, flow: Flow) -> Flow:
        _check_numbers(flow)
        for values in (self.thresholds, self.directions):
            _check_units(values, flow.shape)
        return flow.then(flow.shape, 1, "spins")


@dataclass(frozen=True, eq=False)
class Rescale:
    """An affine function in fixed point: ``⌊(multiplier · value + offset) / 2^shift⌋``, clipped.

    Args:
        multipliers: Shape ``(units,)``, int32.
        offsets: Shape ``(units,)``, int64.
        shift: Binary digits after the point, 0 to 48.
        low, high: The smallest and the largest integer of the result.
    """

    multipliers: Array
    offsets: Array
    shift: int
    low: int
    high: int

    def __post_init__(self) -> None:
        self.check_form()
        if self.offsets.max() > 2**61 or self.offsets.min() < -(2**61):
            raise ValueError("offsets must be at most 2^61 in magnitude")

    def check_form(self) -> None:
        """Check all but the values of tensors, which may not have been read yet."""
        _check_array("multipliers", self.multipliers, np.int32, 1)
        _check_array("offsets", self.offsets, np.int64, 1)
        if not all(_is_integer(end) for end in (self.low, self.high)) or not (
            -WIDEST < self.low <= 0 < self.high < WIDEST
        ):
            raise ValueError(
                "low must be an integer of at most 0, high one of at least 1, both below 2^31 in "
                f"magnitude, got {self.low!r} and {self.high!r}"
            )
        if not _is_integer(self.shift) or not 0 <= self.shift <= 48:
            raise ValueError(f"shift must be an integer from 0 to 48, got {self.shift!r}")

    def flow(self, flow: Flow) -> Flow:
        _check_numbers(flow)
        for values in (self.multipliers, self.offsets):
            _check_units(values, flow.shape)
        if max(int(self.multipliers.max()), -int(self.multipliers.min())) * flow.bound > 2**61:
            raise ValueError(f"multipliers times values of up to {flow.bound:,} must stay below 2^61")
        return flow.then(flow.shape, max(-self.low, self.high))


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
        if len(flow.shape) != 3:
            raise ValueError(
                f"pooling needs images (channels, height, width), got {flow.kind} of shape {flow.shape}"
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


@dataclass(frozen=True, eq=False)
class Add:
    """The sum of several values of one shape, each times a whole number; with one value, a multiple of it.

    Args:
        multipliers: One for each value that is read.
    """

    multipliers: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.multipliers or not all(_is_integer(m) and 0 < abs(m) < WIDEST for m in self.multipliers):
            raise ValueError(
                f"multipliers must be integers below 2^31 in magnitude, none of them zero, "
                f"got {self.multipliers!r:.100}"
            )

    def flow(self, *flows: Flow) -> Flow:
        _check_count(self, flows, len(self.multipliers))
        if len({flow.shape for flow in flows}) > 1:
            raise ValueError(f"values of one shape can be added, got {[flow.shape for flow in flows]}")
        bound = sum(abs(m) * flow.bound for m, flow in zip(self.multipliers, flows, strict=True))
        return flows[0].then(flows[0].shape, bound)


@dataclass(frozen=True, eq=False)
class Concat:
    """Several values one after another: their channels, or their only dimension."""

    def flow(self, *flows: Flow) -> Flow:
        if len(flows) < 2:
            raise ValueError(f"two values or more can be joined, got {len(flows)}")
        if len({flow.shape[1:] for flow in flows}) > 1:
            raise ValueError(
                f"images of one size can be joined, got the shapes {[flow.shape for flow in flows]}"
            )
        kinds = {flow.kind == "spins" for flow in flows}
        if len(kinds) > 1:
            raise ValueError("spins and integers cannot be joined")
        shape = sum(flow.shape[0] for flow in flows), *flows[0].shape[1:]
        bound = max(flow.bound for flow in flows)
        return flows[0].then(shape, bound, "spins" if kinds == {True} else "integers")


@dataclass(frozen=True, eq=False)
class Pad:
    """Zeros around an image, or channels of zeros.

    Args:
        channels, rows, columns: How many zeros come before and after.
    """

    channels: Pair
    rows: Pair
    columns: Pair

    def __post_init__(self) -> None:
        for name in ("channels", "rows", "columns"):
            _check_pair(name, getattr(self, name), 0)

    def flow(self, flow: Flow) -> Flow:
        if len(flow.shape) != 3 or flow.kind == "spins":
            raise ValueError(f"only integers (channels, height, width) can be padded, got {flow}")
        sides = self.channels, self.rows, self.columns
        shape = tuple(size + sum(pair) for size, pair in zip(flow.shape, sides, strict=True))
        return flow.then(shape, flow.bound)


Product = Linear | Convolution
Stage = Product | Threshold | Rescale | Pool | Flatten | Add | Concat | Pad
PRODUCTS = Linear, Convolution
STAGES = (Linear, Convolution, Threshold, Rescale, Pool, Flatten, Add, Concat, Pad)


def chain(count: int) -> Reads:
    """What each of ``count`` stages reads if every stage reads the result of the one before it."""
    return tuple((place,) for place in range(count))


def flows(kind: Kind, shape: Shape, stages: Sequence[Stage], reads: Reads) -> list[Flow]:
    """The input of the network and the output of every stage.

    Raises:
        ValueError: A stage does not accept what it reads, or something that is computed is never read.
    """
    if kind not in INPUTS:
        raise ValueError(f"inputs must be one of {', '.join(INPUTS)}, got {kind!r}")
    if not 1 <= len(shape) <= 3 or not all(_is_integer(size) and size > 0 for size in shape):
        raise ValueError(f"the shape of one example must be one to three positive integers, got {shape}")
    if len(reads) != len(stages):
        raise ValueError(f"expected what each of {len(stages)} stages reads, got {len(reads)} lists")
    along = [Flow(kind, (), INPUTS[kind]).then(shape, INPUTS[kind], kind)]
    for place, (stage, read) in enumerate(zip(stages, reads, strict=True)):
        name = f"stage {place}, {type(stage).__name__}"
        if not read or not all(_is_integer(value) and 0 <= value <= place for value in read):
            raise ValueError(f"{name}: must read values from 0 to {place}, got {read!r:.100}")
        try:
            _check_count(stage, read, None if isinstance(stage, Add | Concat) else 1)
            along.append(stage.flow(*(along[value] for value in read)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    unread = set(range(len(stages))) - {value for read in reads for value in read}
    if unread:
        raise ValueError(f"no stage reads the values {sorted(unread)[:5]}")
    if not any(isinstance(stage, PRODUCTS) for stage in stages):
        raise ValueError("a network needs at least one linear layer or convolution")
    if along[-1].kind != "integers" or len(along[-1].shape) != 1:
        raise ValueError(f"a network must end in one integer per class, got {along[-1]}")
    return along


def is_binary(stage: Product) -> bool:
    """Whether the weights are bits; others are whole numbers."""
    return stage.weight.dtype == np.uint8


def whole_weights(stage: Product, weight: Array | None = None) -> Array:  # (units, fan-in), int8
    """The weights of a layer, or of some of its units, as numbers: -1 and +1 for bits."""
    weight = stage.weight if weight is None else weight
    return spins_of_bits(weight, stage.fan_in) if is_binary(stage) else weight


def reach(stage: Product) -> int:
    """The largest sum of a unit whose inputs have a magnitude of one."""
    if is_binary(stage):
        return stage.fan_in
    few = max(1, 2**17 // stage.fan_in)  # units at a time
    parts = (stage.weight[place : place + few] for place in range(0, len(stage.weight), few))
    return max(1, *(int(np.abs(part.astype(np.int32)).sum(1).max()) for part in parts))


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


def _check_weight_form(weight: Array, count: int) -> None:
    if weight.dtype == np.int8:
        _check_array("weight", weight, np.int8, 2)
        if weight.shape[1] != count:
            raise ValueError(f"expected {count} weights per unit, got {weight.shape[1]}")
        return
    _check_array("weight", weight, np.uint8, 2)
    if weight.shape[1] != -(-count // 8):
        raise ValueError(f"{count} weights per unit take {-(-count // 8)} bytes, got {weight.shape[1]}")


def _check_weight(weight: Array, count: int) -> None:
    if weight.dtype == np.int8:
        if weight.min() == -128:
            raise ValueError("weights must be from -127 to 127")
    elif count % 8 and weight[:, -1].max() >> (count % 8):
        raise ValueError("the unused bits after a unit's weights must be zero")


def _check_units(values: Array | None, shape: Shape) -> None:
    if values is not None and len(values) != shape[0]:
        raise ValueError(f"expected one value for each of {shape[0]} units, got {len(values)}")


def _check_numbers(flow: Flow) -> None:
    if flow.kind == "spins":
        raise ValueError("expected integers, got spins")


def _check_count(stage: Stage, read: Sequence[object], count: int | None) -> None:
    if count is not None and len(read) != count:
        raise ValueError(f"{type(stage).__name__} reads {count} values, got {len(read)}")
