"""What sampling a problem gives: how low its reads are, and how alike the best of them."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from spingrad import BinaryQuadratic
from spingrad_lab.analysis import all_energies, all_spins, jaccard, sampled
from spingrad_lab.paper.layer_problems import POSINGS, TIE, UPDATES, DigitExperiment, Readings
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Table, to_svg
from spingrad_lab.report.statistics import Estimate

NUM_READS, NUM_SWEEPS = 1_000, 2
_STAND_IN = (
    f"Stand-in: {NUM_READS:,} reads of dwave-samplers' simulated annealing with {NUM_SWEEPS} sweeps take "
    "the place of D-Wave's annealer. How often *that* finds the optimum, it cannot say."
)


def annealed(problem: BinaryQuadratic, unit: int, seed: int) -> tuple[Tensor, Tensor]:
    """Reads and their energies from hurried simulated annealing, the stand-in for D-Wave's annealer."""
    from dwave.samplers import SimulatedAnnealingSampler

    sampler = SimulatedAnnealingSampler()
    return sampled(problem, unit, sampler, num_reads=NUM_READS, num_sweeps=NUM_SWEEPS, seed=seed)


class EnergyHistogram(DigitExperiment):
    """Energies of 1,000 reads beside those of all 65,536 states."""

    title = "Energies of sampled solutions"
    source = "appendix, sampling solutions"
    num_bins = 40

    def measure(self, problem: BinaryQuadratic, unit: int, seed: int) -> dict[str, Any]:
        states, reads = all_energies(problem, unit).numpy(), annealed(problem, unit, seed)[1].numpy()
        optimum, spread = states.min(), states.mean() - states.min()
        metrics: dict[str, Any] = {
            "optimum": float(optimum),
            "at_optimum": float((reads < optimum + TIE * spread).mean()),
            "optima": int((states < optimum + TIE * spread).sum()),
            "gap": float((np.median(reads) - optimum) / spread),
            "skew_reads": skewness(reads),
            "skew_states": skewness(states),
        }
        if seed == 0:  # the one that is drawn
            width = max(1.5 * (reads.max() - optimum), 0.2 * spread)
            edges = np.linspace(optimum, optimum + width, self.num_bins + 1)
            metrics["edges"] = [float(edges[0]), float(edges[-1])]
            above = np.maximum(reads, optimum)  # the same state, added up in another order
            metrics["reads"] = np.histogram(above, edges)[0].tolist()
            metrics["states"] = np.histogram(states, edges)[0].tolist()
        return metrics

    def tables(self, found: Readings) -> list[Table]:
        caption = (
            "Mean ± 95 % interval over seeds. Gap of the median read: 0 % is the optimum, 100 % the mean of "
            "all states."
        )
        columns = {
            "reads at the optimum": ("at_optimum", Estimate.percent),
            "median gap": ("gap", Estimate.percent),
        }
        rows = []
        for name in POSINGS:
            skews = (str(found.estimate(name, key)) for key in ("skew_reads", "skew_states"))
            rows.append([name, f"{np.median(found.pooled(name, 'optima')):.0f}", *skews])
        header = ["problem", "states at the optimum (median)", "skewness of reads", "skewness of all states"]
        shape = Table(header, rows, "Shape of the distributions, all updates")
        return [found.table(columns, caption), shape]

    def notes(self, found: Readings) -> list[str]:
        share, gap, skew, states = (
            found.means(key) for key in ("at_optimum", "gap", "skew_reads", "skew_states")
        )
        tail = "has that tail too" if min(states.values()) > 0 else "does not have it"
        return [
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

    def draw(self, run: pd.Series) -> list[Figure]:
        return [self._figure(run, name) for name in POSINGS]

    def _figure(self, run: pd.Series, name: str) -> Figure:
        canvas, axes = figures.new(8.4, 4.4, rows=2, columns=3)
        for place, (update, panel) in enumerate(zip(UPDATES, axes.flat, strict=True)):
            if str(update) not in run:
                panel.set_axis_off()
                continue
            own = run[str(update)][name]
            low, high = own["edges"]
            edges = np.linspace(low, high, self.num_bins + 1)
            reads, states = (np.asarray(own[key]) for key in ("reads", "states"))
            panel.stairs(reads / NUM_READS, edges, fill=True, color=figures.SKY, label="reads")
            panel.stairs(states / 2**16, edges, color=figures.BLACK, label="all 65,536 states")
            panel.axvline(own["optimum"], color=figures.VERMILION, linestyle="--", label="optimum")
            panel.set(title=f"update {update}", yscale="log", ylim=(3e-5, 1.5))
            panel.set_xlabel("energy" if place >= 3 else "")
            panel.set_ylabel("share in a bin" if place % 3 == 0 else "")
        figures.legend_below(canvas, next(panel for panel in axes.flat if panel.lines))
        caption = (
            f"Energies, up to a constant, of {NUM_READS:,} reads (filled) and of all states (line) at six "
            f"updates, {name}; one seed. Most states lie beyond the axis, which ends a little above the "
            "highest read."
        )
        return Figure(f"energy-histogram-{name.replace(' ', '-')}", caption, to_svg(canvas))


class Similarity(DigitExperiment):
    """How much the ten best solutions have in common."""

    title = "Similarity of the best solutions"
    source = "appendix, similarity"
    count = 10
    origins = ("annealing", "enumeration")

    def measure(self, problem: BinaryQuadratic, unit: int, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        states, energies = all_spins(problem.num_spins), all_energies(problem, unit)
        resolution = TIE * float(energies.mean() - energies.min())
        lists = {"annealing": annealed(problem, unit, seed), "enumeration": (states, energies)}
        metrics: dict[str, Any] = {}
        for origin, (spins, own) in lists.items():
            best = lowest(spins, own, self.count, resolution, generator)
            matrix = jaccard(best)
            metrics |= _similarities(matrix, origin) | {f"{origin} distinct": len(best)}
            if seed == 0:
                metrics[f"{origin} matrix"] = [[round(v, 3) for v in row] for row in matrix.tolist()]
        drawn = states[torch.randperm(len(states), generator=generator)[: self.count]]
        return metrics | _similarities(jaccard(drawn), "random")

    def tables(self, found: Readings) -> list[Table]:
        kinds = (*self.origins, "random")
        keys = (*kinds, *(f"{kind} highest" for kind in kinds))
        rows = [[name, *(str(found.estimate(name, key)) for key in keys)] for name in POSINGS]
        caption = (
            "Jaccard similarity of the ten lowest states, of 45 pairs: mean ± 95 % interval over seeds, six "
            "updates each"
        )
        labels = (f"{kind}, {what}" for what in ("mean", "highest pair") for kind in kinds)
        return [Table(["problem", *labels], rows, caption)]

    def notes(self, found: Readings) -> list[str]:
        random = float(np.mean([v for name in POSINGS for v in found.values(name, "random")]))
        distinct = found.means("annealing distinct")
        verdicts = []
        for name in POSINGS:
            mean, half = found.estimate(name, "enumeration")
            far = abs(mean - random) > half  # False for one seed, whose interval is not known
            word = ("more" if mean > random else "less") + " alike than" if far else "about as alike as"
            verdicts.append(f"{name}, the ten lowest states ({mean:.2f}) are {word} random spins")
        return [
            _STAND_IN,
            "Ties are broken at random, and there are many: batches repeat rows. The measure needs a "
            f"reference: two random spin vectors share {random:.2f} on average (1/3 in the limit of many "
            "spins), and the highest of 45 pairs of them is in the table. The paper's highest pair, about "
            "0.4, is to be read by it.",
            f"Read so: {'; '.join(verdicts)}.",
            "Of the ten distinct states asked for, annealing returned on average "
            f"{distinct['as published']:.1f} as published and {distinct['ours']:.1f} with ours.",
        ]

    def draw(self, run: pd.Series) -> list[Figure]:
        update = max(update for update in UPDATES if str(update) in run)
        canvas, axes = figures.new(6.4, 5.4, rows=2, columns=2)
        ticks, ends = range(0, self.count, 3), (-0.5, self.count - 0.5)
        labels = [tick + 1 for tick in ticks]
        for (name, origin), panel in zip(itertools.product(POSINGS, self.origins), axes.flat, strict=True):
            matrix = np.asarray(run[str(update)][name][f"{origin} matrix"])
            image = panel.imshow(matrix, cmap="viridis", vmin=0, vmax=1)
            panel.grid(visible=False)
            panel.set(xticks=ticks, yticks=ticks, xticklabels=labels, yticklabels=labels)
            panel.set(xlim=ends, ylim=ends[::-1], title=f"{name}, {origin}")  # fewer than ten may be found
        for column in range(2):
            axes[1, column].set_xlabel("solution, lowest energy first")
            axes[column, 0].set_ylabel("solution")
        canvas.colorbar(image, ax=axes, label="Jaccard similarity", shrink=0.7)
        caption = f"Similarity of the ten lowest states at update {update}, sampled and true; one seed."
        return [Figure("similarity", caption, to_svg(canvas))]


def lowest(
    spins: Tensor, energies: Tensor, count: int, resolution: float, generator: torch.Generator
) -> Tensor:  # (count, n)
    """The distinct rows of lowest energy; energies closer than ``resolution`` come in random order."""
    n = spins.shape[1]
    _, index = np.unique((spins > 0).numpy() @ (1 << np.arange(n)), return_index=True)
    shuffled = torch.from_numpy(index)[torch.randperm(len(index), generator=generator)]
    steps = ((energies[shuffled] - energies.min()) / resolution).round()
    return spins[shuffled[steps.sort(stable=True).indices[:count]]]


def _similarities(matrix: Tensor, origin: str) -> dict[str, float | None]:
    """Mean and highest similarity of two different rows; none of a single row."""
    pairs = matrix[tuple(torch.triu_indices(len(matrix), len(matrix), 1))]
    mean, highest = (float(pairs.mean()), float(pairs.max())) if len(pairs) else (None, None)
    return {origin: mean, f"{origin} highest": highest}


def skewness(energies: "np.ndarray") -> float:
    """Positive for a long tail to high values; zero where all values are equal."""
    from scipy import stats

    return float(stats.skew(energies)) if np.ptp(energies) > 0 else 0.0


ENERGY_HISTOGRAM = EnergyHistogram()
SIMILARITY = Similarity()
