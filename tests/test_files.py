"""Files that survive crashes, bit flips, full disks and other people's data."""

import errno
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import numpy as np
import pytest
from file_helpers import FOREIGN

from spingrad import _files
from spingrad._files import (
    FIRST_LINE,
    FileFormatError,
    append_record,
    check_own,
    read_records,
    write_atomically,
)

RECORDS = [{"seed": seed, "curve": [0.1 * seed, 1.0], "name": "Ω"} for seed in range(5)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.jsonl"


@pytest.fixture
def filled(path):
    for record in RECORDS:
        append_record(path, record)
    return path


WRITER = """
import runpy, sys
from pathlib import Path
files, path, writer, count = sys.argv[1:]
append_record = runpy.run_path(files)["append_record"]  # without torch, which takes seconds to import
for number in range(int(count)):
    append_record(Path(path), {"writer": int(writer), "number": number, "filling": "x" * 300})
"""


def test_equal_records_are_equal_lines_of_a_known_form(path):
    append_record(path, {"b": 1, "a": [True]})
    assert path.read_bytes() == FIRST_LINE + b'{"sum": "c6ea1a2410d733e4", "record": {"a": [true], "b": 1}}\n'


def test_a_torn_line_may_be_as_long_as_a_line_can_be(filled, monkeypatch):
    torn = b"x" * 200
    filled.write_bytes(filled.read_bytes() + torn)
    monkeypatch.setattr(_files, "LONGEST_LINE", len(torn))
    assert read_records(filled) == RECORDS
    monkeypatch.setattr(_files, "LONGEST_LINE", len(torn) - 1)
    with pytest.raises(FileFormatError, match="line 7 is damaged"):
        read_records(filled)


def test_a_record_of_more_than_64_mb_is_refused_before_anything_is_written(path):
    with pytest.raises(ValueError, match="may have 67108864 bytes"):
        append_record(path, "x" * 64 * 2**20)
    assert not path.exists()


def test_a_lock_that_is_not_free_within_a_minute_is_an_error_that_names_the_file(path, monkeypatch):
    def held(lock, timeout, **_):
        waited.append(timeout)
        raise filelock.Timeout(lock)

    waited = []
    monkeypatch.setattr(_files, "FileLock", held)
    with pytest.raises(OSError, match=re.escape(str(path))):
        append_record(path, {})
    assert waited == [60.0]


def test_a_mark_after_the_first_8192_bytes_does_not_make_a_file_ours(path):
    path.write_bytes(b"x" * (8192 - 8) + b"spingrad")
    check_own(path, b"spingrad")
    path.write_bytes(b"x" * (8192 - 7) + b"spingrad")
    with pytest.raises(FileFormatError, match="one that spingrad has written"):
        check_own(path, b"spingrad")


# Files that are replaced


def test_a_file_is_replaced_as_a_whole_with_the_permissions_of_the_umask(tmp_path):
    old = os.umask(0o026)
    try:
        write_atomically(tmp_path / "new folder" / "file", b"one")
        write_atomically(tmp_path / "new folder" / "file", b"two")
    finally:
        os.umask(old)
    assert (tmp_path / "new folder" / "file").read_bytes() == b"two"
    assert stat.S_IMODE((tmp_path / "new folder" / "file").stat().st_mode) == 0o640
    assert os.listdir(tmp_path / "new folder") == ["file"]


def test_file_and_folder_are_on_disk_before_a_write_returns(path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    write_atomically(path, b"content")
    assert flushed == [path.stat().st_ino, path.parent.stat().st_ino]
    flushed.clear()
    records = path.with_name("records")
    append_record(records, 1)
    append_record(records, 2)
    assert flushed == [records.stat().st_ino, path.parent.stat().st_ino, records.stat().st_ino]


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_full_disk(descriptor, data, write=os.write):
    return write(descriptor, data[: len(data) // 2]) if len(data) > 1 else full_disk()


@pytest.mark.parametrize(
    ("name", "fault"),
    [("write", full_disk), ("write", half_full_disk), ("fsync", full_disk), ("replace", full_disk)],
)
def test_on_a_full_disk_the_old_file_stays_and_the_error_names_it(path, monkeypatch, name, fault):
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fault)
        with pytest.raises(OSError, match=r"No space left on device: .*runs\.jsonl"):
            write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["runs.jsonl"]


@pytest.mark.parametrize(
    ("name", "fault"), [("write", full_disk), ("write", half_full_disk), ("fsync", full_disk)]
)
def test_on_a_full_disk_the_earlier_records_stay_and_later_ones_can_follow(filled, monkeypatch, name, fault):
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fault)
        with pytest.raises(OSError, match=r"No space left on device: .*runs\.jsonl"):
            append_record(filled, "lost")
    assert [record for record in read_records(filled) if record != "lost"] == RECORDS
    append_record(filled, "kept")
    assert [record for record in read_records(filled) if record != "lost"] == [*RECORDS, "kept"]


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    file = tmp_path / "file"
    append_record(file, "content")
    before = file.read_bytes()

    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for write in (lambda path: write_atomically(path, b"new"), lambda path: append_record(path, "new")):
        with pytest.raises(OSError, match=r"Not a directory: .*below"):
            write(file / "folder" / "below")
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", read_only)
            with pytest.raises(OSError, match=r"Read-only file system: .*file'"):
                write(file)
    assert file.read_bytes() == before


def test_only_regular_files_are_replaced_and_a_link_stays_a_link(tmp_path):
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(tmp_path, b"content")
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(Path(os.devnull), b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomically(tmp_path / "link", b"content")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"content"


# Files of records


def test_records_come_back_in_order_and_the_file_is_lines_of_json(filled):
    assert read_records(filled) == RECORDS
    lines = [json.loads(line) for line in filled.read_text().splitlines()]
    assert lines[0] == json.loads(FIRST_LINE)
    assert [line["record"] for line in lines[1:]] == RECORDS


def test_every_bit_flip_is_reported_or_loses_nothing(filled):
    whole = filled.read_bytes()
    rng = np.random.default_rng(0)
    ends = [place for place, byte in enumerate(whole) if byte == 10]
    for place in [*rng.integers(len(whole), size=300), *ends]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.integers(8)
        filled.write_bytes(damaged)
        number = whole[:place].count(b"\n") + 1
        message = (
            "is no file of spingrad's records" if number == 1 else rf"runs\.jsonl, line {number} is damaged"
        )
        with pytest.raises(FileFormatError, match=message):
            read_records(filled)
        assert filled.read_bytes() == damaged


def test_a_torn_last_line_is_skipped_by_readers_and_replaced_by_the_next_writer(filled):
    whole = filled.read_bytes()
    for length in range(len(FIRST_LINE), len(whole), 2):
        filled.write_bytes(whole[:length])
        complete = whole[:length].count(b"\n") - 1
        assert read_records(filled) == RECORDS[:complete]
        assert filled.read_bytes() == whole[:length]
        if length % 29 == 0:
            append_record(filled, "next")
            assert read_records(filled) == [*RECORDS[:complete], "next"]


def test_a_whole_last_line_with_a_damaged_end_is_not_taken_for_a_torn_one(filled):
    damaged = filled.read_bytes()[:-1] + b"\x0b"
    filled.write_bytes(damaged)
    for use in (read_records, lambda path: append_record(path, "next")):
        with pytest.raises(FileFormatError, match="line 6 is damaged"):
            use(filled)
    assert filled.read_bytes() == damaged


def test_a_line_without_end_is_refused_without_reading_all_of_it(path, monkeypatch):
    monkeypatch.setattr("spingrad._files.LONGEST_LINE", 1000)
    path.write_bytes(FIRST_LINE + b"x" * 5000)
    with pytest.raises(FileFormatError, match="line 2 is damaged"):
        read_records(path)
    with pytest.raises(ValueError, match="may have 1000 bytes"):
        append_record(path, "x" * 1000)


OTHERS = FOREIGN | {
    "records of a later version": lambda path: path.write_bytes(FIRST_LINE.replace(b"1", b"2")),
    "part of our first line": lambda path: path.write_bytes(FIRST_LINE[:-5]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_of_somebody_else_is_refused_by_name_and_untouched(path, kind):
    OTHERS[kind](path)
    before = path.read_bytes()
    for use in (read_records, lambda path: append_record(path, "ours")):
        with pytest.raises(FileFormatError, match=r"runs\.jsonl is no file of spingrad's records"):
            use(path)
    assert path.read_bytes() == before


def test_an_empty_file_holds_no_records_and_can_be_filled(path):
    path.touch()
    assert read_records(path) == []
    append_record(path, "first")
    assert read_records(path) == ["first"]


def check_writers_and_readers(path, each):
    done = threading.Event()

    def read():
        seen = 0
        while not done.is_set():
            now = len(read_records(path))
            assert now >= seen
            seen = now
            time.sleep(0.001)

    append_record(path, "first")
    with ThreadPoolExecutor(4) as readers:
        reading = [readers.submit(read) for _ in range(4)]
        command = [sys.executable, "-c", WRITER, _files.__file__, str(path)]
        writers = [subprocess.Popen([*command, str(writer), str(each)]) for writer in range(4)]
        assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
        done.set()
        for reader in reading:
            reader.result()
    kept = [(record["writer"], record["number"]) for record in read_records(path)[1:]]
    assert sorted(kept) == [(writer, number) for writer in range(4) for number in range(each)]


def test_four_writers_and_four_readers_lose_nothing(path):
    check_writers_and_readers(path, 50)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [500, pytest.param(2500, marks=pytest.mark.long)])
def test_all_lines_of_four_writers_are_kept(lines, path):
    check_writers_and_readers(path, lines)
