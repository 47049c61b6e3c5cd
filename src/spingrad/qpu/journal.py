"""The journal of a run: one file with every job, its cost and its answer.

Every event is on disk before anything depends on it. After a crash the file says which jobs may still be at
the service; after the run it says what was paid; and its answers are enough to replay the run without a QPU.

The file is an SQLite database. Each event has a checksum over itself and all events before it, and the table
``ledger`` holds their number and the sum of their costs. So a changed, missing or doubled event is noticed
when the file is opened.
"""

import hashlib
import json
import math
import os
import secrets
import sqlite3
import threading
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from spingrad._files import FileFormatError, write_atomically
from spingrad.qpu.chip import Chip
from spingrad.qpu.service import Answer

MICRO = 1e-6
APPLICATION_ID = 0x5370_4A6F  # "SpJo", in the header of the file
VERSION = 1
TABLES = (
    "CREATE TABLE events (number INTEGER PRIMARY KEY, event TEXT NOT NULL, facts TEXT NOT NULL, "
    "data BLOB NOT NULL, sum BLOB NOT NULL)",
    "CREATE TABLE ledger (events INTEGER NOT NULL, spent_us REAL NOT NULL, sum BLOB NOT NULL)",
)
LARGEST = 32 * 2**20  # bytes of one event, and of its data once inflated
LARGEST_FILE = 2**36  # bytes of a journal
PATIENCE = 60.0  # seconds to wait for a program that reads the file


class BudgetError(RuntimeError):
    """The next call would cost more than the rest of the run's budget; nothing was sent.

    Example:
        >>> import tempfile
        >>> from spingrad.qpu import QPUSolver
        >>> from spingrad.testing import random_problem
        >>> from spingrad.testing.sapi import Sapi
        >>> with tempfile.TemporaryDirectory() as folder, Sapi(size=4) as sapi, sapi.configured():
        ...     with QPUSolver(f"{folder}/run.journal", budget=0.001) as solver:
        ...         solver.solve(random_problem(r=8, n=4, m=2, seed=0))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        spingrad.qpu.journal.BudgetError: a call of 0.016 s does not fit the budget: ...
    """


class JournalError(FileFormatError):
    """A journal is damaged, was deleted during the run, or is no journal; the file was left as it is.

    Example:
        >>> Journal(__file__, read_only=True)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        spingrad.qpu.journal.JournalError: ... is not the journal of a QPU run. It was not changed; ...
    """


@dataclass
class Attempt:
    """One job: the cost that was reserved for it, and what is known about it since.

    The larger parts, ``facts`` and ``answer``, are read from the file when they are needed.
    """

    key: str
    label: str
    reserved_us: float
    fingerprint: list[Any]
    id: str | None = None
    charged_us: float | None = None
    void: str | None = None
    misfits: int = 0  # answers that were fetched and rejected; not in the file
    _journal: "Journal" = field(kw_only=True, repr=False, compare=False)
    _reserved_at: int = field(kw_only=True, repr=False)
    _answered_at: int | None = field(default=None, kw_only=True, repr=False)

    @property
    def is_open(self) -> bool:
        """Whether it is still unknown if the job will be charged."""
        return self.void is None and self.charged_us is None

    @property
    def is_answered(self) -> bool:
        return self._answered_at is not None

    @property
    def cost_us(self) -> float:
        if self.void is not None:
            return 0.0
        return self.reserved_us if self.charged_us is None else self.charged_us

    @property
    def facts(self) -> dict[str, Any]:
        """What was written to the journal together with the job."""
        return self._journal._event(self._reserved_at)[0]["facts"]  # type: ignore[no-any-return]

    @property
    def answer(self) -> Answer | None:
        if self._answered_at is None:
            return None
        with _reading(self._journal.path):
            return _answer(*self._journal._event(self._answered_at))


