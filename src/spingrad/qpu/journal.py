"""What was sent, what it cost and what came back: one file that is journal, ledger and tape.

Every fact is a line of JSON, on disk before anything depends on it. After a crash the file says which jobs
may be out there; after the run it says what was paid; and its answers replay the run without a QPU.
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
except ImportError:  # Windows has no such locks; there, giving each run its own journal is up to its user
    fcntl = None  # type: ignore[assignment]

from spingrad.qpu.chip import Chip
from spingrad.qpu.service import Answer

MICRO = 1e-6


class BudgetError(RuntimeError):
    """The next call would cost more than is left of the run's budget; nothing was sent."""


@dataclass
class Attempt:
    """One job: what was set aside for it, and what is known of it since.

    Its larger parts, ``facts`` and ``answer``, stay in the file until they are asked for.
    """

    key: str
    label: str
    reserved_us: float
    fingerprint: list[Any]
    id: str | None = None
    charged_us: float | None = None
    void: str | None = None
    misfits: int = 0  # answers that were fetched and refused; not written down
    _line: Callable[[int], dict[str, Any]] = field(kw_only=True, repr=False)
    _reserved_at: int = field(kw_only=True, repr=False)
    _answered_at: int | None = field(default=None, kw_only=True, repr=False)

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet if the job will be paid."""
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
        """What was written down beside the job."""
        return self._line(self._reserved_at)["facts"]  # type: ignore[no-any-return]

    @property
    def answer(self) -> Answer | None:
        return None if self._answered_at is None else _answer(self._line(self._answered_at))


class Journal:
    """The jobs of a run, in a file that survives whatever happens to the process.

    A journal belongs to one process at a time; its threads may share it.

    Args:
        path: The file, made if it is not there.
        budget: Seconds of QPU time that the run may use in all, those of earlier processes included.
        read_only: Only look at it.
    """

    def __init__(self, path: str | Path, budget: float | None = None, *, read_only: bool = False) -> None:
        self.path = Path(path)
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
                        f"{self.path} is in use by another run; give each its own journal"
                    ) from None
            self._read()
            self._file.truncate(self._end)  # a line cut short by a crash was never relied upon
            if not self.run:
                self._note("run", id=secrets.token_hex(4))
                _keep_name_of(self.path)
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
        """Charged, or set aside for jobs whose cost is not known yet."""
        with self._lock:
            return self.carried_us + sum(attempt.cost_us for attempt in self.attempts.values())

    def attempts_of(self, key: str) -> list[Attempt]:
        with self._lock:
            return list(self._of_key.get(key, ()))

    def superfluous(self) -> list[Attempt]:
        """Jobs that may be out there though their call has its answer from another."""
        with self._lock:
            candidates = [attempt for attempt in self.attempts.values() if attempt.is_open]
            return [a for a in candidates if any(b.is_answered for b in self._of_key[a.key])]

    def has_answer(self, key: str, layout: str) -> bool:
        """Whether a call was answered, and was laid out like this."""
        return any(a.is_answered and a.facts["layout"] == layout for a in self.attempts_of(key))

    def carry(self, spent_us: float) -> None:
        """Count what a checkpoint says was spent, if this journal knows of less."""
        with self._lock:
            if spent_us > self.spent_us:
                self._note("carried", us=spent_us - self.spent_us)

    def reserve(self, key: str, cost_us: float, fingerprint: list[Any], **facts: Any) -> Attempt:
        """Set the cost of a job aside, and give it a label that no other job has, before it is sent."""
        with self._lock:
            spent = self.spent_us
            if self.budget_us is not None and not spent + cost_us <= self.budget_us:
                raise BudgetError(
                    f"a call of {cost_us * MICRO:.3f} s does not fit: {spent * MICRO:.3f} of "
                    f"{self.budget_us * MICRO:.3f} s of QPU time are used; raise budget, or give a fallback"
                )
            # Random, so that the copy of a journal, carried on by another run, makes labels of its own.
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
        """The job is paid, but nothing of use came of it."""
        self._note("wasted", label=attempt.label, us=attempt.reserved_us, why=why)

    def voided(self, attempt: Attempt, why: str) -> None:
        """The job never ran, so it costs nothing."""
        self._note("void", label=attempt.label, why=why)

    def keep_settings(self, settings: dict[str, Any]) -> None:
        """Write down how the solver is set, if it is set otherwise than before."""
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
                raise RuntimeError(f"{self.path} is closed or was opened to be read")
            line = json.dumps({"event": event, **facts}).encode() + b"\n"
            try:
                if self._file.write(line) != len(line):
                    raise OSError(f"{self.path} took only a part of a line; is the disk full?")
                os.fsync(self._file.fileno())
            except OSError:
                self.close()  # a line after half a line could not be read again
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
                        f"{self.path}, line {number} is not a line of a journal ({error})"
                    ) from None
                self._end += len(line)

    def _line(self, place: int) -> dict[str, Any]:
        """Read a line again: a long run's answers would fill the memory."""
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
            raise ValueError(f"no such event: {event!r}")


def _answer(fact: dict[str, Any]) -> Answer:
    raw = np.frombuffer(zlib.decompress(base64.b64decode(fact["spins"])), np.uint8)
    occurrences = np.array(fact["occurrences"], dtype=np.int64)
    bits = np.unpackbits(raw.reshape(len(occurrences), -1), axis=1)[:, : fact["qubits"]]
    return Answer((2 * bits.astype(np.int8) - 1).astype(np.int8), occurrences, fact["us"])


def _keep_name_of(path: Path) -> None:
    """A new file is only safe from a power cut once its folder is on disk too."""
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
