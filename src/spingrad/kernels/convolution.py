"""Convolutions that read their patches where they are, position by position, instead of unfolding an image.

Images are channels-last: all channels of a position lie side by side, so that a patch is a few runs of bytes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from spingrad.kernels.popcount import LANES, add_from_table, count_patch, fill_tables

Array = npt.NDArray[Any]


@njit(cache=True, nogil=True)
def xnor_convolution(
    x: Array, offsets: Array, masks: Array, weight: Array, begin: Array, patches: Array, out: Array
) -> None:
    """Sums of spins times spins.

    Byte ``p`` of the patch that starts at ``patches[i]`` is ``image[(patches[i] & masks[p]) + offsets[p]]``.

    Args:
        x: Images padded with zero bits, channels packed, shape ``(b, bytes of an image)``.
        offsets: Of the bytes of a patch, shape ``(bytes,)``, a multiple of eight.
        masks: -1, or 0 for bytes that only fill up: their offset is that of a zero in the image.
        weight: Bits of the units, in the order of these bytes, by
            :func:`~spingrad.kernels.popcount.units_by_lanes`.
        begin: What the sums of each position begin with, shape ``(positions, m)`` with ``m`` a multiple of
            64, int32.
        patches: The first byte of each position's patch, shape ``(positions,)``.
        out: Receives the sums, shape ``(b * positions, m)``, int32.
    """
    row = 0
    for number in range(x.shape[0]):
        image = x[number]
        for place in range(len(patches)):
            first = patches[place]
            for block in range(weight.shape[0]):
                for start in range(0, len(offsets), 128):  # up to 1,024 differences are eight times a byte
                    stop = min(start + 128, len(offsets))
                    source, line = (begin, place) if start == 0 else (out, row)
                    count_patch(  # type: ignore[call-arg]
                        image, first, offsets, masks, weight, block, start, stop, source, line, out, row
                    )
            row += 1


@njit(cache=True, nogil=True)
def signed_convolution(x: Array, offsets: Array, weight: Array, patches: Array, out: Array) -> None:
    """Sums of whole numbers with the signs of the weights, four inputs at a time from a table.

    Args:
        x: Images padded with zeros, shape ``(b, numbers of an image)``, in a dtype that holds sums of 64
            inputs.
        offsets: Of the numbers of a patch, shape ``(inputs,)``.
        weight: Bits of the units, in the order of these numbers, shape ``(m, ⌈inputs / 64⌉)``, uint64.
        patches: The first number of each position's patch, shape ``(positions,)``.
        out: Receives the sums, shape ``(b * positions, m)``, int32.
    """
    columns = np.zeros((64 * weight.shape[1], LANES), x.dtype)
    table, total = np.empty((16, 16, LANES), x.dtype), np.empty((weight.shape[0], LANES), np.int32)
    for number in range(x.shape[0]):
        image = x[number]
        for first in range(0, len(patches), LANES):
            count = min(LANES, len(patches) - first)
            for place in range(len(offsets)):
                offset = offsets[place]
                for lane in range(count):
                    columns[place, lane] = image[patches[first + lane] + offset]
            total[:] = 0
            for word in range(weight.shape[1]):
                fill_tables(columns, 64 * word, 0, table)
                for unit in range(weight.shape[0]):
                    add_from_table(table, weight[unit, word], total, unit)  # type: ignore[call-arg]
            for lane in range(count):
                for unit in range(weight.shape[0]):
                    out[number * len(patches) + first + lane, unit] = total[unit, lane]


@njit(cache=True, nogil=True)
def whole_convolution(x: Array, offsets: Array, weight: Array, patches: Array, out: Array) -> None:
    """Sums of whole numbers times whole numbers.

    Args:
        x: Images padded with zeros, shape ``(b, numbers of an image)``, int32.
        offsets: Of the numbers of a patch, shape ``(inputs,)``.
        weight: In the order of these numbers, shape ``(inputs, m)``, int32.
        patches: The first number of each position's patch, shape ``(positions,)``.
        out: Receives the sums, shape ``(b * positions, m)``, int32.
    """
    row = 0
    for number in range(x.shape[0]):
        for first in patches:
            out[row] = 0
            for place in range(len(offsets)):
                value = x[number, first + offsets[place]]
                for unit in range(weight.shape[1]):
                    out[row, unit] += value * weight[place, unit]
            row += 1


@njit(cache=True, nogil=True)
def depthwise_convolution(x: Array, offsets: Array, weight: Array, patches: Array, out: Array) -> None:
    """The same for one unit on each channel; offsets are those of the first channel."""
    row = 0
    for number in range(x.shape[0]):
        for first in patches:
            out[row] = 0
            for place in range(len(offsets)):
                start = first + offsets[place]
                for channel in range(weight.shape[1]):
                    out[row, channel] += x[number, start + channel] * weight[place, channel]
            row += 1


@njit(cache=True, nogil=True)
def rescaled(
    x: Array, multipliers: Array, offsets: Array, shift: int, low: int, high: int, out: Array
) -> None:
    """``(multiplier * x + offset) >> shift``, clipped, for every row of ``x``."""
    for row in range(x.shape[0]):
        for unit in range(x.shape[1]):
            value = (np.int64(x[row, unit]) * multipliers[unit] + offsets[unit]) >> shift
            out[row, unit] = min(max(value, low), high)
