"""Where data files are: ``$SPINGRAD_DATA``, the user's cache, or their official source."""

import hashlib
import os
from pathlib import Path

import pooch  # type: ignore[import-untyped]

from spingrad._files import cache_folder


def fetch(name: str, sha256: str, url: str) -> bytes:
    """The contents of a data file, refused if they are not those with the pinned sum.

    Args:
        name: Path below the data folder, such as ``mnist/train-labels-idx1-ubyte.gz``.
        sha256: The file's SHA-256 in hexadecimal.
        url: Official source, asked only if the file is found nowhere else; it is then kept in the cache.
    """
    folders = [cache_folder()]
    if os.environ.get("SPINGRAD_DATA"):
        folders.insert(0, Path(os.environ["SPINGRAD_DATA"]))
    found = next((path for folder in folders if (path := folder / name).is_file()), None)
    if found is None:
        found = _downloaded(cache_folder() / name, sha256, url, folders)
    content = found.read_bytes()
    if (actual := hashlib.sha256(content).hexdigest()) != sha256:
        raise ValueError(f"{found}: expected a file with SHA-256 {sha256}, got {actual}; delete it and retry")
    return content


def _downloaded(path: Path, sha256: str, url: str, folders: list[Path]) -> Path:
    """Put the file at ``path`` once its sum is right."""
    pooch.get_logger().setLevel("WARNING")
    try:
        return Path(pooch.retrieve(url, sha256, path.name, path.parent))
    except OSError as error:
        looked = " and ".join(str(folder) for folder in folders)
        raise FileNotFoundError(
            f"{path.name} is neither in {looked} nor to be had from {url} ({error}); "
            "put the file there, or point SPINGRAD_DATA at a folder that has it"
        ) from None
