"""The energies of one unit: of all its spin vectors, or of those a sampler returns."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spingrad import BinaryQuadratic

if TYPE_CHECKING:
    from dimod.core.sampler import Sampler

MAX_SPINS = 20
CHUNK = 2**16


def all_spins(n: int) -> Tensor:  # (2^n, n)
    """Every vector of ``n`` spins in double precision; bit ``i`` of the row's index is spin ``i``.

    Example:
        >>> all_spins(2)
        tensor([[-1., -1.],
                [ 1., -1.],
                [-1.,  1.],
                [ 1.,  1.]], dtype=torch.float64)
    """
    _check_enumerable(n)
    return _to_spins(torch.arange(2**n), n)


def all_energies(problem: BinaryQuadratic, unit: int = 0) -> Tensor:  # (2^n,)
    """The energy of every spin vector of one unit, in the order of :func:`all_spins`."""
    n, device = problem.num_spins, problem.H.device
    _check_enumerable(n)
    single = _single_unit(problem, unit).compressed()
    chunks = torch.arange(2**n, device=device).split(CHUNK)
    return torch.cat([single.energy(_to_spins(chunk, n).T) for chunk in chunks])


def sampled(
    problem: BinaryQuadratic, unit: int, sampler: "Sampler", **sample_kwargs: Any
) -> tuple[Tensor, Tensor]:  # (reads, n), (reads,)
    """The reads of a dimod sampler and their energies, lowest first, in double precision.

    A sample that occurred several times is repeated. Energies are the problem's, not those the sampler
    reports, which on an annealer may come from scaled or rounded coefficients.

    Args:
        problem: The problem of a layer.
        unit: Which of its columns to sample.
        sampler: Any object with dimod's ``sample`` method.
        **sample_kwargs: Passed on to ``sampler.sample`` untouched.
    """
    samples = sampler.sample(problem.to_bqm(unit), **sample_kwargs)
    rows = samples.record.sample[:, np.argsort(np.asarray(samples.variables))]
    reads = np.repeat(rows, samples.record.num_occurrences, axis=0).astype(np.float64)
    spins = torch.from_numpy(reads).to(problem.H.device)
    energies, order = _single_unit(problem, unit).energy(spins.T).sort(stable=True)
    return spins[order], energies


def _single_unit(problem: BinaryQuadratic, unit: int) -> BinaryQuadratic:
    """One unit in double precision; its energy takes any number of columns."""
    return problem.double().units(unit, unit + 1)


def _to_spins(index: Tensor, n: int) -> Tensor:  # (k,) -> (k, n)
    bits = index[:, None] >> torch.arange(n, device=index.device) & 1
    return bits.double().mul_(2).sub_(1)


def _check_enumerable(n: int) -> None:
    if not 0 < n <= MAX_SPINS:
        raise ValueError(f"enumeration takes 1 to {MAX_SPINS} spins, got {n}")
