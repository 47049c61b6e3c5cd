"""The two inner loops of the runtime, written in LLVM's vectors so that every processor gets its own.

Numba compiles what is around them. Left to itself it does not keep these sums in registers: it cannot know
that input and output are different memory, and checks it at every turn.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from spingrad.kernels.vectors import load, splat, store

Array = npt.NDArray[Any]
LANES = 64  # units of a popcount, samples of a table: vectors of this many numbers
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES, _SUMS = ir.VectorType(_I8, LANES), ir.VectorType(_I32, LANES)


@njit(cache=True, nogil=True)
def xnor_sums(x: Array, weight: Array, out: Array) -> None:
    """Subtract from ``out`` twice the number of bits in which a row and a unit differ.

    Args:
        x: Bits of the rows, shape ``(r, bytes)``; bytes are a multiple of eight.
        weight: Bits of the units, byte after byte for 64 units at a time, shape ``(m / 64, bytes, 64)``.
        out: Sums, shape ``(r, m)``; the caller puts the fan-in there.
    """
    for block in range(weight.shape[0]):
        for row in range(x.shape[0]):
            for start in range(
                0, x.shape[1], 128
            ):  # a count of up to 1,024 differences is eight times a byte
                stop = min(start + 128, x.shape[1])
                count_differences(x, row, weight, block, start, stop, out)  # type: ignore[call-arg]


@njit(cache=True, nogil=True)
def signed_sums(x: Array, weight: Array, table: Array, total: Array, out: Array) -> None:
    """Sums of whole numbers with the signs of the weights: four inputs at a time, looked up.

    For 64 rows at once, a table holds what four inputs add up to under each of their 16 signs. A unit then
    adds one entry for every four of its weights.

    Args:
        x: Inputs, one column a row of the batch, shape ``(n, r)``, both multiples of 64.
        weight: Bits of the units, shape ``(m, n / 64)``.
        table: Room for the tables, shape ``(16, 16, 64)``, in a dtype that holds sums of 64 inputs.
        total: Room for the sums of 64 rows, shape ``(m, 64)``.
        out: Receives the sums, shape ``(r, m)``.
    """
    for start in range(0, x.shape[1], LANES):
        total[:] = 0
        for word in range(weight.shape[1]):
            fill_tables(x, 64 * word, start, table)
            for unit in range(weight.shape[0]):
                add_from_table(table, weight[unit, word], total, unit)  # type: ignore[call-arg]
        for lane in range(LANES):
            for unit in range(weight.shape[0]):
                out[start + lane, unit] = total[unit, lane]


@njit(cache=True, nogil=True)
def fill_tables(x: Array, first: int, start: int, table: Array) -> None:
    """What four inputs add up to under each of their 16 signs, for 64 inputs of 64 rows."""
    for group in range(16):
        i = first + 4 * group
        for lane in range(LANES):
            a, b = x[i, start + lane], x[i + 1, start + lane]
            c, d = x[i + 2, start + lane], x[i + 3, start + lane]
            table[group, 0, lane] = -a - b - c - d
            table[group, 1, lane] = a - b - c - d
            table[group, 2, lane] = b - a - c - d
            table[group, 3, lane] = a + b - c - d
            table[group, 4, lane] = c - a - b - d
            table[group, 5, lane] = a - b + c - d
            table[group, 6, lane] = b - a + c - d
            table[group, 7, lane] = a + b + c - d
        for signs in range(8):
            for lane in range(LANES):
                table[group, 15 - signs, lane] = -table[group, signs, lane]


@intrinsic
def count_differences(  # type: ignore[no-untyped-def]
    typing_context, x, row, weight, block, start, stop, out
):
    """``out[row, 64 block:] -= 2 popcount(x[row, start:stop] ^ weight[block, start:stop])`` for 64 units."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, weight, out = (context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 2, 6))
        row, block, start, stop = (args[i] for i in (1, 3, 4, 5))
        width = builder.extract_value(x.shape, 1)
        inputs = builder.gep(x.data, [builder.mul(row, width)])
        units = builder.gep(weight.data, [builder.mul(builder.mul(block, width), _I64(LANES))])
        twice = _twice_the_differences(
            builder, units, start, stop, lambda place: builder.load(builder.gep(inputs, [place]))
        )
        place = _first_sum(builder, out, row, block)
        store(builder, builder.sub(load(builder, out.data, place, _SUMS), twice), out.data, place)
        return context.get_dummy_value()

    return types.void(x, row, weight, block, start, stop, out), codegen


