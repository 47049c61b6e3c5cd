"""Any dimod sampler as a solver: simulated annealing, classical or quantum, tabu, a D-Wave QPU."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spingrad.problem import BinaryQuadratic
from spingrad.solvers._openjij import OpenJijSampler, is_openjij
from spingrad.solvers.base import Solution, Solver, derive_seed

if TYPE_CHECKING:
    import dimod
    from dimod.core.sampler import Sampler


class DimodSolver(Solver):
    """Hand each unit to a dimod sampler and keep its best sample.

    Args:
        sampler: Any object with dimod's ``sample`` method.
        **sample_kwargs: Passed on to ``sampler.sample`` untouched. A sampler that knows a ``seed`` gets
            one for each unit unless it is given here. OpenJij's ``SASampler`` and ``SQASampler`` get one
            for each read, or all their reads would be equal.

    Example:
        >>> from dwave.samplers import SimulatedAnnealingSampler
        >>> solver = DimodSolver(SimulatedAnnealingSampler(), num_reads=10, num_sweeps=100)
        >>> problem = BinaryQuadratic.least_squares(torch.eye(2), torch.tensor([[3.0], [-0.5]]))
        >>> solver.solve(problem).spins
        tensor([[ 1.],
                [-1.]])
    """

    def __init__(self, sampler: "Sampler", **sample_kwargs: Any) -> None:
        if not callable(getattr(sampler, "sample", None)):
            raise TypeError(
                f"a dimod sampler has a method `sample`, got {sampler!r}; "
                "pass an instance, such as SimulatedAnnealingSampler()"
            )
        self.sampler = sampler
        self.sample_kwargs = sample_kwargs

    def solve(self, problem: BinaryQuadratic, *, seed: int = 0) -> Solution:
        import dimod

        double = problem.double()
        gram = double.rows.gram().cpu().numpy()
        couplings = dimod.BinaryQuadraticModel(np.zeros(len(gram)), 2 * np.triu(gram, 1), 0.0, dimod.SPIN)
        biases = (-2 * double.H).T.cpu().numpy()
        sampler = OpenJijSampler(self.sampler) if is_openjij(self.sampler) else self.sampler
        own_seed = "seed" in getattr(sampler, "parameters", ()) and "seed" not in self.sample_kwargs
        columns = []
        for unit, h in enumerate(biases):
            bqm = couplings.copy()  # the units differ only in their biases
            bqm.add_linear_from_array(h)
            extra = {"seed": derive_seed(seed, unit)} if own_seed else {}
            columns.append(_best(sampler.sample(bqm, **self.sample_kwargs, **extra)))
        return Solution(problem, torch.stack(columns, 1).to(problem.H))


def _best(samples: "dimod.SampleSet") -> Tensor:
    """The sample of lowest energy, in the order of the variables ``0 … n-1``."""
    record = samples.record
    if len(record) == 0:
        raise RuntimeError("the sampler returned no sample; try a larger num_reads")
    row = record.sample[record.energy.argmin()]
    return torch.from_numpy(row[np.argsort(np.asarray(samples.variables))].astype(np.float64))
