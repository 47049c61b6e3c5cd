"""The journal of a QPU run: nothing lost, nothing overwritten, nothing believed that does not add up."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import Mock

import numpy as np
import pytest
from file_helpers import FOREIGN

from spingrad._files import append_record
from spingrad.qpu import Chip, Journal, JournalError, journal
from spingrad.qpu.service import Answer

CHIP = Chip(
    "chip", "graph", {"qubits": [0, 1], "couplers": [[0, 1]], "topology": {"type": "pegasus", "shape": [2]}}
)
SPINS = np.array([[1, -1, 1], [-1, -1, 1]], dtype=np.int8)


def fill(path):
    """A run with jobs of every kind: answered, wasted, void, open."""
    with closing(Journal(path, budget=1.0)) as run:
        run.keep_settings({"num_reads": 4})
        run.keep_chip(CHIP)
        run.keep_layout("layout", [[[0], [1]]])
        run.carry(5.0)
        jobs = [run.reserve(f"key-{n}", 100.0 + n, [f"print {n}", 0.5], layout="layout") for n in range(4)]
        for number, job in enumerate(jobs[:3]):
            run.accepted(job, f"id-{number}")
        run.answered(jobs[0], Answer(SPINS, np.array([3, 1]), 90.5))
        run.wasted(jobs[1], "damaged")
        run.voided(jobs[2], "FAILED")
        return seen(run)


def seen(run):
    """All that a journal says."""
    jobs = [
        (job.key, job.label, job.reserved_us, job.fingerprint, job.id, job.charged_us, job.void, job.facts)
        for job in run.attempts.values()
    ]
    answers = [job.answer and [part.tolist() for part in job.answer[:2]] for job in run.attempts.values()]
    chips = [(chip.name, dict(chip.properties)) for chip in run.chips.values()]
    return jobs, answers, chips, run.layouts, run.settings, run.run, run.spent_us


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.journal"


def change(path, *statements):
    """Change a journal as a program with bugs would, with sums that are right again."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(*statement)
        before, number = b"", 0
        rows = database.execute("SELECT number, event, facts, data FROM events ORDER BY number").fetchall()
        database.execute("DELETE FROM events")
        for number, (_, event, facts, data) in enumerate(rows, 1):
            before = journal._sum(before, event, facts, data)
            database.execute(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?)", (number, event, facts, data, before)
            )
        database.execute("UPDATE ledger SET events = ?, sum = ?", (number, before))


def test_a_journal_says_the_same_when_it_is_opened_again(path):
    before = fill(path)
    assert before[-1] == 5 + 90.5 + 101 + 103
    content = path.read_bytes()
    assert seen(Journal(path, read_only=True)) == before
    with closing(Journal(path)) as again:
        assert seen(again) == before
        again.reserve("key", 1.0, [])
    assert path.read_bytes() != content


def test_reading_changes_nothing_and_needs_no_lock(path):
    with closing(Journal(path)) as run:
        files = {file: file.read_bytes() for file in path.parent.iterdir()}
        assert Journal(path, read_only=True).run == run.run
        assert {file: file.read_bytes() for file in path.parent.iterdir()} == files


def content_of(path):
    """What a journal says, or the error."""
    try:
        return seen(Journal(path, read_only=True))
    except JournalError as error:
        return str(error)


