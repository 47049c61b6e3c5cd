"""The samples of one training step through Ocean's samplers: kept in a file, summed up, drawn."""

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spingrad import _figures
from spingrad._files import FileFormatError, read_record, to_line, write_atomically
from spingrad.problem import BinaryQuadratic
from spingrad.qpu.chip import Chip, Floats, Ints
from spingrad.qpu.inspect import CHAIN_COLOURS, colour_of, draw_lines, places, shades_of
from spingrad.qpu.packing import Spins
from spingrad.solvers.base import Solution
from spingrad.solvers.dimod import DimodSolver

if TYPE_CHECKING:
    import dimod
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIRST_LINE = b'{"format": "spingrad samples", "version": 1}\n'
LARGEST = 256 * 2**20  # bytes of a file
PARTS = {
    "programming": _figures.GREY,
    "anneal": _figures.VERMILION,
    "readout": _figures.BLUE,
    "delay": _figures.SKY,
}
"""Parts of the QPU time of a call."""


@dataclass(frozen=True)
class SampledCall:
    """One call of a sampler: a unit, or all units of a layer.

    Args:
        layer: Number of the layer, from 0.
        units: Numbers of the units in their layer.
        chains: The qubits of each spin, for each unit.
        spins: Shape ``(samples, units, n)``.
        energies: Energy of each sample of each unit, zero on average over all spins, shape
            ``(samples, units)``.
        occurrences: How often each sample was read, shape ``(samples,)``.
        breaks: Share of broken chains of each sample, shape ``(samples,)``.
        timing: Microseconds, as the service reports them.
    """

    layer: int
    units: list[int]
    chains: list[list[list[int]]]
    spins: Spins
    energies: Floats
    occurrences: Ints
    breaks: Floats
    timing: dict[str, float]

    @property
    def chain_breaks(self) -> float:
        return float(np.average(self.breaks, weights=self.occurrences))

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds of QPU time, by what they were spent on."""
        reads, known = int(self.occurrences.sum()), self.timing
        times = {"programming": known.get("qpu_programming_time", 0.0)}
        for name in ("anneal", "readout", "delay"):
            times[name] = reads * known.get(f"qpu_{name}_time_per_sample", 0.0)
        return {name: value / 1000 for name, value in times.items()}

    def excess(self, unit: int) -> tuple[Floats, Ints]:
        """Distinct energies above the best, 1 for the average of random spins, and the reads of each."""
        energies = self.energies[:, unit]
        best = float(energies.min())
        above = np.round(1 - energies / best, 9) if best < 0 else np.zeros_like(energies)
        values, where = np.unique(above, return_inverse=True)
        return values, np.bincount(where, self.occurrences).astype(np.int64)


def save_samples(path: str | Path, solver: DimodSolver) -> None:
    """Write the samples of the last step that a solver has taken into a file.

    ``spingrad qpu inspect FILE`` sums it up and draws it.

    Args:
        path: The file.
        solver: A solver around one of Ocean's embedding composites, with ``keep_samples=True``.

    Example:
        >>> import tempfile
        >>> from dwave.system import DWaveSampler, EmbeddingComposite
        >>> from spingrad.testing import random_problem
        >>> from spingrad.testing.sapi import Sapi
        >>> problem = random_problem(r=8, n=4, m=2, seed=0)
        >>> with Sapi(size=4) as sapi, sapi.configured(), DWaveSampler() as qpu:
        ...     solver = DimodSolver(EmbeddingComposite(qpu), num_reads=10, keep_samples=True)
        ...     _ = solver.solve_all([problem])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_samples(f"{folder}/step.samples", solver)
    """
    if not solver.latest:
        raise ValueError(
            "expected a solver that has taken a step with keep_samples=True, got one without samples: "
            "DimodSolver(EmbeddingComposite(DWaveSampler()), keep_samples=True)"
        )
    chip = chip_of(solver.sampler)
    graph = {name: chip.properties[name] for name in ("topology", "qubits", "couplers", "num_qubits")}
    calls = [call for layer, solution in enumerate(solver.latest) for call in _calls(layer, solution)]
    record = {"chip": chip.name, "graph": graph, "calls": [_to_json(call) for call in calls]}
    content = FIRST_LINE + to_line(json.dumps(record).encode())
    if len(content) > LARGEST:
        raise ValueError(
            f"the samples take {len(content):,} bytes, and a file may have {LARGEST:,}: take fewer num_reads"
        )
    write_atomically(Path(path), content)


def is_samples(path: Path) -> bool:
    """Whether this is a file of :func:`save_samples`, by its first line."""
    if not path.is_file():  # a pipe would not end
        return False
    with open(path, "rb") as file:
        return file.read(len(FIRST_LINE)) == FIRST_LINE


def load_samples(path: str | Path) -> tuple[Chip, list[SampledCall]]:
    """The chip and the calls in a file of :func:`save_samples`.

    Example:
        >>> import tempfile
        >>> from dwave.system import DWaveSampler, EmbeddingComposite
        >>> from spingrad.testing import random_problem
        >>> from spingrad.testing.sapi import Sapi
        >>> problem = random_problem(r=8, n=4, m=2, seed=0)
        >>> with Sapi(size=4) as sapi, sapi.configured(), DWaveSampler() as qpu:
        ...     solver = DimodSolver(EmbeddingComposite(qpu), num_reads=10, keep_samples=True)
        ...     _ = solver.solve_all([problem])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_samples(f"{folder}/step.samples", solver)
        ...     chip, calls = load_samples(f"{folder}/step.samples")
        >>> [(call.layer, call.units, int(call.occurrences.sum())) for call in calls]
        [(0, [0], 10), (0, [1], 10)]
    """
    try:
        record = read_record(Path(path), FIRST_LINE, LARGEST)
        return Chip(record["chip"], None, record["graph"]), [_from_json(call) for call in record["calls"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise FileFormatError(
            f"{path} is damaged, or is no file of spingrad.qpu.save_samples: {error}"
        ) from None


def chip_of(sampler: Any) -> Chip:
    """The chip of a D-Wave sampler, or of the one within a composite."""
    properties = getattr(sampler, "properties", {})
    if "topology" in properties and "qubits" in properties:
        return Chip(str(properties.get("chip_id", type(sampler).__name__)), None, properties)
    for child in getattr(sampler, "children", ()):
        return chip_of(child)
    raise ValueError(f"expected a sampler on a D-Wave chip, got {type(sampler).__name__} without a topology")


def _calls(layer: int, solution: Solution) -> list[SampledCall]:
    info, problem = solution.info, solution.problem
    if "embeddings" not in info:
        raise ValueError(
            "expected samples with an embedding, as EmbeddingComposite(DWaveSampler()) gives them; "
            f"layer {layer} has none"
        )
    whole = len(info["samples"]) == 1 and (0, 0) in info["samples"][0].variables
    parts = [problem] if whole else list(problem.in_parts(1))
    found = zip(parts, info["samples"], info["embeddings"], strict=True)
    calls = []
    for number, (part, samples, embedding) in enumerate(found):
        units = list(range(part.num_units)) if whole else [number]
        labels = [[(unit, i) if whole else i for i in range(part.num_spins)] for unit in units]
        spins, energies = _reads(part.double(), samples, labels)
        record = samples.record
        calls.append(
            SampledCall(
                layer,
                units,
                [[[int(qubit) for qubit in embedding[label]] for label in own] for own in labels],
                spins,
                energies,
                record.num_occurrences.astype(np.int64),
                record.chain_break_fraction.astype(np.float64),
                {name: float(value) for name, value in samples.info.get("timing", {}).items()},
            )
        )
    return calls


def _reads(
    problem: BinaryQuadratic, samples: "dimod.SampleSet", labels: list[list[Any]]
) -> tuple[Spins, Floats]:
    """Spins, shape ``(samples, units, n)``, and energies without their average over all spins."""
    order = [samples.variables.index(label) for own in labels for label in own]
    spins = samples.record.sample[:, order].reshape(len(samples), len(labels), -1)
    average = problem.gram().trace()
    energies = [
        part.energy(torch.from_numpy(own.astype(np.float64)).T) - part.offset - average
        for part, own in zip(problem.in_parts(1), spins.transpose(1, 0, 2), strict=True)
    ]
    return spins.astype(np.int8), torch.stack(energies, 1).numpy()


def _to_json(call: SampledCall) -> dict[str, Any]:
    bits = base64.b64encode(np.packbits(call.spins > 0).tobytes()).decode()
    arrays = {name: getattr(call, name).tolist() for name in ("energies", "occurrences", "breaks")}
    plain = {name: getattr(call, name) for name in ("layer", "units", "chains", "timing")}
    return plain | arrays | {"bits": bits}


def _from_json(kept: dict[str, Any]) -> SampledCall:
    energies = np.array(kept["energies"], dtype=np.float64)
    shape = (*energies.shape, len(kept["chains"][0]))
    packed = np.frombuffer(base64.b64decode(kept["bits"]), np.uint8)
    if len(packed) != -(-math.prod(shape) // 8):  # or else it would be filled up with zeros
        raise ValueError(f"samples of shape {shape} do not have {len(packed):,} bytes")
    bits = np.unpackbits(packed, count=math.prod(shape)).reshape(shape)
    return SampledCall(
        int(kept["layer"]),
        kept["units"],
        kept["chains"],
        (2 * bits.astype(np.int8) - 1).astype(np.int8),
        energies,
        np.array(kept["occurrences"], dtype=np.int64),
        np.array(kept["breaks"], dtype=np.float64),
        kept["timing"],
    )


def summary(chip: Chip, calls: Sequence[SampledCall]) -> list[tuple[str, str]]:
    """The step as text: pairs of a name and a value."""
    lengths = [len(chain) for call in calls for unit in call.chains for chain in unit]
    total = sum(call.timing.get("qpu_access_time", 0.0) for call in calls)
    layers = sorted({call.layer for call in calls})
    lines = [
        ("chip", f"{chip.name}, {len(chip.qubits)} working qubits"),
        ("calls", f"{len(calls)}, {sum(int(call.occurrences.sum()) for call in calls)} reads in all"),
        ("chain lengths", f"{np.mean(lengths):.1f} on average, {max(lengths)} at most"),
        ("QPU time charged", f"{total * 1e-6:.4f} s"),
    ]
    for layer in layers:
        own = [call for call in calls if call.layer == layer]
        units = [call.excess(unit) for call in own for unit in range(len(call.units))]
        hits = [float(times[0] / times.sum()) for _, times in units]
        seconds = [float(above[1]) for above, _ in units if len(above) > 1]
        size, share = len(own[0].chains[0]), 100 * np.mean(hits)
        text = f"{len(units)} units of {size} spins, best energy in {share:.0f} % of reads"
        if seconds:
            text += f", second best {100 * np.median(seconds):.2g} % above it"
        lines.append((f"layer {layer + 1}", text))
        breaks = np.mean([call.chain_breaks for call in own])
        lines.append((f"broken chains, layer {layer + 1}", f"{100 * breaks:.2f} %"))
    return lines


def picture(chip: Chip, calls: Sequence[SampledCall], number: int) -> "Figure":
    """Four panels: one call on the chip; all samples, chain breaks and QPU time of the step.

    Args:
        chip: The chip of the calls.
        calls: The calls of the step.
        number: The call to draw on the chip, counted from 1.
    """
    if not 1 <= number <= len(calls):
        raise ValueError(f"the step has calls 1 to {len(calls)}, got {number}")
    canvas, blank = _figures.new(11, 6.8)
    blank[0, 0].remove()
    parts: Any = canvas.subfigures(1, 2, width_ratios=[1.1, 1])
    energies, breaks, times = parts[1].subplots(3, 1, height_ratios=[1.6, 1, 1])
    region, foot = parts[0].subplots(2, 1, height_ratios=[6.5, 1])
    _draw_chip(region, foot, chip, calls[number - 1], number)
    _draw_samples(energies, calls)
    _draw_breaks(breaks, calls, number)
    _draw_times(times, calls, number)
    return canvas


def _draw_chip(axes: "Axes", foot: "Axes", chip: Chip, call: SampledCall, number: int) -> None:
    """The chains of a call in the part of the chip that they take, and a map of the whole chip."""
    at = places(chip)
    spin_of = {q: (u, i) for u, unit in enumerate(call.chains) for i, chain in enumerate(unit) for q in chain}
    used = np.array([at[qubit] for qubit in spin_of])
    low, high = used.min(0), used.max(0)
    margin = 0.04 * (high - low).max() + 1e-9
    everything = np.array(list(at.values()))
    near = ((everything >= low - margin) & (everything <= high + margin)).all(1)
    axes.plot(*everything[near].T, ".", color="#BBBBBB", markersize=3, markeredgewidth=0)
    couplers = [(a, b) for a, b in chip.couplers.tolist() if a in spin_of and b in spin_of]
    across = [(at[a], at[b]) for a, b in couplers if spin_of[a] != spin_of[b]]
    draw_lines(axes, np.array(across).reshape(-1, 2, 2), color="#CCCCCC", linewidth=0.4)
    width = 2.0 if len(used) < 100 else 1.0
    for spin, colour in _colours(call).items():
        own = [(at[a], at[b]) for a, b in couplers if spin_of[a] == spin_of[b] == spin]
        draw_lines(axes, np.array(own).reshape(-1, 2, 2), color=colour, linewidth=width)
        chain = np.array([at[qubit] for qubit in call.chains[spin[0]][spin[1]]])
        axes.plot(*chain.T, "o", color=colour, markersize=2 * width, markeredgewidth=0)
    axes.set_aspect("equal")
    axes.axis("off")
    longest = max(len(chain) for unit in call.chains for chain in unit)
    many = f"{len(call.units)} units" if len(call.units) > 1 else f"unit {call.units[0] + 1}"
    axes.set_title(
        f"call {number}, {many} of layer {call.layer + 1}: {len(used):,} of {len(at):,} working qubits\n"
        + ("one shade per unit" if len(call.units) > 1 else "colours tell chains apart")
        + f", chains of up to {longest}; grey: couplers between chains"
    )
    foot.axis("off")
    whole = foot.inset_axes((0.0, 0.0, 0.2, 1.0))
    whole.plot(*everything.T, ",", color="#BBBBBB", rasterized=True)
    whole.plot(*used.T, ".", color=_figures.BLACK, markersize=1.2, markeredgewidth=0)
    whole.set_aspect("equal")
    whole.axis("off")
    foot.text(0.22, 0.5, "the same qubits on the whole chip", va="center", fontsize=8)


def _colours(call: SampledCall) -> dict[tuple[int, int], Any]:
    """A colour for each spin: its unit's shade, or its own in a call of one unit."""
    many = len(call.units) > 1
    units = shades_of(colour_of(call.layer), len(call.units))
    return {
        (u, i): units[u] if many else CHAIN_COLOURS[i % len(CHAIN_COLOURS)]
        for u, unit in enumerate(call.chains)
        for i in range(len(unit))
    }


