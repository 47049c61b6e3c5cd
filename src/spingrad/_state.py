"""A state as a safetensors file: its tensors by name, and in the metadata JSON that says what they are in.

There is no pickle, not even ``torch.load(weights_only=True)``, which still runs a (restricted) unpickler:
what is read here can only become numbers, text, tensors and the few containers that ``KINDS`` names.
"""

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from spingrad._tensors import Form, forms_of, read_array, read_header, to_chunks

KEY, VERSION = "spingrad state", 3
LONGEST_HEADER = 2**26  # bytes
KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size, dict, OrderedDict, Counter)
}
"""Containers; others, such as subclasses of users, would need code to be made again."""
SAME = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
DTYPES = {torch.bfloat16: np.dtype("V2")} | {getattr(torch, name): np.dtype(name) for name in SAME}
"""What tensors have in a file. Those of another dtype are written as bytes; the description has it."""


class PackedState:
    """A state as JSON, and the tensors that it names. It refers to the tensors and holds no copy of them.

    Args:
        state: Tensors, numpy arrays, numbers, text and bytes, in containers.
    """

    def __init__(self, state: Any) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._described = self._describe(state, "")

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of a file, in parts."""
        text = json.dumps({"version": VERSION, "state": self._described}, separators=(",", ":"))
        forms = {
            name: Form(DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in self._tensors.items()
        }
        return to_chunks(KEY, text, forms, lambda name: _bytes_of(self._tensors[name]).numpy().data)

    def digest(self) -> str:
        """SHA-256 of the bytes."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()

    def copy(self) -> Any:
        """The state again, with tensors of its own, on the CPU."""
        return _unpacked(
            self._described, {name: _bytes_of(own).clone() for name, own in self._tensors.items()}
        )

    def _describe(self, value: Any, place: str) -> Any:
        kind, start = type(value), f"{place}." if place else ""
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta:
            stride = torch.empty_like(value, device="meta").stride()  # channels last stay last
            return {"tensor": [self._keep(value, place), _name(value.dtype), list(value.shape), list(stride)]}
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            data = self._describe(value.tobytes(), place)
            return {"numpy": [data, value.dtype.str, list(value.shape), isinstance(value, np.generic)]}
        if kind is bytes:
            return {"bytes": self._keep(torch.from_numpy(np.frombuffer(bytearray(value), np.uint8)), place)}
        if kind is torch.dtype:
            return {"dtype": _name(value)}
        if KINDS.get(kind.__name__) is not kind:
            raise TypeError(
                f"{place} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold. "
                "Expected: dense tensors that have values and are whole on this rank, numpy arrays, numbers, "
                "text, bytes, None, and lists, tuples, sets and dicts of these"
            )
        if not isinstance(value, dict):
            return {kind.__name__: [self._describe(item, f"{start}{i}") for i, item in enumerate(value)]}
        items = value.items()
        pairs = [[self._describe(key, place), self._describe(item, f"{start}{key}")] for key, item in items]
        versions = self._describe(getattr(value, "_metadata", None), place)  # of torch modules
        return {kind.__name__: [pairs, versions]}

    def _keep(self, tensor: Tensor, place: str) -> str:
        """Take the tensor into the file; its name there."""
        name = place if place not in self._tensors else f"{place} #{len(self._tensors)}"
        self._tensors[name] = tensor if tensor.dtype in DTYPES else _bytes_of(tensor)
        return name


def read_state(file: BinaryIO) -> Any:
    """The state in a file, with tensors on the CPU.

    The header is checked before a tensor takes memory, and no tensor is read twice. What nobody has written
    raises errors of many kinds.
    """
    header, room = read_header(file, LONGEST_HEADER)
    signed = json.loads(header.pop("__metadata__")[KEY])
    if signed["version"] != VERSION:
        raise ValueError(f"expected version {VERSION} of a state, got {signed['version']!r:.20}")
    arrays = {name: read_array(file, name, form) for name, form in forms_of(header, room).items()}
    raw = {name: torch.from_numpy(array.reshape(-1).view(np.uint8)) for name, array in arrays.items()}
    return _unpacked(signed["state"], raw)


def _unpacked(described: Any, raw: dict[str, Tensor]) -> Any:
    """The state that is described, of whose tensors these are the bytes."""
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    match kind:
        case "tensor":
            name, dtype, shape, stride = content
            flat = raw.pop(name).view(_dtype(dtype)).view(shape)
            if list(flat.stride()) == stride:
                return flat
            return torch.empty_strided(shape, stride, dtype=flat.dtype).copy_(flat)
        case "numpy":
            data, dtype, shape, is_scalar = content
            array = np.frombuffer(bytearray(_unpacked(data, raw)), dtype).reshape(shape)
            return array[()] if is_scalar else array
        case "bytes":
            return raw.pop(content).numpy().tobytes()
        case "dtype":
            return _dtype(content)
        case "dict" | "OrderedDict" | "Counter":
            pairs, versions = content
            made = KINDS[kind]({_unpacked(key, raw): _unpacked(item, raw) for key, item in pairs})
            if versions is not None:
                made._metadata = _unpacked(versions, raw)
            return made
    return KINDS[kind]([_unpacked(item, raw) for item in content])


def _bytes_of(tensor: Tensor) -> Tensor:
    here = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return here.flatten().view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype
