"""The descent of a layer as a dimod sampler, for any binary quadratic model."""

from typing import Any

import dimod
import numpy as np
import torch
from dimod.core.sampler import Sampler
from torch import Tensor

from spingrad.kernels.descent import flip_
from spingrad.solvers._dense import to_dense


class BlockDescentSampler(Sampler):
    """Descend on all reads of a model together, spin after spin, until no flip lowers the energy.

    The first read starts at zero and sets every spin once, as :class:`BlockDescentSolver` does; the
    others start at random spins. The couplings are held as a dense matrix.

    Example:
        >>> bqm = dimod.BinaryQuadraticModel({"a": 1}, {("a", "b"): -2}, 0, "SPIN")
        >>> print(BlockDescentSampler().sample(bqm))
           a  b energy num_oc.
        0 -1 -1   -3.0       1
        ['SPIN', 1 rows, 1 samples, 2 variables]
    """

    @property
    def parameters(self) -> dict[str, Any]:
        return {"num_reads": [], "num_sweeps": [], "seed": []}

    @property
    def properties(self) -> dict[str, Any]:
        return {}

    def sample(
        self,
        bqm: dimod.BinaryQuadraticModel,
        num_reads: int = 1,
        num_sweeps: int = 100,
        seed: int | None = None,
        **kwargs: Any,
    ) -> dimod.SampleSet:
        """Sample from a binary quadratic model.

        Args:
            bqm: The model, over spins or bits.
            num_reads: Samples to return.
            num_sweeps: Sweeps after which to stop where descent has not ended before.
            seed: Seed of the random starts; equal seeds give equal samples.
            **kwargs: Ignored with a warning, as dimod asks.
        """
        self.remove_unknown_kwargs(**kwargs)
        if num_reads < 1 or num_sweeps < 1:
            raise ValueError(f"num_reads and num_sweeps are at least 1, got {num_reads} and {num_sweeps}")
        h, J = (torch.from_numpy(array) for array in to_dense(bqm))
        spins = torch.from_numpy(np.random.default_rng(seed).choice([-1.0, 1.0], (num_reads, len(h))))
        spins[0] = 0
        _descend_(h, J, spins, num_sweeps)
        if bqm.vartype is dimod.BINARY:
            spins = (spins + 1) / 2
        rows = spins.to(torch.int8).numpy()
        samples: dimod.SampleSet = dimod.SampleSet.from_samples_bqm((rows, list(bqm.variables)), bqm)
        return samples


def _descend_(h: Tensor, J: Tensor, spins: Tensor, num_sweeps: int) -> None:
    for _ in range(num_sweeps):
        change = flip_(J, -torch.addmm(h, spins, J), spins)
        if not change.any():
            return
