"""Safetensors files that say what they hold: a description, and the SHA-256 of it and of every tensor."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MAX_HEADER = 2**20  # bytes; enough for a network of a thousand layers


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Args:
        key: Its name in the metadata of the safetensors file.
        version: Its version; files of other versions are refused.
        content: What its description is called.
        what: What an error message calls it.
        hint: What an error message advises.
    """

    key: str
    version: int
    content: str
    what: str
    hint: str

    def to_bytes(self, content: dict[str, Any], tensors: dict[str, Array]) -> bytes:
        """The content of a file."""
        need_safetensors(self.what)
        from safetensors.numpy import save

        signed = {"version": self.version, "sha256": checksum(content, tensors), self.content: content}
        return save(tensors, {self.key: json.dumps(signed)})

    def read(self, path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
        """Description and tensors of a file.

        Nothing is unpickled or executed. The header, at most 1 MB, is checked before a tensor is read, and no
        tensor can be larger than its part of the file.

        Raises:
            ValueError: The file is of another kind, or was changed since it was written.
        """
        need_safetensors(self.what)
        from safetensors import SafetensorError, safe_open

        self._check_header(path)
        try:
            with safe_open(path, "numpy") as file:
                signed = self._signed(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, TypeError) as error:
            raise ValueError(str(error)) from None
        content: dict[str, Any] = signed[self.content]
        if checksum(content, tensors) != signed["sha256"]:
            raise ValueError("its SHA-256 does not match its content; the file was changed or damaged")
        return content, tensors

    def _check_header(self, path: Path) -> None:
        """Refuse a header that is longer than the file or than ``MAX_HEADER``, before it is parsed."""
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if size < 8 or length > size - 8 or length > MAX_HEADER:
            raise ValueError(
                f"expected a safetensors file with a header of at most {MAX_HEADER:,} bytes, got {length:,} "
                f"in a file of {size:,} bytes. {self.hint}"
            )

    def _signed(self, metadata: dict[str, str]) -> dict[str, Any]:
        """Version, checksum and description, after checking that all of them are there."""
        if self.key not in metadata:
            raise ValueError(f"its metadata does not describe {self.what}. {self.hint}")
        try:
            signed = json.loads(metadata[self.key])
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


def checksum(content: dict[str, Any], tensors: dict[str, Array]) -> str:
    """SHA-256 of the description and of every tensor with its name, dtype and shape."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()


def need_safetensors(what: str) -> None:
    """Raise an ``ImportError`` that names the extra where safetensors is not installed."""
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise ImportError(f'a file of {what} needs safetensors: pip install "spingrad[export]"') from None