@intrinsic
def count_patch(  # type: ignore[no-untyped-def]
    typing_context, x, first, offsets, masks, weight, block, start, stop, begin, place, out, row
):
    """``out[row] = begin[place] - 2 popcount(patch ^ weight[block])`` for 64 units.

    Byte ``p`` of the patch is ``x[(first & masks[p]) + offsets[p]]``: it is read where it is in the image.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def array(i: int) -> Any:
            return context.make_array(signature.args[i])(context, builder, args[i])

        x, offsets, masks, weight, begin, out = (array(i) for i in (0, 2, 3, 4, 8, 10))
        first, block, start, stop, line, row = (args[i] for i in (1, 5, 6, 7, 9, 11))
        width = builder.extract_value(weight.shape, 1)
        units = builder.gep(weight.data, [builder.mul(builder.mul(block, width), _I64(LANES))])

        def byte(place: Any) -> Any:
            offset, mask = (builder.load(builder.gep(one.data, [place])) for one in (offsets, masks))
            return builder.load(builder.gep(x.data, [builder.add(builder.and_(first, mask), offset)]))

        twice = _twice_the_differences(builder, units, start, stop, byte)
        before = load(builder, begin.data, _first_sum(builder, begin, line, block), _SUMS)
        store(builder, builder.sub(before, twice), out.data, _first_sum(builder, out, row, block))
        return context.get_dummy_value()

    return types.void(x, first, offsets, masks, weight, block, start, stop, begin, place, out, row), codegen


def _first_sum(builder: Any, sums: Any, row: Any, block: Any) -> Any:
    """Where the sums of a row and a block of units begin."""
    units = builder.extract_value(sums.shape, 1)
    return builder.add(builder.mul(row, units), builder.mul(block, _I64(LANES)))


def _twice_the_differences(builder: Any, units: Any, start: Any, stop: Any, byte: Any) -> Any:
    """Twice the number of bits in which bytes and the weights of 64 units differ.

    Carry-save adders (Harley and Seal) bring eight bytes down to one before anything is counted.
    """
    zero = ir.Constant(_BYTES, None)
    ones, twos, fours, eights = (cgutils.alloca_once_value(builder, zero) for _ in range(4))

    def difference(place: Any) -> Any:
        bits = splat(builder, byte(place), _BYTES)
        return builder.xor(bits, load(builder, units, builder.mul(place, _I64(LANES)), _BYTES))

    def carry(total: Any, first: Any, second: Any) -> Any:
        """Add two bits to those of ``total``; what does not fit is returned."""
        old = builder.load(total)
        builder.store(builder.xor(builder.xor(old, first), second), total)
        either = builder.or_(first, second)
        return builder.or_(builder.and_(first, second), builder.and_(old, either))

    with cgutils.for_range_slice(builder, start, stop, _I64(8), _I64) as (place, _):
        bits = [difference(builder.add(place, _I64(k))) for k in range(8)]
        pairs = [carry(ones, bits[k], bits[k + 1]) for k in range(0, 8, 2)]
        quads = [carry(twos, pairs[k], pairs[k + 1]) for k in (0, 2)]
        count = _popcount(builder, carry(fours, *quads))
        builder.store(builder.add(builder.load(eights), count), eights)

    def widened(total: Any) -> Any:
        return builder.zext(total, _SUMS)

    count = builder.shl(widened(builder.load(eights)), splat(builder, _I32(3), _SUMS))
    for power, total in enumerate((ones, twos, fours)):
        part = widened(_popcount(builder, builder.load(total)))
        count = builder.add(count, builder.shl(part, splat(builder, _I32(power), _SUMS)))
    return builder.shl(count, splat(builder, _I32(1), _SUMS))


@intrinsic
def add_from_table(typing_context, table, word, total, unit):  # type: ignore[no-untyped-def]
    """``total[unit] += sum of table[g, four bits of word]`` over the 16 groups, for all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table, total = (context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 2))
        number = context.get_data_type(signature.args[0].dtype)
        vector = ir.VectorType(number, LANES)
        added = ir.Constant(vector, None)
        for group in range(16):
            four = builder.and_(builder.lshr(args[1], _I64(4 * group)), _I64(15))
            place = builder.mul(builder.add(four, _I64(16 * group)), _I64(LANES))
            added = builder.add(added, load(builder, table.data, place, vector))
        place = builder.mul(args[3], _I64(LANES))
        wide = added if number.width == 32 else builder.sext(added, _SUMS)
        store(builder, builder.add(load(builder, total.data, place, _SUMS), wide), total.data, place)
        return context.get_dummy_value()

    return types.void(table, word, total, unit), codegen


def _popcount(builder: Any, value: Any) -> Any:  # of every byte
    kind = ir.FunctionType(_BYTES, [_BYTES])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.ctpop.v{LANES}i8")
    return builder.call(function, [value])


def units_by_lanes(bits: Array) -> Array:  # (m, bytes) -> (m / 64, bytes, 64)
    """Packed weights in the order in which :func:`xnor_sums` reads them; missing units are zero."""
    blocks = -(-len(bits) // LANES)
    padded = np.zeros((blocks * LANES, bits.shape[1]), np.uint8)
    padded[: len(bits)] = bits
    return np.ascontiguousarray(padded.reshape(blocks, LANES, -1).transpose(0, 2, 1))
