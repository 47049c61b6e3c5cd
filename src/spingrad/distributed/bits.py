"""Spins as bits, eight to a byte, and the majority of many workers' bits."""

from functools import cache

import torch
from torch import Tensor


def pack(spins: Tensor) -> Tensor:  # any shape -> (bytes,)
    """Eight spins to a byte, the first in the lowest bit; the last byte is filled up with zeros.

    Example:
        >>> pack(torch.tensor([1.0, -1.0, 1.0]))
        tensor([5], dtype=torch.uint8)
    """
    bits = (spins > 0).flatten()
    if missing := -len(bits) % 8:
        bits = torch.cat([bits, bits.new_zeros(missing)])
    eights = bits.view(torch.uint8).view(torch.int64)  # one bit in each of eight bytes
    # The product gathers them in the highest byte: byte k has to move up by 56 - 7k bits.
    return (eights * 0x0102040810204080 >> 56).to(torch.uint8)


def unpack(packed: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:  # (bytes,) -> (count,)
    """The spins that :func:`pack` packed.

    Example:
        >>> unpack(torch.tensor([5], dtype=torch.uint8), 3)
        tensor([ 1., -1.,  1.])
    """
    return _bytes_as_spins(dtype, packed.device)[packed.int()].flatten()[:count]


@cache
def _bytes_as_spins(dtype: torch.dtype, device: torch.device) -> Tensor:  # (256, 8)
    byte = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (byte & 1).mul_(2).sub_(1).to(dtype)


def packed_size(spins: int) -> int:
    return -(-spins // 8)


def majority(votes: Tensor, seed: int) -> Tensor:  # (workers, spins) -> (spins,)
    """The sign of the sum of votes. A vote is -1 or +1, or 0 to abstain; ties are broken at random.

    Args:
        votes: Shape ``(workers, spins)``.
        seed: Decides the ties.

    Example:
        >>> majority(torch.tensor([[1, -1, 1], [1, -1, 0], [-1, -1, 1]]), seed=0)
        tensor([ 1, -1,  1])
    """
    total = votes.sum(0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(256, (packed_size(len(total)),), generator=generator, dtype=torch.uint8)
    coins = unpack(coins.to(total.device), len(total), torch.int32)
    return (2 * total + coins).sign().to(votes.dtype)  # a coin outweighs nobody's vote
