"""The operator ``spingrad::sample`` on a CPU with numba: one loop in place of a hundred calls of torch."""

import numpy as np
import torch
from torch import Tensor

from spingrad.kernels.compiled import HAS_NUMBA
from spingrad.sketch import sample


def on_cpu(x: Tensor, grad: Tensor, shape: list[int], dtype: torch.dtype, geometry: list[int]) -> Tensor:
    """As :func:`spingrad.sketch.sample`, up to rounding.

    Example:
        >>> x, grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [0.0]])
        >>> on_cpu(x, grad, [1, 9, 2], torch.float32, []).abs().sum(1)  # the first row and the count
        tensor([[2., 2.]])
    """
    if not (HAS_NUMBA and x.dtype == grad.dtype == dtype and x.numel()):  # numpy knows no bfloat16
        return sample(x, grad, shape, dtype, geometry)
    from spingrad.kernels import sample_numba

    dims, transposed, *sizes = geometry or (1, False, 1, 1, 0, 1)
    grad = grad.reshape(-1, *grad.shape[-dims - 1 :]) if geometry else grad.reshape(-1, grad.shape[-1], 1)
    images = x.reshape(-1, *x.shape[-dims - 1 :]) if geometry else x.new_empty(0, shape[2], 1)
    matrix = x.new_empty(0, 0) if geometry else x.reshape(-1, shape[2])
    before = (1,) * (3 - dims)  # dimensions that a convolution in one or two does not have
    windows = np.ones((4, 3), np.int64)
    windows[2] = 0
    windows[:, 3 - dims :] = np.reshape(sizes, (4, dims))
    out, row = torch.empty(shape, dtype=dtype), torch.empty(shape[2], dtype=dtype)
    words = row.view(torch.int32)
    words = words if dtype == torch.float32 else words[1::2]  # the high one of a double comes last
    sample_numba.sample(
        images.reshape(*images.shape[:2], *before, *images.shape[2:]).numpy(), matrix.numpy(),
        grad.flatten(2).numpy(), windows, np.array([*before, *grad.shape[2:]]), bool(transposed),
        row.numpy(), words.numpy(), out.numpy(),
    )  # fmt: skip
    return out


torch.library.impl("spingrad::sample", "CPU", on_cpu)
