"""A packed network as C99 that is also C++11: one .c and one .h file, no allocation, no library."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import numpy as np

from spingrad._version import __version__
from spingrad.export import library
from spingrad.export.packed import PackedModel
from spingrad.export.picture import memory_picture
from spingrad.export.plan import Buffer, Step, is_ordered, plan, steps
from spingrad.export.stages import (
    PRODUCTS,
    Add,
    Array,
    Concat,
    Convolution,
    Flatten,
    Linear,
    Pad,
    Pair,
    Pool,
    Product,
    Rescale,
    Shape,
    Stage,
    Threshold,
    bits_of_spins,
    is_binary,
    whole_weights,
)
from spingrad.export.text import write_texts

_Pixelwise = Pool | Pad | Flatten | Add | Threshold | Rescale
INPUT_TYPES = {"pixels": "uint8_t", "int8": "int8_t", "spins": "int8_t"}
WORD_SIZES = 8, 16, 32
CHUNK = 32  # units whose sums are in memory at a time
_MEANING = {
    "pixels": "{n} bytes, 0 to 255.",
    "int8": "{n} numbers, -128 to 127.",
    "spins": "{n} numbers, -1 or +1.",
}
_NOTES = (
    "The buffers are static, so calls must not overlap.",
    "buffer: NETWORK_RAM_BYTES bytes, aligned for an int32_t.",
)
_RANGES = {"i8": (-128, 127), "u8": (0, 255), "i16": (-(2**15), 2**15 - 1), "i32": (-(2**31), 2**31 - 1)}
_BYTES = {"u8": 1, "i8": 1, "i16": 2, "i32": 4}


@dataclass(frozen=True)
class CSource:
    """A network in C.

    Args:
        name: Prefix of its functions, and the name of its files.
        header: Content of the .h file.
        source: Content of the .c file.
        constants: Bytes of weights and other constants, without the code, on a chip of 32 bits.
        ram: Bytes of the buffers; the stack holds the scores and a few more words.
        memory: The buffers in this RAM, and the offset of each.
        steps: The names of the stages that are computed together, in order.

    Example:
        >>> bits = np.array([[0b0101], [0b0011]], np.uint8)
        >>> source = to_c(PackedModel("pixels", (4,), (Linear(bits, 4),)), "tiny")
        >>> list(source.files)
        ['tiny.h', 'tiny.c']
    """

    name: str
    header: str
    source: str
    constants: int
    ram: int
    memory: tuple[tuple[Buffer, int], ...]
    steps: tuple[tuple[str, ...], ...]

    @property
    def files(self) -> dict[str, str]:
        """The two files by their names."""
        return {f"{self.name}.h": self.header, f"{self.name}.c": self.source}

    def save(self, folder: str | Path) -> list[Path]:
        """Write ``name.h`` and ``name.c`` into a folder."""
        return write_texts(folder, self.files)

    def picture(self) -> str:
        """Which buffer is where in the RAM, and when: the content of an SVG file."""
        return memory_picture(f"{self.name}: buffers in RAM", self.memory, self.ram, self.steps)


_HEADERS = """
arduino assert complex ctype endian errno fcntl features fenv float inttypes iso646 limits
locale malloc math memory pgmspace pthread sched setjmp signal stdalign stdarg stdatomic stdbit
stdbool stdckdint stddef stdint stdio stdlib stdnoreturn string strings tgmath threads time
uchar unistd wchar wctype
""".split()  # noqa: SIM905
"""A file of such a name could be included in place of the system's."""


