"""What an annealer is asked: the problems of networks in training, their samples, graphs and spectra."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spinstep import QPSBGD, BinaryLeastSquares, BinaryLinear, binary_parameters
from spinstep.analysis import (
    all_energies,
    all_spins,
    annealing_spectrum,
    chain_lengths,
    find_embedding,
    ground_degeneracy,
    jaccard,
    logical_graph,
    sampled,
    spectral_gap,
)
from spinstep.paper import figures
from spinstep.paper.lab import Experiment, Job, Lab, Line
from spinstep.paper.sections import Figure, Section, Table, to_svg
from spinstep.paper.small import AdultThreeFeatures, Digits12, pair_points
from spinstep.paper.statistics import estimate
from spinstep.paper.training import VectorTask
from spinstep.problem import Rows
from spinstep.record import record_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POSINGS: dict[str, tuple[Rows, float | None]] = {
    "as published": ("normalized", None),
    "ours": ("uniform", 1.0),
}
"""How a record becomes a problem: its rows and its target, as in the paper and by default."""

UPDATES = (0, 10, 20, 30, 40, 50)
ALIVE = 1e-6
"""A gradient of smaller root mean square is zero up to rounding; true ones are about 1e-3 and more."""
TIE = 1e-9
"""Energies closer than this, as a fraction of the problem's spread, are the same."""
NUM_READS, NUM_SWEEPS = 1_000, 2


class Snapshot(NamedTuple):
    """The problem of a layer before an update, posed in each way, and how large each unit's gradient is."""

    update: int
    problems: dict[str, BinaryLeastSquares]
    gradients: Tensor  # (m,)

    @property
    def unit(self) -> int:
        """The unit of largest gradient."""
        return int(self.gradients.argmax())

    @property
    def alive(self) -> bool:
        return float(self.gradients.max()) > ALIVE


def snapshots(task: VectorTask, seed: int) -> Iterator[Snapshot]:
    """Train a task's network with QP-SBGD without end; its first layer's problem before every update."""
    network = task.network()
    first = next(module for module in network.modules() if isinstance(module, BinaryLinear))
    optimizer = QPSBGD(binary_parameters(network), seed=seed)
    for update, loss in enumerate(itertools.chain.from_iterable(task.batches() for _ in itertools.count())):
        optimizer.zero_grad()
        loss(network).backward()
        record = record_of(first.weight)
        assert record is not None  # the optimizer has just made it
        layer = record.layers()[0]
        problems = {name: BinaryLeastSquares.from_record(layer, *posing) for name, posing in POSINGS.items()}
        yield Snapshot(update, problems, layer.grad.square().mean(0).sqrt())
        optimizer.step()


def digit_snapshots(job: Job) -> Iterator[Snapshot]:
    """The six updates of a network on digits 1 and 2, without those at which no unit has a gradient."""
    task = Digits12(job["seed"], False, job["quick"])
    for snapshot in itertools.islice(snapshots(task, job["seed"]), UPDATES[-1] + 1):
        if snapshot.update in UPDATES and snapshot.alive:
            yield snapshot


def annealed(problem: BinaryLeastSquares, unit: int, seed: int) -> tuple[Tensor, Tensor]:
    """Reads and their energies from hurried simulated annealing, the stand-in for D-Wave's annealer."""
    from dwave.samplers import SimulatedAnnealingSampler

    sampler = SimulatedAnnealingSampler()
    return sampled(problem, unit, sampler, num_reads=NUM_READS, num_sweeps=NUM_SWEEPS, seed=seed)


def qubo_matrix(problem: BinaryLeastSquares, unit: int) -> Tensor:  # (n, n)
    """The symmetric ``Q`` with ``bᵀ Q b = E(2b - 1) - E(-1)`` for all bits ``b``, in double precision."""
    h, J, _ = problem.double().to_ising(unit)
    J = J + J.T
    return 2 * J + torch.diag(2 * h - 2 * J.sum(1))


class _DigitExperiment(Experiment):
    """Measures every snapshot of the digits' network; one run for each seed."""

    seeds = 20

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        lab.run([{"seed": seed} for seed in range(lab.seeds or (2 if lab.quick else self.seeds))])

    def compute(self, job: Job) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job["seed"])
            return {
                str(snapshot.update): {
                    name: self.measure(problem, snapshot.unit, job["seed"])
                    for name, problem in snapshot.problems.items()
                }
                for snapshot in digit_snapshots(job)
            }

    def measure(self, problem: BinaryLeastSquares, unit: int, seed: int) -> dict[str, Any]:
        raise NotImplementedError


