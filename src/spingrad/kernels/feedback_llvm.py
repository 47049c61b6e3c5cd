"""The kernel of error feedback: 32 units at a time, written in LLVM's vectors.

A unit's spins depend on each other in turn, so a processor's lanes take units. Left to itself the compiler
does not vectorise this: it cannot know that the parts of its working memory never overlap.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic

from spingrad.kernels.vectors import load, splat, store

Array = npt.NDArray[Any]
_intrinsic: Any = intrinsic  # whose own type says that it never returns
LANES, SPAN, TILE = 32, 512, 16
_I32, _FLOAT = ir.IntType(32), ir.FloatType()
_UNITS, _SPINS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_FLOAT, TILE)


@njit(cache=True, nogil=True, error_model="numpy")
def feed_back(H: Array, rows: tuple[Array, ...], G: Array) -> None:
    """Set spin after spin to the sign of ``H`` less what the spins before it make of its couplings.

    Args:
        H: Fields, shape ``(m, n)``, single precision like the rest.
        rows: Directions of the inputs, shape ``(n,)`` each; compiled anew for every number of them.
        G: Receives the spins, shape ``(m, n)``.
    """
    (m, n), k = H.shape, len(rows)
    work = np.zeros((k + SPAN) * LANES, np.float32)  # outputs of the spins so far, then fields of some
    for unit in range(0, m, LANES):
        work[: k * LANES] = 0
        for start in range(0, n, SPAN):
            _move(H, unit, start, work, k, True)
            _set_spins(work, rows, start, min(SPAN, n - start))
            _move(G, unit, start, work, k, False)


@njit(cache=True, nogil=True, error_model="numpy")
def _move(matrix: Array, unit: int, start: int, work: Array, k: int, inwards: bool) -> None:
    """32 units by 512 spins between a matrix and the working memory, which has spins first."""
    n, units = matrix.shape[1], min(LANES, matrix.shape[0] - unit)
    for row in range(0, units, TILE):
        for i in range(0, min(SPAN, n - start), TILE):
            place = (k + i) * LANES + row
            if row + TILE <= units and start + i + TILE <= n:
                if inwards:
                    _turn(matrix, unit + row, start + i, work, place, True)
                else:
                    _turn(matrix, unit + row, start + i, work, place, False)
                continue
            for lane in range(min(TILE, units - row)):
                for spin in range(min(TILE, n - start - i)):
                    if inwards:
                        work[place + spin * LANES + lane] = matrix[unit + row + lane, start + i + spin]
                    else:
                        matrix[unit + row + lane, start + i + spin] = work[place + spin * LANES + lane]


@_intrinsic
def _set_spins(typing_context, work, rows, start, count):  # type: ignore[no-untyped-def]
    """``count`` fields become spins, one after the other for all lanes; outputs stay in registers."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        work, tuple_, start, count = arguments
        data = context.make_array(signature.args[0])(context, builder, work).data
        kind, directions = signature.args[1], range(signature.args[1].count)
        rows = [
            context.make_array(kind.dtype)(context, builder, builder.extract_value(tuple_, q)).data
            for q in directions
        ]
        places = [start.type(q * LANES) for q in directions]
        outputs = [alloca_once_value(builder, load(builder, data, place, _UNITS)) for place in places]
        zero, up, down = (ir.Constant(_UNITS, [value] * LANES) for value in (0.0, 1.0, -1.0))
        with for_range(builder, count) as loop:
            place = builder.mul(builder.add(loop.index, start.type(len(rows))), start.type(LANES))
            own = [builder.load(builder.gep(row, [builder.add(start, loop.index)])) for row in rows]
            factors = [splat(builder, factor, _UNITS) for factor in own]
            sums = [load(builder, data, place, _UNITS), zero, zero, zero]  # four, so that none waits long
            for q in directions:
                product = builder.fmul(factors[q], builder.load(outputs[q]), flags=["contract"])
                sums[q % 4] = builder.fsub(sums[q % 4], product, flags=["contract"])
            field = builder.fadd(builder.fadd(*sums[:2]), builder.fadd(*sums[2:]))
            spins = builder.select(builder.fcmp_ordered(">=", field, zero), up, down)  # zero counts as +1
            store(builder, spins, data, place)
            for q in directions:
                product = builder.fmul(factors[q], spins, flags=["contract"])
                builder.store(builder.fadd(builder.load(outputs[q]), product, flags=["contract"]), outputs[q])
        for place, output in zip(places, outputs, strict=True):
            store(builder, builder.load(output), data, place)
        return context.get_dummy_value()

    return types.void(work, rows, start, count), generate


@_intrinsic
def _turn(typing_context, matrix, row, column, work, place, inwards):  # type: ignore[no-untyped-def]
    """A tile of 16 units by 16 spins between a matrix and the working memory, which has spins first."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        matrix = context.make_array(signature.args[0])(context, builder, arguments[0])
        work = context.make_array(signature.args[3])(context, builder, arguments[3])
        _, row, column, _, place, _ = arguments
        stride = builder.udiv(builder.extract_value(matrix.strides, 0), row.type(4))

        def unit(i: int) -> tuple[Any, Any]:
            return matrix.data, builder.add(builder.mul(builder.add(row, row.type(i)), stride), column)

        def spin(i: int) -> tuple[Any, Any]:
            return work.data, builder.add(place, place.type(i * LANES))

        source, to = (unit, spin) if signature.args[5].literal_value else (spin, unit)
        lines = [load(builder, *source(i), _SPINS) for i in range(TILE)]
        for step in (8, 4, 2, 1):  # halves change places, then quarters, …
            for i in [i for i in range(TILE) if not i & step]:
                low = [c if not c & step else TILE + c - step for c in range(TILE)]
                high = [c + step if not c & step else TILE + c for c in range(TILE)]
                a, b = lines[i], lines[i + step]
                masks = [ir.Constant(ir.VectorType(_I32, TILE), mask) for mask in (low, high)]
                lines[i], lines[i + step] = (builder.shuffle_vector(a, b, mask) for mask in masks)
        for i, line in enumerate(lines):
            store(builder, line, *to(i))
        return context.get_dummy_value()

    if not isinstance(inwards, types.Literal):
        return None
    return types.void(matrix, row, column, work, place, inwards), generate
