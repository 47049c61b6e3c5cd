"""What a chip does with a problem: scale it to the ranges, add control errors, anneal, read the spins."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from dwave.samplers.sa.simulated_annealing import simulated_annealing

from spingrad.testing.sapi.chip import Chip, Floats, Ints, Range
from spingrad.testing.sapi.wire import Bits, Problem, encode_answer


@dataclass(frozen=True)
class Annealer:
    """Simulated annealing in place of a QPU.

    The temperatures are fixed, as on a chip, so a problem that must be scaled down to fit the ranges is
    sampled less precisely.

    Args:
        chip: The chip with its graph and its ranges.
        noise: Standard deviations of the control errors on ``h`` and ``J`` of the scaled problem.
        num_sweeps: Sweeps per read. The default favours speed over quality.
        beta_range: Inverse temperatures in units of the scaled problem, from hot to cold.
    """

    chip: Chip
    noise: tuple[float, float] = (0.0, 0.0)
    num_sweeps: int = 25
    beta_range: tuple[float, float] = (0.3, 10.0)

    def fill(self, problem: Problem) -> float:
        """The largest share of any range that the problem uses; above 1 it does not fit the chip."""
        h, J = problem.to_ising()
        properties = self.chip.properties
        groups, total_range = self.chip.groups
        totals: Floats = np.zeros(groups.max(initial=0) + 1)
        np.add.at(totals, groups[problem.couplers], J[:, None])
        return max(
            _fill(h, properties["h_range"]),
            _fill(J, properties["extended_j_range"]),
            _fill(totals, total_range),
        )

    def answer(self, problem: Problem, params: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Samples in the ``qp`` format, with the energies of the problem as submitted."""
        h, J = self._program(problem, params.get("auto_scale", True), rng)
        bits = self._anneal(h, J, problem.pairs, params.get("num_reads", 1), rng)
        energies, occurrences = problem.energies(bits), None
        if params.get("answer_mode", "histogram") == "histogram":
            first, occurrences = _distinct(bits)
            order = np.argsort(energies[first], kind="stable")
            bits, energies, occurrences = bits[first[order]], energies[first[order]], occurrences[order]
        return encode_answer(problem, bits, energies, occurrences, self.chip.properties["num_qubits"])

    def _program(self, problem: Problem, auto_scale: bool, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Biases and couplings on the chip: scaled to fill the ranges, with control errors."""
        h, J = problem.to_ising()
        scale = (auto_scale and self.fill(problem)) or 1.0  # a problem of zeros stays as it is
        sigma_h, sigma_J = self.noise
        return (
            h / scale + sigma_h * rng.standard_normal(len(h)),
            J / scale + sigma_J * rng.standard_normal(len(J)),
        )

    def _anneal(
        self, h: Floats, J: Floats, pairs: Ints, num_reads: int, rng: np.random.Generator
    ) -> Bits:  # -> (r, n)
        # This is the compiled core of SimulatedAnnealingSampler. The sampler itself would spend most of a
        # small job's time on dictionaries.
        spins = rng.choice(np.array([-1, 1], dtype=np.int8), (num_reads, len(h)))
        betas = np.geomspace(*self.beta_range, self.num_sweeps)
        seed = int(rng.integers(1, 2**31))
        spins, _ = simulated_annealing(num_reads, h, pairs[:, 0], pairs[:, 1], J, 1, betas, seed, spins)
        return np.asarray(spins > 0, dtype=np.uint8)


def _fill(values: Floats, limits: Range) -> float:
    low, high = limits
    return float(max(values.max(initial=0.0) / high, values.min(initial=0.0) / low))


def _distinct(bits: Bits) -> tuple[Ints, Ints]:
    """The index at which each distinct sample occurs first, and how often it occurs."""
    samples = np.packbits(bits, axis=1)
    _, first, counts = np.unique(samples, axis=0, return_index=True, return_counts=True)
    return first, counts
