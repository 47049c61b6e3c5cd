"""Any dimod sampler as a solver: simulated annealing, classical or quantum, tabu, a D-Wave QPU."""

from collections.abc import Iterator, Sequence
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
    from numpy.typing import NDArray


HYBRID_TIMES = (
    "run_time",
    "charge_time",
    "qpu_access_time",
)  # Leap's hybrid solvers put them beside the rest


class DimodSolver(Solver):
    """Hand each unit to a dimod sampler and keep its best sample.

    ``solution.info`` has what the sampler tells of its time (``"timing"``) and of broken chains
    (``"chain_breaks"``). With ``keep_samples``, it also has every sample (``"samples"``), whose energies
    compare with ``solution.energy``, and the chains of each variable where the sampler embeds
    (``"embeddings"``); :attr:`latest` has the solutions of the last step of an optimizer.

    Args:
        sampler: Any object with dimod's ``sample`` method.
        keep_samples: Keep every ``SampleSet`` in ``solution.info["samples"]``.
        whole_layers: Hand all units of a layer to the sampler as one model, over the variables
            ``(unit, input)``, and keep the best sample of each unit: for samplers that take long or charge
            much for each call, such as ``LeapHybridSampler``.
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

    def __init__(
        self,
        sampler: "Sampler",
        *,
        keep_samples: bool = False,
        whole_layers: bool = False,
        **sample_kwargs: Any,
    ) -> None:
        if isinstance(sampler, type) or not callable(getattr(sampler, "sample", None)):
            raise TypeError(
                f"a dimod sampler has a method `sample`, got {sampler!r}; "
                "pass an instance, such as SimulatedAnnealingSampler()"
            )
        self.sampler = sampler
        self.keep_samples, self.whole_layers = keep_samples, whole_layers
        self.sample_kwargs = sample_kwargs
        self._latest: list[Solution] = []

    @property
    def latest(self) -> list[Solution]:
        """The solutions of the last step, one per layer; kept only with ``keep_samples``."""
        return self._latest

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        solutions = super().solve_all(problems, seed=seed)
        if self.keep_samples:
            self._latest = solutions
        return solutions

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        """Solve every unit, one call of the sampler each, or one for all.

        Args:
            problem: The problem.
            initial: Spins to begin at, shape ``(n, m)``, for a sampler that takes ``initial_states``
                (simulated annealing, tabu) or ``initial_state`` (a QPU, which anneals backwards from there
                with the ``anneal_schedule`` given to this solver). The best sample can be worse than the
                start.
            seed: For samplers that have one.
        """
        double = problem.double()
        start = None if initial is None else checked_start(problem, initial).T.cpu().numpy().astype(np.int8)
        sampler = OpenJijSampler(self.sampler) if is_openjij(self.sampler) else self.sampler
        known = getattr(sampler, "parameters", {})
        given = dict(self.sample_kwargs)
        if self.keep_samples and "return_embedding" in known:
            given.setdefault("return_embedding", True)
        own_seed = "seed" in known and "seed" not in given
        parts = [double] if self.whole_layers else list(double.in_parts(1))
        samples = []
        for call, bqm in enumerate([double.to_bqm()] if self.whole_layers else _units(double)):
            extra = {"seed": derive_seed(seed, call)} if own_seed else {}
            if start is not None:
                extra |= self._start(bqm, start.ravel() if self.whole_layers else start[call])
            samples.append(sampler.sample(bqm, **given, **extra))
        spins = torch.cat([_best(part, own) for part, own in zip(parts, samples, strict=True)], 1)
        return Solution(problem, spins.to(problem.H), self._info(samples, problem.num_units))

    def _start(self, bqm: "dimod.BinaryQuadraticModel", spins: "NDArray[np.int8]") -> dict[str, Any]:
        """What tells the sampler to begin at these spins, one for each variable of the model."""
        known, variables = getattr(self.sampler, "parameters", {}), list(bqm.variables)
        if "spin_reversal_variables" in known:
            raise ValueError(
                "SpinReversalTransformComposite reverses spins at random, but not those of a start, which "
                "would begin elsewhere; give this solver the sampler within it"
            )
        if "initial_states" in known:
            return {"initial_states": (spins[None], variables)}
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
        return {"initial_state": dict(zip(variables, spins.tolist(), strict=True))}

    def _info(self, samples: "list[dimod.SampleSet]", num_units: int) -> Info:
        info, records = Info(), [own.record for own in samples]
        times = [own.info.get("timing") or _hybrid_times(own) for own in samples]
        if all(times):
            info["timing"] = times
        if all("chain_break_fraction" in record.dtype.names for record in records):
            breaks = [np.average(r.chain_break_fraction, weights=r.num_occurrences) for r in records]
            info["chain_breaks"] = torch.tensor(breaks * (num_units if self.whole_layers else 1))
        if self.keep_samples:
            info["samples"] = samples
            contexts = [own.info.get("embedding_context") for own in samples]
            if all(contexts):
                info["embeddings"] = [context["embedding"] for context in contexts if context]
        return info


def _units(problem: BinaryQuadratic) -> "Iterator[dimod.BinaryQuadraticModel]":
    """One model for each unit, over the variables ``0 … n-1``; they differ in biases and constants only."""
    import dimod

    gram = problem.gram().cpu().numpy()
    couplings = dimod.BinaryQuadraticModel(np.zeros(len(gram)), 2 * np.triu(gram, 1), 0.0, dimod.SPIN)
    constants = gram.trace() + problem.offset.cpu().numpy()  # so that samples have the solution's energy
    for h, constant in zip((-2 * problem.H).T.cpu().numpy(), constants, strict=True):
        bqm = couplings.copy()
        bqm.add_linear_from_array(h)
        bqm.offset = float(constant)
        yield bqm


def _hybrid_times(samples: "dimod.SampleSet") -> dict[str, Any]:
    return {name: samples.info[name] for name in HYBRID_TIMES if name in samples.info}


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


def _best(problem: BinaryQuadratic, samples: "dimod.SampleSet") -> Tensor:  # (n, m)
    """The best spins of each unit, which may come from different samples.

    The energies are computed again, since SpinReversalTransformComposite (dwave-preprocessing 0.6) returns
    wrong ones for several transforms of an embedded model.
    """
    if len(samples) == 0:
        raise RuntimeError("the sampler returned no sample; try a larger num_reads")
    samples = samples.change_vartype("SPIN", inplace=False)  # a sampler may answer in bits
    n, m = problem.H.shape
    labels = [(unit, i) for i in range(n) for unit in range(m)] if (0, 0) in samples.variables else range(n)
    if absent := [label for label in labels if label not in samples.variables]:
        raise ValueError(
            f"the sampler returned no value of the variable {absent[0]!r}; expected one of each of the "
            f"{n * m} variables of its model, got those of {[*samples.variables][:5]} …"
        )
    values = samples.record.sample[:, [samples.variables.index(label) for label in labels]]
    if (wrong := values[np.abs(values) != 1]).size:
        raise ValueError(
            f"the sampler returned samples with the spin {wrong[0]:g}; expected -1 or +1 for every variable, "
            "or bits, 0 or 1, in a SampleSet with the vartype BINARY"
        )
    reads = torch.from_numpy(values.astype(np.float64)).view(-1, n, m).to(problem.H)
    units = zip(problem.in_parts(1), reads.unbind(2), strict=True)
    return torch.stack([own[part.energy(own.T).argmin()] for part, own in units], 1)
