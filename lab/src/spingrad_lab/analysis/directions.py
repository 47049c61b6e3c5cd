"""Does a step point along the gradient? The paper's Z test."""

from torch import Tensor


def same_direction(move: Tensor, gradient: Tensor) -> tuple[int, int]:
    """Entries in which a ±1 move is the sign of the gradient, and how many were compared.

    A zero of the gradient has no direction and is left out of both.

    Example:
        >>> import torch
        >>> same_direction(torch.tensor([1, -1, 1]), torch.tensor([0.2, 0.3, 0.0]))
        (1, 2)
    """
    if move.shape != gradient.shape:
        raise ValueError(
            f"move and gradient have the same shape, got {tuple(move.shape)} and {tuple(gradient.shape)}"
        )
    return int((move * gradient > 0).sum()), int(gradient.count_nonzero())


def z_value(same: int, total: int) -> float:
    """``(k - n p) / √(n p (1 - p))`` with ``p = ½``: how far ``same`` is from coin tosses.

    Beyond ±1.96 the hypothesis that the directions are random is rejected at 95 %.

    Example:
        >>> round(z_value(2285, 3915), 2)  # the paper's first run
        10.47
    """
    if not 0 <= same <= total or total == 0:
        raise ValueError(f"same is at most total, and total is positive, got {same} and {total}")
    return float((2 * same - total) / total**0.5)