def to_c(model: PackedModel, name: str = "network", *, reentrant: bool = False) -> CSource:
    """A packed network as C99, which C++11 compilers accept too.

    ``NAME_scores(input, scores)`` computes the same scores as :meth:`PackedModel.scores`, and
    ``NAME_class(input)`` returns the class.

    Args:
        model: The network.
        name: Prefix of its functions, and the name of its files.
        reentrant: Whether the caller brings the memory: both functions then take a last argument
            ``buffer``, ``NAME_RAM_BYTES`` bytes that are aligned for an int32. Otherwise the memory is
            static, and calls must not overlap.

    Example:
        >>> bits = np.array([[0b0101], [0b0011]], np.uint8)
        >>> source = to_c(PackedModel("pixels", (4,), (Linear(bits, 4),)), "tiny")
        >>> source.constants, source.ram
        (8, 8)
    """
    if not (name.isidentifier() and name.isascii()):
        raise ValueError(f"name must be a C identifier, got {name!r}")
    if name.lower() in _HEADERS:
        raise ValueError(
            f"name must not be that of a system header, such as <{name.lower()}.h>, got {name!r}"
        )
    return _Writer(model, name, reentrant).written()


class _Place(NamedTuple):
    """Where a value is stored.

    Args:
        pointer: Its name in C.
        type: ``"bits"``, or the type of its integers.
        shape: Channels, height and width.
        by_channel: Whether whole channels follow each other, as in the network's input. In every other
            value the channels of each pixel are together.
    """

    pointer: str
    type: str
    shape: tuple[int, int, int]
    by_channel: bool = False

    @property
    def pixels(self) -> int:
        return self.shape[1] * self.shape[2]

    @property
    def channel(self) -> int:
        """Distance of two channels."""
        return self.pixels if self.by_channel else 1

    @property
    def pixel(self) -> int:
        """Distance of two pixels."""
        return 1 if self.by_channel else self.shape[0]

    def at(self, first: str) -> str:
        """Index of channel ``first`` at the pixel of the loops."""
        start = _times(first, self.channel)
        return start if self.pixels == 1 else f"{_times('pixel', self.pixel)} + {start}"