_SETTING = (
    "Network 16-4-2 on MNIST digits 1 and 2, trained by QP-SBGD at its defaults; the problem is the first "
    "layer's (16 spins), before updates 0 to 50. The *same* records are posed as published (normalised "
    "rows, the gradient as target) and by our defaults (uniform rows, target of root mean square 1), so the "
    "posing alone differs. At each update it is the unit of largest gradient that is shown: of four units, "
    "those with two equal outgoing weights have none. Outputs are divided by √fan-in, as in *mnist-pairs*."
)
_STAND_IN = (
    f"Stand-in: {NUM_READS:,} reads of dwave-samplers' simulated annealing with {NUM_SWEEPS} sweeps take "
    "the place of D-Wave's annealer. How often *that* finds the optimum, it cannot say."
)


class EnergyHistogram(_DigitExperiment):
    """Energies of 1,000 reads beside those of all 65,536 states."""

    title = "Energies of sampled solutions"
    source = "appendix, sampling solutions"
    num_bins = 40

    def measure(self, problem: BinaryLeastSquares, unit: int, seed: int) -> dict[str, Any]:
        states, reads = all_energies(problem, unit).numpy(), annealed(problem, unit, seed)[1].numpy()
        optimum, spread = states.min(), states.mean() - states.min()
        metrics: dict[str, Any] = {
            "optimum": float(optimum),
            "at_optimum": float((reads < optimum + TIE * spread).mean()),
            "optima": int((states < optimum + TIE * spread).sum()),
            "gap": float((np.median(reads) - optimum) / spread),
            "skew_reads": _skewness(reads),
            "skew_states": _skewness(states),
        }
        if seed == 0:  # the one that is drawn
            width = max(1.5 * (reads.max() - optimum), 0.2 * spread)
            edges = np.linspace(optimum, optimum + width, self.num_bins + 1)
            metrics["edges"] = [float(edges[0]), float(edges[-1])]
            metrics["reads"] = np.histogram(reads, edges)[0].tolist()
            metrics["states"] = np.histogram(states, edges)[0].tolist()
        return metrics

    def show(self, lines: Sequence[Line]) -> Section:
        header = ["update"]
        for name in POSINGS:
            header += [f"reads at the optimum, {name}", f"median gap, {name}"]
        rows = [
            [
                str(update),
                *(
                    _percent(_values(lines, name, key, update))
                    for name in POSINGS
                    for key in ("at_optimum", "gap")
                ),
            ]
            for update in UPDATES
        ]
        rows.append(
            [
                "all",
                *(_percent(_values(lines, name, key)) for name in POSINGS for key in ("at_optimum", "gap")),
            ]
        )
        caption = (
            "Mean ± 95 % interval over seeds. Gap of the median read: 0 % is the optimum, 100 % the mean of "
            "all states."
        )
        shape_rows = [
            [
                name,
                f"{np.median(_values(lines, name, 'optima', pool=True)):.0f}",
                str(estimate(_values(lines, name, "skew_reads"))),
                str(estimate(_values(lines, name, "skew_states"))),
            ]
            for name in POSINGS
        ]
        shape = Table(
            ["problem", "states at the optimum (median)", "skewness of reads", "skewness of all states"],
            shape_rows,
            "Shape of the distributions, all updates",
        )
        drawn = next(line for line in sorted(lines, key=lambda line: line.job["seed"]))
        pictures = [self._figure(drawn, name) for name in POSINGS]
        return Section(self._notes(lines), [Table(header, rows, caption), shape], pictures)

    def _notes(self, lines: Sequence[Line]) -> list[str]:
        share, gap, skew, states = (
            {name: float(np.mean(_values(lines, name, key))) for name in POSINGS}
            for key in ("at_optimum", "gap", "skew_reads", "skew_states")
        )
        tail = "has that tail too" if min(states.values()) > 0 else "does not have it"
        return [
            _SETTING,
            _STAND_IN,
            "The paper shows its *third* layer. A network 16-4-2 has two, and its second has problems of 4 "
            "spins, or 16 states; so we show the layer of 16 spins.",
            f"At the optimum end {share['as published']:.1%} of the reads as published and "
            f"{share['ours']:.1%} of ours, and the median read lies {gap['as published']:.1%} and "
            f"{gap['ours']:.1%} of the way up to random spins. The reads are skewed by "
            f"{skew['as published']:+.2f} and {skew['ours']:+.2f}: the paper sees the long tail to high "
            "energies as a mark of hard problems. The density of all states, which no sampler has touched, "
            f"{tail} ({states['as published']:+.2f} and {states['ours']:+.2f}); the energy is a sum of "
            "squares.",
        ]

    def _figure(self, line: Line, name: str) -> Figure:
        canvas, axes = figures.new(8.4, 4.4, rows=2, columns=3)
        for place, (update, panel) in enumerate(zip(UPDATES, axes.flat, strict=True)):
            if str(update) not in line.metrics:
                panel.set_axis_off()
                continue
            own = line.metrics[str(update)][name]
            low, high = own["edges"]
            edges = np.linspace(low, high, self.num_bins + 1)
            reads, states = (np.asarray(own[key]) for key in ("reads", "states"))
            panel.stairs(reads / NUM_READS, edges, fill=True, color=figures.SKY, label="reads")
            panel.stairs(states / 2**16, edges, color=figures.BLACK, label="all 65,536 states")
            panel.axvline(own["optimum"], color=figures.VERMILION, linestyle="--", label="optimum")
            panel.set(title=f"update {update}", yscale="log", ylim=(3e-5, 1.5))
            panel.set_xlabel("energy" if place >= 3 else "")
            panel.set_ylabel("share in a bin" if place % 3 == 0 else "")
        handles, labels = next(panel for panel in axes.flat if panel.lines).get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        caption = (
            f"Energies ‖V − ZG‖² of {NUM_READS:,} reads (filled) and of all states (line) at six updates, "
            f"{name}; one seed. Most states lie beyond the axis, which ends a little above the highest read."
        )
        return Figure(f"energy-histogram-{name.replace(' ', '-')}", caption, to_svg(canvas))


