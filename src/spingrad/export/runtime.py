"""Runs the stages on a CPU: XNOR and popcount where inputs are spins, signed sums where they are integers.

Without numba, float32 products give the same integers: they are exact below 2^24.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Literal

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
    Product,
    Reads,
    Rescale,
    Stage,
    Threshold,
    is_binary,
    whole_weights,
)
from spingrad.kernels.descent import HAS_NUMBA

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
            raise ValueError(f"examples must have the shape {shape}, got an array of shape {x.shape}")
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
            return _sums(stage, stage.weight, before, None, backend)
        case Convolution():
            return _convolution(stage, before, after, backend)
        case Threshold():
            return _threshold(stage)
        case Rescale():
            return _rescale(stage)
        case Pool():
            return _pool(stage, after)
        case Flatten():
            return lambda x: x.reshape(len(x), -1)
        case Add():
            return _add(stage)
        case Concat():
            return lambda *parts: np.concatenate(parts, 1)
        case Pad():
            sides = (0, 0), stage.channels, stage.rows, stage.columns
            return lambda x: np.pad(x, sides)


def _convolution(stage: Convolution, before: Flow, after: Flow, backend: str) -> Function:
    channels, valid = stage.channels // stage.groups, None
    if any(stage.padding):  # which inputs of each patch lie inside the image, (positions, fan-in)
        valid = _patches(np.ones((1, channels, *before.shape[1:]), bool), stage)
    parts = [_sums(stage, own, before, valid, backend) for own in np.split(stage.weight, stage.groups)]

    def convolve(x: Array) -> Array:
        groups = np.split(x, stage.groups, 1)
        sums = np.concatenate([part(group) for part, group in zip(parts, groups, strict=True)], 1)
        return np.moveaxis(sums.reshape(len(x), *after.shape[1:], after.shape[0]), -1, 1)

    return convolve


def _patches(x: Array, stage: Convolution) -> Array:  # (b, c, h, w) -> (b * positions, c * kernel)
    (top, left), (height, width), (down, right) = stage.padding, stage.kernel, stage.dilation
    x = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    extent = down * (height - 1) + 1, right * (width - 1) + 1
    windows = np.lib.stride_tricks.sliding_window_view(x, extent, (2, 3))
    windows = windows[:, :, :: stage.stride[0], :: stage.stride[1], ::down, ::right]
    return windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, x.shape[1] * height * width)


def _sums(stage: Product, weight: Array, before: Flow, valid: Array | None, backend: str) -> Function:
    """Computes the sums of a layer's units, or of one group of them, for every example or patch."""

    def unfolded(x: Array) -> Array:
        return _patches(x, stage) if isinstance(stage, Convolution) else x

    if backend == "numpy" or not is_binary(stage):
        multiply = _products(whole_weights(stage, weight), before, valid)
        return lambda x: multiply(unfolded(x))
    if before.kind != "spins":
        add = _tables(weight, stage.fan_in, before.bound)
        return lambda x: add(unfolded(x))
    # Channels are packed before patches are unfolded, so that an eighth of the bytes is copied.
    ones = np.unpackbits(weight, axis=1, count=stage.fan_in, bitorder="little")
    shape = (len(ones), -1, *stage.kernel) if isinstance(stage, Convolution) else ones.shape
    weight = np.packbits(ones.reshape(shape), axis=1, bitorder="little").reshape(len(ones), -1)
    start = np.full((1, len(ones)), stage.fan_in, np.int32)
    if valid is not None:
        # Outside the image x is a zero bit, which differs from every weight bit of one. The kernel subtracts
        # two for each such pair, so the start adds two.
        start = valid.sum(1, keepdims=True) + 2 * (~valid @ ones.T.astype(np.int32))
    count = _popcounts(weight, start)
    return lambda x: count(unfolded(np.packbits(x, axis=1, bitorder="little")))


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


def _popcounts(weight: Array, start: Array) -> Function:
    """``start`` minus twice the number of bits in which an input and a unit's weights differ.

    ``start`` holds one line per position of a patch and is repeated for every example.
    """
    from spingrad.kernels.popcount import units_by_lanes, xnor_sums

    units, width = weight.shape
    lanes = units_by_lanes(np.pad(weight, ((0, 0), (0, -width % 8))))
    begin = np.pad(start, ((0, 0), (0, -units % LANES))).astype(np.int32)

    def count(x: Array) -> Array:
        packed = np.zeros((len(x), lanes.shape[1]), np.uint8)
        packed[:, :width] = x
        sums = np.empty((len(x), begin.shape[1]), np.int32)
        sums.reshape(-1, *begin.shape)[:] = begin
        xnor_sums(packed, lanes, sums)
        return sums[:, :units]

    return count


def _tables(bits: Array, fan_in: int, bound: int) -> Function:
    """Sums of integers with signs, four inputs at a time from a table."""
    from spingrad.kernels.popcount import signed_sums

    words = -(-fan_in // 64)
    padded = np.zeros((len(bits), 8 * words), np.uint8)
    padded[:, : bits.shape[1]] = bits
    weight = padded.view("<u8").astype(np.uint64)
    number = np.int16 if 64 * bound < 2**15 else np.int32

    def add(x: Array) -> Array:  # outside the image x is zero and adds nothing
        columns = np.zeros((64 * words, -(-len(x) // LANES) * LANES), number)
        columns[:fan_in, : len(x)] = x.T
        sums = np.empty((columns.shape[1], len(bits)), np.int32)
        table, total = np.empty((16, 16, LANES), number), np.empty((len(bits), LANES), np.int32)
        signed_sums(columns, weight, table, total, sums)
        return sums[: len(x)]

    return add


def _threshold(stage: Threshold) -> Function:
    if stage.thresholds is None or stage.directions is None:
        return lambda x: x >= 0
    thresholds, directions = stage.thresholds, stage.directions
    return lambda x: x * _along(directions, x) >= _along(thresholds, x)


def _rescale(stage: Rescale) -> Function:
    multipliers = stage.multipliers.astype(np.int64)
    dtype = np.int16 if max(-stage.low, stage.high) < 2**15 else np.int32

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


def _pool(stage: Pool, after: Flow) -> Function:
    (down, right), (_, height, width) = stage.stride, after.shape
    corners = [(i, j) for i in range(stage.size[0]) for j in range(stage.size[1])]
    combine = np.maximum if stage.take == "max" else np.add

    def pool(x: Array) -> Array:
        if stage.take == "sum":
            x = _numbers(x)
        parts = [x[:, :, i : i + down * height : down, j : j + right * width : right] for i, j in corners]
        return np.asarray(reduce(combine, (part[:, :, :height, :width] for part in parts)))

    return pool
