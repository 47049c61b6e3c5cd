"""The kernel of descent: a vector of units at a time, four spins at a time, written in LLVM's vectors.

A unit's spins depend on each other in turn, so a processor's lanes take units. Left to itself the compiler
does not vectorise this: it cannot know that the parts of its working memory never overlap.
"""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import alloca_once, alloca_once_value, for_range
from numba.extending import intrinsic

from spingrad.kernels.vectors import load, splat, store

Array = npt.NDArray[Any]
_intrinsic: Any = intrinsic  # whose own type says that it never returns
LANES = 32  # units
BLOCK = 4  # spins whose fields stay in registers
TILE = 16
_BIT, _I32, _FLOAT = ir.IntType(1), ir.IntType(32), ir.FloatType()
_MASK, _UNITS, _SPINS = ir.IntType(LANES), ir.VectorType(_FLOAT, LANES), ir.VectorType(_FLOAT, TILE)
_MATRIX, _BLOCKS = types.float32[:, :], types.float32[:, :, ::1]  # named, so that each is compiled once
_compiled = partial(njit, cache=True, nogil=True, error_model="numpy")


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


@_intrinsic
def _sweep(typing_context, work, rows, couplings):  # type: ignore[no-untyped-def]
    """One sweep over all spins of a vector of units. Returns whether any of them has changed.

    Of four spins at a time, first the fields are computed from the outputs of all spins; then each spin is
    set, which changes the fields of the others; then the outputs are corrected for all four.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        work, rows, couplings = (
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        blocks, k = (builder.extract_value(rows.shape, i) for i in (0, 1))
        size = k.type
        zero, up, down = (ir.Constant(_UNITS, [value] * LANES) for value in (0.0, 1.0, -1.0))
        fields = [alloca_once(builder, _UNITS) for _ in range(BLOCK)]  # the compiler makes them registers
        any_change = alloca_once_value(builder, _BIT(0))

        def at(place: Any) -> Any:
            return builder.mul(place, size(LANES))

        def four(data: Any, index: Any) -> list[Any]:
            """Four neighbouring numbers, each in every lane of a vector."""
            own = builder.gep(data, [builder.mul(index, size(BLOCK))])
            return [splat(builder, builder.load(builder.gep(own, [size(i)])), _UNITS) for i in range(BLOCK)]

        def plus(total: Any, a: Any, b: Any) -> Any:
            return builder.fadd(total, builder.fmul(a, b, flags=["contract"]), flags=["contract"])

        def minus(total: Any, a: Any, b: Any) -> Any:
            return builder.fsub(total, builder.fmul(a, b, flags=["contract"]), flags=["contract"])

        with for_range(builder, blocks) as block:
            first = builder.mul(block.index, size(BLOCK))
            fields_at = [at(builder.add(builder.add(k, first), size(i))) for i in range(BLOCK)]
            spins_at = [builder.add(place, at(builder.mul(blocks, size(BLOCK)))) for place in fields_at]
            columns = builder.gep(rows.data, [builder.mul(first, k)])
            for field, place in zip(fields, fields_at, strict=True):
                builder.store(load(builder, work.data, place, _UNITS), field)
            with for_range(builder, k) as row:
                output = load(builder, work.data, at(row.index), _UNITS)
                for field, factor in zip(fields, four(columns, row.index), strict=True):
                    builder.store(minus(builder.load(field), factor, output), field)
            F, changes, flipped = [builder.load(field) for field in fields], [], _MASK(0)
            for i, place in enumerate(spins_at):
                coupling = four(couplings.data, builder.add(first, size(i)))
                old = load(builder, work.data, place, _UNITS)
                is_up = builder.fcmp_ordered(">=", plus(F[i], coupling[i], old), zero)  # zero counts as +1
                changes.append(builder.select(is_up, builder.fsub(up, old), builder.fsub(down, old)))
                store(builder, builder.select(is_up, up, down), work.data, place)
                F[i + 1 :] = [minus(F[j], coupling[j], changes[i]) for j in range(i + 1, BLOCK)]
                is_other = builder.bitcast(builder.fcmp_unordered("!=", changes[i], zero), _MASK)
                flipped = builder.or_(flipped, is_other)
            with builder.if_then(builder.icmp_unsigned("!=", flipped, _MASK(0))):
                builder.store(_BIT(1), any_change)
                with for_range(builder, k) as row:
                    output = load(builder, work.data, at(row.index), _UNITS)
                    for factor, change in zip(four(columns, row.index), changes, strict=True):
                        output = plus(output, factor, change)
                    store(builder, output, work.data, at(row.index))
        return builder.load(any_change)

    return types.boolean(work, rows, couplings), generate


@_compiled()
def _move(matrix: Array, unit: int, work: Array, start: int, inwards: bool) -> None:
    """A vector of units between a matrix and the working memory, in which the units are side by side."""
    n, units = matrix.shape[1], min(LANES, len(matrix) - unit)
    for row in range(0, units, TILE):
        for i in range(0, n, TILE):
            place = start + i * LANES + row
            if row + TILE <= units and i + TILE <= n:
                if inwards:
                    _turn(matrix, unit + row, i, work, place, True)
                else:
                    _turn(matrix, unit + row, i, work, place, False)
                continue
            for lane in range(min(TILE, units - row)):
                for spin in range(min(TILE, n - i)):
                    if inwards:
                        work[place + spin * LANES + lane] = matrix[unit + row + lane, i + spin]
                    else:
                        matrix[unit + row + lane, i + spin] = work[place + spin * LANES + lane]


@_compiled(types.UniTuple(_BLOCKS, 2)(_MATRIX))
def packed(Z: Array) -> tuple[Array, Array]:
    """The rows ``Z`` (k, n), four columns at a time, zeros after the last, and the couplings of each four.

    Returns:
        Arrays of the shapes ``(n / 4, k, 4)`` and ``(n / 4, 4, 4)``.
    """
    k, n = Z.shape
    blocks = -(-n // BLOCK)
    rows, couplings = np.zeros((blocks, k, BLOCK), Z.dtype), np.zeros((blocks, BLOCK, BLOCK), Z.dtype)
    for q in range(k):
        for i in range(n):
            rows[i // BLOCK, q, i % BLOCK] = Z[q, i]
    for b in range(blocks):
        for q in range(k):
            for i in range(BLOCK):
                for j in range(BLOCK):
                    couplings[b, i, j] += rows[b, q, i] * rows[b, q, j]
    return rows, couplings


@_compiled(types.void(_MATRIX, _BLOCKS, _BLOCKS, _MATRIX, _MATRIX, types.int64))
def descend(H: Array, rows: Array, couplings: Array, G: Array, U: Array, sweeps: int) -> None:
    """Set spin after spin to the sign of its field, in up to ``sweeps`` sweeps.

    A vector of units is done when a sweep has flipped none of its spins.

    Args:
        H: Fields, shape ``(m, n)``, in single precision like the rest.
        rows: As :func:`packed` returns them, like the couplings.
        couplings: Couplings of neighbouring spins.
        G: Receives the spins, shape ``(m, n)``.
        U: Outputs of the spins that ``G`` holds at the start, shape ``(m, k)``. If it has no columns,
            ``G`` is not read, and descent starts at zero.
        sweeps: Largest number of sweeps.
    """
    k, n = rows.shape[1], len(rows) * BLOCK
    fields, spins = k * LANES, (k + n) * LANES  # where they start in the working memory, after the outputs
    work = np.zeros((k + 2 * n) * LANES, H.dtype)
    for unit in range(0, len(H), LANES):
        _move(H, unit, work, fields, True)
        if U.shape[1]:
            _move(U, unit, work, 0, True)
            _move(G, unit, work, spins, True)
        else:
            work[:fields] = 0
            work[spins:] = 0
        for _ in range(sweeps):
            if not _sweep(work, rows, couplings):
                break
        _move(G, unit, work, spins, False)


@_compiled()
def anneal(
    H: Array,
    rows: Array,
    couplings: Array,
    G: Array,
    U: Array,
    temperatures: Array,
    noise: Array,
    places: Array,
    descents: int,
) -> None:
    """Sweeps with noise on the fields, then descent, again and again, each time from the best spins so far.

    Args:
        H: Fields, shape ``(m, n)``, in single precision like the rest.
        rows: As :func:`packed` returns them, like the couplings.
        couplings: Couplings of neighbouring spins.
        G: Receives the best spins of each unit, shape ``(m, n)``.
        U: Outputs of the spins that ``G`` holds at the start, as in :func:`descend`.
        temperatures: Factors of the noise, one per sweep of a read.
        noise: Random numbers, of which each sweep takes some in a row.
        places: Where it takes them, shape ``(vectors of units, reads, sweeps)``.
        descents: Largest number of sweeps without noise, after each read.
    """
    k, n = rows.shape[1], len(rows) * BLOCK
    fields, spins = k * LANES, (k + n) * LANES
    work = np.zeros((k + 2 * n) * LANES, H.dtype)
    own, best = np.zeros(n * LANES, H.dtype), np.zeros((k + n) * LANES, H.dtype)
    energy, lowest = np.zeros(LANES, H.dtype), np.zeros(LANES, H.dtype)
    for unit in range(0, len(H), LANES):
        _move(H, unit, work, fields, True)
        own[:] = work[fields:spins]
        lowest[:] = np.inf
        if U.shape[1]:
            _move(U, unit, work, 0, True)
            _move(G, unit, work, spins, True)
            _keep_lower(work, own, fields, spins, energy, best, lowest)
        else:
            work[:fields] = 0
            work[spins:] = 0
        for read in range(places.shape[1]):
            for sweep in range(places.shape[2]):
                place = places[unit // LANES, read, sweep]
                for i in range(n * LANES):
                    work[fields + i] = own[i] + temperatures[sweep] * noise[place + i]
                _sweep(work, rows, couplings)
            work[fields:spins] = own
            for _ in range(descents):
                if not _sweep(work, rows, couplings):
                    break
            _keep_lower(work, own, fields, spins, energy, best, lowest)
        _move(G, unit, work, spins, False)


@_compiled()
def _keep_lower(
    work: Array, own: Array, fields: int, spins: int, energy: Array, best: Array, lowest: Array
) -> None:
    """Keep outputs and spins of units whose energy is as low as ever; give the others their best back."""
    energy[:] = 0
    for i in range(0, fields, LANES):
        for lane in range(LANES):
            energy[lane] += work[i + lane] * work[i + lane]
    for i in range(0, len(own), LANES):
        for lane in range(LANES):
            energy[lane] -= 2 * own[i + lane] * work[spins + i + lane]
    for lane in range(LANES):
        if energy[lane] <= lowest[lane]:
            lowest[lane] = energy[lane]
            for i in range(lane, fields, LANES):
                best[i] = work[i]
            for i in range(lane, len(own), LANES):
                best[fields + i] = work[spins + i]
        else:
            for i in range(lane, fields, LANES):
                work[i] = best[i]
            for i in range(lane, len(own), LANES):
                work[spins + i] = best[fields + i]
