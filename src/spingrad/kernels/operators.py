"""The operators ``spingrad::descend_`` and ``spingrad::anneal_``: what they mean, and who computes them.

torch chooses by the device of the tensors: numba on a CPU, Triton on CUDA, ROCm and XPU, torch elsewhere.
"""

import torch
from torch import Tensor

from spingrad.kernels import cpu, gpu, plain


def descend_(Z: Tensor, H: Tensor, G: Tensor, sweeps: int, started: bool = False) -> None:
    """Set spin after spin of ``G`` to the sign of its field, in each of some sweeps.

    The field of spin ``i`` of a unit is ``H_i - z_i · U + (z_i · z_i) g_i``. Here ``z_i`` is a column of
    ``Z``, ``g_i`` the spin, zero while it is not set, and ``U = Z g`` the outputs of all spins as they are
    then. Spins are set in the order of the columns; the sign of zero is +1. A sweep never raises the energy
    ``‖Z g‖² - 2⟨H, g⟩``. All devices set the same spins where their sums round alike.

    Args:
        Z: Rows that units share, shape ``(r, n)``; or those of some problems of one shape, ``(g, r, n)``.
        H: Fields, shape ``(m, n)`` or ``(g, m, n)``.
        G: Receives the spins, of the shape of ``H``; not a part of ``H``.
        sweeps: How many times each spin is set.
        started: Whether ``G`` holds spins to begin at, zero where none is set. By default none is set.

    Example:
        >>> G = torch.empty(1, 3)
        >>> descend_(torch.ones(1, 3), torch.tensor([[0.5, 0.0, -0.5]]), G, 1)
        >>> G
        tensor([[ 1., -1., -1.]])
    """
    torch.ops.spingrad.descend_.default(Z, H, G, sweeps, started)


def anneal_(
    Z: Tensor,
    H: Tensor,
    G: Tensor,
    temperatures: list[float],
    noise: Tensor,
    places: Tensor,
    started: bool = False,
) -> None:
    """Anneal each unit: in every read some sweeps on noisy fields, then descent until it ends.

    A sweep sets spins as in :func:`descend_`, to the signs of ``H + temperature · noise``. Descent is without
    noise, and ends where a sweep changes nothing, or after 100. The next read begins at the spins with the
    lowest energy so far, those at the start included, and at the last of equals.

    In its sweep ``s`` of read ``k``, unit ``j`` takes for spin ``i`` the number
    ``noise[places[j // 32, k, s] + 32 i + j % 32]``. So the noise does not depend on the device.

    Args:
        Z: Rows that units share, shape ``(r, n)``.
        H: Fields, shape ``(m, n)``.
        G: Receives the best spins of each unit, shape ``(m, n)``.
        temperatures: Factors of the noise, one for each sweep of a read.
        noise: Random numbers, in the dtype of ``H``: after every place 32 for each spin, and for three more.
        places: Where sweeps find their noise, shape ``(m / 32, reads, sweeps)``, rounded up.
        started: Whether ``G`` holds spins to begin at. By default no spin is set.

    Example:
        >>> noise, places = torch.zeros(32 * 4), torch.zeros(1, 1, 1, dtype=torch.int64)
        >>> G = torch.empty(1, 3)
        >>> anneal_(torch.ones(1, 3), torch.tensor([[0.5, 0.0, -0.5]]), G, [1.0], noise, places)
        >>> G
        tensor([[ 1.,  1., -1.]])
    """
    torch.ops.spingrad.anneal_.default(Z, H, G, temperatures, noise, places, started)


def _nothing(*arguments: object) -> None:
    """The operators return nothing: a tracer has nothing to make."""


torch.library.define(
    "spingrad::descend_", "(Tensor Z, Tensor H, Tensor(a!) G, int sweeps, bool started=False) -> ()"
)
torch.library.define(
    "spingrad::anneal_",
    "(Tensor Z, Tensor H, Tensor(a!) G, float[] temperatures, Tensor noise, Tensor places, "
    "bool started=False) -> ()",
)
for name in ("descend_", "anneal_"):
    for key, module in (("CompositeExplicitAutograd", plain), ("CPU", cpu), ("CUDA", gpu), ("XPU", gpu)):
        torch.library.impl(f"spingrad::{name}", key, getattr(module, name))
    torch.library.register_fake(f"spingrad::{name}", _nothing)
