"""The sketch of a pass on a CPU: what :func:`spingrad.sketch.sample` does, in one loop compiled by numba."""

import math
from typing import Any

import numpy as np
from numba import njit

Array = Any


@njit(cache=True)
def _mixed(bits: int) -> int:
    bits = (bits & 0xFFFFFFFF) * 0x9E3779B1 & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return bits ^ bits >> 12


@njit(cache=True, nogil=True, error_model="numpy")
def sample(
    x: Array,
    matrix: Array,
    grad: Array,
    windows: Array,
    output: Array,
    transposed: bool,
    row: Array,
    words: Array,
    out: Array,
) -> None:
    """Write the sketch of a pass. Rows are unfolded twice: where they go depends on all of them.

    Args:
        x: Inputs of a convolution, shape ``(N, C, a, b, c)``; else empty.
        matrix: Inputs of a matrix product, shape ``(r, n)``; else empty.
        grad: Gradient of the output, shape ``(N, m, places)``.
        windows: Kernel size, stride, padding and dilation of each of three dimensions, shape ``(4, 3)``.
        output: Sizes of the output in three dimensions.
        transposed: Whether the convolution is transposed.
        row: Memory for a row, shape ``(n,)``.
        words: The same memory as integers of 32 bits, the high ones of doubles.
        out: Receives the sketch, shape ``(groups, slots + 1, n)``.
    """
    groups, slots = out.shape[0], out.shape[1] - 1
    units, channels = grad.shape[1] // groups, x.shape[1] // groups
    shift = 23 if out.itemsize == 4 else 20  # to sign and exponent
    live, signs = np.empty(grad.shape[0] * grad.shape[2], np.int64), np.empty(slots, np.int64)
    along = np.empty((3, windows[0].max()), np.int64)
    for g in range(groups):
        count = _live(grad[:, g * units : (g + 1) * units], live)
        total = 0
        for k in range(slots):
            signs[k], bits = 0, k
            if k < count:
                at = _place(k, count, slots)
                _unfold(x, matrix, live[at], g * channels, channels, windows, output, transposed, along, row)
                if _is_finite(row):
                    signs[k] = 1
                    for i in range(len(words)):  # by number: faster than over the array itself
                        bits += words[i] >> shift
            bits = _mixed(bits)
            signs[k] *= (bits >> 7 & 1) * 2 - 1
            total += bits
        kept = out.dtype.type(min(max(count, 1), slots))
        factor = np.sqrt(out.dtype.type(count) / kept)
        onward = _mixed(total)
        for k in range(slots):
            own, sign = out[g, (k + onward) % slots], signs[k]
            if sign == 0:
                own[:] = 0
                continue
            at = _place(k, count, slots)
            _unfold(x, matrix, live[at], g * channels, channels, windows, output, transposed, along, own)
            times = factor if sign > 0 else -factor
            for i in range(len(own)):
                own[i] *= times
        out[g, slots] = 0
        out[g, slots, 0] = count


@njit(cache=True)
def _place(k: int, count: int, slots: int) -> int:
    return (1024 * k + 633 * k % 1024) * count // (1024 * slots) if count > slots else k


@njit(cache=True, nogil=True)
def _is_finite(row: Array) -> bool:
    others = 0
    for i in range(len(row)):
        others += not math.isfinite(row[i])
    return others == 0


@njit(cache=True, nogil=True)
def _live(grad: Array, live: Array) -> int:
    """Note the rows that have a gradient, and count them."""
    count = 0
    for i in range(grad.shape[0]):
        for p in range(grad.shape[2]):
            for u in range(grad.shape[1]):
                if grad[i, u, p] != 0:  # NaN too
                    live[count] = i * grad.shape[2] + p
                    count += 1
                    break
    return count


@njit(cache=True, nogil=True, error_model="numpy")
def _unfold(
    x: Array,
    matrix: Array,
    place: int,
    first: int,
    channels: int,
    windows: Array,
    output: Array,
    transposed: bool,
    along: Array,
    row: Array,
) -> None:
    """The patch at a place of the output; zero beyond the borders."""
    for d in range(2, -1, -1):
        at, place = place % output[d], place // output[d]
        for tap in range(windows[0, d]):
            along[d, tap] = _along(at, tap, windows[1, d], windows[2, d], windows[3, d], transposed)
            if along[d, tap] >= x.shape[2 + d]:
                along[d, tap] = -1
    if matrix.size:
        row[:] = matrix[place]
        return
    if len(row) == channels:  # a convolution of single pixels
        a, b, c = along[0, 0], along[1, 0], along[2, 0]
        for channel in range(channels):
            row[channel] = x[place, first + channel, a, b, c] if a >= 0 and b >= 0 and c >= 0 else 0
        return
    entry = 0
    for channel in range(first, first + channels):
        for i in range(windows[0, 0]):
            a = along[0, i]
            for j in range(windows[0, 1]):
                b = along[1, j]
                for k in range(windows[0, 2]):
                    c = along[2, k]
                    row[entry] = x[place, channel, a, b, c] if a >= 0 and b >= 0 and c >= 0 else 0
                    entry += 1


@njit(cache=True)
def _along(at: int, tap: int, stride: int, padding: int, dilation: int, transposed: bool) -> int:
    """The pixel under a tap of the kernel; negative if there is none."""
    if not transposed:
        return at * stride - padding + tap * dilation
    spread = at + padding - tap * dilation  # of zeros between the pixels
    return spread // stride if spread % stride == 0 else -1
