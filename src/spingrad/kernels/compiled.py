"""Functions compiled by numba where the ``fast`` extra is installed, and units shared among threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy.typing as npt
import torch

HAS_NUMBA = find_spec("numba") is not None
Array = npt.NDArray[Any]


@cache
def compiled(function: Callable[..., Any], fastmath: tuple[str, ...] = ()) -> Callable[..., Any]:
    """``function`` compiled at its first call and cached on disk; as it is without numba."""
    if not HAS_NUMBA:
        return function
    import numba

    return numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=set(fastmath))(function)


def share_out(work: Callable[[slice], None], units: int, whole: int) -> None:
    """Work on all units, some on each thread: a multiple of ``whole``, but for the last."""
    threads = max(1, torch.get_num_threads() // 2)  # torch's own go on spinning on the other half for a while
    share = max(1, -(-units // (whole * threads))) * whole
    parts = [slice(start, min(units, start + share)) for start in range(0, units, share)]
    if len(parts) <= 1:
        for own in parts:
            work(own)
        return
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(work, parts))
