"""A step's passes over weights: each reads and writes its matrices once, in numba on a CPU, else in torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spingrad.kernels.compiled import HAS_NUMBA, Array, compiled, share_out


def lengths(grad: Tensor) -> Tensor:  # (m, n) -> (m,)
    """Length of each unit's gradient, in double precision; squares neither overflow nor underflow.

    Example:
        >>> lengths(torch.tensor([[3e-30, 4e-30]]))
        tensor([5.0000e-30], dtype=torch.float64)
    """
    if _has_kernel(grad):
        out = np.empty(len(grad))
        _shared(_lengths, len(grad), grad.numpy(), out)
        return torch.from_numpy(out)
    if not grad.numel():
        return grad.new_zeros(len(grad), dtype=torch.float64)
    low, high = torch.aminmax(grad)
    peak = torch.maximum(-low, high)
    peak = peak.where(peak != 0, 1)
    length: Tensor = torch.linalg.vector_norm(grad / peak, dim=1)
    return length.double() * peak.double()


def blended(past: Tensor, grad: Tensor, keep: float, size: Tensor, out: Tensor) -> Tensor:
    """``keep · past + size · grad``, with a size for each unit.

    Args:
        past: Shape ``(m, n)``.
        grad: Shape ``(m, n)``.
        keep: Factor of ``past``.
        size: Factors of the units' gradients, shape ``(m,)``.
        out: Receives the result; may be ``past``.

    Example:
        >>> past, grad = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 3.0]])
        >>> blended(past, grad, 0.5, torch.tensor([2.0]), torch.empty(1, 2))
        tensor([[2., 7.]])
    """
    if _has_kernel(past, grad, size, out):
        _shared(_blend, len(grad), past.numpy(), grad.numpy(), size.numpy(), out.numpy(), scalars=(keep,))
        return out
    return torch.mul(past, keep, out=out).addcmul_(grad, size[:, None])


def move_(weight: Tensor, spins: Tensor, idle: Tensor, lr: float, clamp: float | None) -> None:
    """``Ω ← clamp(Ω - lr · G)`` for the units that are not idle.

    Args:
        weight: Latent weights, shape ``(m, n)``; changed in place.
        spins: ``G``, shape ``(m, n)``.
        idle: Units that stay, shape ``(m,)``.
        lr: Learning rate.
        clamp: Largest magnitude of a latent weight; ``None`` for no limit.

    Example:
        >>> weight, spins = torch.zeros(2, 3), torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, 1.0]])
        >>> move_(weight, spins, idle=torch.tensor([False, True]), lr=0.01, clamp=1.0)
        >>> weight
        tensor([[-0.0100,  0.0100, -0.0100],
                [ 0.0000,  0.0000,  0.0000]])
    """
    spins = _with_whole_rows(spins)
    step = torch.where(idle, 0.0, -float(lr)).to(weight.dtype)
    if _has_kernel(weight, spins, step):
        limit = np.inf if clamp is None else float(clamp)
        _shared(_move, len(weight), weight.numpy(), spins.numpy(), step.numpy(), scalars=(limit,))
        return
    weight.addcmul_(spins[:, : weight.shape[1]], step[:, None])
    if clamp is not None:
        weight.clamp_(-float(clamp), float(clamp))


def _has_kernel(*tensors: Tensor) -> bool:
    first = tensors[0]
    return HAS_NUMBA and all(
        own.device.type == "cpu"
        and own.dtype == first.dtype
        and own.dtype in (torch.float32, torch.float64)
        and own.is_contiguous()
        for own in tensors
    )


def _with_whole_rows(matrix: Tensor) -> Tensor:
    """A matrix whose rows are parts of longer ones, as these, if its memory has them: without a copy."""
    (rows, columns), (step, one) = matrix.shape, matrix.stride()
    end = matrix.storage_offset() + rows * step
    if one == 1 and step > columns and end * matrix.element_size() <= matrix.untyped_storage().nbytes():
        return matrix.as_strided((rows, step), (step, 1))
    return matrix


def _shared(kernel: Callable[..., None], units: int, *arrays: Array, scalars: tuple[float, ...] = ()) -> None:
    function, dtype = compiled(kernel, fastmath=("reassoc", "contract")), arrays[0].dtype.type
    numbers = [dtype(value) for value in scalars]
    share_out(lambda own: function(*(array[own] for array in arrays), *numbers), units, whole=1)


def _lengths(grad: Array, out: Array) -> None:
    for j in range(len(grad)):
        total = 0.0
        for i in range(grad.shape[1]):
            total += np.float64(grad[j, i]) * np.float64(grad[j, i])
        out[j] = np.sqrt(total)


def _blend(past: Array, grad: Array, size: Array, out: Array, keep: Any) -> None:
    for j in range(len(grad)):
        for i in range(grad.shape[1]):
            out[j, i] = keep * past[j, i] + size[j] * grad[j, i]


def _move(weight: Array, spins: Array, step: Array, limit: Any) -> None:
    for j in range(len(weight)):
        for i in range(weight.shape[1]):
            moved = weight[j, i] + step[j] * spins[j, i]
            weight[j, i] = limit if moved > limit else -limit if moved < -limit else moved
