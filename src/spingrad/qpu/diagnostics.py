"""How well a chip has sampled the problems of a run: numbers that compare a chip with an emulator."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from spingrad.problem import BinaryQuadratic
from spingrad.qpu.chip import Floats, Ints
from spingrad.qpu.inspect import AnsweredCall, answered_calls
from spingrad.qpu.journal import Journal
from spingrad.qpu.packing import Ising, unpacked
from spingrad.solvers.exact import ExactSolver

MOST_CALLS = 20  # looked at, evenly over the run: every problem in them is solved exactly
MOST_NODES = 200_000
SAME = 1e-6  # of the optimum's energy, since the journal keeps problems in single precision


class SampledUnit(NamedTuple):
    """The reads of one copy of a unit, beside its optimum; energies are zero on average over random spins."""

    problem: Ising
    best: Floats  # (n,)
    lowest: float
    raw: Floats  # (samples, n), the majority of each chain
    repaired: Floats  # (samples,), energies
    occurrences: Ints  # (samples,)

    @property
    def at_optimum(self) -> float:
        """The share of reads that reach the optimum, after the repair of broken chains."""
        reached = self.repaired <= self.lowest + SAME * abs(self.lowest)
        return float(np.average(reached, weights=self.occurrences))

    def distances(self, energies: Floats) -> Floats:  # (samples,) -> (reads,)
        """0 for the optimum and 1 for the average of random spins, once for each read."""
        return np.repeat(1 - energies / self.lowest, self.occurrences)

    @property
    def error(self) -> Floats:  # (n,)
        """Mean spin of the reads minus the optimal spin."""
        mean = np.average(self.raw, axis=0, weights=self.occurrences)
        return np.asarray(mean - self.best)


def diagnosis(journal: Journal) -> list[tuple[str, str]]:
    """Pairs of a name and a value, for each size of clique and for the chip."""
    calls = answered_calls(journal)
    chosen = [calls[i] for i in sorted(set(np.linspace(0, len(calls) - 1, MOST_CALLS).astype(int)))]
    units = [list(_units(call)) for call in chosen]
    lines = []
    for size in sorted({len(unit.best) for own in units for unit in own}, reverse=True):
        own = [unit for found in units for unit in found if len(unit.best) == size]
        lines += [(f"{name}, cliques of {size}", value) for name, value in _of_size(own, chosen[0], journal)]
    lines += _breaks(chosen)
    if len(calls) > 1:
        lines += _lasting(calls)
    return lines


def _units(call: AnsweredCall) -> Iterator[SampledUnit]:
    """The copies of units whose energies are not all zero."""
    numbers = list(dict.fromkeys(call.units))
    problem_of = dict(zip(numbers, unpacked(call.attempt.facts["problems"]), strict=True))
    best_of = {unit: optimum(problem) for unit, problem in problem_of.items()}
    problems = [problem_of[unit] for unit in call.units]
    readings = call.page.read(call.spins, call.answer.occurrences, problems)
    majorities = np.split(call.page.chains(call.spins)[0], call.page.starts[1:-1], axis=1)
    for unit, reading, raw in zip(call.units, readings, majorities, strict=True):
        problem, best = problem_of[unit], best_of[unit]
        lowest = min(float(problem.energies(best[None])[0]), float(reading.energies.min()))
        if lowest < 0:
            yield SampledUnit(problem, best, lowest, raw, reading.energies, call.answer.occurrences)


def optimum(problem: Ising) -> Floats:  # (n,)
    """The best spins of a unit; the best found, if a proof takes too long.

    Example:
        >>> optimum(Ising(np.array([0.1, 0.0]), np.array([[0.0, 1.0], [0.0, 0.0]])))
        array([-1.,  1.])
    """
    gram = (problem.J + problem.J.T) / 2
    values, vectors = np.linalg.eigh(gram)  # the diagonal is free: spins have a square of one
    Z = torch.from_numpy((vectors * np.sqrt(values - values[0])).T.copy())
    own = BinaryQuadratic.of(Z, torch.from_numpy(-problem.h[:, None] / 2))
    return np.asarray(ExactSolver(MOST_NODES).solve(own).spins[:, 0].numpy())


def _of_size(units: Sequence[SampledUnit], call: AnsweredCall, journal: Journal) -> list[tuple[str, str]]:
    chances = np.array([unit.at_optimum for unit in units])
    raw, repaired = (
        np.concatenate([unit.distances(energies) for unit, energies in pairs])
        for pairs in (
            [(unit, unit.problem.energies(unit.raw)) for unit in units],
            [(unit, unit.repaired) for unit in units],
        )
    )
    programming, read = _times(call, journal)
    reads = reads_for_99(float(np.median(chances)))
    time = f"{1e-3 * reads * read:.3g} ms, {1e-3 * (programming + reads * read):.3g} ms with programming"
    return [
        ("P(opt)", f"{100 * chances.mean():.1f} % of reads"),
        ("TTS99", "the median unit was not solved" if math.isinf(reads) else time),
        ("median distance", f"{100 * np.median(repaired):.2f} %, {100 * np.median(raw):.2f} % before repair"),
        ("β_eff · max|J|", f"{np.median([_beta(unit) for unit in units]):.2f}"),
    ]


def reads_for_99(chance: float) -> float:
    """How many reads find the optimum with a probability of 99 %.

    Example:
        >>> reads_for_99(0.5), reads_for_99(1.0), reads_for_99(0.0)
        (7.0, 1.0, inf)
    """
    if not 0 < chance < 1:
        return 1.0 if chance else math.inf
    return float(max(1, math.ceil(math.log(0.01) / math.log(1 - chance))))


def _times(call: AnsweredCall, journal: Journal) -> tuple[float, float]:
    """Microseconds to program the chip, and of a read."""
    chip, settings = call.page.chip, journal.settings.get("sample_kwargs", {})
    one, two = (chip.access_time(len(call.page.qubits), num_reads=n, **settings) for n in (1, 2))
    return 2 * one - two, two - one


def _beta(unit: SampledUnit) -> float:
    """Inverse temperature by maximum pseudo-likelihood, in units of the largest coupling."""
    couplings = unit.problem.J + unit.problem.J.T
    own = unit.raw * (unit.problem.h + unit.raw @ couplings)  # what a flip of each spin would save, halved
    weights = np.repeat(unit.occurrences, own.shape[1]).astype(np.float64)
    values = own.ravel() / max(np.abs(couplings).max(), 1e-30)
    low, high = 0.0, 100.0
    for _ in range(40):
        beta = (low + high) / 2
        slope = float((weights * values / (1 + np.exp(np.clip(-2 * beta * values, -50, 50)))).sum())
        low, high = (beta, high) if slope < 0 else (low, beta)
    return low


def _breaks(calls: Sequence[AnsweredCall]) -> list[tuple[str, str]]:
    """The share of broken chains by their length."""
    lengths, shares = [], []
    for call in calls:
        broken = np.average(call.page.chains(call.spins)[1], axis=0, weights=call.answer.occurrences)
        lengths.append(np.bincount(call.page.spin_of))
        shares.append(broken)
    every, share = np.concatenate(lengths), np.concatenate(shares)
    return [
        (f"broken chains of {length} qubits", f"{100 * share[every == length].mean():.2f} %")
        for length in sorted(set(every.tolist()) - {1})
    ]


def _lasting(calls: Sequence[AnsweredCall]) -> list[tuple[str, str]]:
    """What stays from one call to the next: errors of the same spins, and the bias of each spin."""
    near = [pair for pair in pairwise(calls) if pair[0].page.name == pair[1].page.name]
    near = near[:: max(len(near) // MOST_CALLS, 1)][:MOST_CALLS]
    pairs = [(_errors(one), _errors(other)) for one, other in near]
    known = [(a, b) for a, b in pairs if len(a) == len(b) and a.std() > 0 and b.std() > 0]
    lines = []
    if known:
        mean = float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in known]))
        lines.append(("errors of successive calls", f"correlate by {mean:+.2f}, over {len(known)} pairs"))
    same = [call for call in calls if call.page.name == calls[0].page.name]
    if len({call.attempt.facts["gauge"] for call in same}) > 1:
        turned = [np.average(c.answer.spins, axis=0, weights=c.answer.occurrences) for c in same]
        bias = float(np.square(np.mean(turned, axis=0)).mean() ** 0.5)
        lines.append(
            (
                "bias of a qubit over gauges",
                f"{bias:.3f} rms; {len(same) ** -0.5:.3f} or less if there is none",
            )
        )
    return lines


def _errors(call: AnsweredCall) -> Floats:
    """Errors of all spins as the chip sees them, in the gauge of the call."""
    units = list(_units(call))
    if len(units) < len(call.units):  # a unit without energies has no optimum
        return np.zeros(0)
    return np.asarray(np.concatenate([unit.error for unit in units]) * call.gauge)
