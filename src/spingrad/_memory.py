"""Memory that is used again: a large tensor that is new in every step costs more time than what fills it."""

import torch
from torch import Tensor


def is_free(tensor: Tensor) -> bool:
    """Whether only the caller's name still holds the memory of a tensor: no view, no copy of the name."""
    storage = tensor.untyped_storage()
    ours = 2 if tensor._base is None else 3  # the tensor, ``storage``, and what the tensor is a view of
    return int(torch._C._storage_Use_Count(storage._cdata)) == ours


class Pool:
    """Matrices that are handed out again once nobody looks at them any more."""

    def __init__(self) -> None:
        self._matrices: dict[tuple[int, int], list[Tensor]] = {}

    def empty(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """A matrix with any content, in the dtype and on the device of ``like``."""
        if like.device.type != "cpu":
            return like.new_empty(rows, columns)  # an accelerator's allocator does this itself
        known = self._matrices.setdefault((rows, columns), [])
        for matrix in known:
            if matrix.dtype == like.dtype and is_free(matrix):
                return matrix
        known.append(like.new_empty(rows, columns))
        return known[-1]

    def __deepcopy__(self, memo: object) -> "Pool":
        return Pool()

    def __reduce__(self) -> tuple[type["Pool"], tuple[()]]:
        return Pool, ()
