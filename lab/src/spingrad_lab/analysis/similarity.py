"""How much the solutions of a problem have in common."""

import torch
from torch import Tensor


def jaccard(spins: Tensor) -> Tensor:  # (k, n) -> (k, k)
    """Jaccard similarity ``|A ∩ B| / |A ∪ B|`` between the sets of +1 spins of every two rows.

    Two rows without any +1 are equal, so their similarity is 1.

    Example:
        >>> jaccard(torch.tensor([[1, 1, -1], [-1, 1, 1]]))
        tensor([[1.0000, 0.3333],
                [0.3333, 1.0000]], dtype=torch.float64)
    """
    if spins.ndim != 2:
        raise ValueError(f"spins have shape (k, n), one row per solution, got {tuple(spins.shape)}")
    up = (spins > 0).double()
    both, size = up @ up.T, up.sum(1)
    either = size[:, None] + size - both
    return torch.where(either > 0, both / either, 1.0)
