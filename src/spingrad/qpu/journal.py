"""The journal of a run: one file with every job, its cost and its answer.

Every event is a line of JSON that is on disk before anything depends on it. After a crash the file says
which jobs may still be at the service; after the run it says what was paid; and its answers are enough to
replay the run without a QPU.
"""

import base64
import json
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

try:
    import fcntl
except ImportError:  # Windows has no such locks; there, the user must give each run its own journal
    fcntl = None  # type: ignore[assignment]

from spingrad.qpu.chip import Chip
from spingrad.qpu.service import Answer

MICRO = 1e-6


class BudgetError(RuntimeError):
    """The next call would cost more than the rest of the run's budget; nothing was sent."""


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
    _line: Callable[[int], dict[str, Any]] = field(kw_only=True, repr=False)
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
        return self._line(self._reserved_at)["facts"]  # type: ignore[no-any-return]

    @property
    def answer(self) -> Answer | None:
        return None if self._answered_at is None else _answer(self._line(self._answered_at))


class Journal:
    """The jobs of a run, in a file that survives a crash of the process.

    Only one process at a time may open a journal for writing; its threads may share it.

    Args:
        path: The file, created if it does not exist.
        budget: Seconds of QPU time that the run may use in total, including earlier processes of the run.
        read_only: Only read the file.
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
        self._file: IO[bytes] | None = None
        self._end = 0
        if read_only:
            self._read()
        else:
            self._open()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115, it stays open
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise RuntimeError(
                        f"{self.path} is in use by another run; give each run its own journal"
                    ) from None
            self._read()
            self._file.truncate(self._end)  # nothing depends on a line that a crash cut short
            if not self.run:
                self._note("run", id=secrets.token_hex(4))
                _flush_folder_of(self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

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
            label=attempt.label,
            us=attempt.reserved_us if answer.charged_us is None else answer.charged_us,
            qubits=answer.spins.shape[1],
            occurrences=answer.occurrences.tolist(),
            spins=base64.b64encode(zlib.compress(bits.tobytes())).decode(),
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
                packed = base64.b64encode(zlib.compress(definition.encode())).decode()
                self._note("chip", chip=chip.key, name=chip.name, definition=packed)

    def keep_layout(self, name: str, cliques: Sequence[Any]) -> None:
        with self._lock:
            if name not in self.layouts:
                self._note("layout", layout=name, cliques=list(cliques))

    def _note(self, event: str, **facts: Any) -> None:
        with self._lock:
            if self._file is None:
                raise RuntimeError(f"{self.path} is closed, or was opened with read_only=True")
            line = json.dumps({"event": event, **facts}).encode() + b"\n"
            try:
                if self._file.write(line) != len(line):
                    raise OSError(f"only part of a line could be written to {self.path}; is the disk full?")
                os.fsync(self._file.fileno())
            except OSError:
                self.close()  # another line after half a line would make the file unreadable
                raise
            self._apply(json.loads(line), self._end)
            self._end += len(line)

    def _read(self) -> None:
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._apply(json.loads(line), self._end)
                except (ValueError, KeyError, TypeError, zlib.error) as error:
                    raise ValueError(
                        f"{self.path} is not a journal: line {number} cannot be read ({error})"
                    ) from None
                self._end += len(line)

    def _line(self, place: int) -> dict[str, Any]:
        """Read a line again from the file, since the answers of a long run would fill the memory."""
        with open(self.path, "rb") as file:
            file.seek(place)
            return json.loads(file.readline())  # type: ignore[no-any-return]

    def _apply(self, fact: dict[str, Any], place: int) -> None:
        event = fact["event"]
        if event == "run":
            self.run = fact["id"]
        elif event == "settings":
            self.settings = fact["settings"]
        elif event == "chip":
            definition = json.loads(zlib.decompress(base64.b64decode(fact["definition"])))
            self.chips[fact["chip"]] = Chip(fact["name"], definition["graph_id"], definition["properties"])
        elif event == "layout":
            self.layouts[fact["layout"]] = fact["cliques"]
        elif event == "carried":
            self.carried_us += fact["us"]
        elif event == "reserve":
            own = (fact[name] for name in ("key", "label", "us", "fingerprint"))
            attempt = Attempt(*own, _line=self._line, _reserved_at=place)
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
                attempt._answered_at = place
        else:
            raise ValueError(f"unknown event {event!r}")


def _answer(fact: dict[str, Any]) -> Answer:
    raw = np.frombuffer(zlib.decompress(base64.b64decode(fact["spins"])), np.uint8)
    occurrences = np.array(fact["occurrences"], dtype=np.int64)
    bits = np.unpackbits(raw.reshape(len(occurrences), -1), axis=1)[:, : fact["qubits"]]
    return Answer((2 * bits.astype(np.int8) - 1).astype(np.int8), occurrences, fact["us"])


def _flush_folder_of(path: Path) -> None:
    """Flush the folder of a new file: without that, a power cut may lose the file's name."""
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
