"""Size, operations and time of every layer of a packed network, compared with torch in float32 and int8."""

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spingrad._text import aligned
from spingrad._timing import in_turns, threads
from spingrad.export.packed import PackedModel
from spingrad.export.runtime import Runtime, chosen
from spingrad.export.stages import (
    PRODUCTS,
    Add,
    Array,
    Concat,
    Convolution,
    Flatten,
    Flow,
    Linear,
    Pad,
    Pool,
    Reads,
    Rescale,
    Shape,
    Stage,
    Threshold,
    bits_of_spins,
    chain,
    is_binary,
    whole_weights,
)
from spingrad.nn.sign import spins_of

Sizes = tuple[int, int, int, int]  # the first four numbers of a LayerReport


@dataclass(frozen=True)
class LayerReport:
    """One layer with its activation, or the whole network; times are medians in milliseconds."""

    name: str
    float_bytes: int
    packed_bytes: int
    additions: int
    packed_operations: int
    packed_ms: float
    float_ms: float
    int8_ms: float | None

    @property
    def sizes(self) -> "Sizes":
        return self.float_bytes, self.packed_bytes, self.additions, self.packed_operations

    @property
    def gain(self) -> str:
        """How much faster than torch's faster way, or ``"size only"`` if it is not faster."""
        ratio = min(self.float_ms, self.int8_ms or self.float_ms) / self.packed_ms
        return f"{ratio:.2f} times" if ratio > 1.05 else "size only"


def measure(model: PackedModel, batch: int = 256, repeats: int = 60) -> list[LayerReport]:
    """Time every layer and the whole network on one thread; the three runtimes take turns.

    Torch gets inputs that are already float32 or int8; the packed network gets its inputs as they come.
    """
    generator = np.random.default_rng(0)
    numbers = generator.integers(0, 256, (batch, *model.shape), np.uint8)
    x = {"pixels": numbers, "int8": numbers.view(np.int8), "spins": numbers > 127}[model.kind]
    functions = Runtime(model.stages, model.reads, model.flows, chosen("auto")).functions
    values = _evaluated(functions, model.reads, x)
    reports: list[LayerReport] = []
    with threads(1), torch.no_grad():
        for places in _groups(model):
            sizes, name = _sizes(model, places[0])
            part = _Part(
                [model.stages[i] for i in places], chain(len(places)), [functions[i] for i in places]
            )
            before = model.reads[places[0]][0]
            flows = [model.flows[before], *(model.flows[i + 1] for i in places)]
            reports.append(
                _timed(f"{len(reports) + 1}: {name}", part, flows, values[before], [sizes], repeats)
            )
        everything = _Part(model.stages, model.reads, functions)
        all_sizes = [report.sizes for report in reports]
        reports.append(_timed("whole network", everything, model.flows, x, all_sizes, repeats))
    return reports


class _Part(NamedTuple):
    """Some stages that follow from one input, and the functions of the runtime that compute them."""

    stages: Sequence[Stage]
    reads: Reads
    functions: Sequence[Any]


def _groups(model: PackedModel) -> list[list[int]]:
    """The places of every layer and of the stages after it, up to the next layer or branch."""
    readers = Counter(value for reads in model.reads for value in reads)
    groups: list[list[int]] = []
    for place, (stage, reads) in enumerate(zip(model.stages, model.reads, strict=True)):
        if isinstance(stage, PRODUCTS):
            groups.append([place])
        elif groups and reads == (groups[-1][-1] + 1,) and readers[reads[0]] == 1:
            groups[-1].append(place)
    return groups


def _sizes(model: PackedModel, place: int) -> tuple[Sizes, str]:
    stage, before, after = model.stages[place], model.flows[model.reads[place][0]], model.flows[place + 1]
    assert isinstance(stage, PRODUCTS)
    positions = int(np.prod(after.shape[1:]))
    units, fan_in = len(stage.weight), stage.fan_in
    # One popcount takes 64 inputs, one entry of a table takes four.
    inputs = 1 if not is_binary(stage) else 64 if before.kind == "spins" else 4
    operations = units * positions * -(-fan_in // inputs)
    kind = "linear" if isinstance(stage, Linear) else "{} × {} convolution".format(*stage.kernel)
    name = f"{kind}, {fan_in} → {units}, {before.kind}{'' if is_binary(stage) else ', int8 weights'}"
    return (4 * units * fan_in, stage.weight.nbytes, units * fan_in * positions, operations), name


def _timed(
    name: str, part: _Part, flows: Sequence[Flow], x: Array, sizes: Sequence[Sizes], repeats: int
) -> LayerReport:
    floats = torch.from_numpy(x * np.float32(2) - 1 if x.dtype == bool else x.astype(np.float32))
    in_floats = [
        _in_floats(stage, flows[read[0]]) for stage, read in zip(part.stages, part.reads, strict=True)
    ]
    candidates: dict[str, Callable[[], object]] = {
        "packed": lambda: _evaluated(part.functions, part.reads, x),
        "float32": lambda: _evaluated(in_floats, part.reads, floats),
    }
    int8 = [_in_int8(stage) for stage in part.stages]
    if all(int8):
        small = floats.clamp(-127, 127).to(torch.int8)
        candidates["int8"] = lambda: _evaluated(int8, part.reads, small)
    taken = in_turns(candidates, repeats, 5, time.process_time)
    ms = {key: round(1e3 * statistics.median(own), 4) for key, own in taken.items()}
    floats_, packed, additions, operations = (sum(column) for column in zip(*sizes, strict=True))
    times = ms["packed"], ms["float32"], ms.get("int8")
    return LayerReport(name, floats_, packed, additions, operations, *times)


def _evaluated(functions: Sequence[Any], reads: Reads, x: Any) -> list[Any]:
    """All values: the input and the result of every function."""
    values = [x]
    for function, read in zip(functions, reads, strict=True):
        values.append(function(*(values[value] for value in read)))
    return values


def _in_floats(stage: Stage, flow: Flow) -> Callable[..., Tensor]:
    """A stage as torch computes it in float32; scales are left out, since they do not change the time."""
    match stage:
        case Linear():
            weight = torch.from_numpy(whole_weights(stage)).float()
            return lambda x: F.linear(x, weight)
        case Convolution():
            spins = torch.from_numpy(whole_weights(stage)).float()
            kernel = spins.view(len(spins), -1, *stage.kernel)
            geometry = None, stage.stride, stage.padding, stage.dilation, stage.groups
            return lambda x: F.conv2d(x, kernel, *geometry)
        case Threshold():
            if stage.thresholds is None:
                return spins_of
            limit = torch.from_numpy(stage.thresholds).float().view(-1, *[1] * (len(flow.shape) - 1))
            return lambda x: spins_of(x - limit)
        case Rescale():
            return lambda x: F.hardtanh(x * 0.01)
        case Pool():
            pool: Any = F.max_pool2d if stage.take == "max" else F.avg_pool2d
            return lambda x: pool(x, stage.size, stage.stride)
        case Flatten():
            return lambda x: x.flatten(1)
        case Add():
            return lambda *parts: reduce(torch.add, parts)
        case Concat():
            return lambda *parts: torch.cat(parts, 1)
        case Pad():
            sides = (*stage.columns, *stage.rows, *stage.channels)
            return lambda x: F.pad(x, sides)


def _in_int8(stage: Stage) -> Callable[[Tensor], Tensor] | None:
    """Linear layers and signs in int8; torch's other int8 operators are deprecated."""
    match stage:
        case Linear():
            weight = torch.from_numpy(whole_weights(stage)).T
            return lambda x: torch._int_mm(x, weight)
        case Threshold():
            if stage.thresholds is None:
                return lambda x: (x >= 0).to(torch.int8) * 2 - 1
            limit = torch.from_numpy(stage.thresholds)
            return lambda x: (x >= limit).to(torch.int8) * 2 - 1
    return None


def lines(model: PackedModel, reports: Sequence[LayerReport], batch: int) -> list[str]:
    """The measured numbers as text: a table, and what its columns mean."""
    table = [
        [
            report.name,
            f"{report.float_bytes / 1024:.1f}",
            f"{report.packed_bytes / 1024:.1f}",
            f"{report.additions / 1e6:.3f}",
            f"{report.packed_operations / 1e6:.3f}",
            f"{report.packed_ms:.3f}",
            f"{report.float_ms / report.packed_ms:.2f}",
            "–" if report.int8_ms is None else f"{report.int8_ms / report.packed_ms:.2f}",
            report.gain,
        ]
        for report in reports
    ]
    header = ["layer", "float32 kB", "packed kB", "M additions", "M popcounts or look-ups",
              "packed ms", "float32 ×", "int8 ×", "gain in time"]  # fmt: skip
    file = len(model.to_bytes())
    notes = (
        f"Medians of the processor time of one thread for batches of {batch}. The columns with × give "
        "torch's time divided by the packed network's. "
        f"The packed file has {file:,} bytes, 1/{4 * model.num_weights / file:.1f} of the weights in float32 "
        f"({4 * model.num_weights:,} bytes).",
        "int8 is `torch._int_mm`, which adds products of int8 in int32; torch's int8 convolutions are "
        "deprecated. The gain in time compares with the faster of float32 and int8.",
    )
    return [*aligned([header, *table]), "", *notes]


def to_json(reports: Sequence[LayerReport]) -> list[dict[str, Any]]:
    return [asdict(report) | {"gain": report.gain} for report in reports]


def example(widths: Shape = (784, 1024, 1024, 10)) -> PackedModel:
    """A network with random weights, which is enough for a report: its time does not depend on them."""
    generator = np.random.default_rng(0)
    stages: list[Stage] = []
    for fan_in, units in itertools.pairwise(widths):
        stages += [Linear(bits_of_spins(generator.normal(size=(units, fan_in))), fan_in), Threshold()]
    return PackedModel("pixels", widths[:1], tuple(stages[:-1]))
