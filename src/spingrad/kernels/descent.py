"""Descent over single spins, compiled by numba where the ``fast`` extra is installed, else in torch."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spingrad.nn.sign import spins_of

HAS_NUMBA = find_spec("numba") is not None
Array = npt.NDArray[Any]
Backend = Literal["auto", "numba", "torch"]
_NO_OUTPUTS: Array = np.empty((0, 0), np.float32)
NOISE = 2**16  # random numbers to choose a beginning from
MOST_DESCENTS = 100  # sweeps after each read; descent ends long before
MOST_ROWS = 1024  # the outputs of a vector of units fit in a processor's second cache


@cache
def compiled(function: Callable[..., Any], fastmath: tuple[str, ...] = ()) -> Callable[..., Any]:
    """``function`` compiled at its first call and cached on disk; as it is without numba."""
    if not HAS_NUMBA:
        return function
    import numba

    return numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=set(fastmath))(function)


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


def flip_(K: Tensor, field: Tensor, g: Tensor, backend: Backend = "auto") -> Tensor:  # -> (m, b)
    """Set spin after spin of a block to the sign of its field; return the change.

    Args:
        K: Couplings of the block, shape ``(b, b)``.
        field: Fields of the block, shape ``(m, b)``; overwritten.
        g: Spins of the block, shape ``(m, b)``; updated.
        backend: As in :class:`BlockDescentSolver`.
    """
    change = torch.empty_like(field)
    if backend != "torch" and HAS_NUMBA and g.device.type == "cpu":
        compiled(descend_block)(K.numpy(), field.numpy(), g.numpy(), change.numpy())
        return change
    for i in range(len(K)):
        old = g[:, i].clone()
        g[:, i] = spins_of(field[:, i] + K[i, i] * old)
        change[:, i] = g[:, i] - old
        field.addr_(change[:, i], K[i], alpha=-1)
    return change


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


def descend_together_(K: Tensor, F: Tensor, S: Tensor, sweeps: int, backend: Backend = "auto") -> None:
    """:func:`descend_groups` compiled by numba, or in torch, in which it takes all problems at once."""
    if backend != "torch" and HAS_NUMBA and S.device.type == "cpu":
        compiled(descend_groups)(*(own.contiguous().numpy() for own in (K, F)), S.numpy(), sweeps)
        return
    diagonal = K.diagonal(dim1=1, dim2=2)
    for _ in range(sweeps):
        for i in range(K.shape[1]):
            old = S[:, :, i].clone()
            S[:, :, i] = spins_of(F[:, :, i] + diagonal[:, i, None] * old)
            F -= (S[:, :, i] - old)[:, :, None] * K[:, None, i]


def has_kernel(H: Tensor, num_rows: int, backend: Backend) -> bool:
    """Whether :func:`descend_` can take a problem with these fields, shape ``(m, n)``, and so many rows."""
    return HAS_NUMBA and backend != "torch" and fits_kernel(H, num_rows)


def fits_kernel(H: Tensor, num_rows: int) -> bool:
    """Whether :func:`descend_` could take it if numba were installed."""
    return num_rows <= MOST_ROWS and H.device.type == "cpu" and H.dtype == torch.float32


def descend_(Z: Tensor, H: Tensor, G: Tensor, num_sweeps: int, U: Tensor | None = None) -> None:
    """Set spin after spin to the sign of its field; a compiled kernel, shared out over threads.

    A sweep never raises the energy, and units that a sweep has left as they were are not swept again.

    Args:
        Z: Rows, shape ``(r, n)``, on a CPU and in single precision like the rest.
        H: Fields, shape ``(m, n)``.
        G: Receives the spins, shape ``(m, n)``.
        num_sweeps: Largest number of sweeps.
        U: Outputs ``G Zᵀ`` of the spins that ``G`` holds at the start, shape ``(m, r)``. By default descent
            starts at zero, whatever ``G`` holds.
    """
    from spingrad.kernels.descent_llvm import LANES, descend, packed

    rows, couplings = packed(Z.numpy())
    H = H if H.stride(1) == 1 else H.contiguous()
    h, g, u = H.numpy(), G.numpy(), _NO_OUTPUTS if U is None else U.numpy()
    share_out(lambda own: descend(h[own], rows, couplings, g[own], u[own], num_sweeps), len(h), whole=LANES)


def anneal_(
    Z: Tensor,
    H: Tensor,
    G: Tensor,
    temperatures: Array,
    num_reads: int,
    seed: int,
    U: Tensor | None = None,
) -> None:
    """Simulated annealing of all units by a compiled kernel, shared out over threads.

    Args:
        Z: Rows, shape ``(r, n)``, on a CPU and in single precision like the rest.
        H: Fields, shape ``(m, n)``.
        G: Receives the best spins of each unit, shape ``(m, n)``.
        temperatures: Factors of the noise, one per sweep of a read.
        num_reads: Reads, each from the best spins so far.
        seed: Of the random numbers, which do not depend on the number of threads.
        U: Outputs ``G Zᵀ`` of the spins that ``G`` holds at the start; by default the start is zero.
    """
    from spingrad.kernels.descent_llvm import LANES, anneal, packed

    rows, couplings = packed(Z.numpy())
    h, g, u = H.contiguous().numpy(), G.numpy(), _NO_OUTPUTS if U is None else U.numpy()
    random = np.random.default_rng(seed)
    noise = logistic(random, NOISE + rows.shape[0] * rows.shape[2] * LANES)
    places = random.integers(0, NOISE, (-(-len(h) // LANES), num_reads, len(temperatures)))
    factors = temperatures.astype(np.float32)

    def work(own: slice) -> None:
        parts = places[own.start // LANES : -(-own.stop // LANES)]
        anneal(h[own], rows, couplings, g[own], u[own], factors, noise, parts, MOST_DESCENTS)

    share_out(work, len(h), whole=LANES)


def logistic(random: np.random.Generator, count: int) -> Array:
    """Random numbers for which ``sign(f + T · number)`` is +1 with probability ``1 / (1 + exp(-f / T))``."""
    uniform = random.random(count, np.float32).clip(1e-7, 1 - 1e-7)
    return np.asarray(np.log(uniform / (1 - uniform)), np.float32)


def share_out(work: Callable[[slice], None], units: int, whole: int) -> None:
    """Work on all units, some on each thread: a multiple of ``whole``, but for the last."""
    threads = max(1, torch.get_num_threads() // 2)  # torch's own go on spinning on the other half for a while
    share = max(1, -(-units // (whole * threads))) * whole
    parts = [slice(start, min(units, start + share)) for start in range(0, units, share)]
    if len(parts) <= 1:
        for own in parts:
            work(own)
        return
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(work, parts))
