"""Durable files: the one place of the library and the lab that writes to disk.

A file is either replaced as a whole (:func:`write_atomically`) or grows record by record
(:func:`append_record`). A file of records is text: a first line that says what it is, then one JSON object
with a checksum per line. Reading changes no file. The QPU journal is a database: see ``qpu/journal.py``.
"""

import errno
import hashlib
import json
import os
import secrets
import socket
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

FIRST_LINE = b'{"format": "spingrad records", "version": 1}\n'
LONGEST_LINE = 64 * 2**20
LOCK_SECONDS = 60.0


class FileFormatError(ValueError):
    """A file is damaged or was not written by spingrad; it was left as it is."""


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/spingrad``, or ``~/.cache/spingrad``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spingrad"


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; readers see the old file or the new one, never a part of it.

    After any error the old file is as it was. When the function returns, the new file survives a power cut.

    Raises:
        OSError: The file could not be written; the error names ``path``.
    """
    with _errors_name(path):
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it exists and is not a regular file")
        _make_folder(target.parent)
        temporary = target.with_name(f".spingrad-{secrets.token_hex(8)}.tmp")
        try:
            _write(temporary, os.O_CREAT | os.O_EXCL, [content])
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        flush_folder(target.parent)


def check_own(path: Path, mark: bytes) -> None:
    """Raise an error if there is a file without this mark in its first bytes: somebody else's.

    For files that spingrad replaces in a place that the user did not name.

    Raises:
        FileFormatError: The file has no mark; it was left as it is.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        start = file.read(8192)
    if start and mark not in start:
        raise FileFormatError(
            f"expected no file, or one that spingrad has written, got {path}. It was not changed; move it "
            "away or choose another place"
        )


