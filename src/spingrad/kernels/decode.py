"""The sphere decoder: a depth-first search for the best point of a lattice."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


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
