"""Writes files that survive a crash."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/spingrad``, or ``~/.cache/spingrad``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spingrad"


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; readers see the old file or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # temporary files are created readable only by their owner
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
