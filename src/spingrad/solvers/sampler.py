"""The descent and the annealing of a layer as dimod samplers, for any binary quadratic model."""

from typing import Any

import dimod
import numpy as np
import torch
from dimod.core.sampler import Sampler
from torch import Tensor

from spingrad.kernels.cpu import flip_
from spingrad.solvers._dense import to_dense
from spingrad.solvers.annealing import logistic


class _DenseSampler(Sampler):
    @property
    def properties(self) -> dict[str, Any]:
        return {}


class BlockDescentSampler(_DenseSampler):
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
        h, J = _dense(bqm, num_reads, num_sweeps)
        spins = torch.from_numpy(np.random.default_rng(seed).choice([-1.0, 1.0], (num_reads, len(h))))
        spins[0] = 0
        _descend_(h, J, spins, num_sweeps)
        return _to_samples(spins, bqm)


class AnnealingSampler(_DenseSampler):
    """Simulated annealing of all reads of a model together, spin by spin, by a heat bath.

    The couplings are held as a dense matrix. The projection of a layer is faster with
    :class:`AnnealingSolver`, which never forms it.

    Example:
        >>> bqm = dimod.BinaryQuadraticModel({"a": 1}, {("a", "b"): -2}, 0, "SPIN")
        >>> float(AnnealingSampler().sample(bqm, num_reads=5, seed=0).first.energy)
        -3.0
    """

    @property
    def parameters(self) -> dict[str, Any]:
        return {"beta_range": [], "initial_states": [], "num_reads": [], "num_sweeps": [], "seed": []}

    def sample(
        self,
        bqm: dimod.BinaryQuadraticModel,
        num_reads: int = 1,
        num_sweeps: int = 1000,
        beta_range: tuple[float, float] | None = None,
        initial_states: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> dimod.SampleSet:
        """Sample from a binary quadratic model.

        Args:
            bqm: The model, over spins or bits.
            num_reads: Samples to return.
            num_sweeps: Sweeps with noise; descent until no flip lowers the energy follows.
            beta_range: First and last inverse temperature. By default from the largest norm of the couplings
                of a spin to a fiftieth of it, as temperatures.
            initial_states: Samples to begin at, as dimod takes them, in the order of the reads and again from
                the first if there are fewer; by default random spins.
            seed: Equal seeds give equal samples.
            **kwargs: Ignored with a warning, as dimod asks.
        """
        self.remove_unknown_kwargs(**kwargs)
        h, J = _dense(bqm, num_reads, num_sweeps)
        random = np.random.default_rng(seed)
        spins = torch.from_numpy(random.choice([-1.0, 1.0], (num_reads, len(h))))
        if initial_states is not None:
            spins = _from_states(initial_states, bqm, num_reads)
        for temperature in _temperatures(h, J, beta_range, num_sweeps):
            noise = torch.from_numpy(logistic(random, spins.numel())).view_as(spins)
            flip_(J, temperature / 2 * noise - torch.addmm(h, spins, J), spins)
        _descend_(h, J, spins, num_sweeps=100)
        return _to_samples(spins, bqm)


def _dense(bqm: dimod.BinaryQuadraticModel, num_reads: int, num_sweeps: int) -> tuple[Tensor, Tensor]:
    """Fields and couplings, after a look at the counts."""
    if num_reads < 1 or num_sweeps < 1:
        raise ValueError(f"num_reads and num_sweeps are at least 1, got {num_reads} and {num_sweeps}")
    h, J = to_dense(bqm)
    return torch.from_numpy(h), torch.from_numpy(J)


def _temperatures(h: Tensor, J: Tensor, beta_range: tuple[float, float] | None, count: int) -> list[float]:
    """Falling temperatures, each a constant factor below the one before."""
    if beta_range is None:
        hot = max(float((J.square().sum(1) + h.square()).max().sqrt()) if len(h) else 0.0, 1e-30)
        return list(np.geomspace(hot, hot / 50, count))
    first, last = beta_range
    if not 0 < first <= last < float("inf"):
        raise ValueError(f"beta_range is two positive numbers, the smaller first, got {beta_range}")
    return list(1 / np.geomspace(first, last, count))


def _from_states(states: Any, bqm: dimod.BinaryQuadraticModel, count: int) -> Tensor:
    """The spins of given samples, shape ``(count, n)``."""
    rows, labels = dimod.as_samples(states)
    if not len(rows) or set(labels) != set(bqm.variables):
        raise ValueError("initial_states holds at least one sample, of all variables of the model")
    order = [labels.index(variable) for variable in bqm.variables]
    chosen = torch.from_numpy(rows[np.arange(count) % len(rows)][:, order].astype(np.float64))
    return torch.where(chosen > 0, 1.0, -1.0).double()


def _to_samples(spins: Tensor, bqm: dimod.BinaryQuadraticModel) -> dimod.SampleSet:
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
