"""Runs the stages on a CPU: XNOR and popcount where inputs are spins, signed sums where they are integers.

Without numba, float32 products give the same integers: they are exact below 2^24.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Literal, assert_never

import numpy as np

from spingrad.export.stages import (
    PRODUCTS,
    Add,
    Array,
    Concat,
    Convolution,
    Flatten,
    Flow,
    Linear,
    Pad,
    Pool,
    Reads,
    Rescale,
    Stage,
    Threshold,
    is_binary,
    whole_weights,
)
from spingrad.kernels.compiled import HAS_NUMBA

Backend = Literal["auto", "numba", "numpy"]
Function = Callable[..., Array]
CHUNK = 256  # examples that pass all layers together, so that what flows between layers stays in the cache
LANES = 64  # of the kernels


def chosen(backend: Backend) -> Literal["numba", "numpy"]:
    """The backend to use on this machine: ``"auto"`` is numba if it is installed, else numpy."""
    if backend not in ("auto", "numba", "numpy"):
        raise ValueError(f'backend must be "auto", "numba" or "numpy", got {backend!r}')
    if backend == "numba" and not HAS_NUMBA:
        raise ImportError('the popcount runtime needs numba: pip install "spingrad[export]"')
    return "numpy" if backend == "numpy" or not HAS_NUMBA else "numba"


class Runtime:
    """A packed network that is ready to run: one function per stage, from batch to batch.

    Spins are booleans (true is +1), everything else integers; the first axis counts the examples.

    Args:
        stages: The stages of the network.
        reads: Which values each stage reads.
        flows: The values: the input and the result of every stage.
        backend: What computes the sums.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        reads: Reads,
        flows: Sequence[Flow],
        backend: Literal["numba", "numpy"],
    ) -> None:
        self.stages, self.reads, self.flows = stages, reads, flows
        self.functions = [
            _function(stage, flows[read[0]], after, backend)
            for stage, read, after in zip(stages, reads, flows[1:], strict=True)
        ]
        self.last_read = {value: place for place, read in enumerate(reads) for value in read}

    def scores(self, x: Array, threads: int | None) -> Array:
        x = self._inputs(x)
        out = np.empty((len(x), self.flows[-1].shape[0]), np.int32)
        chunks = [slice(start, start + CHUNK) for start in range(0, len(x), CHUNK)]

        def run(chunk: slice) -> None:
            *_, (_, out[chunk]) = self._results(x[chunk])

        threads = min(threads or os.cpu_count() or 1, len(chunks))
        if threads > 1:  # the kernels release the interpreter lock
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(run, chunks))
        else:
            for chunk in chunks:
                run(chunk)
        return out

    def sums(self, x: Array) -> list[Array]:
        return [result for stage, result in self._results(self._inputs(x)) if isinstance(stage, PRODUCTS)]

    def _results(self, x: Array) -> Iterator[tuple[Stage, Array]]:
        """Every stage and what it computes; a value is forgotten once its last reader has read it."""
        values = {0: x}
        for place, (stage, function) in enumerate(zip(self.stages, self.functions, strict=True)):
            result = function(*(values[value] for value in self.reads[place]))
            for value in set(self.reads[place]):
                if self.last_read[value] == place:
                    del values[value]
            values[place + 1] = result
            yield stage, result

    def _inputs(self, x: Array) -> Array:
        x, (kind, shape, _) = np.asarray(x), self.flows[0]
        without_ones = tuple(size for size in shape if size > 1)  # a signal is an image of height one
        if x.shape[1:] not in (shape, without_ones, (shape[0], *shape[2:]), (int(np.prod(shape)),)):
            raise ValueError(
                f"expected a batch of examples, each of the shape {shape}, got an array of shape {x.shape}"
            )
        expected = {"pixels": "uint8", "int8": "int8"}.get(kind)
        if expected and x.dtype != expected:
            raise ValueError(f"this network takes {expected}, got {x.dtype}")
        if kind == "spins":
            if not (np.abs(x) == 1).all():
                raise ValueError("this network takes spins, -1 or +1, got other values")
            x = x > 0
        return x.reshape(len(x), *shape)


