"""Where data files are: ``$SPINGRAD_DATA``, the user's cache, or their official source."""

import hashlib
import os
import urllib.request
from pathlib import Path

from spingrad._files import cache_folder, write_atomically


def fetch(name: str, sha256: str, url: str) -> bytes:
    """The contents of a data file, refused if they are not those with the pinned sum.

    Args:
        name: Path below the data folder, such as ``mnist/train-labels-idx1-ubyte.gz``.
        sha256: The file's SHA-256 in hexadecimal.
        url: Official source, asked only if the file is found nowhere else.
    """
    folders = [cache_folder()]
    if os.environ.get("SPINGRAD_DATA"):
        folders.insert(0, Path(os.environ["SPINGRAD_DATA"]))
    for folder in folders:
        if (path := folder / name).is_file():
            return _checked(path.read_bytes(), sha256, str(path))
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            content = _checked(response.read(), sha256, url)
    except OSError as error:
        looked = " and ".join(str(folder / name) for folder in folders)
        raise FileNotFoundError(
            f"{name} is neither at {looked} nor to be had from {url} ({error}); "
            "put the file there, or point SPINGRAD_DATA at a folder that has it"
        ) from None
    write_atomically(cache_folder() / name, content)
    return content


def _checked(content: bytes, sha256: str, where: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{where}: expected a file with SHA-256 {sha256}, got {found}; delete it and retry")
    return content
