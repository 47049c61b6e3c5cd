"""The certificate: how low can the energy of any spins be?"""

import torch
from torch import Tensor


def box_minimum(
    Z: Tensor, H: Tensor, offset: Tensor, tolerance: float, max_iterations: int
) -> Tensor:  # (n, m)
    """A point of the box [-1, 1] near each unit's minimum of ``‖ZG‖² - 2⟨H, G⟩``.

    Accelerated projected gradient descent, restarted where its momentum points uphill (O'Donoghue and
    Candès, 2015), on all units together. Of the points it meets, each unit keeps the one with the best
    bound.

    Args:
        Z: Rows, shape ``(r, n)``.
        H: Fields, shape ``(n, m)``.
        offset: Constant of each unit's energy, shape ``(m,)``.
        tolerance: Stop once the gap of every unit is below this fraction of its energy.
        max_iterations: Stop here in any case.

    Example:
        >>> Z, H, offset = torch.eye(2), torch.tensor([[3.0], [-0.5]]), torch.zeros(1)
        >>> box_minimum(Z, H, offset, tolerance=1e-3, max_iterations=100)
        tensor([[ 1.0000],
                [-0.5000]])
    """
    # D - ZᵀZ is positive semidefinite for D = diag(|Z|ᵀ|Z| 1), so 1/D is a step that cannot overshoot.
    step = 1 / (Z.abs().T @ Z.abs().sum(1)).clamp_(min=torch.finfo(Z.dtype).tiny)[:, None]
    G = Y = best = torch.zeros_like(H)
    bound = H.new_full((H.shape[1],), -torch.inf)
    momentum = 1.0
    for iteration in range(max_iterations + 1):
        if iteration % 10 == 0:
            energy, gap = _energy_and_gap(Z, H, G)
            best = torch.where(energy - gap > bound, G, best)
            bound = torch.maximum(bound, energy - gap)
            if ((energy - bound) <= tolerance * (energy + offset).abs()).all():
                break
        previous = G
        G = (Y + step * (H - Z.T @ (Z @ Y))).clamp_(-1, 1)
        if ((Y - G) * (G - previous) / step).sum() > 0:
            momentum = 1.0
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        Y = G + (momentum - 1) / following * (G - previous)
        momentum = following
    return best


def box_bound(Z: Tensor, H: Tensor, offset: Tensor, G: Tensor) -> Tensor:  # (m,)
    """A value below the energy of every point of the box, and so of all spins, for any ``G`` in the box.

    The box relaxation ``G ∈ [-1, 1]`` is convex, and its minimum is at most that of the spins. The energy
    at any ``G`` less the Frank-Wolfe gap is below that minimum. What rounding can have added to either is
    taken off too: none of the sums has more than ``r + n`` terms, and none of the terms adds up to more
    than ``largest``.

    The relaxation of a wide layer is nearly tight (``spingrad-lab bench solvers`` shows how nearly); that of
    a small one is not, because small problems are combinatorial, whatever the solver.

    Example:
        >>> Z, H, offset = torch.eye(2), torch.tensor([[3.0], [-0.5]]), torch.zeros(1)
        >>> box_bound(Z, H, offset, torch.tensor([[1.0], [-0.5]]))  # the best spins, +1 and -1, reach -5
        tensor([-5.2500])
    """
    energy, gap = _energy_and_gap(Z, H, G)
    largest = Z.abs().sum(1).square().sum() + 2 * H.abs().sum(0) + offset.abs()
    return energy + offset - gap - 8 * sum(Z.shape) * torch.finfo(Z.dtype).eps * largest


def _energy_and_gap(Z: Tensor, H: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """Energy of ``G``, and how far below it the minimum over the box can lie (Frank and Wolfe, 1956)."""
    outputs = Z @ G
    slope = H - Z.T @ outputs
    energy = outputs.square().sum(0) - 2 * (H * G).sum(0)
    return energy, 2 * (slope.abs() - slope * G).sum(0)
