"""Descent and annealing in torch: what the operators mean, on any device and in any precision."""

from collections.abc import Callable

import torch
from torch import Tensor

from spingrad.nn.sign import spins_of

BLOCK = 32  # spins between two corrections of the outputs: large enough for matrix products
LANES = 32  # units that take their noise from one place
MOST_DESCENTS = 100  # sweeps after each read; descent ends long before
Flip = Callable[[Tensor, Tensor, Tensor], Tensor]


def flip_(K: Tensor, field: Tensor, G: Tensor) -> Tensor:  # -> (..., m, b)
    """Set spin after spin of a block to the sign of its field, and correct the fields of those that follow.

    Args:
        K: Couplings of the block, shape ``(..., b, b)``.
        field: Fields of the block, shape ``(..., m, b)``; overwritten.
        G: Spins of the block, shape ``(..., m, b)``; updated.

    Returns:
        The change of ``G``.
    """
    change = torch.empty_like(field)
    for i in range(K.shape[-1]):
        old = G[..., i].clone()
        G[..., i] = spins_of(field[..., i] + K[..., i, i, None] * old)
        change[..., i] = G[..., i] - old
        field -= change[..., i, None] * K[..., i, None, :]
    return change


@torch.no_grad()
def descend_(Z: Tensor, H: Tensor, G: Tensor, sweeps: int, started: bool = False, flip: Flip = flip_) -> None:
    """:func:`spingrad.kernels.operators.descend_` says what this is.

    Example:
        >>> G = torch.empty(1, 2)
        >>> descend_(torch.eye(2), torch.tensor([[3.0, -0.5]]), G, 1)
        >>> G
        tensor([[ 1., -1.]])
    """
    U, blocks = outputs_of_(Z, G, started), blocks_of(Z)
    for _ in range(sweeps):
        sweep_(blocks, H, G, U, flip)


def outputs_of_(Z: Tensor, G: Tensor, started: bool) -> Tensor:  # -> (..., m, r)
    """The outputs of the spins at the start; without a start all are zero, which ``G`` becomes as well."""
    if started:
        return G @ Z.mT
    G.zero_()
    return G.new_zeros(*G.shape[:-1], Z.shape[-2])


def blocks_of(Z: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Couplings and rows of some spins at a time."""
    return [(z.mT @ z, z) for z in Z.split(BLOCK, -1)]


def sweep_(blocks: list[tuple[Tensor, Tensor]], H: Tensor, G: Tensor, U: Tensor, flip: Flip) -> None:
    """Set every spin of ``G`` once, and keep ``U`` its outputs."""
    fields, spins = H.split(BLOCK, -1), G.split(BLOCK, -1)
    for (K, z), h, g in zip(blocks, fields, spins, strict=True):
        U += flip(K, h - U @ z, g) @ z.mT


@torch.no_grad()
def anneal_(
    Z: Tensor,
    H: Tensor,
    G: Tensor,
    temperatures: list[float],
    noise: Tensor,
    places: Tensor,
    started: bool = False,
    flip: Flip = flip_,
) -> None:
    """:func:`spingrad.kernels.operators.anneal_` says what this is.

    Example:
        >>> noise, places = torch.zeros(32 * 4), torch.zeros(1, 1, 1, dtype=torch.int64)
        >>> G = torch.empty(1, 2)
        >>> anneal_(torch.eye(2), torch.tensor([[3.0, -0.5]]), G, [1.0], noise, places)
        >>> G
        tensor([[ 1., -1.]])
    """
    (m, n), U, blocks = H.shape, outputs_of_(Z, G, started), blocks_of(Z)
    unit, spin = torch.arange(m, device=H.device), torch.arange(n, device=H.device)
    own = (unit % LANES)[:, None] + LANES * spin  # where a unit's noise is, from the place on
    best, outputs = G.clone(), U.clone()
    lowest = energy(H, G, U) if started else H.new_full((m,), torch.inf)
    for read in range(places.shape[1]):
        for sweep, temperature in enumerate(temperatures):
            place = places[unit // LANES, read, sweep]
            sweep_(blocks, H + temperature * noise[place[:, None] + own], G, U, flip)
        for _ in range(MOST_DESCENTS):
            before = G.clone()
            sweep_(blocks, H, G, U, flip)
            if torch.equal(G, before):
                break
        found = energy(H, G, U)
        lower = (found <= lowest)[:, None]
        best, outputs = torch.where(lower, G, best), torch.where(lower, U, outputs)
        lowest = torch.minimum(found, lowest)
        G.copy_(best)
        U.copy_(outputs)


def energy(H: Tensor, G: Tensor, U: Tensor) -> Tensor:  # -> (m,)
    return U.square().sum(1) - 2 * (H * G).sum(1)
