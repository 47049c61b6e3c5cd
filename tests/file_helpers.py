"""Files of many kinds that spingrad did not write."""

import gzip
import io
import pickle
import signal
import sqlite3
import tarfile
import zipfile
from contextlib import closing, contextmanager

import numpy as np
import torch


def database(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE events (number INTEGER PRIMARY KEY, text)")
        connection.commit()


def archive(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "content")


def numpy_file():
    content = io.BytesIO()
    np.save(content, np.zeros(3))
    return content.getvalue()


def tar(path):
    with tarfile.open(path, "w") as file:
        file.addfile(tarfile.TarInfo("notes.txt"))


FOREIGN = {
    "one line of text": lambda path: path.write_text("my only copy"),
    "text": lambda path: path.write_text("first\nsecond\n"),
    "one letter": lambda path: path.write_text("x"),
    "json": lambda path: path.write_text('{"learning rate": 0.1}'),
    "json lines": lambda path: path.write_text('{"event": "run", "id": "0"}\n{"event": "run"}\n'),
    "csv": lambda path: path.write_text("a,b\n1,2\n"),
    "newlines": lambda path: path.write_text("\n\n\n"),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "random bytes": lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000)),
    "gzip": lambda path: path.write_bytes(gzip.compress(b"content")),
    "pickle": lambda path: path.write_bytes(pickle.dumps([1, 2, 3])),
    "archive": archive,
    "torch": lambda path: torch.save({"a": torch.zeros(3)}, path),
    "database": database,
    "numpy": lambda path: path.write_bytes(numpy_file()),
    "picture": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100)),
    "drawing": lambda path: path.write_text('<svg xmlns="http://www.w3.org/2000/svg"><g/></svg>'),
    "page": lambda path: path.write_text("<!doctype html><title>my report</title>"),
    "markdown": lambda path: path.write_text("# My report\n\nText.\n"),
    "tar": tar,
    "program": lambda path: path.write_bytes(b"\x7fELF" + bytes(200)),
    "UTF-16": lambda path: path.write_text("first\n", encoding="utf-16"),
}


@contextmanager
def full_disk():
    """Every file ends after 200 bytes: an error of the operating system, in the middle of a write."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def contents(folder):
    """Every file below a folder and what is in it, but for lock files."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "lock" not in path.name]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
