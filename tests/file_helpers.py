"""Files of many kinds that spingrad did not write."""

import gzip
import pickle
import sqlite3
import zipfile
from contextlib import closing

import numpy as np
import torch


def database(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE events (number INTEGER PRIMARY KEY, text)")
        connection.commit()


def archive(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "content")


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
}
