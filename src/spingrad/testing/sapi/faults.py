"""Faults on demand: which kind, at which stage, how often."""

import random
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spingrad.testing.sapi.wire import from_base64, to_base64

TRANSPORT = {
    "status": "an HTTP error `code`, with `headers` and `message`",
    "redirect": "307 to the same path at `to`",
    "reset": "the connection is reset; the request is not processed",
    "reset_after": "the request is processed, but the connection is reset instead of a reply",
    "slow": "the request is processed and the reply sent after `seconds`",
    "drip": "the request is processed, and the reply sent byte by byte for up to `seconds`, then reset",
    "garbage": "HTML of a proxy under the right media type; the request is not processed",
    "media": "a reply of the wrong media type; the request is not processed",
    "empty": "an empty list; the request is not processed",
    "truncate": "the request is processed, but the reply is cut in half",
}
ANSWER = {
    "bad_b64": "solutions that are not base64",
    "short": "the last byte of the solutions is missing",
    "flip": "bits of the solutions flipped",
    "nan": "energies that are NaN",
    "missing": "the field `key` is missing",
    "format": "an unknown format",
    "mutate": "one to three bytes changed at random",
}
STAGES: dict[str, Mapping[str, str]] = {
    "solvers": TRANSPORT,
    "submit": {**TRANSPORT, "late": "the connection is reset, and the job is accepted `seconds` later"},
    "poll": TRANSPORT,
    "load": TRANSPORT,
    "list": TRANSPORT,
    "cancel": TRANSPORT,
    "upload": TRANSPORT,
    "batch": {"error": "one problem of a submission is refused with `code` and `message`"},
    "run": {
        "FAILED": "the job fails with `message`",
        "CANCELLED": "the job is cancelled by the service",
        "stuck": "the job never finishes",
    },
    "answer": ANSWER,  # of the QPU, as stored, in every reply
    "transit": ANSWER,  # in one reply only; `mutate` changes any bytes of its body
}
ARRAYS = ("solutions", "energies", "active_variables", "num_occurrences")


@dataclass(frozen=True)
class Fault:
    """A kind of fault at a stage, with its details.

    Example:
        >>> Fault("poll", "status", code=503).message
        'injected'
        >>> Fault("run", "reset")
        Traceback (most recent call last):
        ValueError: a fault of stage run must be one of FAILED, CANCELLED, stuck, got 'reset'
    """

    stage: str
    kind: str
    code: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = "injected"
    seconds: float = 1.0
    to: str = ""
    key: str = "energies"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {self.stage!r}")
        if self.kind not in STAGES[self.stage]:
            kinds = ", ".join(STAGES[self.stage])
            raise ValueError(f"a fault of stage {self.stage} must be one of {kinds}, got {self.kind!r}")

    def damaged(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A copy of the answer with this fault."""
        if self.kind == "missing":
            return {name: value for name, value in answer.items() if name != self.key}
        rng = random.Random(self.seed)
        solutions = from_base64(answer["solutions"], "u1")
        change: dict[str, str] = {}
        match self.kind:
            case "bad_b64":
                change = {"solutions": "!!not base64!!"}
            case "short":
                change = {"solutions": to_base64(solutions[:-1], "u1")}
            case "flip":
                mask = np.array([rng.randint(1, 255) for _ in solutions], dtype=np.uint8)
                change = {"solutions": to_base64(solutions ^ mask, "u1")}
            case "nan":
                change = {"energies": to_base64(np.nan * from_base64(answer["energies"], "<f8"), "<f8")}
            case "format":
                change = {"format": "zz"}
            case "mutate":
                name = rng.choice([name for name in ARRAYS if name in answer])
                array = mutated(from_base64(answer[name], "u1").tobytes(), rng)
                change = {name: to_base64(np.frombuffer(array, "u1"), "u1")}
        return {**answer, **change}


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A copy of the data with one to three bytes changed."""
    changed = bytearray(data)
    for place in rng.sample(range(len(data)), min(rng.randint(1, 3), len(data))):
        changed[place] ^= rng.randint(1, 255)
    return bytes(changed)


class Faults:
    """The faults that are still to come, and a count of those that have occurred."""

    def __init__(self, seed: int) -> None:
        self.fired: Counter[tuple[str, str]] = Counter()
        self._rng = random.Random(seed)
        self._plans: list[_Plan] = []
        self._lock = threading.Lock()

    def inject(self, fault: Fault, times: float, probability: float) -> None:
        with self._lock:
            self._plans.append(_Plan(fault, times, probability, random.Random(self._rng.random())))

    def take(self, stage: str) -> Fault | None:
        """The fault that occurs at this stage now, if any."""
        with self._lock:
            for plan in self._plans:
                if plan.fault.stage == stage and plan.occurs():
                    self.fired[stage, plan.fault.kind] += 1
                    return replace(plan.fault, seed=plan.rng.getrandbits(32))
        return None


@dataclass
class _Plan:
    fault: Fault
    times: float
    probability: float
    rng: random.Random  # its own, so that faults at other stages do not change it

    def occurs(self) -> bool:
        if self.times < 1 or self.rng.random() >= self.probability:
            return False
        self.times -= 1
        return True
