"""What a chip does with a problem: scale it to the ranges, add control errors, anneal, read the spins."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from dwave.samplers.sa.simulated_annealing import simulated_annealing
from numpy.typing import NDArray

from spingrad.testing.sapi.chip import Chip, Floats, Ints, Range
from spingrad.testing.sapi.wire import Bits, Problem, encode_answer

Spins = NDArray[np.int8]


UNUSED = 3  # stands for a qubit without a value in an ``initial_state``


@dataclass(frozen=True)
class Annealer:
    """Simulated annealing in place of a QPU.

    The temperatures are fixed, as on a chip, so a problem that must be scaled down to fit the ranges is
    sampled less precisely. They follow the anneal fraction ``s`` of a schedule: hot at ``s = 0``, cold at
    ``s = 1``, and geometric between. Only the shape of a schedule counts, as the number of sweeps is the
    same for any duration. Reverse annealing begins at the given state; while ``s = 1``, nothing moves.

    Args:
        chip: The chip with its graph and its ranges.
        noise: Standard deviations of the control errors on ``h`` and ``J`` of the scaled problem, which are
            drawn for each job.
        persistent_noise: The same of the errors that each qubit and each coupler of the chip keeps.
        seed: Determines the errors that are kept, together with the working graph.
        num_sweeps: Sweeps per read. The default favours speed over quality.
        beta_range: Inverse temperatures in units of the scaled problem, from hot to cold.
    """

    chip: Chip
    noise: tuple[float, float] = (0.0, 0.0)
    persistent_noise: tuple[float, float] = (0.0, 0.0)
    seed: int = 0
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
        bits = self._anneal(h, J, problem, params, rng)
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
        of_qubits, of_couplers = self._kept_errors
        return (
            h / scale + of_qubits[problem.qubits] + sigma_h * rng.standard_normal(len(h)),
            J / scale + of_couplers[problem.couplers] + sigma_J * rng.standard_normal(len(J)),
        )

    @cached_property
    def _kept_errors(self) -> tuple[Floats, Floats]:  # by number of the qubit, by place of the coupler
        """Errors of this working graph's biases and couplings, the same in every job."""
        rng = np.random.default_rng([self.seed, int(self.chip.identity["version"]["graph_id"], 16)])
        sigma_h, sigma_J = self.persistent_noise
        return (
            sigma_h * rng.standard_normal(self.chip.properties["num_qubits"]),
            sigma_J * rng.standard_normal(len(self.chip.endpoints)),
        )

    def _anneal(
        self, h: Floats, J: Floats, problem: Problem, params: dict[str, Any], rng: np.random.Generator
    ) -> Bits:  # -> (r, n)
        num_reads, betas = params.get("num_reads", 1), self._betas(params.get("anneal_schedule"))

        def annealed(spins: Spins) -> Spins:  # (r, n)
            # This is the compiled core of SimulatedAnnealingSampler. The sampler itself would spend most of
            # a small job's time on dictionaries.
            seed, (a, b) = int(rng.integers(1, 2**31)), problem.pairs.T
            return simulated_annealing(len(spins), h, a, b, J, 1, betas, seed, spins)[0]  # type: ignore[no-any-return]

        if not is_reverse(params):
            spins = annealed(rng.choice(np.array([-1, 1], dtype=np.int8), (num_reads, len(h))))
        elif len(betas) == 0:
            spins = _start(problem, params["initial_state"]).repeat(num_reads, 0)
        elif params.get("reinitialize_state", True):
            spins = annealed(_start(problem, params["initial_state"]).repeat(num_reads, 0))
        else:  # each read begins where the one before has ended
            reads = [_start(problem, params["initial_state"])]
            for _ in range(num_reads):
                reads.append(annealed(reads[-1].copy()))
            spins = np.concatenate(reads[1:])
        return np.asarray(spins > 0, dtype=np.uint8)

    def _betas(self, schedule: list[list[float]] | None) -> Floats:  # (num_sweeps,)
        """Inverse temperatures along a schedule; none if nothing moves."""
        times, s = np.array(schedule or [[0, 0], [1, 1]], dtype=np.float64).T
        if s.min() == 1:
            return np.zeros(0)
        hot, cold = self.beta_range
        along = np.interp(np.linspace(0, times[-1], self.num_sweeps), times, s)
        return np.asarray(hot * (cold / hot) ** along)


def is_reverse(params: dict[str, Any]) -> bool:
    """Whether a job anneals backwards from a given state."""
    return "anneal_schedule" in params and params["anneal_schedule"][0][1] == 1


def _start(problem: Problem, state: list[int]) -> Spins:  # (1, n)
    values = np.array(state)[None, problem.qubits]
    return np.where(values > 0, 1, -1).astype(np.int8)


def _fill(values: Floats, limits: Range) -> float:
    low, high = limits
    return float(max(values.max(initial=0.0) / high, values.min(initial=0.0) / low))


def _distinct(bits: Bits) -> tuple[Ints, Ints]:
    """The index at which each distinct sample occurs first, and how often it occurs."""
    samples = np.packbits(bits, axis=1)
    _, first, counts = np.unique(samples, axis=0, return_index=True, return_counts=True)
    return first, counts
