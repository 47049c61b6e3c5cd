"""Inner loops over single spins, compiled by numba where the ``fast`` extra is installed, else in torch."""

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
FEW_ROWS = 32  # for which a kernel sets spin after spin
Array = npt.NDArray[Any]
Backend = Literal["auto", "numba", "torch"]


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled at its first call and cached on disk; as it is without numba."""
    if not HAS_NUMBA:
        return function
    import numba

    return numba.njit(cache=True, nogil=True)(function)


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


def decode(
    R: Array, u: Array, values: Array, prices: Array, counts: Array, best: Array, radius: float,
    max_nodes: int, next_: Array, g: Array, gap: Array,
) -> tuple[float, int, bool]:  # fmt: skip
    """Schnorr-Euchner search for the best point: ``min ‖u - R g‖² + Σ price(g)``, ``R`` upper triangular.

    Depth first from the last coordinate, the cheapest value first, cutting every branch whose partial
    cost reaches ``radius``. Its place is kept in ``next_``, ``g`` and ``gap``, so a search that
    stops at ``max_nodes`` can go on where it was.

    Args:
        R: Upper triangular factor, shape ``(n, n)``.
        u: Rotated target, shape ``(n,)``.
        values: What each coordinate can be, rising, shape ``(n, c)``: -1 and +1 for spins.
        prices: What each value costs, not negative; the cost of a coordinate is convex along its values.
        counts: How many values of each coordinate count, shape ``(n,)``.
        best: The best point so far, shape ``(n,)``; updated.
        radius: Cost of ``best``.
        max_nodes: Return after this many nodes.
        next_: The next value to try below and above the cheapest of each level, shape ``(n + 1, 2)``, two
            negative numbers where none was tried; entry ``n`` is the level.
        g: The current path, shape ``(n,)``.
        gap: ``gap[k]`` is the cost of levels ``k`` and above, shape ``(n + 1,)``.

    Returns:
        The radius, the number of nodes visited, and whether the search has ended.
    """
    n, costs = len(u), np.empty(values.shape[1])
    level = next_[n, 0]
    nodes = 0
    while level < n:
        below, above = next_[level]
        count = counts[level]
        if below < 0 and above == count:  # all values tried: back up
            next_[level] = -1
            level += 1
            continue
        if nodes >= max_nodes:
            next_[n, 0] = level
            return radius, nodes, False
        nodes += 1
        rest = u[level]
        for k in range(level + 1, n):
            rest -= R[level, k] * g[k]
        for i in range(count):
            costs[i] = (rest - R[level, level] * values[level, i]) ** 2 + prices[level, i]
        if above < 0:
            at = 0
            for i in range(1, count):
                at = i if costs[i] <= costs[at] else at
            below, above = at - 1, at + 1
        elif below < 0 or (above < count and costs[above] <= costs[below]):
            at = above
            above += 1
        else:
            at = below
            below -= 1
        next_[level, 0], next_[level, 1] = below, above
        g[level] = values[level, at]
        total = gap[level + 1] + costs[at]
        if total >= radius:
            next_[level, 0], next_[level, 1] = -1, count  # the others cost more still
        elif level == 0:
            radius = total
            best[:] = g
        else:
            gap[level] = total
            level -= 1
    next_[n, 0] = n
    return radius, nodes, True


def can_feed_back(R: Tensor, backend: Backend) -> bool:  # (m, k)
    """Is there a kernel for these residuals: few, on a CPU, in single precision?"""
    fits = R.shape[1] <= FEW_ROWS and R.device.type == "cpu" and R.dtype == torch.float32
    return fits and backend != "torch" and HAS_NUMBA


def feed_back_(H: Tensor, Z: Tensor, G: Tensor) -> None:
    """Spin after spin from zero, each knowing the error of those before it.

    Args:
        H: Fields, shape ``(m, n)``, on a CPU and in single precision like the rest.
        Z: Rows, shape ``(k, n)``; few.
        G: Receives the spins, shape ``(m, n)``.
    """
    from spingrad.kernels.feedback import LANES, feed_back

    if len(Z) % 8:  # few numbers of rows, for each is compiled
        Z = torch.nn.functional.pad(Z, (0, 0, 0, -len(Z) % 8))
    rows, H = tuple(Z.numpy()), H if H.stride(1) == 1 else H.contiguous()
    threads = max(1, torch.get_num_threads() // 2)  # torch's own go on spinning on the other half for a while
    share = -(-len(H) // (LANES * threads)) * LANES
    if share >= len(H):
        feed_back(H.numpy(), rows, G.numpy())
        return
    parts = [(h.numpy(), rows, g.numpy()) for h, g in zip(H.split(share), G.split(share), strict=True)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part: feed_back(*part), parts))


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
