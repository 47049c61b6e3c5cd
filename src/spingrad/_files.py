"""Files that survive a crash: the one place that writes to disk."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/spingrad``, or ``~/.cache/spingrad``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spingrad"


def write_atomically(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # a temporary file is its owner's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