def write_new(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file that does not exist yet, in parts, and wait until it is on disk; its size and SHA-256.

    Its name is on disk after :func:`flush_folder`, which serves all new files of a folder at once.

    Raises:
        OSError: The file could not be written; the error names ``path``.
    """
    size, digest = 0, hashlib.sha256()

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal size
        for chunk in chunks:
            size += len(chunk)
            digest.update(chunk)
            yield chunk

    with _errors_name(path):
        _write(path, os.O_CREAT | os.O_EXCL, counted())
    return size, digest.hexdigest()


def append_record(path: Path, record: Any) -> None:
    """Add a record to a file of records, which is created if it does not exist.

    Any number of processes may append to the same file. When the function returns, the record survives a
    power cut. The rest of a record that a crash cut short is removed first.

    Args:
        path: The file.
        record: A value that JSON can hold.

    Raises:
        FileFormatError: The file was not written by this function, or its last line is damaged.
        OSError: The record could not be written; the error names ``path``. All earlier records are intact.
    """
    line = to_line(json.dumps(record, sort_keys=True).encode())
    if len(line) > LONGEST_LINE:
        raise ValueError(f"a record of {path} may have {LONGEST_LINE} bytes, got {len(line)}")
    with _errors_name(path):
        _make_folder(path.parent)
        with FileLock(path.parent / ".lock", timeout=LOCK_SECONDS, poll_interval=0.01):
            if not path.exists() or not path.stat().st_size:
                write_atomically(path, FIRST_LINE + line)
            elif _ends_with_newline(path):
                _write(path, os.O_APPEND, [line])
            else:
                # Not shortened in place: a reader may be in the middle of it.
                write_atomically(path, _without_torn_line(path) + line)


def to_records(*records: Any) -> bytes:
    """A whole file of records, for :func:`write_atomically`."""
    return FIRST_LINE + b"".join(to_line(json.dumps(record, sort_keys=True).encode()) for record in records)


def read_records(path: Path, longest: int | None = None) -> list[Any]:
    """The records of a file, which is only read; a last record that a crash cut short is left out.

    Record number ``i``, counted from 0, is line ``i + 2`` of the file.

    Args:
        path: The file.
        longest: Bytes that a line may have, by default ``LONGEST_LINE``.

    Raises:
        FileFormatError: The file was not written by :func:`append_record`, or a line is damaged.
    """
    records: list[Any] = []
    longest = longest or LONGEST_LINE
    with open(path, "rb") as file:
        _check_first_line(path, file.read(len(FIRST_LINE)))
        while line := file.readline(longest + 1):
            if not line.endswith(b"\n") and len(line) <= longest:
                _check_torn(path, line, len(records) + 2)
                break
            try:
                records.append(json.loads(_body(line)))
            except (ValueError, RecursionError):
                raise _damaged(path, len(records) + 2) from None
    return records


def read_record(path: Path, first_line: bytes, most: int) -> Any:
    """The record of a file that has one, after a first line of its own; the file is only read.

    Nothing is read of a file of more than ``most`` bytes, and nothing is parsed before its checksum.
    """
    with open(path, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"it has {size:,} bytes, and at most {most:,} are read")
        if file.read(len(first_line)) != first_line:
            raise ValueError("its first line is another one")
        return json.loads(_body(file.read(size)))


def to_line(body: bytes) -> bytes:
    """One line of a file of records: the record with its checksum, itself a JSON object."""
    return b'{"sum": "%s", "record": %s}\n' % (hashlib.sha256(body).hexdigest()[:16].encode(), body)


def _body(line: bytes) -> bytes:
    """The record in a line, as JSON."""
    body = line[len(to_line(b"")) - 2 : -2]
    if to_line(body) != line:
        raise ValueError("the checksum does not match")
    return body


def _check_first_line(path: Path, start: bytes) -> None:
    if start and start != FIRST_LINE:
        raise FileFormatError(
            f"{path} is no file of spingrad's records: its first line is not {FIRST_LINE.decode().strip()}. "
            "It was not changed; move it away or choose another path"
        )


def _check_torn(path: Path, line: bytes, number: int) -> None:
    """Raise an error if the last line is a whole record whose line end was damaged."""
    try:
        _body(line[:-1] + b"\n")
    except ValueError:
        return
    raise _damaged(path, number)


def _damaged(path: Path, number: int) -> FileFormatError:
    return FileFormatError(
        f"{path}, line {number} is damaged: its checksum does not match. The file was not changed; delete "
        "the line or restore the file from a copy"
    )


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        _check_first_line(path, file.read(len(FIRST_LINE)))
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _without_torn_line(path: Path) -> bytes:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST_LINE))
        _, newline, torn = file.read(LONGEST_LINE).rpartition(b"\n")
        if not newline:
            raise FileFormatError(f"{path} ends with no record, in {len(torn):,} bytes. It was not changed")
        file.seek(0)
        whole = file.read(size - len(torn))
    _check_torn(path, torn, whole.count(b"\n") + 1)
    return whole


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # which sounds as if the file in the folder existed
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


def _write(path: Path, flags: int, chunks: Iterable[bytes | memoryview]) -> None:
    """Write all chunks and wait until they are on disk; the umask decides who may read a new file."""
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_BINARY", 0) | flags, 0o666)
    try:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """Without this, a power cut may lose the name of a new file."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Claim:
    """This process's word that it writes to a folder; taken back when nobody refers to it any more."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)  # which also gives up the lock


_claims: "weakref.WeakValueDictionary[tuple[int, str], Claim]" = weakref.WeakValueDictionary()


def claim(folder: Path) -> Claim:
    """Warn if another process has claimed the folder, and otherwise claim it.

    A warning and no more: not every network file system passes locks on, and the name in the file is shown,
    never acted on: from here a process of another host or container looks like a dead one.
    """
    real = os.path.realpath(folder)
    key = os.getpid(), real
    if (own := _claims.get(key)) is not None:
        return own
    own = Claim()
    if fcntl is not None:
        with suppress(OSError):  # no right to make the file, or a file system without locks
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(os.path.join(real, ".spingrad-lock"), flags, 0o666)
            own = Claim(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                warnings.warn(
                    f"another process saves to {folder} too ({other or 'unknown'}). No save is lost by that, "
                    "but only the two newest of all are kept; give each run a folder of its own",
                    stacklevel=2,
                )
            else:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
    _claims[key] = own
    return own


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Let every error of the operating system name the file that was asked for."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error
