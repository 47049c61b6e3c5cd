"""The box relaxation: how low can the energy of any spins be?"""

import torch
from torch import Tensor

Problem = tuple[Tensor, Tensor, Tensor | None]
"""``Z``, ``V`` and ``H``."""


def lower_bound(whole: Problem, compressed: Problem, tolerance: float, max_iterations: int) -> Tensor:  # (m,)
    """An energy that no spins of each unit can go below, in double precision.

    The box relaxation ``G ∈ [-1, 1]`` is convex and its minimum is at most that of the spins. Any ``G``
    in the box bounds that minimum from below: its energy less ``⟨∇, G⟩ + ‖∇‖₁`` (the Frank-Wolfe gap).
    Descent finds a ``G`` that makes the bound tight; then the bound is evaluated on the problem as
    given and what rounding could have added is taken off, so it holds whenever the descent stops.

    The relaxation of a wide layer is nearly tight (``spingrad-lab bench solvers`` shows how nearly); that of
    a small one is not, which is the price of combinatorics and not of the solver.

    Args:
        whole: The problem as given, in double precision.
        compressed: An equal one with fewer rows, if there is one.
        tolerance: Stop once the gap of every unit is below this fraction of its relaxed energy.
        max_iterations: Stop here in any case.
    """
    bound = box_bound(*whole, box_minimum(*compressed, tolerance, max_iterations))
    return bound.clamp_(min=0) if whole[2] is None else bound


def box_minimum(
    Z: Tensor, V: Tensor, H: Tensor | None, tolerance: float, max_iterations: int
) -> Tensor:  # (n, m)
    """A point of the box [-1, 1] near each unit's minimum of ``‖V - ZG‖² - 2⟨H, G⟩``.

    Accelerated projected gradient descent, restarted where its momentum points uphill (O'Donoghue and
    Candès, 2015), on all units together. Of the points it meets, each unit keeps the one with the best
    bound.
    """
    # D - ZᵀZ is positive semidefinite for D = diag(|Z|ᵀ|Z| 1), so 1/D is a step that cannot overshoot.
    step = 1 / (Z.abs().T @ Z.abs().sum(1)).clamp_(min=torch.finfo(Z.dtype).tiny)[:, None]
    pull = Z.new_zeros(()) if H is None else H
    G = Y = best = Z.new_zeros(Z.shape[1], V.shape[1])
    bound = V.new_full((V.shape[1],), -torch.inf)
    momentum = 1.0
    for iteration in range(max_iterations + 1):
        if iteration % 10 == 0:
            energy, gap = _energy_and_gap(Z, V, H, G)
            best = torch.where(energy - gap > bound, G, best)
            bound = torch.maximum(bound, energy - gap)
            if ((energy - bound) <= tolerance * energy.abs()).all():
                break
        previous = G
        G = (Y + step * (Z.T @ (V - Z @ Y) + pull)).clamp_(-1, 1)
        if ((Y - G) * (G - previous) / step).sum() > 0:
            momentum = 1.0
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        Y = G + (momentum - 1) / following * (G - previous)
        momentum = following
    return best


def box_bound(Z: Tensor, V: Tensor, H: Tensor | None, G: Tensor) -> Tensor:  # (m,)
    """A value below the energy of every point of the box, and so of all spins, for any ``G`` in the box.

    The energy at ``G`` less the Frank-Wolfe gap, less what rounding can have added to either: none of
    the sums has more than ``r + n`` terms, and none of the terms adds up to more than ``largest``.
    """
    energy, gap = _energy_and_gap(Z, V, H, G)
    largest = (V.abs() + Z.abs().sum(1, keepdim=True)).square().sum(0)
    if H is not None:
        largest = largest + 2 * H.abs().sum(0)
    return energy - gap - 8 * sum(Z.shape) * torch.finfo(Z.dtype).eps * largest


def _energy_and_gap(Z: Tensor, V: Tensor, H: Tensor | None, G: Tensor) -> tuple[Tensor, Tensor]:
    """Energy of ``G``, and how far below it the minimum over the box can lie (Frank and Wolfe, 1956)."""
    residual = V - Z @ G
    slope = Z.T @ residual
    energy = residual.square().sum(0)
    if H is not None:
        slope = slope + H
        energy = energy - 2 * (H * G).sum(0)
    return energy, 2 * (slope.abs() - slope * G).sum(0)