class Similarity(_DigitExperiment):
    """How much the ten best solutions have in common."""

    title = "Similarity of the best solutions"
    source = "appendix, similarity"
    count = 10
    origins = ("annealing", "enumeration")

    def measure(self, problem: BinaryLeastSquares, unit: int, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        states, energies = all_spins(problem.num_spins), all_energies(problem, unit)
        resolution = TIE * float(energies.mean() - energies.min())
        lists = {"annealing": annealed(problem, unit, seed), "enumeration": (states, energies)}
        metrics: dict[str, Any] = {}
        for origin, (spins, own) in lists.items():
            lowest = _lowest(spins, own, self.count, resolution, generator)
            matrix = jaccard(lowest)
            metrics |= _similarities(matrix, origin) | {f"{origin} distinct": len(lowest)}
            if seed == 0:
                metrics[f"{origin} matrix"] = [[round(v, 3) for v in row] for row in matrix.tolist()]
        drawn = states[torch.randperm(len(states), generator=generator)[: self.count]]
        return metrics | _similarities(jaccard(drawn), "random")

    def show(self, lines: Sequence[Line]) -> Section:
        kinds = (*self.origins, "random")
        header = [
            "problem",
            *(f"{kind}, mean" for kind in kinds),
            *(f"{kind}, highest pair" for kind in kinds),
        ]
        rows = [
            [
                name,
                *(str(estimate(_values(lines, name, kind))) for kind in kinds),
                *(str(estimate(_values(lines, name, f"{kind} highest"))) for kind in kinds),
            ]
            for name in POSINGS
        ]
        caption = (
            "Jaccard similarity of the ten lowest states, of 45 pairs: mean ± 95 % interval over seeds, six "
            "updates each"
        )
        drawn = min(lines, key=lambda line: line.job["seed"])
        return Section(self._notes(lines), [Table(header, rows, caption)], [self._figure(drawn)])

    def _notes(self, lines: Sequence[Line]) -> list[str]:
        random = float(np.mean([v for name in POSINGS for v in _values(lines, name, "random")]))
        found = {name: estimate(_values(lines, name, "enumeration")) for name in POSINGS}
        distinct = {name: float(np.mean(_values(lines, name, "annealing distinct"))) for name in POSINGS}
        verdicts = []
        for name, mean in found.items():
            far = abs(mean.mean - random) > mean.half  # False for one seed, whose interval is not known
            word = ("more" if mean.mean > random else "less") + " alike than" if far else "about as alike as"
            verdicts.append(f"{name}, the ten lowest states ({mean.mean:.2f}) are {word} random spins")
        return [
            _SETTING,
            _STAND_IN,
            "Ties are broken at random, and there are many: batches repeat rows. The measure needs a "
            f"reference: two random spin vectors share {random:.2f} on average (1/3 in the limit of many "
            "spins), and the highest of 45 pairs of them is in the table. The paper's highest pair, about "
            "0.4, is to be read by it.",
            f"Read so: {'; '.join(verdicts)}.",
            "Of the ten distinct states asked for, annealing returned on average "
            f"{distinct['as published']:.1f} as published and {distinct['ours']:.1f} with ours.",
        ]

    def _figure(self, line: Line) -> Figure:
        update = max(line.metrics, key=int)
        canvas, axes = figures.new(6.4, 5.4, rows=2, columns=2)
        for row, name in enumerate(POSINGS):
            for column, origin in enumerate(self.origins):
                panel = axes[row, column]
                matrix = np.asarray(line.metrics[update][name][f"{origin} matrix"])
                image = panel.imshow(matrix, cmap="viridis", vmin=0, vmax=1)
                panel.grid(visible=False)
                ticks = range(0, self.count, 3)
                panel.set(
                    xticks=ticks, yticks=ticks, xticklabels=[t + 1 for t in ticks], title=f"{name}, {origin}"
                )
                panel.set(xlim=(-0.5, self.count - 0.5), ylim=(self.count - 0.5, -0.5))
                panel.set_yticklabels([t + 1 for t in ticks])
                panel.set_xlabel("solution, lowest energy first" if row else "")
                panel.set_ylabel("" if column else "solution")
        canvas.colorbar(image, ax=axes, label="Jaccard similarity", shrink=0.7)
        caption = f"Similarity of the ten lowest states at update {update}, sampled and true; one seed."
        return Figure("similarity", caption, to_svg(canvas))


class QuboEvolution(_DigitExperiment):
    """The QUBO matrix along the way."""

    title = "Evolution of the QUBO"
    source = "appendix, evolution of the QUBO"

    def measure(self, problem: BinaryLeastSquares, unit: int, seed: int) -> dict[str, Any]:
        h, J, _ = problem.double().to_ising(unit)
        couplings = J[tuple(torch.triu_indices(len(h), len(h), 1))]
        rms_bias, rms_coupling = (float(t.square().mean().sqrt()) for t in (h, couplings))
        metrics: dict[str, Any] = {
            "density": float((couplings.abs() > TIE * couplings.abs().max()).double().mean()),
            "ratio": rms_bias / rms_coupling,
            "rms_coupling": rms_coupling,
        }
        if seed == 0:
            Q = qubo_matrix(problem, unit)
            metrics["upper"] = [[_short(v) for v in row[i:]] for i, row in enumerate(Q.tolist())]
        return metrics

    def show(self, lines: Sequence[Line]) -> Section:
        header = ["update"]
        for name in POSINGS:
            header += [f"nonzero couplings, {name}", f"bias / coupling, {name}"]

        def cells(update: int | None) -> list[str]:
            found = []
            for name in POSINGS:
                found.append(_percent(_values(lines, name, "density", update)))
                ratios = _values(lines, name, "ratio", update)
                found.append(str(estimate(ratios)) if ratios else "–")
            return found

        rows = [[str(update), *cells(update)] for update in UPDATES] + [["all", *cells(None)]]
        caption = (
            "Share of the 120 couplings that are not zero, and ratio of the root mean squares of biases and "
            "couplings (of spins, h and J): mean ± 95 % interval over seeds"
        )
        drawn = min(lines, key=lambda line: line.job["seed"])
        return Section(self._notes(lines), [Table(header, rows, caption)], [self._figure(drawn)])

    def _notes(self, lines: Sequence[Line]) -> list[str]:
        density = float(np.mean(_values(lines, "as published", "density")))
        ratio = {name: float(np.mean(_values(lines, name, "ratio"))) for name in POSINGS}
        pairs = list(zip(*(_values(lines, name, "rms_coupling", pool=True) for name in POSINGS), strict=True))
        same = float(np.mean([abs(a - b) < 1e-4 * abs(a) for a, b in pairs]))
        return [
            _SETTING,
            f"The paper calls the graph sparse. Measured, {density:.1%} of the couplings are not zero: ZᵀZ "
            "of a batch is dense, and a zero is two inputs that agree as often as they differ.",
            f"The biases carry the gradient. As published they are {ratio['as published']:.3f} times the "
            f"couplings, with our target {ratio['ours']:.2f} times. The inputs are spins, rows of equal "
            f"norm, so in {same:.0%} of the problems both posings have the same couplings and differ in the "
            "diagonal alone; in the others ours leaves out rows without a gradient.",
        ]

    def _figure(self, line: Line) -> Figure:
        from matplotlib.colors import SymLogNorm

        shown = [update for update in UPDATES if str(update) in line.metrics]
        matrices = {
            (name, update): _symmetric(line.metrics[str(update)][name]["upper"])
            for name in POSINGS
            for update in shown
        }
        limit = max(float(np.abs(matrix).max()) for matrix in matrices.values())
        norm = SymLogNorm(limit / 30, vmin=-limit, vmax=limit)
        canvas, axes = figures.new(10, 3.5, rows=len(POSINGS), columns=len(shown))
        for (name, update), panel in zip(matrices, axes.flat, strict=True):
            image = panel.imshow(matrices[name, update], cmap="PuOr", norm=norm)
            panel.grid(visible=False)
            panel.set(xticks=(0, 15), yticks=(0, 15), xticklabels=(1, 16), yticklabels=(1, 16))
            if name == next(iter(POSINGS)):
                panel.set_title(f"update {update}")
            else:
                panel.set_xlabel("bit")
            panel.set_ylabel(f"{name}\nbit" if update == shown[0] else "")
        canvas.colorbar(image, ax=axes, label="entry of the QUBO matrix", shrink=0.8)
        caption = (
            "QUBO matrices over bits: couplings off the diagonal, linear terms on it (they hold the row "
            "sums of the couplings too). One colour scale for all, logarithmic except near zero; one seed."
        )
        return Figure("qubo-evolution", caption, to_svg(canvas))


class Embedding(Experiment):
    """The problem of a layer on the chip, and what an embedding costs."""

    title = "Minor embedding"
    source = "appendix, embedding"
    sizes = (4, 8, 16, 32, 64)
    topologies = ("pegasus", "zephyr")
    time_limit = 60.0
    """Seconds after which the heuristic stops looking for shorter chains, or at all."""

    def plan(self, lab: Lab) -> None:
        pair_points(lab.quick)
        jobs: list[Job] = [{"stage": "layer", "seed": 0}]
        for n in self.sizes[:2] if lab.quick else self.sizes:
            repeats = 1 if lab.quick or n > 32 else 2 if n == 32 else lab.seeds or 3
            jobs.append({"stage": "clique", "n": n, "topology": "pegasus", "method": "busclique", "seed": 0})
            for topology, seed in itertools.product(self.topologies, range(repeats)):
                jobs.append(
                    {"stage": "clique", "n": n, "topology": topology, "method": "heuristic", "seed": seed}
                )
        lab.run(jobs)

    def compute(self, job: Job) -> dict[str, Any]:
        return self._layer(job) if job["stage"] == "layer" else self._clique(job)

    def _layer(self, job: Job) -> dict[str, Any]:
        """The embedding of a real problem, and the part of the chip around it as points and lines."""
        import dwave.graphs

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job["seed"])
            snapshot = next(digit_snapshots(job))
        graph = logical_graph(snapshot.problems["as published"])
        chains, chip = find_embedding(graph, "pegasus", seed=job["seed"])
        layout = dwave.graphs.pegasus_layout(chip)
        used = np.array([layout[qubit] for chain in chains.values() for qubit in chain])
        low, high = used.min(0) - 0.004, used.max(0) + 0.004
        near = sorted(q for q, place in layout.items() if (place >= low).all() and (place <= high).all())
        index = {qubit: i for i, qubit in enumerate(near)}
        return {
            "update": snapshot.update,
            "couplings": [[i, j, _short(w)] for i, j, w in graph.edges(data="weight")],
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
        chip = (
            dwave.graphs.pegasus_graph(16) if job["topology"] == "pegasus" else dwave.graphs.zephyr_graph(12)
        )
        clique = networkx.complete_graph(job["n"])
        begin = time.perf_counter()
        if job["method"] == "busclique":
            chains = find_clique_embedding(job["n"], chip, seed=job["seed"], use_cache=False)
        else:
            chains = minorminer.find_embedding(clique, chip, random_seed=job["seed"], timeout=self.time_limit)
        seconds = time.perf_counter() - begin
        lengths = chain_lengths(chains)
        return {"qubits": sum(lengths), "longest": max(lengths, default=0), "seconds": round(seconds, 3)}

    def show(self, lines: Sequence[Line]) -> Section:
        cells: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
        for line in lines:
            if line.job["stage"] == "clique":
                key = line.job["n"], line.job["method"], line.job["topology"]
                cells.setdefault(key, []).append(line.metrics)
        columns = [("heuristic", "pegasus"), ("heuristic", "zephyr"), ("busclique", "pegasus")]
        header = ["spins"]
        for method, topology in columns:
            header += [
                f"{quantity}, {method} on {topology.title()}"
                for quantity in ("qubits", "longest chain", "seconds")
            ]
        sizes = sorted({key[0] for key in cells})
        rows = [
            [
                str(n),
                *itertools.chain.from_iterable(
                    _embedding_cells(cells.get((n, *column), [])) for column in columns
                ),
            ]
            for n in sizes
        ]
        caption = (
            "Cliques on chips without defects: median over runs, without the time to build the chip's graph"
        )
        layer = next(line for line in lines if line.job["stage"] == "layer").metrics
        return Section(self._notes(layer, cells), [Table(header, rows, caption)], [self._figure(layer)])

    def _notes(
        self, layer: dict[str, Any], cells: dict[tuple[int, str, str], list[dict[str, Any]]]
    ) -> list[str]:
        num_spins, lengths = len(layer["chains"]), [len(chain) for chain in layer["chains"]]
        n = max(key[0] for key in cells)
        slow, quick = (
            _median(cells[n, method, "pegasus"], "seconds") for method in ("heuristic", "busclique")
        )
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

    def _figure(self, layer: dict[str, Any]) -> Figure:
        canvas, axes = figures.new(10, 5)
        canvas.delaxes(axes[0, 0])
        left, right = canvas.subplots(1, 2, width_ratios=(1, 1.25))
        for panel in (left, right):
            panel.set_axis_off()
            panel.set_aspect("equal")
        _draw_logical(left, layer)
        _draw_chip(right, layer)
        left.set_title("logical graph: one node for each spin")
        right.set_title("on Pegasus: one chain of qubits for each spin")
        caption = (
            f"The problem of a layer of {len(layer['chains'])} spins and its embedding. Numbers are spins; "
            "left, orange couplings are negative and purple ones positive; right, thick lines hold chains "
            "together and thin ones carry the couplings; grey qubits are free."
        )
        return Figure("embedding", caption, to_svg(canvas))


def _embedding_cells(found: list[dict[str, Any]]) -> list[str]:
    done = [metrics for metrics in found if metrics["qubits"]]
    if not done:
        return ["none found" if found else "–", "–", f"{_median(found, 'seconds'):.2f}" if found else "–"]
    return [f"{_median(done, key):.0f}" for key in ("qubits", "longest")] + [
        f"{_median(done, 'seconds'):.2f}"
    ]


def _median(found: list[dict[str, Any]], key: str) -> float:
    return float(np.median([metrics[key] for metrics in found]))


def _chain_colours(count: int) -> list[Any]:
    """The palette, then again paler."""
    from matplotlib.colors import to_rgb

    palette = (
        figures.ORANGE,
        figures.SKY,
        figures.GREEN,
        figures.YELLOW,
        figures.VERMILION,
        figures.PURPLE,
        figures.GREY,
    )
    colours = [np.asarray(to_rgb(colour)) for colour in palette]
    return [tuple(1 - (1 - colours[i % len(colours)]) * 0.6 ** (i // len(colours))) for i in range(count)]


def _draw_logical(panel: "Axes", layer: dict[str, Any]) -> None:
    from matplotlib.collections import LineCollection

    count = len(layer["chains"])
    angles = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    places = np.stack([np.cos(angles), np.sin(angles)], 1)
    weights = np.array([weight for _, _, weight in layer["couplings"]])
    lines = LineCollection(
        [places[[i, j]] for i, j, _ in layer["couplings"]], cmap="PuOr", linewidth=0.9, zorder=1
    )
    lines.set_array(weights)
    lines.set_clim(-np.abs(weights).max(), np.abs(weights).max())
    panel.add_collection(lines)
    panel.scatter(
        places[:, 0],
        places[:, 1],
        s=210,
        c=_chain_colours(count),
        edgecolors="black",
        linewidths=0.6,
        zorder=2,
    )
    for spin, (x, y) in enumerate(places):
        panel.text(x, y, str(spin + 1), ha="center", va="center", fontsize=8, zorder=3)
    panel.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15))


def _draw_chip(panel: "Axes", layer: dict[str, Any]) -> None:
    from matplotlib.collections import LineCollection

    places = np.asarray(layer["places"])
    colours = _chain_colours(len(layer["chains"]))
    owner = {qubit: spin for spin, chain in enumerate(layer["chains"]) for qubit in chain}
    joined = {(i, j) for i, j, _ in layer["couplings"]}
    free, carrying, chains, chain_colours = [], [], [], []
    for a, b in layer["couplers"]:
        ends = owner.get(a), owner.get(b)
        if ends[0] is not None and ends[0] == ends[1]:
            chains.append(places[[a, b]])
            chain_colours.append(colours[ends[0]])
        elif None not in ends and (ends in joined or ends[::-1] in joined):
            carrying.append(places[[a, b]])
        else:
            free.append(places[[a, b]])
    panel.add_collection(LineCollection(free, colors="0.93", linewidth=0.4, zorder=1))
    panel.add_collection(LineCollection(carrying, colors="0.45", linewidth=0.5, zorder=2))
    panel.add_collection(LineCollection(chains, colors=chain_colours, linewidth=4, zorder=3))
    spare = [q for q in range(len(places)) if q not in owner]
    panel.scatter(places[spare, 0], places[spare, 1], s=10, color="0.85", zorder=2)
    used = list(owner)
    panel.scatter(
        places[used, 0],
        places[used, 1],
        s=110,
        c=[colours[owner[q]] for q in used],
        edgecolors="black",
        linewidths=0.6,
        zorder=4,
    )
    for qubit, spin in owner.items():
        x, y = places[qubit]
        panel.text(x, y, str(spin + 1), ha="center", va="center", fontsize=6, zorder=5)
    panel.autoscale_view()


class SpectralGap(Experiment):
    """Levels of the annealing Hamiltonian for one to four units of a layer."""

    title = "Spectral gap"
    source = "appendix, spectral gap"
    batches = (1, 20)
    neurons = (1, 2, 3, 4)
    seeds = 20
    patience = 600
    """Updates after which a run without four live units is given up."""

    def plan(self, lab: Lab) -> None:
        seeds = range(lab.seeds or (2 if lab.quick else self.seeds))
        lab.run([{"batch": batch, "seed": seed} for batch, seed in itertools.product(self.batches, seeds)])

    def compute(self, job: Job) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job["seed"])
            task = AdultThreeFeatures(job["seed"], False, job["quick"])
            task.batch = job["batch"]
            for snapshot in itertools.islice(snapshots(task, job["seed"]), self.patience):
                units = (snapshot.gradients > ALIVE).nonzero()[:, 0].tolist()[: self.neurons[-1]]
                if len(units) == self.neurons[-1]:
                    break
            else:
                return {}
        metrics: dict[str, Any] = {"update": snapshot.update}
        fractions = np.linspace(0, 1, 26 if job["quick"] else 51).tolist()
        for name, problem in snapshot.problems.items():
            metrics[name] = {
                "plain": [self._gap(problem, units[:count], fractions, False) for count in self.neurons],
                "range": [self._gap(problem, units[:count], fractions, True) for count in self.neurons],
                "own": [self._gap(problem, [unit], fractions, False)[0] for unit in units],
            }
            if job["seed"] == 0 and job["batch"] == self.batches[0]:  # the one that is drawn
                spectra = [
                    annealing_spectrum(problem, [unit], fractions, 2**problem.num_spins) for unit in units[:2]
                ]
                metrics[name]["levels"] = [[[_short(v) for v in row] for row in s.tolist()] for s in spectra]
        return metrics

    def _gap(
        self, problem: BinaryLeastSquares, units: list[int], fractions: list[float], normalize: bool
    ) -> tuple[float, float, int]:
        """The smallest gap, the fraction of the anneal where it is, and how many levels end in the ground."""
        degeneracy = ground_degeneracy(problem, units)
        spectrum = annealing_spectrum(problem, units, fractions, degeneracy + 1, normalize=normalize)
        gap, row = spectral_gap(spectrum, degeneracy)
        return _short(gap), fractions[row], degeneracy

    def show(self, lines: Sequence[Line]) -> Section:
        lines = [line for line in lines if line.metrics]
        scales = {"plain": "as it is", "range": "scaled to the annealer's range"}
        header = ["neurons", *(f"{name}, {scale}" for scale in scales.values() for name in POSINGS)]
        tables = []
        for batch in self.batches:
            own = [line for line in lines if line.job["batch"] == batch]
            rows = [
                [
                    str(count),
                    *(
                        str(estimate([line.metrics[name][scale][i][0] for line in own]))
                        for scale in scales
                        for name in POSINGS
                    ),
                ]
                for i, count in enumerate(self.neurons)
            ]
            caption = f"Smallest gap at batch size {batch}: mean ± 95 % interval over {len(own)} seeds"
            tables.append(Table(header, rows, caption))
        drawn = min(
            (line for line in lines if "levels" in line.metrics["ours"]), key=lambda line: line.job["seed"]
        )
        return Section(self._notes(lines), tables, [self._figure(drawn)])

    def _notes(self, lines: Sequence[Line]) -> list[str]:
        runs = [line.metrics[name] for line in lines for name in POSINGS]
        same = float(np.mean([abs(r["plain"][-1][0] - min(r["own"])) < 1e-4 for r in runs]))
        published = [line.metrics["as published"]["plain"] for line in lines]
        late = float(np.mean([gaps[0][1] > 0.98 for gaps in published]))
        single = [line for line in lines if line.job["batch"] == self.batches[0]]
        flat = float(
            np.mean([g[0][0] == g[1][0] for g in (line.metrics["as published"]["plain"] for line in single)])
        )
        left = {
            scale: float(np.mean([r[scale][-1][0] / r[scale][0][0] for r in runs]))
            for scale in ("plain", "range")
        }
        return [
            "First layer of the network 3-5-2 on three features of Adult, at the first update at which four "
            "of its units have a gradient; H(s) = −(1 − s) Σσx + s H_P with s = t/T, in the units of H_P. "
            "The gap is that to the first level that does not end in the ground state, as in the paper, "
            "which trains one layer of two neurons and gives neither the schedule nor the scale of its H_P.",
            "No term joins two units: their levels add up, so the gap of several is the smallest of their "
            f"own (to four digits in {same:.0%} of our runs with four neurons). It shrinks with their "
            "number only as the smallest of more draws does, not because the problem grows harder: units "
            "can be annealed one by one, or side by side, with each its own gap. That is no reason to keep "
            "layers narrow.",
            f"At batch size {self.batches[0]}, {flat:.0%} of the runs as published have the *same* gap for "
            "one and for two neurons (the paper reads 0.03 and 0.01): one row gives all live units a "
            f"gradient of equal size. In {late:.0%} of the runs as published the gap is smallest at the "
            "very end of the anneal: it is the classical distance of the best two energies, which the size "
            "of the gradient sets.",
            "What can tie units together is the range of the chip, if one factor scales them all. With four "
            f"neurons the gap is on average {left['range']:.0%} of the first one's when scaled so, and "
            f"{left['plain']:.0%} without scaling.",
        ]

    def _figure(self, line: Line) -> Figure:
        canvas, axes = figures.new(7.2, 5.4, rows=2, columns=2)
        for row, name in enumerate(POSINGS):
            own = line.metrics[name]
            first, second = (np.asarray(levels) for levels in own["levels"])
            both = np.sort((first[:, :, None] + second[:, None, :]).reshape(len(first), -1), 1)
            for column, levels in enumerate((first, both)):
                panel, (gap, fraction, degeneracy) = axes[row, column], own["plain"][column]
                fractions = np.linspace(0, 1, len(levels))
                at = int(np.abs(fractions - fraction).argmin())
                panel.plot(
                    fractions,
                    np.unique(levels.round(4), axis=1),
                    color=figures.BLUE,
                    linewidth=0.7,
                    alpha=0.8,
                )
                panel.plot(
                    [fraction] * 2,
                    levels[at, [0, degeneracy]],
                    color=figures.VERMILION,
                    linewidth=4,
                    zorder=3,
                )
                count = f"{column + 1} neuron{'s' if column else ''}"
                panel.set_title(f"{name}, {count}", fontsize=10)
                panel.text(0.98, 0.03, f"smallest gap {gap:.3f}", ha="right", transform=panel.transAxes)
                panel.set_xlabel("t / T" if row else "")
                panel.set_ylabel("" if column else "eigenvalue")
        caption = (
            "All levels of the annealing Hamiltonian for one and two units, batch size "
            f"{line.job['batch']}; red: the smallest gap between the ground level and the first that does "
            "not end in the ground state. One seed."
        )
        return Figure("spectral-gap", caption, to_svg(canvas))


def _values(
    lines: Sequence[Line], name: str, key: str, update: int | None = None, pool: bool = False
) -> list[float]:
    """One value for each seed: at an update, or the mean of its updates; ``pool`` gives those one by one."""
    found: list[float] = []
    for line in lines:
        own = [metrics[name][key] for at, metrics in line.metrics.items() if update in (None, int(at))]
        own = [value for value in own if value is not None]
        found += own if pool else [float(np.mean(own))] if own else []
    return found


def _symmetric(upper: list[list[float]]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """The matrix whose rows, each from its diagonal on, are given."""
    full = np.zeros((len(upper), len(upper)))
    for i, row in enumerate(upper):
        full[i, i:] = full[i:, i] = row
    return full


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean, half = estimate(values)
    return f"{mean:.1%}" if np.isnan(half) else f"{100 * mean:.1f} ± {100 * half:.1f} %"


def _short(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")


def _skewness(values: "np.ndarray[Any, np.dtype[np.float64]]") -> float:
    """Third moment in units of the standard deviation: positive for a long tail to high values."""
    centred = values - values.mean()
    spread = float(centred.std())
    return float((centred**3).mean() / spread**3) if spread > 0 else 0.0


def _similarities(matrix: Tensor, origin: str) -> dict[str, float | None]:
    """Mean and highest similarity of two different rows; none of a single row."""
    pairs = matrix[tuple(torch.triu_indices(len(matrix), len(matrix), 1))]
    if not len(pairs):
        return {origin: None, f"{origin} highest": None}
    return {origin: float(pairs.mean()), f"{origin} highest": float(pairs.max())}


def _lowest(
    spins: Tensor, energies: Tensor, count: int, resolution: float, generator: torch.Generator
) -> Tensor:  # (count, n)
    """The distinct rows of lowest energy; energies closer than ``resolution`` come in random order."""
    n = spins.shape[1]
    _, index = np.unique((spins > 0).numpy() @ (1 << np.arange(n)), return_index=True)
    shuffled = torch.from_numpy(index)[torch.randperm(len(index), generator=generator)]
    steps = ((energies[shuffled] - energies.min()) / resolution).round()
    return spins[shuffled[steps.sort(stable=True).indices[:count]]]


ENERGY_HISTOGRAM = EnergyHistogram()
SIMILARITY = Similarity()
QUBO_EVOLUTION = QuboEvolution()
EMBEDDING = Embedding()
SPECTRAL_GAP = SpectralGap()
