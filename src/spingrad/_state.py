"""The state of a model or an optimizer as bytes: a JSON description, then the raw bytes of its tensors.

There is no pickle, not even ``torch.load(weights_only=True)``, which still runs a (restricted) unpickler:
what is read here can only become numbers, text, tensors and the few containers that ``KINDS`` names.
"""

import hashlib
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAGIC = b"spingrad state 1\n"
LENGTH = struct.Struct("<Q")  # of the description, which follows it
KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (tuple, set, frozenset, torch.Size, dict, OrderedDict, Counter)
}
"""Containers besides lists; others, such as subclasses of users, would need code to be made again."""


class PackedState:
    """A state that is ready to be written. It refers to the tensors and holds no copy of them.

    Args:
        state: Tensors, numpy arrays, numbers, text and bytes, in containers.
        name: What errors call it.
    """

    def __init__(self, state: Any, name: str) -> None:
        self._tensors: list[Tensor] = []
        self._end = 0  # of the tensors described so far, in bytes
        described = self._describe(state, name)
        self._header = json.dumps(described, separators=(",", ":")).encode()

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes, in parts."""
        yield MAGIC + LENGTH.pack(len(self._header)) + self._header
        for tensor in self._tensors:
            yield _raw(tensor)

    def digest(self) -> str:
        """SHA-256 of the bytes."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()

    def _describe(self, value: Any, place: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self._describe(item, f"{place}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, Tensor):
            _check_tensor(value, place)
            stride = torch.empty_like(value, device="meta").stride()  # channels last stay last
            return {"tensor": [_name(value.dtype), list(value.shape), list(stride), self._place(value)]}
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            raw = self._place(_as_tensor(value.tobytes()))
            return {"numpy": [value.dtype.str, list(value.shape), raw, isinstance(value, np.generic)]}
        if kind is bytes:
            return {"bytes": [len(value), self._place(_as_tensor(value))]}
        if kind is torch.dtype:
            return {"dtype": _name(value)}
        if kind.__name__ not in KINDS or KINDS[kind.__name__] is not kind:
            raise TypeError(
                f"{place} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold. "
                "Expected: tensors, numpy arrays, numbers, text, bytes, None, and lists, tuples, sets and "
                "dicts of these"
            )
        if not isinstance(value, dict):
            return {kind.__name__: [self._describe(item, place) for item in value]}
        pairs = [
            [self._describe(key, place), self._describe(item, f"{place}[{key!r}]")]
            for key, item in value.items()
        ]
        versions = self._describe(getattr(value, "_metadata", None), place)  # of torch modules
        return {kind.__name__: [pairs, versions]}

    def _place(self, tensor: Tensor) -> int:
        """Where the tensor's bytes begin, counted from the end of the description."""
        begin = self._end
        self._tensors.append(tensor)
        self._end += tensor.numel() * tensor.element_size()
        return begin


def unpacked(data: bytearray) -> Any:
    """The state whose bytes are ``data``, with tensors on the CPU; ``ValueError`` if it is none."""
    try:
        begin = len(MAGIC) + LENGTH.size
        if data[: len(MAGIC)] != MAGIC:
            raise ValueError(f"expected the first bytes {MAGIC!r}, found {bytes(data[: len(MAGIC)])!r}")
        (length,) = LENGTH.unpack(data[len(MAGIC) : begin])
        return _Reader(torch.frombuffer(data, dtype=torch.uint8)[begin + length :]).value(
            json.loads(data[begin : begin + length])
        )
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, MemoryError, struct.error) as error:
        raise ValueError(f"not a state as spingrad writes it ({type(error).__name__}: {error})") from error


class _Reader:
    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    def value(self, described: Any) -> Any:
        if isinstance(described, list):
            return [self.value(item) for item in described]
        if not isinstance(described, dict):
            return described
        ((kind, content),) = described.items()
        if kind == "tensor":
            return self.tensor(*content)
        if kind == "numpy":
            return self.array(*content)
        if kind == "bytes":
            return self.bytes(*content)
        if kind == "dtype":
            return _dtype(content)
        if not issubclass(KINDS[kind], dict):
            return KINDS[kind]([self.value(item) for item in content])
        pairs, versions = content
        made = KINDS[kind]({self.value(key): self.value(item) for key, item in pairs})
        if versions is not None:
            made._metadata = self.value(versions)
        return made

    def tensor(self, dtype: str, shape: list[int], stride: list[int], begin: int) -> Tensor:
        made = _dtype(dtype)
        flat = self._cut(begin, math.prod(shape) * made.itemsize).clone().view(made)
        return torch.empty_strided(shape, stride, dtype=made).copy_(flat.view(shape))

    def array(self, dtype: str, shape: list[int], begin: int, scalar: bool) -> Any:
        made = np.dtype(dtype)
        array = np.frombuffer(self.bytes(math.prod(shape) * made.itemsize, begin), made).reshape(shape).copy()
        return array[()] if scalar else array

    def bytes(self, size: int, begin: int) -> bytes:
        return bytes(self._cut(begin, size).numpy())

    def _cut(self, begin: int, size: int) -> Tensor:
        if not 0 <= begin <= begin + size <= len(self.raw):
            raise ValueError(f"expected {size} bytes from byte {begin} on, there are {len(self.raw)} in all")
        return self.raw[begin : begin + size]


def _check_tensor(value: Tensor, place: str) -> None:
    if hasattr(value, "device_mesh"):
        raise TypeError(
            f"{place} is sharded over the ranks (a DTensor, as fully_shard makes them), but a checkpoint "
            "holds whole tensors. Save such a model by torch.distributed.checkpoint"
        )
    plain = type(value) in (Tensor, torch.nn.Parameter)
    if not plain or value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise TypeError(
            f"{place} is a {type(value).__name__} of layout {value.layout} on {value.device}, which a "
            "checkpoint cannot hold. Expected: a dense torch.Tensor that has values"
        )


def _raw(tensor: Tensor) -> memoryview:
    here = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return here.flatten().view(torch.uint8).numpy().data


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype
