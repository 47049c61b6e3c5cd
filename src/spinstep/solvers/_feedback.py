"""Error feedback spin by spin, for couplings of few directions: 32 units at a time, in LLVM's vectors.

A unit's spins depend on each other in turn, so a processor's lanes take units. Left to itself the compiler
does not vectorise this: it cannot know that the parts of its working memory never overlap.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Array = npt.NDArray[Any]
_intrinsic: Any = intrinsic  # whose own type says that it never returns
LANES, SPAN, TILE = 32, 128, 16
_I32, _FLOAT = ir.IntType(32), ir.FloatType()
_UNITS, _SPINS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_FLOAT, TILE)


@njit(cache=True, nogil=True, error_model="numpy")
def feed_back(H: Array, Z: Array, G: Array) -> None:
    """Set spin after spin to the sign of ``H`` less what the spins before it make of its couplings.

    Args:
        H: Fields, shape ``(m, n)``, single precision like the rest.
        Z: Directions of the inputs, shape ``(n, k)``.
        G: Receives the spins, shape ``(m, n)``.
    """
    (m, n), k = H.shape, Z.shape[1]
    work = np.zeros((k + SPAN) * LANES, np.float32)  # outputs of the spins so far, then fields of some
    for unit in range(0, m, LANES):
        work[: k * LANES] = 0
        for start in range(0, n, SPAN):
            _move(H, unit, start, work, k, True)
            for i in range(min(SPAN, n - start)):
                own = (k + i) * LANES
                for q in range(k):
                    _add_scaled(work, own, q * LANES, -Z[start + i, q])
                _take_sign(work, own)
                for q in range(k):
                    _add_scaled(work, q * LANES, own, Z[start + i, q])
            _move(G, unit, start, work, k, False)


@njit(cache=True, nogil=True, error_model="numpy")
def _move(matrix: Array, unit: int, start: int, work: Array, k: int, inwards: bool) -> None:
    """32 units by 128 spins between a matrix and the working memory, which has spins first."""
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
def _add_scaled(typing_context, work, to, source, factor):  # type: ignore[no-untyped-def]
    """``work[to] += factor · work[source]`` for all lanes."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        to, source = (builder.bitcast(builder.gep(data, [k]), _UNITS.as_pointer()) for k in arguments[1:3])
        empty = ir.Constant(_UNITS, ir.Undefined)
        first = builder.insert_element(empty, arguments[3], _I32(0))
        factors = builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))
        product = builder.fmul(factors, builder.load(source, align=4), flags=["contract"])
        builder.store(builder.fadd(builder.load(to, align=4), product, flags=["contract"]), to, align=4)
        return context.get_dummy_value()

    return types.void(work, to, source, factor), generate


@_intrinsic
def _take_sign(typing_context, work, place):  # type: ignore[no-untyped-def]
    """Fields of all lanes become spins; zero counts as +1."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        own = builder.bitcast(builder.gep(data, [arguments[1]]), _UNITS.as_pointer())
        zero, up, down = (ir.Constant(_UNITS, [value] * LANES) for value in (0.0, 1.0, -1.0))
        positive = builder.fcmp_ordered(">=", builder.load(own, align=4), zero)
        builder.store(builder.select(positive, up, down), own, align=4)
        return context.get_dummy_value()

    return types.void(work, place), generate


@_intrinsic
def _turn(typing_context, matrix, row, column, work, place, inwards):  # type: ignore[no-untyped-def]
    """A tile of 16 units by 16 spins between a matrix and the working memory, which has spins first."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        matrix = context.make_array(signature.args[0])(context, builder, arguments[0])
        work = context.make_array(signature.args[3])(context, builder, arguments[3])
        _, row, column, _, place, _ = arguments
        stride = builder.udiv(builder.extract_value(matrix.strides, 0), row.type(4))

        def unit(i: int) -> Any:
            at = builder.add(builder.mul(builder.add(row, row.type(i)), stride), column)
            return builder.bitcast(builder.gep(matrix.data, [at]), _SPINS.as_pointer())

        def spin(i: int) -> Any:
            at = builder.add(place, place.type(i * LANES))
            return builder.bitcast(builder.gep(work.data, [at]), _SPINS.as_pointer())

        source, to = (unit, spin) if signature.args[5].literal_value else (spin, unit)
        lines = [builder.load(source(i), align=4) for i in range(TILE)]
        for step in (8, 4, 2, 1):  # halves change places, then quarters, …
            for i in [i for i in range(TILE) if not i & step]:
                low = [c if not c & step else TILE + c - step for c in range(TILE)]
                high = [c + step if not c & step else TILE + c for c in range(TILE)]
                a, b = lines[i], lines[i + step]
                masks = [ir.Constant(ir.VectorType(_I32, TILE), mask) for mask in (low, high)]
                lines[i], lines[i + step] = (builder.shuffle_vector(a, b, mask) for mask in masks)
        for i, line in enumerate(lines):
            builder.store(line, to(i), align=4)
        return context.get_dummy_value()

    if not isinstance(inwards, types.Literal):
        return None
    return types.void(matrix, row, column, work, place, inwards), generate