class Journal:
    """The jobs of a run, in a file that survives a crash of the process.

    Only one process at a time may open a journal for writing; its threads may share it. Others may read it
    meanwhile.

    Args:
        path: The file, created if it does not exist.
        budget: Seconds of QPU time that the run may use in total, including earlier processes of the run.
        read_only: Only read the file.

    Raises:
        JournalError: The file is damaged or is no journal; it was left as it is. The next write raises it too
            if the file was deleted or replaced meanwhile.
        RuntimeError: Another process has the journal open for writing.
        OSError: The file could not be written. The journal is then closed; it holds all earlier events.

    Example:
        >>> import tempfile
        >>> from spingrad.qpu import QPUSolver
        >>> from spingrad.testing import random_problem
        >>> from spingrad.testing.sapi import Sapi
        >>> with tempfile.TemporaryDirectory() as folder, Sapi(size=4) as sapi, sapi.configured():
        ...     with QPUSolver(f"{folder}/run.journal", budget=1.0) as solver:
        ...         _ = solver.solve(random_problem(r=8, n=4, m=2, seed=0))
        ...     journal = Journal(f"{folder}/run.journal", read_only=True)
        ...     len(journal.attempts), journal.spent_us == sapi.charged_us
        (1, True)
    """

    def __init__(self, path: str | Path, budget: float | None = None, *, read_only: bool = False) -> None:
        self.path, self.read_only = Path(path), read_only
        self.budget_us = None if budget is None else budget / MICRO
        self.attempts: dict[str, Attempt] = {}
        self.chips: dict[str, Chip] = {}
        self.layouts: dict[str, list[Any]] = {}
        self.run = ""
        self.settings: dict[str, Any] = {}
        self.carried_us = 0.0
        self._of_key: dict[str, list[Attempt]] = {}
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None
        self._events, self._sum = 0, b""
        if read_only:
            _check_kind(self.path)
            with _reading(self.path), closing(_connected(self.path, "ro")) as database:
                self._read(database)
        else:
            self._open()

    def _open(self) -> None:
        if self.path.exists():
            _check_kind(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._run_lock = FileLock(f"{os.path.realpath(self.path)}.lock", timeout=0, thread_local=False)
        try:
            self._run_lock.acquire()
        except Timeout:
            raise RuntimeError(
                f"{self.path} is in use by another run; give each run its own journal"
            ) from None
        try:
            if not self.path.exists():
                _create(self.path)
            self._place = _place(self.path)
            with _reading(self.path):
                self._database = _connected(self.path, "rw")
                self._read(self._database)
            if not self.run:
                self._note("run", id=secrets.token_hex(4))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None
            if not self.read_only:
                self._run_lock.release()

    @property
    def spent_us(self) -> float:
        """Microseconds charged, or reserved for jobs whose cost is not known yet."""
        with self._lock:
            return self.carried_us + sum(attempt.cost_us for attempt in self.attempts.values())

    def attempts_of(self, key: str) -> list[Attempt]:
        with self._lock:
            return list(self._of_key.get(key, ()))

    def superfluous(self) -> list[Attempt]:
        """Jobs that may still be at the service although another job has answered their call."""
        with self._lock:
            candidates = [attempt for attempt in self.attempts.values() if attempt.is_open]
            return [a for a in candidates if any(b.is_answered for b in self._of_key[a.key])]

    def has_answer(self, key: str, layout: str) -> bool:
        """Whether a call with this layout was answered."""
        return any(a.is_answered and a.facts["layout"] == layout for a in self.attempts_of(key))

    def carry(self, spent_us: float) -> None:
        """Count what a checkpoint says was spent, if it is more than this journal knows of."""
        with self._lock:
            if spent_us > self.spent_us:
                self._note("carried", us=spent_us - self.spent_us)

    def reserve(self, key: str, cost_us: float, fingerprint: list[Any], **facts: Any) -> Attempt:
        """Before a job is sent, reserve its cost and give it a label that no other job has."""
        with self._lock:
            spent = self.spent_us
            if self.budget_us is not None and not spent + cost_us <= self.budget_us:
                raise BudgetError(
                    f"a call of {cost_us * MICRO:.3f} s does not fit the budget: {spent * MICRO:.3f} of "
                    f"{self.budget_us * MICRO:.3f} s of QPU time are used; raise budget, or give a fallback"
                )
            # Random, so that a run that continues a copy of this journal never uses the same labels.
            label = f"spingrad-{self.run}/{key}/{secrets.token_hex(4)}"
            self._note("reserve", label=label, key=key, us=cost_us, fingerprint=fingerprint, facts=facts)
            return self.attempts[label]

    def accepted(self, attempt: Attempt, job: str) -> None:
        self._note("accepted", label=attempt.label, id=job)

    def answered(self, attempt: Attempt, answer: Answer) -> None:
        bits = np.packbits(answer.spins > 0, axis=1)
        self._note(
            "answer",
            zlib.compress(bits.tobytes()),
            label=attempt.label,
            us=attempt.reserved_us if answer.charged_us is None else answer.charged_us,
            qubits=answer.spins.shape[1],
            occurrences=answer.occurrences.tolist(),
        )

    def wasted(self, attempt: Attempt, why: str) -> None:
        """The job is charged, but gave no usable answer."""
        self._note("wasted", label=attempt.label, us=attempt.reserved_us, why=why)

    def voided(self, attempt: Attempt, why: str) -> None:
        """The job never ran, so it is not charged."""
        self._note("void", label=attempt.label, why=why)

    def keep_settings(self, settings: dict[str, Any]) -> None:
        """Write down the settings of the solver, if they have changed."""
        with self._lock:
            if settings != self.settings:
                self._note("settings", settings=settings)

    def keep_chip(self, chip: Chip) -> None:
        """Write the chip down once, so that the run can be replayed without it."""
        with self._lock:
            if chip.key not in self.chips:
                definition = json.dumps({"graph_id": chip.graph_id, "properties": dict(chip.properties)})
                self._note("chip", zlib.compress(definition.encode()), chip=chip.key, name=chip.name)

    def keep_layout(self, name: str, cliques: Sequence[Any]) -> None:
        with self._lock:
            if name not in self.layouts:
                self._note("layout", layout=name, cliques=list(cliques))

    def _note(self, event: str, data: bytes = b"", **facts: Any) -> None:
        with self._lock:
            if self._database is None:
                raise RuntimeError(f"{self.path} is closed, or was opened with read_only=True")
            if _place(self.path) != self._place:
                raise JournalError(
                    f"{self.path} was deleted or replaced while this run was using it; nothing was written. "
                    "Put it back and start the run again: without it, jobs may be paid twice"
                )
            text = json.dumps(facts)
            if len(text) + len(data) > LARGEST // 2:
                raise ValueError(f"an event may have {LARGEST // 2} bytes, got {len(text) + len(data)}")
            fact, number = json.loads(text), self._events + 1
            self._check(event, fact)
            spent = self.spent_us + self._added_us(event, fact)
            own = _sum(self._sum, event, text, data)
            try:
                self._database.execute("BEGIN IMMEDIATE")
                row = (number, event, text, data, own)
                self._database.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", row)
                update = "UPDATE ledger SET events = ?, spent_us = ?, sum = ? WHERE sum = ?"
                if self._database.execute(update, (number, spent, own, self._sum)).rowcount != 1:
                    raise sqlite3.IntegrityError("another program has changed it")
                self._database.execute("COMMIT")
                self._apply(event, fact, data, number)
                self._events, self._sum = number, own
            except BaseException as error:  # Ctrl-C too: this object may then know less than the file
                self.close()  # this takes back a transaction that was begun
                if isinstance(error, sqlite3.Error):
                    raise OSError(f"{self.path} could not be written: {error}") from error
                raise

    def _read(self, database: sqlite3.Connection) -> None:
        """Take over all events of the file, and check them."""
        database.execute("BEGIN")
        if database.execute("PRAGMA integrity_check(1)").fetchall() != [("ok",)]:
            raise ValueError("the database is malformed")
        if tuple(database.execute("SELECT sql FROM sqlite_master ORDER BY name")) != tuple(
            (t,) for t in TABLES
        ):
            raise ValueError("its tables are not those of a journal")
        for number, event, text, data, own in database.execute("SELECT * FROM events ORDER BY number"):
            if number != self._events + 1 or own != _sum(self._sum, event, text, data):
                raise ValueError(f"event {self._events + 1} is missing or its checksum does not match")
            fact = json.loads(text)
            self._check(event, fact)
            self._apply(event, fact, data, number)
            self._events, self._sum = number, own
        ((events, spent_us, last),) = database.execute("SELECT * FROM ledger")
        agrees = math.isclose(spent_us, self.spent_us, rel_tol=1e-9, abs_tol=1e-3)
        if (events, last) != (self._events, self._sum) or not agrees:
            raise ValueError(
                f"its ledger says {events} events and {spent_us} µs, its events are {self._events} and cost "
                f"{self.spent_us} µs"
            )
        database.execute("COMMIT")

    def _event(self, number: int) -> tuple[dict[str, Any], bytes]:
        """Read an event again from the file, since the answers of a long run would fill the memory."""
        select, place = "SELECT facts, data FROM events WHERE number = ?", (number,)
        with _reading(self.path), self._lock:
            if self._database is not None:
                ((text, data),) = self._database.execute(select, place)
            else:
                with closing(_connected(self.path, "ro")) as database:
                    ((text, data),) = database.execute(select, place)
            return json.loads(text), data

    def _check(self, event: str, fact: dict[str, Any]) -> None:
        """Raise an error if an event cannot follow on those before it."""
        if "us" in fact and not 0 <= fact["us"] < math.inf:
            raise ValueError(f"a cost must be finite and not negative, got {fact['us']} µs")
        if event in ("accepted", "answer", "wasted", "void"):
            if fact["label"] not in self.attempts:
                raise ValueError(f"{event} of a job that was never reserved: {fact['label']}")
            if not self.attempts[fact["label"]].is_open:
                raise ValueError(f"{event} of a job that is already settled: {fact['label']}")
        known: dict[str, Collection[str]] = {
            "reserve": self.attempts,
            "chip": self.chips,
            "layout": self.layouts,
        }
        name = fact.get("label" if event == "reserve" else event)
        if name in known.get(event, ()) or (event == "run" and self.run):
            raise ValueError(f"{event} is there twice: {name}")

    def _added_us(self, event: str, fact: dict[str, Any]) -> float:
        """What an event adds to the cost of the run."""
        new: float = fact.get("us", 0.0)
        settled = event in ("answer", "wasted", "void")
        return new - self.attempts[fact["label"]].cost_us if settled else new

    def _apply(self, event: str, fact: dict[str, Any], data: bytes, number: int) -> None:
        if event == "run":
            self.run = fact["id"]
        elif event == "settings":
            self.settings = fact["settings"]
        elif event == "chip":
            definition = json.loads(_inflated(data, LARGEST))
            self.chips[fact["chip"]] = Chip(fact["name"], definition["graph_id"], definition["properties"])
        elif event == "layout":
            self.layouts[fact["layout"]] = fact["cliques"]
        elif event == "carried":
            self.carried_us += fact["us"]
        elif event == "reserve":
            own = (fact[name] for name in ("key", "label", "us", "fingerprint"))
            attempt = Attempt(*own, _journal=self, _reserved_at=number)
            self.attempts[attempt.label] = attempt
            self._of_key.setdefault(attempt.key, []).append(attempt)
        elif event == "accepted":
            self.attempts[fact["label"]].id = fact["id"]
        elif event == "void":
            self.attempts[fact["label"]].void = fact["why"]
        elif event in ("answer", "wasted"):
            attempt = self.attempts[fact["label"]]
            attempt.charged_us = fact["us"]
            if event == "answer":
                attempt._answered_at = number
        else:
            raise ValueError(f"unknown event {event!r}")


def _answer(fact: dict[str, Any], data: bytes) -> Answer:
    occurrences = np.array(fact["occurrences"], dtype=np.int64)
    width = -(-fact["qubits"] // 8)  # bytes of one sample
    size = len(occurrences) * width
    raw = np.frombuffer(_inflated(data, min(size, LARGEST)), np.uint8)
    bits = np.unpackbits(raw.reshape(len(occurrences), width), axis=1)[:, : fact["qubits"]]
    return Answer((2 * bits.astype(np.int8) - 1).astype(np.int8), occurrences, fact["us"])


def _inflated(data: bytes, most: int) -> bytes:
    """Decompressed bytes, of which there may be at most ``most``."""
    stream = zlib.decompressobj()
    content = stream.decompress(data, most + 1)
    if len(content) > most or not stream.eof:
        raise ValueError(f"compressed data is cut short or larger than {most} bytes")
    return content


def _sum(before: bytes, event: str, facts: str, data: bytes) -> bytes:
    """The checksum of an event, which includes the one of the event before it."""
    digest = hashlib.sha256(before)
    for part in (event.encode(), facts.encode(), data):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _place(path: Path) -> tuple[int, int] | None:
    """Which file has this name now."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _create(path: Path) -> None:
    leftover = path.with_name(f"{path.name}-journal")
    if leftover.exists():  # SQLite would write its content into the new file
        raise JournalError(f"{leftover} is left over from a database that is gone; move it away first")
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {VERSION}")
        for table in TABLES:
            database.execute(table)
        database.execute("INSERT INTO ledger VALUES (0, 0.0, ?)", (b"",))
        write_atomically(path, database.serialize())


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    """The open database; ``mode`` is SQLite's "ro" or "rw"."""
    database = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        timeout=PATIENCE,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
    )
    try:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
        database.execute("PRAGMA trusted_schema = OFF")
        (size,) = database.execute("PRAGMA page_size").fetchone()
        database.execute(f"PRAGMA max_page_count = {LARGEST_FILE // size}")
        database.execute("PRAGMA synchronous = EXTRA")  # FULL may lose the last event in a power cut
    except BaseException:
        database.close()
        raise
    return database


def _check_kind(path: Path) -> None:
    """Raise an error if a file is not a journal of this version; it is only read, without any lock."""
    if path.is_file() and not path.stat().st_size:  # a new journal is never empty, see _create
        raise JournalError(
            f"{path} is empty, and a journal never is. If it was the journal of a run, restore it from a "
            "copy: without it, jobs may be paid twice. To start a new run, delete it"
        )
    if (size := path.stat().st_size) > LARGEST_FILE:  # SQLite takes memory for each page of a file
        raise JournalError(f"{path} has {size:,} bytes, and a journal at most {LARGEST_FILE:,}")
    mark = version = 0
    if path.is_file():
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        try:
            with closing(sqlite3.connect(address, uri=True)) as database:
                ((mark,),) = database.execute("PRAGMA application_id")
                ((version,),) = database.execute("PRAGMA user_version")
        except (sqlite3.Error, UnicodeDecodeError):  # the second if SQLite's own message quotes the file
            mark = 0
    if mark != APPLICATION_ID:
        raise JournalError(
            f"{path} is not the journal of a QPU run. It was not changed; move it away or choose another path"
        )
    if version != VERSION:
        raise JournalError(f"{path} is a journal of version {version}; this release reads version {VERSION}")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Let every error while reading name the file and say what to do."""
    try:
        yield
    except (
        sqlite3.Error,
        zlib.error,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code == sqlite3.SQLITE_READONLY_ROLLBACK:
            raise JournalError(
                f"{path} ends with a write that a crash interrupted. It was not changed; continue the run, "
                "or open and close the journal for writing: that takes the write back"
            ) from None
        if code & 0xFF == sqlite3.SQLITE_BUSY:
            raise OSError(f"{path} was locked by another program for {PATIENCE:.0f} s") from None
        raise JournalError(
            f"{path} is damaged: {error}. It was not changed; restore it from a copy before the run goes on"
        ) from None
