"""Several bits per weight: a binary layer on inputs that are repeated at 1, 1/2, 1/4, … of their size."""

import torch
from torch import Tensor, nn

from spingrad._numbers import check_whole


class Bits(nn.Module):
    """Repeats its input so that the binary layer that follows has weights of ``count`` bits.

    A weight of ``k`` bits is ``s₀ + s₁/2 + … + s_(k-1)/2^(k-1)`` with spins ``s``: one of ``2^k`` evenly
    spaced values. Its product with ``x`` is that of ``k`` spins with ``x, x/2, …``, so the layer that follows
    takes ``count`` times as many inputs; its problem and its solver do not change.

    Args:
        count: Bits per weight.
        dim: The dimension that holds the inputs: the last, or 1 for the channels of images.

    Example:
        >>> from spingrad import BinaryLinear
        >>> model = nn.Sequential(Bits(2), BinaryLinear(2 * 784, 512), nn.Hardtanh())
    """

    def __init__(self, count: int, dim: int = -1) -> None:
        super().__init__()
        check_whole("count", count, 1, 24)  # a float32 has no more bits
        self.count, self.dim = count, dim
        strengths = [2.0**-k for k in range(count)]
        self.scale = (count / sum(s * s for s in strengths)) ** 0.5
        """Keeps the variance of the output: the layer that follows divides by the root of its fan-in."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * (self.scale * 2.0**-k) for k in range(self.count)], self.dim)

    def values(self, weight: Tensor) -> Tensor:  # (m, k n) -> (m, n)
        """The weights of ``count`` bits that the spins of the layer that follows stand for.

        Example:
            >>> Bits(2).values(torch.tensor([[1.0, -1.0, 1.0, 1.0]]))
            tensor([[ 1.5000, -0.5000]])
        """
        parts = weight.chunk(self.count, 1)
        return torch.stack([part * 2.0**-k for k, part in enumerate(parts)]).sum(0)

    def extra_repr(self) -> str:
        return f"{self.count}"