def _draw_samples(axes: "Axes", calls: Sequence[SampledCall]) -> None:
    """A disc for each distinct energy of each unit, with the share of reads as area; rings: second best."""
    layers: list[int] = []
    for call in calls:
        for unit in range(len(call.units)):
            above, times = call.excess(unit)
            here, area = np.full(len(above), len(layers)), 140 * times / times.sum() + 1.5
            axes.scatter(here, above, area, colour_of(call.layer), alpha=0.7, linewidths=0)
            axes.scatter(here[1:2], above[1:2], 26, "none", edgecolors=_figures.BLACK, linewidths=0.7)
            layers.append(call.layer)
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.set_ylim(top=1.18 * max(axes.get_ylim()[1], 0.05))  # leaves room for the names of the layers
    for layer in sorted(set(layers)):
        own = np.flatnonzero(np.array(layers) == layer)
        if layer:
            axes.axvline(own[0] - 0.5, color=_figures.GREY, linewidth=0.6, linestyle=":")
        place = float(own.mean()), 0.97 * axes.get_ylim()[1]
        axes.text(*place, f"layer {layer + 1}", ha="center", va="top", color=colour_of(layer))
    axes.set_xticks([])
    axes.set_title("samples of every unit (ring: second best)")
    axes.set_xlabel("unit (area of a disc: its share of the reads)")
    axes.set_ylabel("energy above the best\n(1: random spins)")