def test_every_bit_flip_is_reported_or_changes_nothing_that_is_read(path):
    expected, whole = fill(path), path.read_bytes()
    used = np.flatnonzero(np.frombuffer(whole, np.uint8))  # most of a small database is empty
    rng = np.random.default_rng(0)
    reported = 0
    for place in [*rng.choice(used, 350), *rng.integers(len(whole), size=50)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        content = content_of(path)
        if content != expected:
            assert str(path) in content
            reported += 1
            with pytest.raises(JournalError):
                Journal(path)
        assert path.read_bytes() == damaged
    assert reported > 300


def test_every_truncation_is_reported(path):
    fill(path)
    whole = path.read_bytes()
    for length in [*range(1, len(whole), len(whole) // 100), len(whole) - 1]:
        path.write_bytes(whole[:length])
        for read_only in (True, False):
            with pytest.raises(JournalError, match=r"run\.journal"):
                Journal(path, read_only=read_only)
        assert path.read_bytes() == whole[:length]


@pytest.mark.parametrize("kind", [*FOREIGN, "records", "folder"])
def test_a_file_of_somebody_else_is_refused_by_name_and_untouched(path, kind):
    if kind == "folder":
        path.mkdir()
    elif kind == "records":
        append_record(path.with_name("records"), "ours, and no journal")
        path.with_name("records").rename(path)
        path.with_name(".lock").unlink()
    else:
        FOREIGN[kind](path)
    before = None if kind == "folder" else path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(JournalError, match=r"run\.journal is not the journal of a QPU run"):
            Journal(path, read_only=read_only)
    assert before is None or path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_journal_in_use_is_refused_under_another_name_of_it_too(path):
    link, folder = path.with_name("link"), path.parent / "folder"
    folder.symlink_to(path.parent)
    with closing(Journal(path)):
        link.symlink_to(path)
        for name in (path, link, folder / "run.journal", folder / "link"):
            with pytest.raises(RuntimeError, match="is in use by another run"):
                Journal(name)
    Journal(link).close()


def test_an_emptied_journal_is_not_taken_for_a_new_one(path):
    path.touch()
    for read_only in (True, False):
        with pytest.raises(JournalError, match="is empty, and a journal never is"):
            Journal(path, read_only=read_only)
    assert not path.read_bytes()
    assert list(path.parent.iterdir()) == [path]


def test_a_crash_while_a_journal_is_created_leaves_no_file_and_the_next_try_succeeds(path, monkeypatch):
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                Journal(path, 1.0)
        assert not path.exists()
    Journal(path, 1.0).close()


def test_a_journal_of_another_version_is_refused(path):
    fill(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(JournalError, match="version 2; this release reads version 1"):
        Journal(path)


FIRST = "(SELECT min(number) FROM events WHERE event = 'reserve')"
FORGED = {
    "negative": (f"UPDATE events SET facts = json_set(facts, '$.us', -900e6) WHERE number = {FIRST}",),
    "not finite": ("UPDATE events SET facts = replace(facts, '90.5', 'Infinity')",),
    "no number": (f"UPDATE events SET facts = json_set(facts, '$.us', 'free') WHERE number = {FIRST}",),
    "never reserved": (f"DELETE FROM events WHERE number = {FIRST}",),
    "there twice": (
        f"INSERT INTO events SELECT 100, event, facts, data, sum FROM events WHERE number = {FIRST}",
    ),
    "already settled": (
        "INSERT INTO events SELECT 100, event, facts, data, sum FROM events WHERE event = 'answer'",
    ),
    "its ledger says": ("UPDATE events SET facts = replace(facts, '90.5', '80.5')",),
    "unknown event": ("UPDATE events SET event = 'gift' WHERE event = 'void'",),
    "its tables": ("CREATE TABLE more (text)",),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_ledger_that_does_not_add_up_is_an_error(path, kind):
    fill(path)
    change(path, FORGED[kind])
    expected = {"not finite": "finite and not negative", "negative": "not negative", "no number": "damaged"}
    with pytest.raises(JournalError, match=expected.get(kind, kind)):
        Journal(path, read_only=True)


def test_a_changed_deleted_or_added_event_is_noticed(path):
    fill(path)
    whole = path.read_bytes()
    for statement in (
        "UPDATE events SET facts = replace(facts, '90.5', '80.5')",
        "DELETE FROM events WHERE number = (SELECT max(number) FROM events)",
        "DELETE FROM events WHERE number = 3",
        "INSERT INTO events SELECT 100, event, facts, data, sum FROM events WHERE number = 2",
        "UPDATE ledger SET spent_us = 0",
        "DELETE FROM ledger",
    ):
        path.write_bytes(whole)
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute(statement)
        with pytest.raises(JournalError, match="damaged"):
            Journal(path, read_only=True)


@pytest.mark.parametrize("event", ["chip", "answer"])
def test_a_compressed_bomb_is_not_inflated(path, event, monkeypatch):
    fill(path)
    change(path, ("UPDATE events SET data = ? WHERE event = ?", (zlib.compress(bytes(1 << 25)), event)))
    monkeypatch.setattr(journal, "LARGEST", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(JournalError, match="cut short or larger"):
            seen(Journal(path, read_only=True))
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_an_event_of_more_than_half_the_limit_of_the_database_is_refused(path, monkeypatch):
    monkeypatch.setattr(journal, "LARGEST", 2**20)
    with closing(Journal(path)) as run:
        assert run.spent_us == 0
        with pytest.raises(ValueError, match="an event may have 524288 bytes"):
            run.keep_layout("too large", ["x" * 2**19])
        run.keep_layout("largest", ["x" * (2**19 - 100)])
    assert [*Journal(path, read_only=True).layouts] == ["largest"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_journal_that_was_deleted_or_replaced_is_noticed_at_the_next_write(path, replaced):
    with closing(Journal(path)) as run:
        shutil.copy(path, path.with_name("copy"))
        path.unlink()
        if replaced:
            path.with_name("copy").rename(path)
        with pytest.raises(JournalError, match="was deleted or replaced"):
            run.reserve("key", 1.0, [])
        assert not run.attempts
        assert path.exists() == replaced


def test_a_write_of_another_program_is_noticed(path):
    with closing(Journal(path)) as run:
        change(path, ("DELETE FROM events",))
        with pytest.raises(OSError, match="another program has changed it"):
            run.reserve("key", 1.0, [])


CRASH = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA cache_size = 1")
database.execute("BEGIN IMMEDIATE")
for number in range(1000, 1200):
    database.execute("INSERT INTO events VALUES (?, 'void', '{}', zeroblob(3000), zeroblob(32))", (number,))
os._exit(0)
"""


def test_a_write_that_a_crash_interrupted_is_taken_back_by_the_next_writer_only(path):
    expected = fill(path)
    subprocess.run([sys.executable, "-c", CRASH, str(path)], check=True)
    rest = path.with_name("run.journal-journal")
    torn = path.read_bytes(), rest.read_bytes()
    with pytest.raises(JournalError, match="a crash interrupted"):
        Journal(path, read_only=True)
    assert (path.read_bytes(), rest.read_bytes()) == torn
    Journal(path).close()
    assert not rest.exists()
    assert seen(Journal(path, read_only=True)) == expected


def test_what_is_left_of_a_deleted_journal_is_not_written_into_a_new_one(path):
    path.with_name("run.journal-journal").write_bytes(b"left over")
    with pytest.raises(JournalError, match=r"run\.journal-journal is left over"):
        Journal(path)
    assert not path.exists()


def test_an_event_is_on_disk_when_the_call_returns(path):
    with closing(Journal(path)) as run:
        assert run._database.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert run._database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        run.reserve("key", 1.0, [])
        shutil.copy(path, path.with_name("copy"))  # what a power cut would leave
    assert list(Journal(path.with_name("copy"), read_only=True)._of_key) == ["key"]


READER = """
import sqlite3, sys
for _ in range(200):
    database = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
    database.execute("SELECT * FROM events").fetchall()
    database.close()
"""


def test_readers_and_threads_that_write_do_not_disturb_each_other(path):
    with closing(Journal(path)) as run, ThreadPoolExecutor(4) as threads:
        other = subprocess.Popen([sys.executable, "-c", READER, str(path)])
        list(threads.map(lambda number: run.reserve(f"key-{number}", 1.0, []), range(40)))
        assert len(Journal(path, read_only=True).attempts) == 40
        assert other.wait() == 0


def test_the_file_of_a_new_journal_is_plain(path):
    """Anyone can read it with SQLite's own tools."""
    fill(path)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        events = database.execute("SELECT event, facts FROM events ORDER BY number").fetchall()
    assert events[0][0] == "run"
    assert json.loads(events[-1][1])["why"] == "FAILED"
