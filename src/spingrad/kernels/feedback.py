"""Error feedback spin by spin, for couplings of few rows: a compiled kernel, shared out over threads."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from spingrad.kernels.descent import HAS_NUMBA, Backend

FEW_ROWS = 32  # rows for which there is a kernel


def can_feed_back(H: Tensor, num_rows: int, backend: Backend) -> bool:
    """Is there a kernel for these fields: with few rows, on a CPU, in single precision?"""
    fits = num_rows <= FEW_ROWS and H.device.type == "cpu" and H.dtype == torch.float32
    return fits and backend != "torch" and HAS_NUMBA


def feed_back_(H: Tensor, Z: Tensor, G: Tensor) -> None:
    """Spin after spin from zero, each knowing the error of those before it.

    Args:
        H: Fields, shape ``(m, n)``, on a CPU and in single precision like the rest.
        Z: Rows, shape ``(k, n)``; few.
        G: Receives the spins, shape ``(m, n)``.
    """
    from spingrad.kernels.feedback_llvm import LANES, feed_back

    if len(Z) % 8:  # few numbers of rows, for each is compiled
        Z = torch.nn.functional.pad(Z, (0, 0, 0, -len(Z) % 8))
    rows, H = tuple(Z.numpy()), H if H.stride(1) == 1 else H.contiguous()
    threads = max(1, torch.get_num_threads() // 2)  # torch's own go on spinning on the other half for a while
    share = -(-len(H) // (LANES * threads)) * LANES
    if share >= len(H):
        feed_back(H.numpy(), rows, G.numpy())
        return
    parts = [(h.numpy(), rows, g.numpy()) for h, g in zip(H.split(share), G.split(share), strict=True)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part: feed_back(*part), parts))
