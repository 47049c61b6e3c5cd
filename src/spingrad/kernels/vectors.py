"""Vectors of LLVM in numba's functions, for inner loops that the compiler does not vectorise by itself."""

from typing import Any

from llvmlite import ir


def load(builder: Any, data: Any, place: Any, vector: Any) -> Any:
    pointer = builder.bitcast(builder.gep(data, [place]), vector.as_pointer())
    return builder.load(pointer, align=_size(vector))


def store(builder: Any, value: Any, data: Any, place: Any) -> None:
    pointer = builder.bitcast(builder.gep(data, [place]), value.type.as_pointer())
    builder.store(value, pointer, align=_size(value.type))


def splat(builder: Any, scalar: Any, vector: Any) -> Any:
    """A vector with ``scalar`` in every lane."""
    undefined, lanes = ir.Constant(vector, ir.Undefined), ir.VectorType(ir.IntType(32), vector.count)
    first = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(lanes, None))


def _size(vector: Any) -> int:  # of an element, in bytes
    return 4 if isinstance(vector.element, ir.FloatType) else int(vector.element.width) // 8
