"""Descent and annealing on CUDA, ROCm and XPU devices, by Triton."""

import contextlib
import warnings
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad

from spingrad.kernels import plain

HAS_TRITON = find_spec("triton") is not None
MOST_ROWS = 1024
LANES = 32  # units of a program, one each
OUTPUTS = 2048  # of all units of a program: so many that a lane's registers hold its part
OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}
NO_TRITON = (
    "Triton is not installed: torch sets single spins, many times slower, to the same spins. "
    "pip install triton"
)


def descend_(Z: Tensor, H: Tensor, G: Tensor, sweeps: int, started: bool = False) -> None:
    """:func:`spingrad.kernels.operators.descend_`, in one launch; nothing is read back to the host."""
    if not _is_compiled(Z, H):
        plain.descend_(Z, H, G, sweeps, started)
        return
    from spingrad.kernels.descent_triton import descend

    rows = _packed(Z)
    units = units_of(R := rows.shape[-1])
    fields, problems = H.mT.contiguous(), H.shape[0] if H.ndim == 3 else 1
    spins = G.mT.contiguous() if started else torch.zeros_like(fields)
    n, m = fields.shape[-2:]
    if fields.numel():
        with _device_of(H):
            descend[(-(-m // units), problems)](
                rows, fields, spins, n, m, sweeps, int(started), R=R, UNITS=units, **OPTIONS
            )
    G.copy_(spins.mT)


def anneal_(
    Z: Tensor,
    H: Tensor,
    G: Tensor,
    temperatures: list[float],
    noise: Tensor,
    places: Tensor,
    started: bool = False,
) -> None:
    """:func:`spingrad.kernels.operators.anneal_`, in one launch."""
    if not _is_compiled(Z, H):
        plain.anneal_(Z, H, G, temperatures, noise, places, started)
        return
    from spingrad.kernels.descent_triton import anneal

    rows = _packed(Z)
    units = units_of(R := rows.shape[-1])
    fields = H.mT.contiguous()
    best = G.mT.contiguous() if started else torch.zeros_like(fields)
    factors, (n, m), (_, reads, sweeps) = H.new_tensor(temperatures), fields.shape, places.shape
    if fields.numel():
        with _device_of(H):
            anneal[(-(-m // units),)](
                rows, fields, best, best.clone(), factors, noise, places.contiguous(), n, m, reads, sweeps,
                plain.MOST_DESCENTS, int(started), R=R, UNITS=units, **OPTIONS,
            )  # fmt: skip
    G.copy_(best.mT)


def _is_compiled(Z: Tensor, H: Tensor) -> bool:
    if H.dtype != torch.float32 or Z.shape[-2] > MOST_ROWS:
        return False
    if not HAS_TRITON:
        warnings.warn(NO_TRITON, stacklevel=1)
    return HAS_TRITON


def _packed(Z: Tensor) -> Tensor:
    """Rows as the kernels take them, shape ``(..., n, R)``: a power of two, the last ones zero."""
    R = max(16, 1 << max(Z.shape[-2] - 1, 0).bit_length())
    return pad(Z.mT, (0, R - Z.shape[-2])).contiguous()


def units_of(R: int) -> int:
    """Units of a program with ``R`` rows: a lane each, or, with many rows, some lanes for each.

    Example:
        >>> [units_of(R) for R in (16, 64, 128, 1024)]
        [32, 32, 16, 2]
    """
    return min(LANES, OUTPUTS // R)


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Where Triton launches; a CPU for its interpreter."""
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[object]
    device = torch.get_device_module(tensor.device).device(tensor.device)
    return device
