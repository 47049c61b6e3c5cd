"""OpenJij's samplers with dimod's manners: dense models from numpy, and reads that differ."""

from typing import TYPE_CHECKING, Any

import numpy as np

from spingrad.solvers._dense import to_dense
from spingrad.solvers.base import derive_seed

if TYPE_CHECKING:
    import dimod
    from dimod.core.sampler import Sampler


def is_openjij(sampler: object) -> bool:
    """Is it OpenJij's ``SASampler`` or ``SQASampler``, or derived from one?"""
    return any(
        c.__module__.startswith("openjij.") and c.__name__ in ("SASampler", "SQASampler")
        for c in type(sampler).__mro__
    )


class OpenJijSampler:
    """Reads of an OpenJij sampler, each with a seed of its own.

    OpenJij gives the same seed to every read, so that all reads of a seeded call are equal, and does not
    list ``seed`` among its parameters. It turns a dimod model into dictionaries, which takes far longer
    than annealing; its own dense model comes from a matrix.
    """

    def __init__(self, sampler: "Sampler") -> None:
        self.sampler = sampler
        self.parameters = {**sampler.parameters, "seed": []}

    def sample(
        self, bqm: "dimod.BinaryQuadraticModel", *, seed: int, num_reads: int = 1, **kwargs: Any
    ) -> "dimod.SampleSet":
        import dimod
        import openjij

        h, J = to_dense(bqm)
        matrix = np.diag(h) + np.triu(J)
        model = openjij.BinaryQuadraticModel.from_numpy_matrix(matrix, vartype="SPIN", sparse=False)
        settings = {"sparse": False, **kwargs, "num_reads": 1}
        reads = [
            self.sampler.sample(model, seed=derive_seed(seed, read), **settings) for read in range(num_reads)
        ]
        samples: dimod.SampleSet = dimod.concatenate(reads)
        return samples
