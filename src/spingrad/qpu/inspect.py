"""Looks at a run through its journal: the units on the chip, the energies of their samples, chain breaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from spingrad import _figures
from spingrad.qpu.chip import Chip, Floats, Ints
from spingrad.qpu.embedding import lattice_module
from spingrad.qpu.journal import MICRO, Attempt, Journal
from spingrad.qpu.packing import Page, Spins, unpacked, unpacked_gauge
from spingrad.qpu.service import Answer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LAYER_COLOURS = (_figures.BLUE, _figures.ORANGE, _figures.GREEN, _figures.PURPLE, _figures.SKY)
CHAIN_COLOURS = (*LAYER_COLOURS[:3], _figures.VERMILION, *LAYER_COLOURS[3:])


@dataclass(frozen=True)
class AnsweredCall:
    """A call that was answered.

    Args:
        attempt: The job in the journal.
        page: The cliques that the call programmed.
    """

    attempt: Attempt
    page: Page

    @property
    def answer(self) -> Answer:
        answer = self.attempt.answer
        assert answer is not None
        return answer

    @cached_property
    def gauge(self) -> Spins:  # (spins,)
        """The signs by which the spins were turned."""
        return unpacked_gauge(self.attempt.facts["gauge"], int(self.page.starts[-1]))

    @cached_property
    def spins(self) -> Spins:  # (samples, qubits)
        """The samples, turned back from the gauge in which they were read."""
        return self.answer.spins * self.gauge[self.page.spin_of]

    @cached_property
    def units(self) -> list[int]:  # one for each clique
        """The unit on each clique; copies of a unit have the same number."""
        return list(self.attempt.facts["units"])

    @cached_property
    def layers(self) -> Ints:  # (cliques,)
        """The layer of each clique; units with the same couplings belong to one layer."""
        kept = self.attempt.facts["problems"]
        layer_of = dict(zip(dict.fromkeys(self.units), kept["layer_of"], strict=True))
        return np.array([layer_of[unit] for unit in self.units], dtype=np.int64)

    @cached_property
    def chain_breaks(self) -> Floats:  # (cliques,)
        """The share of broken chains, over all reads."""
        broken = np.average(
            self.page.chains(self.spins)[1], axis=0, weights=self.answer.occurrences
        )  # (spins,)
        return np.add.reduceat(broken, self.page.starts[:-1]) / np.diff(self.page.starts)

    def excess_energies(self) -> dict[int, Floats]:  # layer -> (samples,)
        """How far each sample lies above the best sample of its unit: 0 for the best, 1 for random spins.

        The average energy of random spins is zero, so energies relative to the best one are comparable
        between units of any size. Broken chains are repaired first, as in training.
        """
        problems = unpacked(self.attempt.facts["problems"])
        problem_of = dict(zip(dict.fromkeys(self.units), problems, strict=True))
        occurrences = self.answer.occurrences
        readings = self.page.read(self.spins, occurrences, [problem_of[unit] for unit in self.units])
        best: dict[int, float] = {}
        for unit, reading in zip(self.units, readings, strict=True):
            best[unit] = min(best.get(unit, 0.0), float(reading.energies.min()))
        excess: dict[int, list[Floats]] = {}
        for unit, layer, reading in zip(self.units, self.layers.tolist(), readings, strict=True):
            if best[unit] < 0:  # otherwise all energies of the unit are zero
                above = 1 - reading.energies / best[unit]
                excess.setdefault(layer, []).append(np.repeat(above, occurrences))
        return {layer: np.concatenate(values) for layer, values in sorted(excess.items())}


def answered_calls(journal: Journal) -> list[AnsweredCall]:
    """The calls of a run, in the order in which they were sent."""
    pages: dict[str, Page] = {}
    calls = []
    for attempt in journal.attempts.values():
        if attempt.is_answered:
            name = attempt.facts["layout"]
            if name not in pages:
                pages[name] = _page(journal, name)
            calls.append(AnsweredCall(attempt, pages[name]))
    if not calls:
        raise ValueError(f"{journal.path} holds no answered call")
    return calls


def _page(journal: Journal, name: str) -> Page:
    """The page of a layout, on the chip that the layout was made for."""
    for chip in journal.chips.values():
        if set(chip.qubits) >= {q for clique in journal.layouts[name] for chain in clique for q in chain}:
            page = Page.of(chip, journal.layouts[name])
            if page.name == name:
                return page
    raise ValueError(f"the layout {name} in {journal.path} fits none of its chips")


def breaks_by_size(calls: Sequence[AnsweredCall]) -> dict[int, Floats]:  # size -> (calls,)
    """The share of broken chains in every call, for each size of clique that needs chains."""
    sizes = sorted({size for call in calls for size in _chained(call.page)}, reverse=True)
    return {size: np.array([_breaks(call, size) for call in calls]) for size in sizes}


def _chained(page: Page) -> set[int]:
    return {len(clique) for clique in page.cliques if any(len(chain) > 1 for chain in clique)}


def _breaks(call: AnsweredCall, size: int) -> float:
    here = np.array([len(clique) == size for clique in call.page.cliques])
    return float(call.chain_breaks[here].mean()) if here.any() else np.nan


def summary(journal: Journal) -> list[tuple[str, str]]:
    """The run as text: pairs of a name and a value."""
    calls, jobs = answered_calls(journal), list(journal.attempts.values())
    void = sum(job.void is not None for job in jobs)
    wasted = sum(job.charged_us is not None and not job.is_answered for job in jobs)
    charged = sum(job.cost_us for job in jobs if not job.is_open)
    chips = ", ".join(f"{chip.name}, {len(chip.qubits)} working qubits" for chip in journal.chips.values())
    return [
        ("run", journal.run),
        ("chip", chips),
        ("calls answered", f"{len(calls)}"),
        ("jobs void", f"{void}, not charged"),
        ("jobs wasted", f"{wasted}, charged without a usable answer"),
        ("jobs open", f"{sum(job.is_open for job in jobs)}"),
        ("QPU time charged", f"{charged * MICRO:.3f} s"),
        ("QPU time reserved", f"{(journal.spent_us - charged) * MICRO:.3f} s more"),
        *(
            (f"broken chains, cliques of {size}", f"{100 * np.nanmean(shares):.2f} %")
            for size, shares in breaks_by_size(calls).items()
        ),
    ]


def places(chip: Chip) -> dict[int, tuple[float, float]]:
    """The position of each qubit in D-Wave's drawing of the chip."""
    lattices = lattice_module()
    build, layout = (getattr(lattices, f"{chip.topology}_{part}") for part in ("graph", "layout"))
    lattice = build(chip.size, node_list=chip.qubits.tolist(), edge_list=[])
    return {int(qubit): (float(x), float(y)) for qubit, (x, y) in layout(lattice).items()}


def picture(calls: Sequence[AnsweredCall], number: int) -> "Figure":
    """Three panels: one call on the chip, the energies of its samples, and the chain breaks of the run.

    Args:
        calls: The calls of the run.
        number: The call to draw, counted from 1.
    """
    if not 1 <= number <= len(calls):
        raise ValueError(f"the journal has calls 1 to {len(calls)}, got {number}")
    canvas, blank = _figures.new(11, 6.4)
    blank[0, 0].remove()
    parts: Any = canvas.subfigures(1, 2, width_ratios=[1.1, 1])
    left, right = parts
    chip, foot = left.subplots(2, 1, height_ratios=[5.5, 1])
    energies, breaks = right.subplots(2, 1)
    call = calls[number - 1]
    _draw_chip(chip, foot, call, number)
    _draw_energies(energies, call, number)
    _draw_breaks(breaks, calls, number)
    return canvas


def _draw_chip(axes: "Axes", foot: "Axes", call: AnsweredCall, number: int) -> None:
    """All working qubits, and the chains on top: one colour per layer, one shade per unit."""
    page, at = call.page, places(call.page.chip)
    points = np.array([at[qubit] for qubit in page.qubits.tolist()])
    used = set(page.qubits.tolist())
    rest = np.array([place for qubit, place in at.items() if qubit not in used]).reshape(-1, 2)
    axes.plot(*rest.T, ".", color="#BBBBBB", markersize=2.0, markeredgewidth=0, rasterized=True)
    shown = _shown_couplers(page)
    legend = {}
    for layer in range(call.layers.max() + 1):
        cliques = np.flatnonzero(call.layers == layer)
        units = sorted({call.units[k] for k in cliques})
        shades = shades_of(colour_of(layer), len(units))
        for unit, shade in zip(units, shades, strict=True):
            here = (np.array(call.units) == unit)[page.clique_of]
            draw_lines(axes, points[shown[here[shown[:, 0]]]], color=shade, linewidth=0.9)
            axes.plot(*points[here].T, "o", color=shade, markersize=1.7, markeredgewidth=0, rasterized=True)
        copies, size = len(cliques) / len(units), len(page.cliques[cliques[0]])
        text = f"{len(units)} {'units' if len(units) > 1 else 'unit'} of {size} spins"
        legend[text + (f", {copies:g} copies each" if copies > 1 else "")] = shades
    foot.axis("off")
    _draw_legend(foot, legend)
    _draw_clique(foot.inset_axes((0.62, 0.0, 0.16, 1.0)), call, points)
    words = f"one of the largest units:\n{max(map(len, page.cliques))} chains, any two coupled"
    foot.text(0.8, 0.5, words, va="center", fontsize=8)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(
        f"call {number} on the chip: {len(page.qubits):,} of {len(page.chip.qubits):,} working qubits\n"
        "one colour per layer, one shade per unit",
    )


