"""Any dimod sampler as a solver: simulated annealing, classical or quantum, tabu, a D-Wave QPU."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spingrad.problem import BinaryQuadratic
from spingrad.solvers._openjij import OpenJijSampler, is_openjij
from spingrad.solvers.base import Info, Solution, Solver, checked_start, derive_seed

if TYPE_CHECKING:
    import dimod
    from dimod.core.sampler import Sampler


class DimodSolver(Solver):
    """Hand each unit to a dimod sampler and keep its best sample.

    ``solution.info`` has what the sampler tells of its time (``"timing"``) and of broken chains
    (``"chain_breaks"``), and every sample of every unit (``"samples"``) if ``keep_samples`` is set.

    Args:
        sampler: Any object with dimod's ``sample`` method.
        keep_samples: Keep the ``SampleSet`` of every unit in ``solution.info["samples"]``.
        **sample_kwargs: Passed on to ``sampler.sample`` untouched. A sampler that knows a ``seed`` gets
            one for each unit unless it is given here. OpenJij's ``SASampler`` and ``SQASampler`` get one
            for each read, or all their reads would be equal.

    Example:
        >>> from dwave.samplers import SimulatedAnnealingSampler
        >>> solver = DimodSolver(SimulatedAnnealingSampler(), keep_samples=True, num_reads=10, num_sweeps=100)
        >>> problem = BinaryQuadratic.least_squares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
        >>> solution = solver.solve(problem)
        >>> solution.spins
        tensor([[ 1.],
                [-1.]])
        >>> len(solution.info["samples"][0])
        10
    """

    def __init__(self, sampler: "Sampler", *, keep_samples: bool = False, **sample_kwargs: Any) -> None:
        if isinstance(sampler, type) or not callable(getattr(sampler, "sample", None)):
            raise TypeError(
                f"a dimod sampler has a method `sample`, got {sampler!r}; "
                "pass an instance, such as SimulatedAnnealingSampler()"
            )
        self.sampler = sampler
        self.keep_samples = keep_samples
        self.sample_kwargs = sample_kwargs

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        """Solve every unit, one call of the sampler each.

        Args:
            problem: The problem.
            initial: Spins to begin at, shape ``(n, m)``, for a sampler that takes ``initial_states``
                (simulated annealing, tabu) or ``initial_state`` (a QPU, which anneals backwards from there
                with the ``anneal_schedule`` given to this solver). The best sample can be worse than the
                start.
            seed: For samplers that have one.
        """
        import dimod

        double = problem.double()
        starts = None if initial is None else self._starts(checked_start(problem, initial))
        gram = double.rows.gram().cpu().numpy()
        couplings = dimod.BinaryQuadraticModel(np.zeros(len(gram)), 2 * np.triu(gram, 1), 0.0, dimod.SPIN)
        biases = (-2 * double.H).T.cpu().numpy()
        sampler = OpenJijSampler(self.sampler) if is_openjij(self.sampler) else self.sampler
        own_seed = "seed" in getattr(sampler, "parameters", ()) and "seed" not in self.sample_kwargs
        samples = []
        for unit, h in enumerate(biases):
            bqm = couplings.copy()  # the units differ only in their biases
            bqm.add_linear_from_array(h)
            extra = {"seed": derive_seed(seed, unit)} if own_seed else {}
            extra |= {} if starts is None else starts[unit]
            samples.append(sampler.sample(bqm, **self.sample_kwargs, **extra))
        spins = torch.stack([_best(own) for own in samples], 1).to(problem.H)
        return Solution(problem, spins, self._info(samples))

    def _starts(self, spins: Tensor) -> list[dict[str, Any]]:
        """What tells the sampler to begin at these spins, unit by unit."""
        known = getattr(self.sampler, "parameters", {})
        columns = spins.T.cpu().numpy().astype(np.int8)
        if "initial_states" in known:
            return [{"initial_states": (own[None], list(range(len(own))))} for own in columns]
        if "initial_state" not in known:
            raise ValueError(
                f"{type(self.sampler).__name__} takes no start: expected a sampler with the parameter "
                "initial_states or initial_state, such as SimulatedAnnealingSampler()"
            )
        if "anneal_schedule" in known and "anneal_schedule" not in self.sample_kwargs:
            raise ValueError(
                "a QPU begins at given spins by annealing backwards, which needs a schedule: "
                "DimodSolver(sampler, anneal_schedule=[[0, 1], [5, 0.45], [15, 0.45], [20, 1]])"
            )
        return [{"initial_state": dict(enumerate(own.tolist()))} for own in columns]

    def _info(self, samples: "list[dimod.SampleSet]") -> Info:
        info, records = Info(), [own.record for own in samples]
        if all("timing" in own.info for own in samples):
            info["timing"] = [own.info["timing"] for own in samples]
        if all("chain_break_fraction" in record.dtype.names for record in records):
            breaks = [np.average(r.chain_break_fraction, weights=r.num_occurrences) for r in records]
            info["chain_breaks"] = torch.tensor(breaks)
        if self.keep_samples:
            info["samples"] = samples
        return info


def to_solver(solver: "Solver | Sampler") -> Solver:
    """A solver as it is, and any dimod sampler as a :class:`DimodSolver`."""
    if isinstance(solver, Solver):
        return solver
    try:
        return DimodSolver(solver)
    except TypeError:
        raise TypeError(
            "solver is an instance of spingrad.solvers.Solver, or a dimod sampler such as "
            f"SimulatedAnnealingSampler(), got {solver!r}"
        ) from None


def _best(samples: "dimod.SampleSet") -> Tensor:
    """The sample of lowest energy, in the order of the variables ``0 … n-1``."""
    record = samples.record
    if len(record) == 0:
        raise RuntimeError("the sampler returned no sample; try a larger num_reads")
    row = record.sample[record.energy.argmin()]
    return torch.from_numpy(row[np.argsort(np.asarray(samples.variables))].astype(np.float64))
