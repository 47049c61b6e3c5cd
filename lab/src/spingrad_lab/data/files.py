"""Where data files are: ``$SPINGRAD_DATA``, the user's cache, or their official source."""

import hashlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

from spingrad._files import cache_folder
from spingrad_lab.data.download import DataError, download


class Known(NamedTuple):
    """Size in bytes and SHA-256 in hexadecimal, which a data file must have."""

    size: int
    sha256: str


def fetch(name: str, known: Known, url: str) -> bytes:
    """The content of a data file, refused unless it has the known size and SHA-256.

    A file that is there is only read: a wrong one is reported, never replaced.

    Args:
        name: Path below the data folder, such as ``mnist/train-labels-idx1-ubyte.gz``.
        known: The file's size and SHA-256.
        url: Official source, asked only if the file is found nowhere else; it is then kept in the cache.

    Raises:
        DataError: The file is not the expected one, or could not be downloaded.
        OSError: The file could not be read, or not be written to the cache.
    """
    folders = [cache_folder()]
    if os.environ.get("SPINGRAD_DATA"):
        folders.insert(0, Path(os.environ["SPINGRAD_DATA"]))
    found = next((path for folder in folders if (path := folder / name).exists()), None)
    if found is None:
        found = cache_folder() / name
        print(f"downloading {url}, {known.size / 1e6:,.1f} MB", file=sys.stderr, flush=True)
        try:
            download(url, found, *known)
        except DataError as error:
            looked = " and ".join(str(folder) for folder in folders)
            raise DataError(
                f"{name} is neither in {looked} nor to be had from {url}: {error}. Try again, or put the "
                "file there, or point SPINGRAD_DATA at a folder that has it"
            ) from None
    return _read(found, known)


def _read(path: Path, known: Known) -> bytes:
    """At most the known size is read, whatever the size of the file."""
    if not path.is_file():
        raise DataError(f"{path}: expected a file, got a folder or device; move it away and retry")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(known.size) if size == known.size else b""
    if size != known.size:
        raise DataError(f"{path}: expected a file of {known.size:,} bytes, got {size:,}; delete it and retry")
    if (actual := hashlib.sha256(content).hexdigest()) != known.sha256:
        raise DataError(
            f"{path}: expected a file with SHA-256 {known.sha256}, got {actual}; delete it and retry"
        )
    return content
