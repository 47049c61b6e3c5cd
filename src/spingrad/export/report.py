"""Size, operations and time of every layer of a packed network, compared with torch in float32 and int8."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spingrad._text import aligned
from spingrad._timing import in_turns, threads
from spingrad.export.packed import PackedModel
from spingrad.export.runtime import Runtime, chosen
from spingrad.export.stages import (
    Convolution,
    Flatten,
    Flow,
    Linear,
    Pool,
    Rescale,
    Shape,
    Stage,
    Threshold,
    bits_of_spins,
    spins_of_bits,
)
from spingrad.nn.sign import spins_of

Sizes = tuple[int, int, int, int]  # the first four numbers of a LayerReport
Group = Sequence[
    tuple[Stage, Flow]
]  # a layer and the stages between it and the next layer, with their inputs


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
    pixels = generator.integers(0, 256, (batch, *model.shape), np.uint8)
    x = pixels if model.kind == "pixels" else pixels > 127
    functions = Runtime(model.stages, model.flows, chosen("auto")).functions
    reports: list[LayerReport] = []
    with threads(1), torch.no_grad():
        flow, place = x, 0
        for group in _groups(model):
            own = functions[place : place + len(group)]
            reports.append(_layer(len(reports) + 1, group, own, flow, repeats))
            flow, place = _chain(own)(flow), place + len(group)
        everything = [*zip(model.stages, model.flows, strict=False)]
        sizes = [report.sizes for report in reports]
        reports.append(_timed("whole network", everything, functions, x, sizes, repeats))
    return reports


def _layer(number: int, group: Group, functions: Any, x: Any, repeats: int) -> LayerReport:
    stage, before = next(pair for pair in group if isinstance(pair[0], Linear | Convolution))
    assert isinstance(stage, Linear | Convolution)
    after = stage.flow(before)
    positions = int(np.prod(after.shape[1:]))
    units, fan_in = len(stage.bits), stage.fan_in
    # One popcount takes 64 inputs, one entry of a table takes four.
    operations = units * positions * -(-fan_in // (64 if before.kind == "spins" else 4))
    kind = "linear" if isinstance(stage, Linear) else "{} × {} convolution".format(*stage.kernel)
    name = f"{number}: {kind}, {fan_in} → {units}, {before.kind}"
    sizes = 4 * units * fan_in, stage.bits.nbytes, units * fan_in * positions, operations
    return _timed(name, group, functions, x, [sizes], repeats)


def _timed(
    name: str, group: Group, functions: Any, x: Any, sizes: Sequence[Sizes], repeats: int
) -> LayerReport:
    floats = torch.from_numpy(x * np.float32(2) - 1 if x.dtype == bool else x.astype(np.float32))
    run_floats = _chain([_in_floats(stage, flow) for stage, flow in group])
    candidates: dict[str, Callable[[], object]] = {
        "packed": lambda: _chain(functions)(x),
        "float32": lambda: run_floats(floats),
    }
    int8 = [_in_int8(stage) for stage, _ in group]
    if all(int8):
        small, run_int8 = floats.clamp(-127, 127).to(torch.int8), _chain(int8)
        candidates["int8"] = lambda: run_int8(small)
    taken = in_turns(candidates, repeats, 5, time.process_time)
    ms = {key: round(1e3 * statistics.median(own), 4) for key, own in taken.items()}
    floats_, packed, additions, operations = (sum(column) for column in zip(*sizes, strict=True))
    times = ms["packed"], ms["float32"], ms.get("int8")
    return LayerReport(name, floats_, packed, additions, operations, *times)


def _groups(model: PackedModel) -> list[Group]:
    groups: list[list[tuple[Stage, Flow]]] = []
    for stage, flow in zip(model.stages, model.flows, strict=False):
        starts = isinstance(stage, Linear | Convolution)
        if not groups or (starts and any(isinstance(one, Linear | Convolution) for one, _ in groups[-1])):
            groups.append([])
        groups[-1].append((stage, flow))
    return [*groups]


def _chain(functions: Sequence[Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    return run


def _in_floats(stage: Stage, flow: Flow) -> Callable[[Tensor], Tensor]:
    """A stage as torch computes it in float32; scales are left out, since they do not change the time."""
    match stage:
        case Linear():
            weight = torch.from_numpy(spins_of_bits(stage.bits, stage.fan_in)).float()
            return lambda x: F.linear(x, weight)
        case Convolution():
            spins = torch.from_numpy(spins_of_bits(stage.bits, stage.fan_in)).float()
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


def _in_int8(stage: Stage) -> Callable[[Tensor], Tensor] | None:
    """Linear layers and signs in int8; torch's other int8 operators are deprecated."""
    match stage:
        case Linear():
            weight = torch.from_numpy(spins_of_bits(stage.bits, stage.fan_in)).T
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
