"""Safetensors files that say what they hold: a description, and the SHA-256 of it and of every tensor.

They are read and written here, by a few lines, since a file has to be compared with its description before
any of its tensors takes memory, and is then read once, into the arrays that are returned.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MAX_HEADER = 2**20  # bytes; enough for a network of a thousand layers
DTYPES = {
    **{"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"},
    **{"F16": "<f2", "BF16": "V2", "F32": "<f4", "F64": "<f8"},  # numpy has no bfloat16, only its two bytes
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Form:
    """Dtype and shape of a tensor that has not been read yet; an array to those who look at no value."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Args:
        key: Its name in the metadata of the safetensors file.
        version: Its version; files of other versions are refused.
        content: What its description is called.
        what: What an error message calls it.
        hint: What an error message advises.
        most: Bytes that the tensors may take together.
    """

    key: str
    version: int
    content: str
    what: str
    hint: str
    most: int

    def to_bytes(self, content: dict[str, Any], tensors: dict[str, Array]) -> bytes:
        """The content of a file."""
        if (size := sum(tensor.nbytes for tensor in tensors.values())) > self.most:
            raise ValueError(f"a file of {self.what} holds at most {self.most:,} bytes, got {size:,}")
        signed = {"version": self.version, "sha256": checksum(content, tensors), self.content: content}
        forms = {name: Form(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        chunks = to_chunks(self.key, json.dumps(signed), forms, lambda name: tensors[name].tobytes())
        return b"".join(chunks)

    def read(
        self, path: Path, check: Callable[[dict[str, Any], dict[str, Form]], None]
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Description and tensors of a file.

        Nothing is unpickled or executed. The header is at most 1 MB. Before a tensor is read, the header has
        to account for every byte of the file, and its names, dtypes and shapes have to be what the
        description allows.

        Args:
            path: The file.
            check: Raises an error if the description and these tensors do not go together.

        Raises:
            ValueError: The file is of another kind, or was changed since it was written.
        """
        with open(path, "rb") as file:
            header, room = read_header(file, MAX_HEADER, self.hint)
            signed = self._signed(header.pop("__metadata__", {}))
            forms = forms_of(header, room)
            if room > self.most:
                raise ValueError(f"{self.what} has at most {self.most:,} bytes, this file has {room:,}")
            content: dict[str, Any] = signed[self.content]
            check(content, forms)
            tensors = {name: read_array(file, name, form) for name, form in forms.items()}
        if checksum(content, tensors) != signed["sha256"]:
            raise ValueError("its SHA-256 does not match its content; the file was changed or damaged")
        return content, tensors

    def _signed(self, metadata: Any) -> dict[str, Any]:
        """Version, checksum and description, after checking that all of them are there."""
        text = metadata.get(self.key) if isinstance(metadata, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"its metadata does not describe {self.what}. {self.hint}")
        try:
            signed = json.loads(text)
        except RecursionError:
            raise ValueError("its description is nested too deeply") from None
        if not isinstance(signed, dict) or signed.get("version") != self.version:
            version = signed.get("version") if isinstance(signed, dict) else None
            raise ValueError(
                f"this spingrad reads version {self.version} of the format, the file has version "
                f"{version!r:.20}"
            )
        own = {"version", "sha256", self.content}
        if set(signed) != own or not isinstance(signed[self.content], dict):
            raise ValueError(f"its metadata must hold version, sha256 and {self.content}, and nothing else")
        return signed


def to_chunks(
    key: str, text: str, forms: dict[str, Form], raw: Callable[[str], bytes | memoryview]
) -> Iterator[bytes | memoryview]:
    """A file in parts: under ``key`` a text, and tensors of these forms, of which ``raw`` gives the bytes."""
    header: dict[str, Any] = {"__metadata__": {key: text}}
    names = sorted(forms, key=lambda name: (-forms[name].dtype.itemsize, name))  # wide ones first: aligned
    end = 0
    for name in names:
        begin, end = end, end + forms[name].nbytes
        dtype, shape = NAMES[forms[name].dtype], list(forms[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    start = json.dumps(header, separators=(",", ":")).encode()
    start += b" " * (-len(start) % 8)
    yield len(start).to_bytes(8, "little") + start
    for name in names:
        yield raw(name)


def read_header(file: BinaryIO, longest: int, hint: str = "") -> tuple[dict[str, Any], int]:
    """The header, and how many bytes follow it. It is not parsed if it is too long."""
    length = int.from_bytes(file.read(8), "little")
    size = os.fstat(file.fileno()).st_size
    if size < 8 or length > size - 8 or length > longest:
        raise ValueError(
            f"expected a safetensors file with a header of at most {longest:,} bytes, got {length:,} "
            f"in a file of {size:,} bytes. {hint}"
        )
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"its header is not that of a safetensors file. {hint}")
    return header, size - 8 - length


def forms_of(header: dict[str, Any], room: int) -> dict[str, Form]:
    """The tensors that a header lists, in the order of the file, which they fill."""
    places: list[tuple[int, int, str, Form]] = []
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
                pass
            case _:
                raise ValueError(f"the tensor {name!r:.100} needs a dtype, a shape and two offsets")
        if dtype not in DTYPES:
            raise ValueError(f"tensors must be {', '.join(DTYPES)}, {name!r:.100} is {dtype!r:.20}")
        if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
            raise ValueError(f"the shape of {name!r:.100} must be a list of sizes, got {shape!r:.100}")
        form = Form(np.dtype(DTYPES[dtype]), tuple(shape))
        places.append((begin, end, name, form))
    places.sort(key=lambda place: place[:2])
    filled = 0
    for begin, end, name, form in places:
        if begin != filled or end != begin + form.nbytes:
            raise ValueError(
                f"{name!r:.100} takes {form.nbytes:,} bytes from {filled:,} on, not {begin} to {end}"
            )
        filled = end
    if filled != room:
        raise ValueError(f"its tensors take {filled:,} bytes, and there are {room:,}")
    return {name: form for _, _, name, form in places}


def read_array(file: BinaryIO, name: str, form: Form) -> Array:
    """The next tensor of a file."""
    array = np.empty(form.shape, form.dtype)
    raw = array.reshape(-1).view(np.uint8).data
    filled = 0
    while filled < len(raw) and (more := file.readinto(raw[filled:])):  # type: ignore[attr-defined]
        filled += more
    if filled < len(raw):
        raise ValueError(f"the file ends in the middle of {name!r:.100}")
    if form.dtype == np.bool_ and len(raw) and array.view(np.uint8).max() > 1:
        raise ValueError(f"{name!r:.100} has values besides true and false")
    return array


def checksum(content: dict[str, Any], tensors: dict[str, Array]) -> str:
    """SHA-256 of the description and of every tensor with its name, dtype and shape."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tensor.shape}\0".encode(errors="surrogatepass"))
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()
