"""A problem on the chip: which qubits stand for its spins, and what it costs to find them."""

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from spingrad_lab.analysis import chain_lengths, find_embedding, logical_graph
from spingrad_lab.paper.layer_problems import TIE, digit_snapshots
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import significant
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.small import pair_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHIPS = {"pegasus": 16, "zephyr": 12}  # the sizes of Advantage and Advantage2


class Embedding(Experiment):
    """The problem of a layer on the chip, and what an embedding costs."""

    title = "Minor embedding"
    source = "appendix, embedding"
    sizes = (4, 8, 16, 32, 64)
    time_limit = 60.0
    """Seconds after which the heuristic stops looking for shorter chains, or at all."""

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        jobs: list[Job] = [{"stage": "layer", "seed": 0}]
        for n in self.sizes[:2] if lab.quick else self.sizes:
            repeats = 1 if lab.quick or n > 32 else 2 if n == 32 else lab.seeds or 3
            runs = [("pegasus", "busclique", 0)]
            runs += [(topology, "heuristic", seed) for topology in CHIPS for seed in range(repeats)]
            jobs += [{"stage": "clique", "n": n, "topology": t, "method": m, "seed": s} for t, m, s in runs]
        lab.run(jobs)

    def compute(self, job: Job) -> dict[str, Any]:
        return self._layer(job) if job["stage"] == "layer" else self._clique(job)

    def _layer(self, job: Job) -> dict[str, Any]:
        """The embedding of a real problem, and the part of the chip around it as points and lines."""
        import dwave.graphs

        with seeded(job["seed"]):
            snapshot = next(digit_snapshots(job))
        problem = snapshot.problems["as published"]
        graph = logical_graph(problem, TIE * float(problem.gram().abs().max()))
        chains, chip = find_embedding(graph, "pegasus", seed=job["seed"])
        layout = dwave.graphs.pegasus_layout(chip)
        used = np.array([layout[qubit] for chain in chains.values() for qubit in chain])
        low, high = used.min(0) - 0.004, used.max(0) + 0.004
        near = sorted(q for q, place in layout.items() if (place >= low).all() and (place <= high).all())
        index = {qubit: i for i, qubit in enumerate(near)}
        return {
            "update": snapshot.update,
            "couplings": [[i, j, significant(w, 5)] for i, j, w in graph.edges(data="weight")],
            "places": [[round(float(v), 4) for v in layout[qubit]] for qubit in near],
            "couplers": [[index[a], index[b]] for a, b in chip.subgraph(near).edges],
            "chains": [[index[qubit] for qubit in chain] for chain in chains.values()],
            "chip": len(chip),
        }

    def _clique(self, job: Job) -> dict[str, Any]:
        import dwave.graphs
        import minorminer
        import networkx
        from minorminer.busclique import find_clique_embedding

        # busclique knows Pegasus; asked for 8 nodes of Zephyr, minorminer 0.2.22 takes all memory there is.
        topology = job["topology"]
        chip = getattr(dwave.graphs, f"{topology}_graph")(CHIPS[topology])
        clique = networkx.complete_graph(job["n"])
        begin = time.perf_counter()
        if job["method"] == "busclique":
            chains = find_clique_embedding(job["n"], chip, seed=job["seed"], use_cache=False)
        else:
            chains = minorminer.find_embedding(clique, chip, random_seed=job["seed"], timeout=self.time_limit)
        seconds = time.perf_counter() - begin
        lengths = chain_lengths(chains)
        return {"qubits": sum(lengths), "longest": max(lengths, default=0), "seconds": round(seconds, 3)}

    def show(self, runs: pd.DataFrame) -> Section:
        cliques, layer = where(runs, stage="clique"), where(runs, stage="layer").iloc[0]
        return Section(self._notes(layer, cliques), [_table(cliques)], [_figure(layer)])

    def _notes(self, layer: pd.Series, cliques: pd.DataFrame) -> list[str]:
        num_spins, lengths = len(layer["chains"]), [len(chain) for chain in layer["chains"]]
        n = cliques["n"].max()
        largest = where(cliques, n=n, topology="pegasus")
        slow, quick = (where(largest, method=m)["seconds"].median() for m in ("heuristic", "busclique"))
        return [
            f"Drawn: the first layer of the digits' network 16-4-2 before update {layer['update']}, "
            f"{len(layer['couplings'])} of {num_spins * (num_spins - 1) // 2} couplings, on Pegasus of size "
            f"16 ({layer['chip']:,} qubits) by minorminer's heuristic: {sum(lengths)} qubits, longest chain "
            f"{max(lengths)}. The paper's caption says second layer and its text third; a network 16-4-2 "
            "has two.",
            f"The heuristic takes {slow:.1f} s for {n} spins, and the paper's way is to embed every problem "
            "anew. As ZᵀZ is dense and a layer's shape stays, one embedding of the clique serves all its "
            f"units and updates: busclique's takes {quick:.1f} s, once. The heuristic stops at "
            f"{self.time_limit:.0f} s; times are of one thread with others at work beside it.",
        ]


def _table(cliques: pd.DataFrame) -> Table:
    columns = [("heuristic", "pegasus"), ("heuristic", "zephyr"), ("busclique", "pegasus")]
    quantities = ("qubits", "longest chain", "seconds")
    header = ["spins", *(f"{q}, {how} on {chip.title()}" for how, chip in columns for q in quantities)]
    rows = []
    for n, own in groups(cliques.sort_values("n"), "n"):
        found = (_cost(where(own, method=how, topology=chip)) for how, chip in columns)
        rows.append([str(n), *itertools.chain.from_iterable(found)])
    caption = "Cliques on chips without defects: median over runs, without the time to build the chip's graph"
    return Table(header, rows, caption)


def _cost(found: pd.DataFrame) -> list[str]:
    """Qubits, longest chain and seconds, of the runs that found an embedding if any did."""
    if found.empty:
        return ["–"] * 3
    done = found[found["qubits"] > 0]
    sizes = (
        [f"{done[key].median():.0f}" for key in ("qubits", "longest")] if len(done) else ["none found", "–"]
    )
    return [*sizes, f"{(done if len(done) else found)['seconds'].median():.2f}"]


def _figure(layer: pd.Series) -> Figure:
    canvas, axes = figures.new(10, 5)
    canvas.delaxes(axes[0, 0])
    panels = canvas.subplots(1, 2, width_ratios=(1, 1.25))
    for panel, draw in zip(panels, (_draw_logical, _draw_chip), strict=True):
        panel.set_axis_off()
        panel.set_aspect("equal")
        draw(panel, layer)
    caption = (
        f"The problem of a layer of {len(layer['chains'])} spins and its embedding. Numbers are spins; "
        "left, orange couplings are negative and purple ones positive; right, thick lines hold chains "
        "together and thin ones carry the couplings; grey qubits are free."
    )
    return Figure("embedding", caption, to_svg(canvas))


def _draw_logical(panel: "Axes", layer: pd.Series) -> None:
    from matplotlib.collections import LineCollection

    count = len(layer["chains"])
    angles = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    places = np.stack([np.cos(angles), np.sin(angles)], 1)
    weights = np.array([weight for _, _, weight in layer["couplings"]])
    pairs = [places[[i, j]] for i, j, _ in layer["couplings"]]
    lines = LineCollection(pairs, cmap="PuOr", linewidth=0.9, zorder=1)
    lines.set_array(weights)
    lines.set_clim(-np.abs(weights).max(), np.abs(weights).max())
    panel.add_collection(lines)
    _draw_spins(panel, places, range(count), 210, fontsize=8, zorder=2)
    panel.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), title="logical graph: one node for each spin")


def _draw_chip(panel: "Axes", layer: pd.Series) -> None:
    from matplotlib.collections import LineCollection

    places = np.asarray(layer["places"])
    owner = {qubit: spin for spin, chain in enumerate(layer["chains"]) for qubit in chain}
    joined = {(i, j) for i, j, _ in layer["couplings"]}
    free, carrying, chains, colours = [], [], [], []
    for a, b in layer["couplers"]:
        ends = owner.get(a), owner.get(b)
        if ends[0] is not None and ends[0] == ends[1]:
            chains.append(places[[a, b]])
            colours.append(_colour(ends[0]))
        elif ends in joined or ends[::-1] in joined:
            carrying.append(places[[a, b]])
        else:
            free.append(places[[a, b]])
    panel.add_collection(LineCollection(free, colors="0.93", linewidth=0.4, zorder=1))
    panel.add_collection(LineCollection(carrying, colors="0.45", linewidth=0.5, zorder=2))
    panel.add_collection(LineCollection(chains, colors=colours, linewidth=4, zorder=3))
    spare = [qubit for qubit in range(len(places)) if qubit not in owner]
    panel.scatter(places[spare, 0], places[spare, 1], s=10, color="0.85", zorder=2)
    _draw_spins(panel, places[list(owner)], list(owner.values()), 110, fontsize=6, zorder=4)
    panel.autoscale_view()
    panel.set_title("on Pegasus: one chain of qubits for each spin")


def _draw_spins(
    panel: "Axes", places: "np.ndarray", spins: Sequence[int], size: int, fontsize: int, zorder: int
) -> None:
    """A disc at each place, with the colour and the number of its spin."""
    colours = [_colour(spin) for spin in spins]
    panel.scatter(
        places[:, 0], places[:, 1], s=size, c=colours, edgecolors="black", linewidths=0.6, zorder=zorder
    )
    for spin, (x, y) in zip(spins, places, strict=True):
        panel.text(x, y, str(spin + 1), ha="center", va="center", fontsize=fontsize, zorder=zorder + 1)


def _colour(spin: int) -> tuple[float, ...]:
    """The palette, then again paler."""
    from matplotlib.colors import to_rgb

    again, place = divmod(spin, len(figures.FILLS))
    return tuple(1 - (1 - np.asarray(to_rgb(figures.FILLS[place]))) * 0.6**again)


EMBEDDING = Embedding()
