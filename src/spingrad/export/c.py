"""A packed network as C99: one .c and one .h file, the weights as constants, no allocation, no library."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spingrad._files import write_atomically
from spingrad.export._c_library import FUNCTIONS, GEOMETRY, HEADER, SOURCE
from spingrad.export.packed import PackedModel
from spingrad.export.stages import (
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
)

_MEANING = {"pixels": "{n} bytes, 0 to 255.", "spins": "{n} numbers, -1 or +1."}


@dataclass(frozen=True)
class CSource:
    """A network in C.

    Args:
        name: Prefix of its functions, and the name of its files.
        header: Content of the .h file.
        source: Content of the .c file.
        constants: Bytes of weights and other constants in flash, without the code.
        ram: Bytes of the static buffers; the stack holds the scores and a few more words.
    """

    name: str
    header: str
    source: str
    constants: int
    ram: int

    def save(self, folder: str | Path) -> list[Path]:
        """Write ``name.h`` and ``name.c`` into a folder."""
        paths = [Path(folder) / f"{self.name}.{ending}" for ending in ("h", "c")]
        for path, text in zip(paths, (self.header, self.source), strict=True):
            write_atomically(path, text.encode())
        return paths


def to_c(model: PackedModel, name: str = "network") -> CSource:
    """A packed network as C99.

    ``NAME_scores(input, scores)`` computes the same scores as :meth:`PackedModel.scores`, and
    ``NAME_class(input)`` returns the class.

    Example:
        >>> bits = np.array([[0b0101], [0b0011]], np.uint8)
        >>> source = to_c(PackedModel("pixels", (4,), (Linear(bits, 4),)), "tiny")
        >>> source.constants, source.ram
        (8, 8)
    """
    if not (name.isidentifier() and name.isascii()):
        raise ValueError(f"name must be a C identifier, got {name!r}")
    return _Writer(model, name).written()


class _Writer:
    """Writes a few function calls for each layer or pooling and the activation that follows it.

    The inputs and outputs of layers alternate between two buffers; spins are stored as bits, integers as
    int32. The sums of one position of a layer are in ``sums`` until the activation has been applied.
    """

    def __init__(self, model: PackedModel, name: str) -> None:
        self.model, self.name = model, name
        self.arrays: list[str] = []
        self.constants = 0
        self.used: set[str] = set()
        self.body: list[str] = []
        self.buffers: dict[tuple[str, str], int] = {}  # (type, name) -> length

    def written(self) -> CSource:
        self._write_body()
        inputs, classes = math.prod(self.model.shape), self.model.flows[-1].shape[0]
        widths = "-".join(str(width) for width in [inputs, *(len(p.bits) for p in self.model.products)])
        fields: dict[str, Any] = {
            "title": f"{widths}, {self.model.num_weights} weights of one bit; written by spingrad",
            "name": self.name,
            "upper": self.name.upper(),
            "kind": "uint8_t" if self.model.kind == "pixels" else "int8_t",
            "inputs": inputs,
            "classes": classes,
        }
        arrays = "".join(self.arrays)
        needs_geometry = any("geometry" in text for text in (arrays, *self.body))
        buffers = "".join(f"static {kind} {name}[{size}];\n" for (kind, name), size in self.buffers.items())
        source = SOURCE.format(
            **fields,
            constants=(GEOMETRY if needs_geometry else "") + arrays,
            buffers=buffers,
            functions="".join(text for name, (text, _) in FUNCTIONS.items() if name in self.used),
            body="".join(f"    {line}\n" for line in self.body),
        )
        header = HEADER.format(**fields, meaning=_MEANING[self.model.kind].format(n=inputs))
        ram = sum((1 if kind == "uint8_t" else 4) * size for (kind, _), size in self.buffers.items())
        return CSource(self.name, header, source, self.constants, ram)

    def _write_body(self) -> None:
        flows, stages = self.model.flows, self.model.stages
        place, layer, turn, reads = 0, 0, 0, "input"
        if self.model.kind == "spins":
            reads, turn = self._buffer(0, flows[0]), 1
            self.body.append(self._call("bits_of_input", "input", math.prod(self.model.shape), reads))
        while place < len(stages):
            stage, before, after = stages[place], flows[place], flows[place + 1]
            label, place = place, place + 1
            if isinstance(stage, Flatten):  # the values are already in this order
                continue
            activation: Stage | None = None
            if place < len(stages) and isinstance(stages[place], Threshold | Rescale):
                activation, place = stages[place], place + 1
            ends = all(isinstance(rest, Flatten) for rest in stages[place:])
            writes = "scores" if ends else self._buffer(turn, flows[place])
            positions = math.prod(after.shape[1:])
            if isinstance(stage, Linear | Convolution):
                groups = stage.groups if isinstance(stage, Convolution) else 1
                units = after.shape[0] // groups
                calls = self._product(stage, before, reads, units, label)
                where = f"{units}, {_place(after)}, {positions}"
                calls.append(f"{self.name.upper()}_TRACE({layer}, sums, {where});")
                layer += 1
            else:
                assert isinstance(stage, Pool)
                groups, units = 1, after.shape[0]
                calls = self._pool(stage, before, reads, label)
            self._reserve("int32_t", "sums", units)
            calls.append(self._put(activation, after, units, writes, positions, label))
            self._write_loops(after, groups, units, calls)
            reads, turn = writes, 1 - turn

    def _write_loops(self, after: Flow, groups: int, units: int, calls: list[str]) -> None:
        """Loops over positions and groups of channels around ``calls``; ``first`` is a group's first unit."""
        if len(after.shape) == 1:
            self.body += calls
            return
        height, width = after.shape[1:]
        loops = [
            f"for (int32_t {name} = 0; {name} < {size}; {name}{'++' if by == 1 else f' += {by}'})"
            for name, size, by in (("y", height, 1), ("x", width, 1), ("first", groups * units, units))
        ]
        self.body += ["    " * depth + loop for depth, loop in enumerate(loops)]
        self.body[-1] += " {"
        place = f"const int32_t place = first * {height * width} + y * {width} + x;"
        self.body += ["            " + line for line in (place, *calls)]
        self.body.append("        }")

    def _product(self, stage: Product, before: Flow, reads: str, units: int, label: int) -> list[str]:
        """Calls that compute the sums of ``units`` units, starting with unit ``first``."""
        words = -(-stage.fan_in // 32)
        padded = np.zeros((len(stage.bits), 4 * words), np.uint8)
        padded[:, : stage.bits.shape[1]] = stage.bits
        weight = self._array(f"weight_{label}", padded.view("<u4"))
        rest = stage.fan_in, units, "sums"
        kind = {"spins": "bits", "pixels": "bytes", "integers": "numbers"}[before.kind]
        if isinstance(stage, Linear):
            return [self._call(f"add_{kind}", reads, weight, *rest)]
        weight = f"{weight} + first * {words}"
        channels = stage.channels // stage.groups
        geometry = (
            channels,
            *before.shape[1:],
            *stage.kernel,
            *stage.stride,
            *stage.padding,
            *stage.dilation,
        )
        shared = reads, f"&{self._geometry(label, geometry)}", f"first / {units} * {channels}", "y", "x"
        patch = f"patch_of_{kind}"
        if kind == "bits":
            rooms = [self._reserve("uint32_t", name, words) for name in ("patch_bits", "valid_bits")]
            return [
                self._call(patch, *shared, *rooms),
                self._call("add_patch_of_bits", *rooms, weight, *rest),
            ]
        room = self._reserve("uint8_t" if kind == "bytes" else "int32_t", f"patch_{kind}", stage.fan_in)
        return [self._call(patch, *shared, room), self._call(f"add_{kind}", room, weight, *rest)]

    def _pool(self, stage: Pool, before: Flow, reads: str, label: int) -> list[str]:
        geometry = (before.shape[0], *before.shape[1:], *stage.size, *stage.stride, 0, 0, 1, 1)
        name = "pool_bits" if before.kind == "spins" else "pool_numbers"
        add = int(stage.take == "sum")
        return [self._call(name, reads, f"&{self._geometry(label, geometry)}", "y", "x", add, "sums")]

    def _put(
        self, activation: Stage | None, after: Flow, units: int, writes: str, positions: int, label: int
    ) -> str:
        first = " + first" if len(after.shape) == 3 else ""
        where = units, writes, _place(after), positions
        match activation:
            case Threshold(thresholds=np.ndarray() as thresholds, directions=np.ndarray() as directions):
                arrays = (("threshold", thresholds), ("direction", directions))
                names = [f"{self._array(f'{name}_{label}', values)}{first}" for name, values in arrays]
                return self._call("put_thresholds", "sums", *names, *where)
            case Threshold():
                return self._call("put_signs", "sums", *where)
            case Rescale(multipliers=multipliers, offsets=offsets, shift=shift, limit=limit):
                if shift == 0 and (multipliers == 1).all() and not offsets.any():
                    return self._call("put_clipped", "sums", limit, *where)
                arrays = (("multiplier", multipliers), ("offset", offsets))
                names = [f"{self._array(f'{name}_{label}', values)}{first}" for name, values in arrays]
                return self._call("put_lines", "sums", *names, shift, limit, *where)
        return self._call("put_signs" if after.kind == "spins" else "put_sums", "sums", *where)

    def _call(self, function: str, *arguments: object) -> str:
        def use(name: str) -> None:
            self.used.add(name)
            for other in FUNCTIONS[name][1]:
                use(other)

        use(function)
        return f"{function}({', '.join(map(str, arguments))});"

    def _buffer(self, turn: int, flow: Flow) -> str:
        """The name of the buffer whose turn it is; the unused bits after the last spin are cleared."""
        count = math.prod(flow.shape)
        if flow.kind != "spins":
            return self._reserve("int32_t", f"numbers_{'ab'[turn]}", count)
        name = self._reserve("uint32_t", f"bits_{'ab'[turn]}", -(-count // 32))
        if count % 32:
            self.body.append(f"{name}[{count // 32}] = 0;")
        return name

    def _reserve(self, kind: str, name: str, size: int) -> str:
        self.buffers[kind, name] = max(size, self.buffers.get((kind, name), 0))
        return name

    def _geometry(self, label: int, values: tuple[int, ...]) -> str:
        self.constants += 4 * len(values)
        name = f"geometry_{label}"
        self.arrays.append(f"static const geometry {name} = {{{', '.join(map(str, values))}}};\n\n")
        return name

    def _array(self, name: str, values: Array) -> str:
        self.constants += values.nbytes
        numbers = [_literal(value) for value in values.ravel()]
        lines = ",\n    ".join(", ".join(numbers[i : i + 8]) for i in range(0, len(numbers), 8))
        kind = f"{values.dtype.name}_t"
        self.arrays.append(f"static const {kind} {name}[{len(numbers)}] = {{\n    {lines}\n}};\n\n")
        return name


def _place(after: Flow) -> str:
    """Index of a position's first value: a variable of the loops, or zero."""
    return "place" if len(after.shape) == 3 else "0"


def _literal(value: Any) -> str:
    if value.dtype == np.uint32:
        return f"0x{int(value):08x}u"
    if value.dtype != np.int64:
        return str(int(value))
    return f"INT64_C({int(value)})"
