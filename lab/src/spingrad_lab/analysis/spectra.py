"""The levels of a quantum annealer on its way from the transverse field to the problem."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spingrad import BinaryQuadratic
from spingrad_lab.analysis.energies import all_energies, all_spins

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

MAX_QUBITS = 16
DENSE_QUBITS = 9  # up to here, LAPACK is quick


def annealing_spectrum(
    problem: BinaryQuadratic,
    units: Sequence[int],
    fractions: Sequence[float],
    num_levels: int,
    *,
    normalize: bool = False,
) -> Tensor:  # (len(fractions), num_levels)
    """The lowest eigenvalues of ``H(s) = -(1 - s) Σ σx + s H_P``, ascending.

    ``H_P`` is the Ising energy of the units together, each with its own ``n`` spins and without the
    constant offset. No term joins two units, so the levels of ``H(s)`` are the sums of theirs, and one
    unit's matrix at a time is diagonalised.

    Args:
        problem: The problem of a layer.
        units: Which of its columns to anneal together, at most 16 qubits in all.
        fractions: The values of ``s``, from 0 to 1.
        num_levels: How many levels to return, counted with multiplicity.
        normalize: Scale ``H_P`` to a largest ``|h|`` or ``|J|`` of 1, as an annealer's range asks.
    """
    num_qubits = _count_qubits(problem, units)
    if not 0 < num_levels <= 2**num_qubits:
        raise ValueError(f"{num_qubits} qubits have 1 to {2**num_qubits} levels, got {num_levels}")
    if not all(0 <= s <= 1 for s in fractions):
        raise ValueError(f"fractions are between 0 and 1, got {list(fractions)}")
    scale = _largest_coefficient(problem, units) if normalize else 1.0
    total = np.zeros((len(fractions), 1))
    for unit in units:
        offset = problem.double().to_ising(unit)[2]
        diagonal = ((all_energies(problem, unit) - offset) / scale).cpu().numpy()
        levels = _unit_levels(diagonal, fractions, min(num_levels, len(diagonal)))
        sums = (total[:, :, None] + levels[:, None, :]).reshape(len(fractions), -1)
        total = np.sort(sums, axis=1)[:, :num_levels]
    return torch.from_numpy(total)


def spectral_gap(spectrum: Tensor, degeneracy: int) -> tuple[float, int]:
    """The smallest distance between level 0 and level ``degeneracy``, and the row where it occurs.

    The levels below ``degeneracy`` all end in the ground state (see :func:`ground_degeneracy`), so that
    an annealer that reaches them has not left it.

    Example:
        >>> spectral_gap(torch.tensor([[-1.0, 1.0], [-0.75, 0.75], [-1.0, 1.0]]), degeneracy=1)
        (1.5, 1)
    """
    if not 0 < degeneracy < spectrum.shape[1]:
        raise ValueError(f"level {degeneracy} is not above the ground state among {spectrum.shape[1]} levels")
    gap, row = (spectrum[:, degeneracy] - spectrum[:, 0]).min(0)
    return float(gap), int(row)


def ground_degeneracy(problem: BinaryQuadratic, units: Sequence[int], tolerance: float = 1e-9) -> int:
    """How many spin vectors of the units together lie within ``tolerance`` of the lowest energy."""
    _count_qubits(problem, units)
    above = torch.zeros(1, dtype=torch.float64, device=problem.H.device)
    for unit in units:
        energies = all_energies(problem, unit)
        above = (above[:, None] + (energies - energies.min())).flatten()
        above = above[above <= tolerance]
    return len(above)


def _count_qubits(problem: BinaryQuadratic, units: Sequence[int]) -> int:
    num_qubits = problem.num_spins * len(units)
    if not 0 < num_qubits <= MAX_QUBITS:
        raise ValueError(
            f"spectra take 1 to {MAX_QUBITS} qubits, got {len(units)} units of {problem.num_spins} spins"
        )
    return num_qubits


def _largest_coefficient(problem: BinaryQuadratic, units: Sequence[int]) -> float:
    coefficients = [c for unit in units for c in problem.double().to_ising(unit)[:2]]
    return max(float(c.abs().max()) for c in coefficients) or 1.0


def _unit_levels(diagonal: "Vector", fractions: Sequence[float], k: int) -> "Vector":
    """The ``k`` lowest levels of one unit at each fraction; ``diagonal`` are its energies."""
    from scipy.linalg import eigvalsh
    from scipy.sparse import csr_array, diags_array

    size, n = len(diagonal), len(diagonal).bit_length() - 1
    index = np.arange(size)
    flipped = np.concatenate([index ^ (1 << i) for i in range(n)])
    driver = csr_array((np.ones(n * size), (np.tile(index, n), flipped)))  # Σ σx
    dense = n <= DENSE_QUBITS or k >= size // 8
    start, levels = np.random.default_rng(0).standard_normal(size), []
    for s in fractions:
        H = diags_array(s * diagonal) - (1 - s) * driver
        if s == 1:
            lowest = np.sort(diagonal)[:k]
        elif s == 0:
            lowest = np.sort(all_spins(n).sum(1).numpy())[:k]  # σx has the eigenvalues of a spin
        elif dense:
            lowest = eigvalsh(H.toarray(), subset_by_index=(0, k - 1))
        else:
            lowest, start = _lanczos(H, k, start, lift=2 * n + np.ptp(diagonal))
        levels.append(lowest)
    return np.stack(levels)


def _lanczos(H: Any, k: int, start: "Vector", lift: float) -> tuple["Vector", "Vector"]:
    """The ``k`` lowest levels of ``H`` and a vector to start its neighbour from.

    A Krylov space holds one vector of a degenerate level, and none of a symmetry that its start lacks.
    So we look for lower levels in the complement of what was found, until there are none: ``lift``, more
    than the width of the spectrum, takes the levels found out of the way.
    """
    from scipy.sparse.linalg import aslinearoperator, eigsh

    noise = np.random.default_rng(1).standard_normal(len(start))
    values, vectors = eigsh(H, k, which="SA", v0=start)
    while True:
        found = aslinearoperator(vectors)
        rest = aslinearoperator(H) + lift * (found @ found.T)
        value, vector = eigsh(rest, 1, which="SA", v0=noise)
        if value[0] > np.sort(values)[k - 1] - 1e-10 * lift:
            return np.sort(values)[:k], vectors.sum(1)
        values, vectors = np.append(values, value), np.hstack([vectors, vector])