class _Writer:
    """Writes a few function calls for every step.

    They compute the sums of at most ``CHUNK`` units at one pixel; activations change them in place, and the
    result is stored as bits, or in the smallest type of integer that holds it.
    """

    def __init__(self, model: PackedModel, name: str, reentrant: bool) -> None:
        self.model, self.name, self.reentrant = model, name, reentrant
        self.steps, self.roots = steps(model.stages, model.reads, model.flows)
        self.ranges = _ranges(model)
        self.arrays: dict[str, str] = {}  # name -> declaration
        self.flash = dict.fromkeys(WORD_SIZES, 0)
        self.longest = [math.prod(flow.shape) for flow in model.flows]  # numbers that an int must hold
        self.used: set[str] = set()
        self.lines: list[str] = []
        self.depth = 1
        self.places: dict[int, _Place] = {}
        self.buffers: dict[str, tuple[str, Buffer]] = {}  # name -> type and buffer
        self.most_units = 1

    def written(self) -> CSource:
        self._write_steps()
        self._reserve("sums", "i32", self.most_units, 0, len(self.steps))
        buffers = [buffer for _, buffer in self.buffers.values()]
        offsets, ram = plan(buffers)
        inputs = math.prod(self.model.shape)
        widths = "-".join(str(width) for width in [inputs, *(len(p.weight) for p in self.model.products)])
        pointers = [f"    uint8_t *const memory = (uint8_t *){'buffer' if self.reentrant else 'arena'};\n"]
        for name, (kind, _) in self.buffers.items():
            pointers.append(f"    {kind} *const {name} = ({kind} *)(void *)(memory + {offsets[name]});\n")
        pointers.append("    i32 *const out = (i32 *)scores;\n")
        extra = ", void *buffer" if self.reentrant else ""
        fields: dict[str, object] = {
            "constants": "".join(self.arrays.values()),
            "arena": "" if self.reentrant else "static uint32_t arena[NETWORK_RAM_BYTES / 4];\n\n",
            "calls": "".join(pointers + self.lines),
            "title": f"{widths}, {self.model.num_weights} weights; written by spingrad",
            "version": __version__,
            "inputs": inputs,
            "classes": self.model.flows[-1].shape[0],
            "ram": ram,
            **{f"flash_{size}": self.flash[size] for size in WORD_SIZES},
            "meaning": _MEANING[self.model.kind].format(n=inputs),
            "note": _NOTES[self.reentrant],
            "kind": INPUT_TYPES[self.model.kind],
            "scores": f"*scores{extra}",
            "input": f"*input{extra}",
            "passed": "scores, buffer" if self.reentrant else "scores",
            "longest": max(ram, *self.longest),
        }
        header, source = (
            library.named(library.filled(text, fields), self.name)
            for text in (library.source("network.h"), self._assembled())
        )
        placed = tuple((buffer, offsets[buffer.name]) for buffer in buffers)
        named = tuple(
            tuple(type(self.model.stages[number]).__name__.lower() for number in (step.head, *step.tail))
            for step in self.steps
        )
        return CSource(self.name, header, source, self.flash[32], ram, placed, named)

    def _assembled(self) -> str:
        """The .c file before its marks are filled: with the types, and the functions that are called."""
        text = library.source("network.c").replace('#include "types.h"\n', library.types())
        return text.replace('#include "library.c"\n\n', library.needed(self.used))

    def _write_steps(self) -> None:
        model = self.model
        if model.kind == "spins":
            place = self._store(0, 0)
            self._call("spins_of_input", "input", place.shape[0], place.pixels, place.pointer)
        else:
            kind = {"pixels": "u8", "int8": "i8"}[model.kind]
            self.places[0] = _Place("input", kind, _dimensions(model.shape), by_channel=True)
        for turn, step in enumerate(self.steps):
            names = [type(model.stages[number]).__name__ for number in (step.head, *step.tail)]
            self._line(f"/* {', '.join(names)} */")
            out = self._store(step.value, turn)
            sources = [self._source(value) for value in model.reads[step.head]]
            if out.type == "bits" and math.prod(out.shape) % 32:
                self._line(f"{out.pointer}[WORDS({math.prod(out.shape)}) - 1] = 0;")
            stage = model.stages[step.head]
            match stage:
                case Linear():
                    self._write_linear(step, stage, sources[0], out)
                case Convolution():
                    self._write_convolution(step, stage, sources[0], out, turn)
                case Concat():
                    self._write_concat(step, sources, out)
                case Pool() | Pad() | Flatten() | Add() | Threshold() | Rescale():
                    self._write_pixels(step, stage, sources, out)
                case _:
                    assert_never(stage)

    def _write_linear(self, step: Step, stage: Linear, source: _Place, out: _Place) -> None:
        weight = self._weight(step, stage, source)
        bound = self.model.flows[self.model.reads[step.head][0]].bound
        with self._chunks(len(stage.weight)) as units:
            self._sum(stage, source.type, bound, source.pointer, weight, units)
            self._finish(step, out, units)

    def _write_convolution(
        self, step: Step, stage: Convolution, source: _Place, out: _Place, turn: int
    ) -> None:
        channels, each = stage.channels // stage.groups, len(stage.weight) // stage.groups
        weight = self._weight(step, stage, source)
        windows = stage.kernel, stage.stride, stage.padding, stage.dilation
        where = self._geometry(step.head, channels, source, *windows)
        kind = "i8" if source.type == "bits" and not is_binary(stage) else source.type
        names = [f"patch_{step.head}"]
        function = f"patch_of_{source.type if kind == source.type else 'spins'}"
        if kind == "bits" and any(stage.padding):
            names, function = [*names, f"valid_{step.head}"], "patch_of_valid_bits"
        for name in names:
            self._reserve(name, kind, stage.fan_in, turn, turn)
            if kind == "bits" and stage.fan_in % 32:
                self._line(f"{name}[WORDS({stage.fan_in}) - 1] = 0;")
        bound = self.model.flows[self.model.reads[step.head][0]].bound
        with self._pixels(out) as at, self._groups(stage.groups) as group:
            self._call(function, source.pointer, where, _times(group, channels), *at, *names)
            with self._chunks(each, _times(group, each)) as units:
                self._sum(stage, kind, bound, ", ".join(names), weight, units)
                self._finish(step, out, units)

    def _sum(self, stage: Product, kind: str, bound: int, source: str, weight: str, units: str) -> None:
        """The sums of units, starting with unit ``first``; inputs have a magnitude of at most ``bound``."""
        row = f"WORDS({stage.fan_in})" if is_binary(stage) else str(stage.fan_in)
        if not is_binary(stage):
            name = f"sum_whole_{kind}"
        elif kind == "bits":
            name = "sum_valid_bits" if "," in source else "sum_bits"
        else:  # the sum of a word's inputs fits into 16 bits, or not
            short = kind in ("u8", "i8") or 32 * bound < 2**15
            name = f"sum_{kind}_in_{'i16' if short else 'i32'}"
        self._call(name, source, f"{weight} + first * {row}", stage.fan_in, units, "sums")

    def _write_concat(self, step: Step, sources: Sequence[_Place], out: _Place) -> None:
        start = 0
        for source in sources:
            with self._pixels(out), self._chunks(source.shape[0], name="from") as units:
                self._load(source, "from", units)
                self._line(f"const int first = from + {start};")
                self._finish(step, out, units)
            start += source.shape[0]

    def _write_pixels(self, step: Step, stage: _Pixelwise, sources: Sequence[_Place], out: _Place) -> None:
        """Stages that need no more than the values at one pixel, or a few around it."""
        source = sources[0]
        where = ""
        if isinstance(stage, Pool):
            where = self._geometry(step.head, source.shape[0], source, stage.size, stage.stride)
        if isinstance(stage, Pad):
            where = self._geometry(step.head, source.shape[0], source)
        with self._pixels(out) as at, self._chunks(out.shape[0]) as units:
            match stage:
                case Pool():
                    shared = where, "first", *at, int(stage.take == "sum"), units, "sums"
                    self._call(f"pool_{source.type}", source.pointer, *shared)
                case Pad():
                    before = stage.channels[0], stage.rows[0], stage.columns[0]
                    corner = [
                        f"{name} - {count}" if count else name
                        for name, count in zip(("first", *at), before, strict=True)
                    ]
                    self._call(f"pad_{source.type}", source.pointer, where, *corner, units, "sums")
                case Flatten():
                    turned = source.shape[0], source.pixels, "first", units, "sums"
                    self._call(f"turn_{source.type}", source.pointer, *turned)
                case Add():
                    self._load(source, "first", units)
                    if stage.multipliers[0] != 1:
                        self._call("multiply", stage.multipliers[0], units, "sums")
                    for other, multiplier in zip(sources[1:], stage.multipliers[1:], strict=True):
                        place = _index(other, "first")
                        self._call(f"join_{other.type}", other.pointer, *place, multiplier, units, "sums")
                case Threshold() | Rescale():
                    self._load(source, "first", units)
                case _:
                    assert_never(stage)
            self._finish(step, out, units)

    def _load(self, source: _Place, first: str, units: str) -> None:
        self._call(f"load_{source.type}", source.pointer, *_index(source, first), units, "sums")

    def _finish(self, step: Step, out: _Place, units: str) -> None:
        """Trace the sums, apply the activations, and store the result."""
        stages, head = self.model.stages, self.model.stages[step.head]
        if isinstance(head, PRODUCTS):
            layer = sum(isinstance(stage, PRODUCTS) for stage in stages[: step.head])
            place = _Place("", "", out.shape, by_channel=True)
            trace = "NETWORK_TRACE"
            self._line(
                f"{trace}({layer}, (const int32_t *)sums, {units}, {place.at('first')}, {place.channel});"
            )
        alone = isinstance(head, Threshold | Rescale)
        numbers = [*([step.head] if alone else []), *step.tail]
        value = self.model.reads[step.head][0] if alone else step.head + 1
        while numbers:
            number, bound = numbers.pop(0), self.model.flows[value].bound
            stage = stages[number]
            value = number + 1
            if isinstance(stage, Rescale) and numbers and isinstance(stages[numbers[0]], Threshold):
                number = numbers.pop(0)
                stage = _threshold_after(stage, stages[number], self.model.flows[value].shape[0])
                value = number + 1
            if isinstance(stage, Threshold):
                self._threshold(stage, number, bound, units)
            else:
                assert isinstance(stage, Rescale)
                self._rescale(stage, number, bound, units)
        self._call(f"put_{out.type}", "sums", units, out.pointer, out.at("first"))

    def _threshold(self, stage: Threshold, number: int, bound: int, units: str) -> None:
        if stage.thresholds is None or stage.directions is None:
            return
        if (stage.directions < 0).any():
            directions = self._array(f"direction_{number}", stage.directions)
            self._call("direct", f"{directions} + first", units, "sums")
        thresholds = np.clip(stage.thresholds, -bound, min(bound + 1, 2**31 - 1))
        if (thresholds == thresholds[0]).all():
            if thresholds[0]:
                self._call("compare", thresholds[0], units, "sums")
            return
        kind, dtype = ("i16", np.int16) if bound < 2**15 - 1 else ("i32", np.int32)
        values = self._array(f"threshold_{number}", thresholds.astype(dtype))
        self._call(f"compare_{kind}", f"{values} + first", units, "sums")

    def _rescale(self, stage: Rescale, number: int, bound: int, units: str) -> None:
        ends = stage.low, stage.high
        if stage.shift == 0 and (stage.multipliers == 1).all() and not stage.offsets.any():
            self._call("clip", *ends, units, "sums")
            return
        numbers = stage.multipliers, stage.offsets
        if all((each == each[0]).all() for each in numbers):
            arguments = [_literal(each[0]) for each in numbers]
            self._call("rescale", *arguments, stage.shift, *ends, units, "sums")
            return
        names = (
            f"{self._array(f'{name}_{number}', each)} + first"
            for name, each in zip(("multiplier", "offset"), numbers, strict=True)
        )
        self._call("rescale_each", *names, stage.shift, *ends, units, "sums")

    def _store(self, value: int, turn: int) -> _Place:
        """The place of a value written in a turn: the caller's scores, or memory until its last use."""
        flow = self.model.flows[value]
        shape = _dimensions(flow.shape)
        if self.roots[len(self.model.stages)] == value:
            place = _Place("out", "i32", shape)
        else:
            shared = {each for each, root in self.roots.items() if root == value}
            uses = [
                later
                for later, step in enumerate(self.steps)
                if shared.intersection(self.model.reads[step.head])
            ]
            low, high = self.ranges[value]
            fits = (name for name, (least, most) in _RANGES.items() if least <= low and high <= most)
            kind = "bits" if flow.kind == "spins" else next(fits)
            place = _Place(f"value_{value}", kind, shape)
            self._reserve(place.pointer, kind, math.prod(shape), turn, max(uses))
        self.places[value] = place
        return place

    def _source(self, value: int) -> _Place:
        """Where a value is; an image that was flattened is a vector, unless it is in another order."""
        place, shape = self.places[self.roots[value]], self.model.flows[value].shape
        if len(shape) == 1 and is_ordered(self.roots[value], self.model.flows):
            return place._replace(shape=(*shape, 1, 1))
        return place

    def _reserve(self, name: str, kind: str, count: int, start: int, end: int) -> None:
        size = 4 * -(-count // 32) if kind == "bits" else _BYTES[kind] * count
        self.buffers[name] = "word" if kind == "bits" else kind, Buffer(name, size, start, end)

    @contextmanager
    def _pixels(self, out: _Place) -> Iterator[tuple[str, str]]:
        """Loops over the pixels of a value; yields row and column."""
        if out.pixels == 1:
            yield "0", "0"
            return
        loops = [
            f"for (int {name} = 0; {name} < {size}; {name}++)"
            for name, size in zip("yx", out.shape[1:], strict=True)
        ]
        with self._block(loops[0]), self._block(loops[1]):
            self._line(f"const int pixel = {_times('y', out.shape[2])} + x;")
            yield "y", "x"

    @contextmanager
    def _groups(self, groups: int) -> Iterator[str]:
        if groups == 1:
            yield "0"
            return
        with self._block(f"for (int group = 0; group < {groups}; group++)"):
            yield "group"

    @contextmanager
    def _chunks(self, count: int, start: str = "0", name: str = "first") -> Iterator[str]:
        """A loop over ``count`` units from ``start``, some at a time; yields how many at a time."""
        self.most_units = max(self.most_units, min(count, CHUNK))
        if count <= CHUNK:
            with self._block(""):
                self._line(f"const int {name} = {start};")
                yield str(count)
            return
        end = str(count) if start == "0" else f"{start} + {count}"
        with self._block(f"for (int {name} = {start}; {name} < {end}; {name} += {CHUNK})"):
            if count % CHUNK:
                self._line(f"const int left = {end} - {name}, units = left < {CHUNK} ? left : {CHUNK};")
            yield "units" if count % CHUNK else str(CHUNK)

    @contextmanager
    def _block(self, header: str) -> Iterator[None]:
        self._line(f"{header} {{".strip())
        self.depth += 1
        yield
        self.depth -= 1
        self._line("}")

    def _line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text + "\n")

    def _call(self, name: str, *arguments: object) -> None:
        self.used.add(name)
        self._line(f"{name}({', '.join(map(str, arguments))});")

    def _weight(self, step: Step, stage: Product, source: _Place) -> str:
        """The weights of a layer, in the order in which its inputs are stored or copied."""
        weight = whole_weights(stage)
        units = len(weight)
        if isinstance(stage, Convolution):
            shape = units, stage.channels // stage.groups, *stage.kernel
            weight = weight.reshape(shape).transpose(0, 2, 3, 1)
        elif not source.by_channel:
            weight = weight.reshape(units, source.shape[0], -1).swapaxes(1, 2)
        weight = weight.reshape(units, stage.fan_in)
        self.longest += [2 * stage.fan_in, weight.size // 8 if is_binary(stage) else weight.size]
        name = f"weight_{step.head}"
        return self._bits(name, weight) if is_binary(stage) else self._array(name, weight)

    def _bits(self, name: str, weight: Array) -> str:
        fan_in = weight.shape[1]
        whole, rest = divmod(-(-fan_in // 8), 4)  # words of 32 bits, and the bytes after them
        packed = np.zeros((len(weight), 4 * -(-fan_in // 32)), np.uint8)
        packed[:, : 4 * whole + rest] = bits_of_spins(weight)
        widths = [4] * whole + [rest] * bool(rest)
        texts = [
            f"WORD_{width}(0x{int(word):0{2 * width}x}u)"
            for row in packed.view("<u4")
            for word, width in zip(row, widths, strict=True)
        ]
        sizes = [len(weight) * (4 * whole + -(-8 * rest // bits) * bits // 8) for bits in WORD_SIZES]
        return self._declare("word", name, f"[{len(weight)} * WORDS({fan_in})]", texts, sizes)

    def _array(self, name: str, values: Array) -> str:
        kind = f"i{8 * values.itemsize}"
        texts = [_literal(value) for value in values.ravel()]
        return self._declare(kind, name, f"[{values.size}]", texts, [values.nbytes] * len(WORD_SIZES))

    def _declare(self, kind: str, name: str, size: str, texts: Sequence[str], sizes: Sequence[int]) -> str:
        """Declare constants, once; ``sizes`` are their bytes for the three sizes of words."""
        if name not in self.arrays:
            wide = 16 if kind == "i8" else 6 if kind == "word" else 13
            lines = ",\n    ".join(", ".join(texts[i : i + wide]) for i in range(0, len(texts), wide))
            section = "NETWORK_CONST_SECTION"
            declared = f"static const FLASH {kind} {name}{size} {section}"
            self.arrays[name] = f"{declared} = {{\n    {lines}\n}};\n\n"
            for bits, count in zip(WORD_SIZES, sizes, strict=True):
                self.flash[bits] += count
        return name

    def _geometry(
        self,
        number: int,
        channels: int,
        source: _Place,
        size: Pair = (1, 1),
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        dilation: Pair = (1, 1),
    ) -> str:
        values = (
            channels,
            *source.shape[1:],
            source.channel,
            source.pixel,
            *size,
            *stride,
            *padding,
            *dilation,
        )
        sizes = [len(values) * each for each in (2, 2, 4)]  # of int
        return "&" + self._declare("geometry", f"geometry_{number}", "", [*map(str, values)], sizes)


def _threshold_after(line: Rescale, sign: Stage, units: int) -> Threshold:
    """One threshold for ``sign(line(value))``: the line rises or falls, so that it changes sign only once."""
    assert isinstance(sign, Threshold)
    thresholds, directions = np.zeros(units, np.int64), np.ones(units, np.int64)
    always, never = -(2**31) + 1, 2**31 - 1
    for unit in range(units):
        m, offset = int(line.multipliers[unit]), int(line.offsets[unit])
        level = 0 if sign.thresholds is None else int(sign.thresholds[unit])
        rising = sign.directions is None or sign.directions[unit] > 0
        if not rising:  # -line(value) >= level where line(value) < 1 - level: the opposite of rising
            level = 1 - level
        # line(value) >= level where multiplier * value + offset >= level * 2^shift
        if level <= line.low or level > line.high or m == 0:
            reached = level <= line.low or (level <= line.high and offset >> line.shift >= level)
            thresholds[unit] = always if reached == rising else never
            continue
        need = (level << line.shift) - offset
        if m > 0:  # value >= need / m, or not
            least = -(-need // m)
            thresholds[unit], directions[unit] = (least, 1) if rising else (1 - least, -1)
        else:  # value <= need / m, or not
            most = need // m
            thresholds[unit], directions[unit] = (-most, -1) if rising else (most + 1, 1)
    clipped = np.clip(thresholds, always, never).astype(np.int32)
    return Threshold(clipped, directions.astype(np.int8))


def _ranges(model: PackedModel) -> list[tuple[int, int]]:
    """The smallest and the largest integer of every value."""
    start = {"pixels": (0, 255), "int8": (-128, 127), "spins": (-1, 1)}[model.kind]
    found = [start]
    for stage, read, flow in zip(model.stages, model.reads, model.flows[1:], strict=True):
        before = [found[value] for value in read]
        match stage:
            case Rescale(low=low, high=high):
                found.append((low, high))
            case Flatten() | Concat() | Pool(take="max"):
                found.append((min(low for low, _ in before), max(high for _, high in before)))
            case Pad():
                found.append((min(0, before[0][0]), max(0, before[0][1])))
            case Linear() | Convolution() | Threshold() | Pool() | Add():
                found.append((-flow.bound, flow.bound))
            case _:
                assert_never(stage)
    return found


def _dimensions(shape: Shape) -> tuple[int, int, int]:
    """Channels, height and width; missing sizes are one."""
    channels, height, width = (*shape, 1, 1)[:3]
    return channels, height, width


def _index(place: _Place, first: str) -> tuple[object, ...]:
    """Index of a channel and, of integers, the distance to the next channel."""
    return (place.at(first),) if place.type == "bits" else (place.at(first), place.channel)


def _times(name: str, factor: int) -> str:
    return "0" if name == "0" else name if factor == 1 else f"{name} * {factor}"


def _literal(value: Any) -> str:
    return f"INT64_C({int(value)})" if value.dtype == np.int64 else str(int(value))