def _shown_couplers(page: Page) -> Ints:  # (c, 2)
    """The couplers within chains and, in cliques without chains, the couplers between their qubits."""
    a, b = page.couplers.T
    chained = np.array([any(len(chain) > 1 for chain in clique) for clique in page.cliques])
    alike = page.spin_of[a] == page.spin_of[b]
    joined = (page.clique_of[a] == page.clique_of[b]) & ~chained[page.clique_of[a]]
    shown: Ints = page.couplers[alike | joined]
    return shown


def _draw_clique(axes: "Axes", call: AnsweredCall, points: Floats) -> None:
    """One unit alone: each of its chains in a colour, the couplers between chains in grey."""
    page = call.page
    largest = max(range(len(page.cliques)), key=lambda k: len(page.cliques[k]))
    a, b = page.couplers.T
    own = page.couplers[(page.clique_of[a] == largest) & (page.clique_of[b] == largest)]
    alike = page.spin_of[own[:, 0]] == page.spin_of[own[:, 1]]
    draw_lines(axes, points[own[~alike]], color="#BBBBBB", linewidth=0.3)
    for spin in range(page.starts[largest], page.starts[largest + 1]):
        colour = CHAIN_COLOURS[spin % len(CHAIN_COLOURS)]
        draw_lines(axes, points[own[alike & (page.spin_of[own[:, 0]] == spin)]], color=colour, linewidth=1.6)
        axes.plot(*points[page.spin_of == spin].T, "o", color=colour, markersize=2.6, markeredgewidth=0)
    axes.set_aspect("equal")
    axes.axis("off")


def draw_lines(axes: "Axes", pairs: Floats, **style: Any) -> None:  # (lines, 2, 2)
    """Many lines as one path."""
    gaps = np.full((len(pairs), 1, 2), np.nan)
    axes.plot(*np.concatenate([pairs, gaps], axis=1).reshape(-1, 2).T, solid_capstyle="round", **style)


def _draw_legend(axes: "Axes", legend: dict[str, list[Any]]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    few = [shades[:: -(-len(shades) // 8)] for shades in legend.values()]
    axes.legend(
        [tuple(Patch(color=shade, linewidth=0) for shade in shades) for shades in few],
        list(legend),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.1)},
        handlelength=4,
        loc="center left",
    )


def colour_of(layer: int) -> str:
    return LAYER_COLOURS[layer % len(LAYER_COLOURS)]


def shades_of(colour: str, count: int) -> list[Any]:
    """Shades of a colour, from light to dark."""
    from matplotlib.colors import to_rgb

    base = np.array(to_rgb(colour))
    light, dark = base + 0.5 * (1 - base), 0.6 * base
    along = np.linspace(0, 1, count)[:, None] if count > 1 else np.array([[0.5]])
    return [tuple(shade) for shade in light + along * (dark - light)]


def _draw_energies(axes: "Axes", call: AnsweredCall, number: int) -> None:
    excess = call.excess_energies()
    widest = max((float(values.max()) for values in excess.values()), default=1.0)
    bins = np.linspace(0, max(widest, 0.1), 31)
    for layer, values in excess.items():
        shares = 100 * np.histogram(values, bins)[0] / len(values)
        axes.stairs(shares, bins, fill=True, color=colour_of(layer), alpha=0.25, linewidth=0)
        axes.stairs(shares, bins, color=colour_of(layer), linewidth=1.5)
    axes.set_title(f"energies of call {number}, chains repaired")
    axes.set_xlabel("energy above the unit's best sample (1: random spins)")
    axes.set_ylabel("samples of each layer, %")


def _draw_breaks(axes: "Axes", calls: Sequence[AnsweredCall], number: int) -> None:
    from matplotlib.markers import MarkerStyle

    turns = np.arange(1, len(calls) + 1)
    for place, (size, shares) in enumerate(breaks_by_size(calls).items()):
        colour, marker = (_figures.VERMILION, _figures.BLUE, _figures.GREY)[place % 3], "os^D"[place % 4]
        label = f"cliques of {size}: {100 * np.nanmean(shares):.2f} % on average"
        axes.plot(turns, 100 * shares, marker=marker, markersize=3, linewidth=1, color=colour, label=label)
        ring = MarkerStyle("o", fillstyle="none")
        axes.plot(number, 100 * shares[number - 1], _figures.BLACK, marker=ring, markersize=9, clip_on=False)
    if axes.lines:
        axes.legend(loc="upper right")
    axes.set_ylim(0, 1.3 * max(axes.get_ylim()[1], 0.1))  # leaves room for the legend
    axes.locator_params(axis="x", integer=True)
    axes.set_title(f"chain breaks of the run (ring: call {number})")
    axes.set_xlabel("call")
    axes.set_ylabel("broken chains, %")
