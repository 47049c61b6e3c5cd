"""The runtime on a processor: XNOR and popcount where inputs are spins, signed sums where they are numbers.

Without numba the same whole numbers come out of float32 products, which are exact below 2^24.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import numpy as np

from spinstep.export.stages import (
    Array,
    Convolution,
    Flatten,
    Flow,
    Linear,
    Pool,
    Product,
    Rescale,
    Stage,
    Threshold,
    spins_of_bits,
)

if TYPE_CHECKING:
    from spinstep.export.packed import PackedModel

Backend = Literal["auto", "numba", "numpy"]
Step = Callable[[Array], Array]
CHUNK = 256  # samples that go through all layers together, so that what flows between them stays in cache
LANES = 64  # of the kernels


def chosen(backend: Backend) -> Literal["numba", "numpy"]:
    """The backend that a name stands for on this machine."""
    if backend not in ("auto", "numba", "numpy"):
        raise ValueError(f'backend is "auto", "numba" or "numpy", got {backend!r}')
    has_numba = find_spec("numba") is not None
    if backend == "numba" and not has_numba:
        raise ImportError('the popcount runtime needs numba: pip install "spinstep[export]"')
    return "numpy" if backend == "numpy" or not has_numba else "numba"


class Runtime:
    """A packed network made ready to run: every stage a function of a batch of what flows in.

    Spins flow as booleans (+1 is true), all else as whole numbers; the first axis is the sample.
    """

    def __init__(self, model: "PackedModel", backend: Literal["numba", "numpy"]) -> None:
        self.model = model
        self.steps = [
            _step(stage, before, after, backend)
            for stage, before, after in zip(model.stages, model.flows, model.flows[1:], strict=False)
        ]

    def scores(self, x: Array, threads: int | None) -> Array:
        x = self._inputs(x)
        out = np.empty((len(x), self.model.flows[-1].shape[0]), np.int32)
        chunks = [slice(start, start + CHUNK) for start in range(0, len(x), CHUNK)]

        def run(chunk: slice) -> None:
            flow = x[chunk]
            for step in self.steps:
                flow = step(flow)
            out[chunk] = flow

        threads = min(threads or os.cpu_count() or 1, len(chunks))
        if threads > 1:  # the kernels let go of the interpreter
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(run, chunks))
        else:
            for chunk in chunks:
                run(chunk)
        return out

    def sums(self, x: Array) -> list[Array]:
        x, found = self._inputs(x), []
        for stage, step in zip(self.model.stages, self.steps, strict=True):
            x = step(x)
            if isinstance(stage, Linear | Convolution):
                found.append(x)
        return found

    def _inputs(self, x: Array) -> Array:
        x, kind, shape = np.asarray(x), self.model.kind, self.model.shape
        if x.shape[1:] not in (shape, (int(np.prod(shape)),)):
            raise ValueError(f"samples have the shape {shape}, got an array of shape {x.shape}")
        if kind == "pixels" and x.dtype != np.uint8:
            raise ValueError(f"this network takes pixels as uint8, 0 to 255, got {x.dtype}")
        if kind == "spins":
            if not (np.abs(x) == 1).all():
                raise ValueError("this network takes spins, -1 or +1, got other numbers")
            x = x > 0
        return x.reshape(len(x), *shape)


def _step(stage: Stage, before: Flow, after: Flow, backend: str) -> Step:
    match stage:
        case Linear():
            rows = _rows(stage, before, None, backend)
            return lambda x: rows(x[:, None])
        case Convolution():
            return _convolution(stage, before, after, backend)
        case Threshold():
            return _threshold(stage)
        case Rescale():
            return _rescale(stage)
        case Pool():
            return _pool(stage)
        case Flatten():
            return lambda x: x.reshape(len(x), -1)


def _convolution(stage: Convolution, before: Flow, after: Flow, backend: str) -> Step:
    valid = None  # which inputs of a patch lie inside the image, (positions, fan-in)
    if any(stage.padding):
        valid = _patches(np.ones((1, *before.shape), bool), stage)[:, 0]
    rows = _rows(stage, before, valid, backend)

    def step(x: Array) -> Array:
        sums = rows(_patches(x, stage))
        return np.moveaxis(sums.reshape(len(x), *after.shape[1:], -1), -1, 1)

    return step


def _patches(x: Array, stage: Convolution) -> Array:  # (b, c, h, w) -> (b * positions, groups, fan-in)
    (top, left), (height, width), (rows, columns) = stage.padding, stage.kernel, stage.dilation
    x = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    reach = rows * (height - 1) + 1, columns * (width - 1) + 1
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, (2, 3))
    windows = windows[:, :, :: stage.stride[0], :: stage.stride[1], ::rows, ::columns]
    grouped = windows.reshape(len(x), stage.groups, -1, *windows.shape[2:])
    return grouped.transpose(0, 3, 4, 1, 2, 5, 6).reshape(-1, stage.groups, stage.fan_in)


def _rows(stage: Product, before: Flow, valid: Array | None, backend: str) -> Step:
    """Sums of rows of inputs, a row for every sample or patch: ``(r, groups, fan-in)`` to ``(r, m)``."""
    groups = stage.groups if isinstance(stage, Convolution) else 1
    parts = [_group(bits, stage.fan_in, before, valid, backend) for bits in np.split(stage.bits, groups)]
    if groups == 1:
        return lambda x: parts[0](x[:, 0])
    return lambda x: np.concatenate([part(x[:, g]) for g, part in enumerate(parts)], 1)


def _group(bits: Array, fan_in: int, before: Flow, valid: Array | None, backend: str) -> Step:
    """The same for one group of channels: ``(r, fan-in)`` to ``(r, m)``."""
    if backend == "numpy":
        return _products(bits, fan_in, before, valid)
    return _popcounts(bits, fan_in, valid) if before.kind == "spins" else _tables(bits, fan_in, before.bound)


def _products(bits: Array, fan_in: int, before: Flow, valid: Array | None) -> Step:
    spins = spins_of_bits(bits, fan_in).astype(np.float32).T

    def rows(x: Array) -> Array:
        numbers = x.astype(np.float32)
        if before.kind == "spins":
            numbers = 2 * numbers - 1
            if valid is not None:
                numbers = (numbers.reshape(-1, *valid.shape) * valid).reshape(x.shape)
        return (numbers @ spins).astype(np.int32)

    return rows


def _popcounts(bits: Array, fan_in: int, valid: Array | None) -> Step:
    from spinstep.export._kernels import units_by_lanes, xnor_sums

    width = -(-bits.shape[1] // 8) * 8
    padded = np.zeros((len(bits), width), np.uint8)
    padded[:, : bits.shape[1]] = bits
    lanes, units = units_by_lanes(padded), len(bits)
    start = np.full((1, len(lanes) * LANES), fan_in, np.int32)
    if valid is not None:
        # Outside the image x is a zero bit. Where the weight is one they differ, and what that will take
        # away is given beforehand.
        ones = np.unpackbits(bits, axis=1, count=fan_in, bitorder="little").astype(np.int32)
        start = np.zeros((len(valid), len(lanes) * LANES), np.int32)
        start[:, :units] = valid.sum(1, keepdims=True) + 2 * (~valid @ ones.T)

    def rows(x: Array) -> Array:  # x is boolean
        packed = np.zeros((len(x), width), np.uint8)
        packed[:, : bits.shape[1]] = np.packbits(x, axis=1, bitorder="little")
        sums = np.empty((len(x), start.shape[1]), np.int32)
        sums.reshape(-1, *start.shape)[:] = start
        xnor_sums(packed, lanes, sums)
        return sums[:, :units]

    return rows


def _tables(bits: Array, fan_in: int, bound: int) -> Step:
    from spinstep.export._kernels import signed_sums

    words = -(-fan_in // 64)
    padded = np.zeros((len(bits), 8 * words), np.uint8)
    padded[:, : bits.shape[1]] = bits
    weight = padded.view("<u8").astype(np.uint64)
    number = np.int16 if 64 * bound < 2**15 else np.int32

    def rows(x: Array) -> Array:  # zeros outside the image count as zeros
        columns = np.zeros((64 * words, -(-len(x) // LANES) * LANES), number)
        columns[:fan_in, : len(x)] = x.T
        sums = np.empty((columns.shape[1], len(bits)), np.int32)
        table, total = np.empty((16, 16, LANES), number), np.empty((len(bits), LANES), np.int32)
        signed_sums(columns, weight, table, total, sums)
        return sums[: len(x)]

    return rows


def _threshold(stage: Threshold) -> Step:
    if stage.thresholds is None or stage.directions is None:
        return lambda x: x >= 0
    thresholds, directions = stage.thresholds, stage.directions
    return lambda x: x * _along(directions, x) >= _along(thresholds, x)


def _rescale(stage: Rescale) -> Step:
    multipliers = stage.multipliers.astype(np.int64)
    dtype = np.int16 if stage.limit < 2**15 else np.int32

    def step(x: Array) -> Array:
        line = x.astype(np.int64) * _along(multipliers, x) + _along(stage.offsets, x)
        clipped: Array = np.clip(line >> stage.shift, -stage.limit, stage.limit)
        return clipped.astype(dtype)

    return step


def _along(values: Array, x: Array) -> Array:
    """One value a unit, beside a batch whose units are on axis 1."""
    return values.reshape(-1, *[1] * (x.ndim - 2))


def _pool(stage: Pool) -> Step:
    def step(x: Array) -> Array:
        windows = np.lib.stride_tricks.sliding_window_view(x, stage.size, (2, 3))
        windows = windows[:, :, :: stage.stride[0], :: stage.stride[1]]
        if stage.take == "max":
            return np.asarray(windows.max((-2, -1)))
        sums = np.asarray(windows.sum((-2, -1), dtype=np.int32))
        return sums if windows.dtype != bool else 2 * sums - np.int32(np.prod(stage.size))

    return step
