"""Descent and annealing on a CPU, compiled by numba where the ``fast`` extra is installed."""

import warnings

import numpy as np
import torch
from torch import Tensor

from spingrad.kernels import plain
from spingrad.kernels.compiled import HAS_NUMBA, Array, compiled, share_out

_NO_OUTPUTS: Array = np.empty((0, 0), np.float32)
MOST_ROWS = 1024  # the outputs of a vector of units fit in a processor's second cache
NO_NUMBA = (
    "numba is not installed: torch sets single spins, many times slower, to the same spins. "
    'pip install "spingrad[fast]"'
)


def descend_(Z: Tensor, H: Tensor, G: Tensor, sweeps: int, started: bool = False) -> None:
    """:func:`spingrad.kernels.operators.descend_`, shared among threads.

    A vector of units that a sweep has left as it was is not swept again.

    Example:
        >>> G = torch.empty(1, 2)
        >>> descend_(torch.eye(2), torch.tensor([[3.0, -0.5]]), G, 1)
        >>> G
        tensor([[ 1., -1.]])
    """
    if not HAS_NUMBA:
        warnings.warn(NO_NUMBA, stacklevel=1)
    if not _is_compiled(H):
        plain.descend_(Z, H, G, sweeps, started)
    elif Z.ndim == 3:
        K = Z.mT @ Z
        F = H - G @ K if started else H.clone()
        spins = G if started else G.zero_()
        compiled(descend_groups)(_array(K), _array(F.contiguous()), _array(spins), sweeps)
    elif not _has_vectors(Z, H):
        plain.descend_(Z, H, G, sweeps, started, flip_)
    else:
        from spingrad.kernels.descent_llvm import LANES, descend

        h, g, u, rows, couplings = _packed(Z, H, G, started)
        share_out(lambda own: descend(h[own], rows, couplings, g[own], u[own], sweeps), len(h), whole=LANES)


def anneal_(
    Z: Tensor,
    H: Tensor,
    G: Tensor,
    temperatures: list[float],
    noise: Tensor,
    places: Tensor,
    started: bool = False,
) -> None:
    """:func:`spingrad.kernels.operators.anneal_`, shared among threads.

    Example:
        >>> noise, places = torch.zeros(32 * 4), torch.zeros(1, 1, 1, dtype=torch.int64)
        >>> G = torch.empty(1, 2)
        >>> anneal_(torch.eye(2), torch.tensor([[3.0, -0.5]]), G, [1.0], noise, places)
        >>> G
        tensor([[ 1., -1.]])
    """
    if not HAS_NUMBA:
        warnings.warn(NO_NUMBA, stacklevel=1)
    if not _has_vectors(Z, H):
        plain.anneal_(Z, H, G, temperatures, noise, places, started, flip_)
        return
    from spingrad.kernels.descent_llvm import LANES, anneal

    h, g, u, rows, couplings = _packed(Z, H, G, started)
    factors, numbers, where = np.asarray(temperatures, np.float32), _array(noise), _array(places)

    def work(own: slice) -> None:
        vectors = where[own.start // LANES : -(-own.stop // LANES)]
        anneal(h[own], rows, couplings, g[own], u[own], factors, numbers, vectors, plain.MOST_DESCENTS)

    share_out(work, len(h), whole=LANES)


def flip_(K: Tensor, field: Tensor, G: Tensor) -> Tensor:
    """As :func:`spingrad.kernels.plain.flip_`, in one loop.

    Example:
        >>> G = torch.zeros(1, 2)
        >>> flip_(torch.eye(2), torch.tensor([[3.0, -0.5]]), G), G
        (tensor([[ 1., -1.]]), tensor([[ 1., -1.]]))
    """
    if not _is_compiled(G):
        return plain.flip_(K, field, G)
    change = torch.empty_like(field)
    compiled(descend_block)(_array(K), _array(field), _array(G), _array(change))
    return change


def _is_compiled(H: Tensor) -> bool:
    return HAS_NUMBA and H.dtype in (torch.float32, torch.float64)  # numpy knows no bfloat16


def _has_vectors(Z: Tensor, H: Tensor) -> bool:
    """Whether the kernel of :mod:`spingrad.kernels.descent_llvm` takes the problem."""
    return HAS_NUMBA and H.dtype == torch.float32 and len(Z) <= MOST_ROWS


def _packed(Z: Tensor, H: Tensor, G: Tensor, started: bool) -> tuple[Array, Array, Array, Array, Array]:
    """Fields, spins and outputs, rows and couplings as that kernel takes them."""
    from spingrad.kernels.descent_llvm import packed

    rows, couplings = packed(_array(Z))
    H = H if H.stride(1) == 1 else H.contiguous()
    return _array(H), _array(G), _array(G @ Z.T) if started else _NO_OUTPUTS, rows, couplings


def _array(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().numpy())


def descend_block(K: Array, F: Array, S: Array, D: Array) -> None:
    """Set the spins of a block one after the other, each to the sign of its field, in every unit.

    Args:
        K: Couplings ``Z_bᵀZ_b`` of the block, shape ``(b, b)``.
        F: Fields ``R Z_b`` of the block, shape ``(m, b)``; overwritten.
        S: Spins of the block (zero where none is set yet), shape ``(m, b)``; updated.
        D: Receives the change of ``S``.
    """
    units, size = F.shape
    one = F.dtype.type(1)
    for j in range(units):
        for i in range(size):
            old = S[j, i]
            new = one if F[j, i] + K[i, i] * old >= 0 else -one
            change = new - old
            D[j, i] = change
            if change != 0:
                S[j, i] = new
                for k in range(i + 1, size):
                    F[j, k] -= change * K[i, k]


def descend_groups(K: Array, F: Array, S: Array, sweeps: int) -> None:
    """Set spin after spin of small problems, each with couplings of its own.

    Args:
        K: Couplings of each problem, shape ``(g, n, n)``.
        F: Fields ``H - S K``, shape ``(g, m, n)``; overwritten.
        S: Spins, or zero where none is set yet, shape ``(g, m, n)``; updated.
        sweeps: Largest number of sweeps.
    """
    problems, units, size = F.shape
    one = F.dtype.type(1)
    for g in range(problems):
        for j in range(units):
            for _ in range(sweeps):
                flipped = False
                for i in range(size):
                    old = S[g, j, i]
                    new = one if F[g, j, i] + K[g, i, i] * old >= 0 else -one
                    if new != old:
                        flipped, S[g, j, i] = True, new
                        for k in range(size):
                            F[g, j, k] -= (new - old) * K[g, i, k]
                if not flipped:
                    break