def _draw_breaks(axes: "Axes", calls: Sequence[SampledCall], number: int) -> None:
    turns = np.arange(1, len(calls) + 1)
    axes.bar(
        turns, [100 * call.chain_breaks for call in calls], 0.7, color=[colour_of(c.layer) for c in calls]
    )
    axes.set_ylim(0, max(1.1 * axes.get_ylim()[1], 0.1))
    _mark(axes, len(calls), number)
    axes.set_title("chain breaks of every call")
    axes.set_ylabel("broken\nchains, %")


def _draw_times(axes: "Axes", calls: Sequence[SampledCall], number: int) -> None:
    turns, below = np.arange(1, len(calls) + 1), np.zeros(len(calls))
    for name, colour in PARTS.items():
        heights = np.array([call.parts[name] for call in calls])
        axes.bar(turns, heights, 0.7, below, color=colour, label=name)
        below += heights
    axes.set_ylim(0, 1.45 * max(float(below.max()), 1e-3))  # leaves room for the legend
    _mark(axes, len(calls), number)
    axes.legend(ncols=4, loc="upper right", handlelength=1.2, columnspacing=1.2)
    axes.set_title("QPU time of every call, by what it was spent on")
    axes.set_xlabel("call (bold: the one on the left)")
    axes.set_ylabel("QPU time, ms")


def _mark(axes: "Axes", count: int, number: int) -> None:
    """Ticks at whole calls; the number of the call that is drawn on the chip in bold."""
    step = -(-count // 12)
    ticks = sorted({number, *range(1, count + 1, step)} - ({number - 1, number + 1} if step > 1 else set()))
    axes.set_xticks(ticks)
    axes.set_xlim(0.4, count + 0.6)
    axes.grid(visible=False, axis="x")
    for label, tick in zip(axes.get_xticklabels(), ticks, strict=True):
        if tick == number:
            label.set_fontweight("bold")
