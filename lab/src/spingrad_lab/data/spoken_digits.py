"""The Free Spoken Digit Dataset: 3,000 recordings of ten digits by six people."""

import hashlib
import io
import os
import tarfile
import wave
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spingrad_lab.data.download import DataError
from spingrad_lab.data.files import Known, fetch

_ARCHIVE = "fsdd/fsdd_recordings.tar.xz"
_KNOWN = Known(13_725_120, "73be4a7ca579e3b934bf5567c855a6bb494e8dd88d6a63d865c3426f75bde97e")
_CONTENT = "6b1a8e30f4df78a933fe25cf1ca0140c8c6f169c0a83649a15b70a5ae7407014"
_SOURCE = "https://github.com/Jakobovski/free-spoken-digit-dataset"
_COUNT, _LONGEST = 3_000, 100_000  # recordings, bytes of one


class Recording(NamedTuple):
    """8,000 samples a second in [-1, 1], the digit, who says it, and the number of the repetition."""

    sound: np.ndarray
    digit: int
    speaker: str
    take: int


@cache
def spoken_digits() -> tuple[Recording, ...]:
    """All recordings; it is customary to test on takes 0 to 4 of each digit and speaker (Jackson et al.).

    Read from ``$SPINGRAD_DATA/fsdd``: the archive ``fsdd_recordings.tar.xz``, or the folder ``recordings`` of
    a checkout of the data set.

    Raises:
        DataError: Neither is there, or the recordings are not the known ones.
    """
    folder = Path(os.environ.get("SPINGRAD_DATA", "")) / "fsdd" / "recordings"
    files = _from_folder(folder) if folder.is_dir() else _from_archive()
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name])
    if digest.hexdigest() != _CONTENT:
        raise DataError(
            f"expected the {_COUNT:,} recordings with SHA-256 {_CONTENT}, "
            f"got {len(files):,} with {digest.hexdigest()}; clone {_SOURCE} anew"
        )
    return tuple(_recording(name, files[name]) for name in sorted(files))


def _from_folder(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.glob("*.wav") if path.stat().st_size < _LONGEST]
    return {path.name: path.read_bytes() for path in paths[: _COUNT + 1]}


def _from_archive() -> dict[str, bytes]:
    path = Path(os.environ.get("SPINGRAD_DATA", "")) / _ARCHIVE
    if not path.is_file():
        raise DataError(
            "the spoken digits are not there: clone "
            f"{_SOURCE} into a folder `fsdd` and point SPINGRAD_DATA at the folder above it"
        )
    content = fetch(_ARCHIVE, _KNOWN, _SOURCE)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        found = {Path(m.name).name: tar.extractfile(m) for m in tar if m.name.endswith(".wav")}
        return {name: file.read() for name, file in found.items() if file is not None}


def _recording(name: str, content: bytes) -> Recording:
    digit, speaker, take = name.removesuffix(".wav").split("_")
    with wave.open(io.BytesIO(content)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return Recording(samples.astype(np.float32) / 2**15, int(digit), speaker, int(take))