def _function(stage: Stage, before: Flow, after: Flow, backend: str) -> Function:
    match stage:
        case Linear():
            return _sums(stage, before, backend)
        case Convolution():
            return _convolution(stage, before, after, backend)
        case Threshold():
            return _threshold(stage)
        case Rescale():
            return _rescale(stage, backend)
        case Pool():
            return _pool(stage, before, after)
        case Flatten():
            return lambda x: x.reshape(len(x), -1)
        case Add():
            return _add(stage)
        case Concat():
            return lambda *parts: np.concatenate(parts, 1)
        case Pad():
            sides = (0, 0), stage.channels, stage.rows, stage.columns
            return lambda x: np.pad(x, sides)
        case _:
            assert_never(stage)


def _convolution(stage: Convolution, before: Flow, after: Flow, backend: str) -> Function:
    if backend == "numba":
        return _compiled_convolution(stage, before, after)
    channels, valid = stage.channels // stage.groups, None
    if any(stage.padding):  # which inputs of each patch lie inside the image, (positions, fan-in)
        valid = _patches(np.ones((1, channels, *before.shape[1:]), bool), stage)
    parts = [
        _products(whole_weights(stage, own), before, valid) for own in np.split(stage.weight, stage.groups)
    ]

    def convolve(x: Array) -> Array:
        groups = np.split(x, stage.groups, 1)
        sums = [part(_patches(group, stage)) for part, group in zip(parts, groups, strict=True)]
        return _channels_first(np.concatenate(sums, 1), after)

    return convolve


def _channels_first(sums: Array, after: Flow) -> Array:  # (b * positions, m) -> (b, m, h, w)
    return np.moveaxis(sums.reshape(-1, *after.shape[1:], after.shape[0]), -1, 1)


def _compiled_convolution(stage: Convolution, before: Flow, after: Flow) -> Function:
    """By the kernels, which read images with their channels last; a group of channels at a time."""
    from spingrad.kernels import convolution as kernels

    channels, units = stage.channels // stage.groups, len(stage.weight) // stage.groups
    whole = np.moveaxis(whole_weights(stage).reshape(-1, channels, *stage.kernel), 1, -1)
    is_depthwise = channels == units == 1
    if is_binary(stage) and before.kind == "spins" and not is_depthwise:
        return _in_groups(stage, after, [
            _spin_part(stage, own, before, after) for own in np.split(whole, stage.groups)
        ])  # fmt: skip
    if is_depthwise:
        offsets, patches = _places(stage, before, after, stage.channels)
        kernel, weights = kernels.depthwise_convolution, [whole.reshape(units * stage.groups, -1).T]
        offsets, groups = offsets[:: stage.channels], 1
    else:
        offsets, patches = _places(stage, before, after, channels)
        flat = [own.reshape(units, -1) for own in np.split(whole, stage.groups)]
        kernel = kernels.signed_convolution if is_binary(stage) else kernels.whole_convolution
        weights, groups = [_words(own > 0) if is_binary(stage) else own.T for own in flat], stage.groups
    small = is_binary(stage) and not is_depthwise and 64 * before.bound < 2**15
    dtype = np.int16 if small else np.int32
    weights = [own if own.dtype == np.uint64 else np.ascontiguousarray(own, np.int32) for own in weights]

    def part(weight: Array) -> Function:
        def sums(x: Array) -> Array:
            image = _bordered(x.astype(dtype), stage)
            out = np.empty((len(x) * len(patches), after.shape[0] // groups), np.int32)
            kernel(image, offsets, weight, patches, out)
            return out

        return sums

    parts = [part(weight) for weight in weights]
    convolve = _in_groups(stage, after, parts)
    return lambda x: convolve(_numbers(x))


def _in_groups(stage: Convolution, after: Flow, parts: Sequence[Function]) -> Function:
    """Convolves each part of the channels, which come last; the sums have their channels first."""

    def convolve(x: Array) -> Array:
        groups = np.split(np.moveaxis(x, 1, -1), len(parts), -1)
        sums = [part(group) for part, group in zip(parts, groups, strict=True)]
        return _channels_first(sums[0] if len(sums) == 1 else np.concatenate(sums, 1), after)

    return convolve


def _spin_part(stage: Convolution, whole: Array, before: Flow, after: Flow) -> Function:
    """Sums of some units by popcount; ``whole`` are their weights, channels last."""
    from spingrad.kernels.convolution import xnor_convolution
    from spingrad.kernels.popcount import units_by_lanes

    units, channels = len(whole), whole.shape[-1]
    packed = np.packbits(whole > 0, axis=-1, bitorder="little").reshape(units, -1)
    fill = -packed.shape[1] % 8
    weight = units_by_lanes(np.pad(packed, ((0, 0), (0, fill))))
    offsets, patches = _places(stage, before, after, -(-channels // 8))
    zero = _bordered(np.zeros((1, *before.shape[1:], -(-channels // 8)), np.uint8), stage).shape[1] - 1
    masks = np.repeat([-1, 0], [len(offsets), fill])
    offsets = np.pad(offsets, (0, fill), constant_values=zero)
    # Outside the image x is a zero bit, which differs from every weight bit of one. The kernel subtracts two
    # for each such pair, so the sum begins with two more.
    inside = _patches(np.ones((1, channels, *before.shape[1:]), bool), stage)
    ones = np.moveaxis(whole > 0, -1, 1).reshape(units, -1)
    begin = inside.sum(1, keepdims=True) + 2 * (~inside @ ones.T.astype(np.int32))
    begin = np.pad(begin, ((0, 0), (0, -units % LANES))).astype(np.int32)

    def sums(x: Array) -> Array:
        image = _bordered(np.packbits(x, axis=-1, bitorder="little"), stage)
        out = np.empty((len(x) * len(patches), begin.shape[1]), np.int32)
        xnor_convolution(image, offsets, masks, weight, begin, patches, out)
        return out[:, :units]

    return sums


def _places(stage: Convolution, before: Flow, after: Flow, width: int) -> tuple[Array, Array]:
    """Where the numbers of a patch are, relative to its first, and where every patch begins.

    ``width`` is how many numbers, or bytes of bits, each pixel has.
    """
    columns = (before.shape[2] + 2 * stage.padding[1]) * width
    rows, across = (np.arange(size) * step for size, step in zip(stage.kernel, stage.dilation, strict=True))
    offsets = rows[:, None, None] * columns + across[:, None] * width + np.arange(width)
    down, right = (np.arange(size) * step for size, step in zip(after.shape[1:], stage.stride, strict=True))
    return offsets.ravel(), (down[:, None] * columns + right * width).ravel()


def _bordered(x: Array, stage: Convolution) -> Array:  # (b, h, w, c) -> (b, numbers)
    """Images with zeros around them, and one zero more at the end."""
    (top, left), (count, height, width, channels) = stage.padding, x.shape
    size = height + 2 * top, width + 2 * left, channels
    out = np.zeros((count, np.prod(size) + 1), x.dtype)
    out[:, :-1].reshape(count, *size)[:, top : top + height, left : left + width] = x
    return out


def _patches(x: Array, stage: Convolution) -> Array:  # (b, c, h, w) -> (b * positions, c * kernel)
    (top, left), (height, width), (down, right) = stage.padding, stage.kernel, stage.dilation
    x = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    extent = down * (height - 1) + 1, right * (width - 1) + 1
    windows = np.lib.stride_tricks.sliding_window_view(x, extent, (2, 3))
    windows = windows[:, :, :: stage.stride[0], :: stage.stride[1], ::down, ::right]
    return windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, x.shape[1] * height * width)


def _sums(stage: Linear, before: Flow, backend: str) -> Function:
    """Computes the sums of a linear layer."""
    if backend == "numpy" or not is_binary(stage):
        return _products(whole_weights(stage), before, None)
    if before.kind != "spins":
        return _tables(stage.weight, stage.fan_in, before.bound)
    count = _popcounts(stage.weight, stage.fan_in)
    return lambda x: count(np.packbits(x, axis=1, bitorder="little"))


def _products(weight: Array, before: Flow, valid: Array | None) -> Function:
    """Sums as float32 products."""
    transposed = weight.astype(np.float32).T

    def multiply(x: Array) -> Array:
        numbers = x.astype(np.float32)
        if before.kind == "spins":
            numbers = 2 * numbers - 1
            if valid is not None:
                numbers = (numbers.reshape(-1, *valid.shape) * valid).reshape(x.shape)
        return (numbers @ transposed).astype(np.int32)

    return multiply


def _popcounts(weight: Array, fan_in: int) -> Function:
    """The fan-in minus twice the number of bits in which an input and a unit's weights differ."""
    from spingrad.kernels.popcount import units_by_lanes, xnor_sums

    units, width = weight.shape
    lanes = units_by_lanes(np.pad(weight, ((0, 0), (0, -width % 8))))

    def count(x: Array) -> Array:
        packed = np.zeros((len(x), lanes.shape[1]), np.uint8)
        packed[:, :width] = x
        sums = np.full((len(x), LANES * len(lanes)), fan_in, np.int32)
        xnor_sums(packed, lanes, sums)
        return sums[:, :units]

    return count


def _tables(bits: Array, fan_in: int, bound: int) -> Function:
    """Sums of integers with signs, four inputs at a time from a table."""
    from spingrad.kernels.popcount import signed_sums

    weight = _words(np.unpackbits(bits, axis=1, count=fan_in, bitorder="little"))
    words = weight.shape[1]
    number = np.int16 if 64 * bound < 2**15 else np.int32

    def add(x: Array) -> Array:  # outside the image x is zero and adds nothing
        columns = np.zeros((64 * words, -(-len(x) // LANES) * LANES), number)
        columns[:fan_in, : len(x)] = x.T
        sums = np.empty((columns.shape[1], len(bits)), np.int32)
        table, total = np.empty((16, 16, LANES), number), np.empty((len(bits), LANES), np.int32)
        signed_sums(columns, weight, table, total, sums)
        return sums[: len(x)]

    return add


def _words(ones: Array) -> Array:  # (m, n) -> (m, ⌈n / 64⌉)
    """Bits in words of 64."""
    packed = np.packbits(np.pad(ones, ((0, 0), (0, -ones.shape[1] % 64))), axis=1, bitorder="little")
    return packed.view("<u8").astype(np.uint64)


def _threshold(stage: Threshold) -> Function:
    if stage.thresholds is None or stage.directions is None:
        return lambda x: x >= 0
    thresholds, directions = stage.thresholds, stage.directions
    return lambda x: _numbers(x) * _along(directions, x) >= _along(thresholds, x)  # -(-128) is no int8


def _rescale(stage: Rescale, backend: str) -> Function:
    multipliers = stage.multipliers.astype(np.int64)
    dtype = np.int16 if max(-stage.low, stage.high) < 2**15 else np.int32
    if backend == "numba":
        from spingrad.kernels.convolution import rescaled

        def compiled(x: Array) -> Array:
            last = np.ascontiguousarray(np.moveaxis(x, 1, -1))
            out = np.empty(last.shape, dtype)
            rows = last.reshape(-1, len(multipliers)), out.reshape(-1, len(multipliers))
            rescaled(rows[0], multipliers, stage.offsets, stage.shift, stage.low, stage.high, rows[1])
            return np.moveaxis(out, -1, 1)

        return compiled

    def rescale(x: Array) -> Array:
        line = x.astype(np.int64) * _along(multipliers, x) + _along(stage.offsets, x)
        clipped: Array = np.clip(line >> stage.shift, stage.low, stage.high)
        return clipped.astype(dtype)

    return rescale


def _add(stage: Add) -> Function:
    def add(*parts: Array) -> Array:
        pairs = zip(stage.multipliers, map(_numbers, parts), strict=True)
        return reduce(np.add, (part if m == 1 else np.int32(m) * part for m, part in pairs))

    return add


def _numbers(x: Array) -> Array:
    """Spins as -1 and +1, and everything else as it is, in int32."""
    return 2 * x.astype(np.int32) - 1 if x.dtype == bool else x.astype(np.int32)


def _along(values: Array, x: Array) -> Array:
    """One value per unit, shaped to broadcast against a batch whose units are on axis 1."""
    return values.reshape(-1, *[1] * (x.ndim - 2))


def _pool(stage: Pool, before: Flow, after: Flow) -> Function:
    if stage.take == "sum" and stage.size == before.shape[1:]:
        return lambda x: _numbers(x).sum((2, 3), np.int32, keepdims=True)
    (down, right), (_, height, width) = stage.stride, after.shape
    corners = [(i, j) for i in range(stage.size[0]) for j in range(stage.size[1])]
    combine = np.maximum if stage.take == "max" else np.add

    def pool(x: Array) -> Array:
        if stage.take == "sum":
            x = _numbers(x)
        parts = [x[:, :, i : i + down * height : down, j : j + right * width : right] for i, j in corners]
        return np.asarray(reduce(combine, (part[:, :, :height, :width] for part in parts)))

    return pool
