"""One job for one problem, whatever the network does: none lost, none paid twice.

The service knows no key that would make a submission idempotent. So the cost is set aside and a label is
written to the journal before anything is sent; after a failure that leaves the outcome open the service is
asked for the label before the job is sent again; and an answer is fetched again by its id, never bought
again, until it fits the problem.

One case cannot be excluded: a job that the service accepts later than ``settle`` seconds after the request
failed is not found in time and is sent a second time. It is paid at most once more.
"""

import hashlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from spinstep.qpu.journal import Attempt, Journal
from spinstep.qpu.packing import Programmed
from spinstep.qpu.service import Answer, QPUService, ServiceError

T = TypeVar("T")
PAUSE = 0.25  # seconds between two requests of a loop at least: no more than four a second
LONGEST_PAUSE = 10.0


class StepError(RuntimeError):
    """A call to the QPU that came to no answer; the step can be taken again and goes on where it stood."""


class Submission:
    """Sends problems and waits for their answers.

    Args:
        service: The QPU; none to replay a journal.
        journal: Where everything is written down first.
        deadline: Seconds that a call may take, its time in the queue included.
        settle: Seconds during which a job may turn up whose submission failed.
        attempts: Jobs that may be sent for one problem, if the service fails or cancels them.
    """

    def __init__(
        self,
        service: QPUService | None,
        journal: Journal,
        deadline: float = 600.0,
        settle: float = 10.0,
        attempts: int = 5,
    ) -> None:
        self.service, self.journal = service, journal
        self.deadline, self.settle, self.attempts = deadline, settle, attempts

    def sample(
        self, problem: Programmed, key: str, cost_us: float, params: dict[str, Any], **facts: Any
    ) -> Answer:
        """Samples of a problem, from the journal if they are there.

        Args:
            problem: What is sent.
            key: Names the call; the same in every process that takes this step.
            cost_us: What the call will be charged.
            params: The solver's parameters.
            **facts: Kept beside the job in the journal.
        """
        until, print_ = time.monotonic() + self.deadline, fingerprint(problem, params)
        for attempt in self.journal.attempts_of(key):
            if attempt.void is None and same_problem(attempt.facts["fingerprint"], print_):
                answer = attempt.answer or self._settled(attempt, problem, params, until)
                if answer is not None:
                    return answer
        for _ in range(self.attempts if self.service else 0):
            number = len(self.journal.attempts_of(key))
            label = f"spinstep-{self.journal.run}/{key}/{number}"
            attempt = self.journal.reserve(key, label, cost_us, fingerprint=print_, **facts)
            answer = self._settled(attempt, problem, params, until, fresh=True)
            if answer is not None:
                return answer
        if self.service is None:
            raise StepError(f"the journal holds no answer for {key}; the run or its problem has changed")
        raise StepError(f"{self.attempts} jobs for {key} failed or were cancelled by the service")

    def _settled(
        self, attempt: Attempt, problem: Programmed, params: dict[str, Any], until: float, fresh: bool = False
    ) -> Answer | None:
        """The answer of one attempt, or none if the service failed or cancelled the job."""
        if self.service is None:
            return None
        if attempt.id is None:
            self._submit(attempt, problem, params, until, fresh)
        assert attempt.id is not None
        state = self._final_state(attempt.id, until)
        if state != "COMPLETED":
            self.journal.voided(attempt, state)
            return None
        job, service, reads = attempt.id, self.service, int(params.get("num_reads", 1))
        answer = self._persist(lambda: service.answer(job, problem, reads), until, f"the answer of job {job}")
        self.journal.answered(attempt, answer)
        return answer

    def _submit(
        self, attempt: Attempt, problem: Programmed, params: dict[str, Any], until: float, fresh: bool
    ) -> None:
        """Send a job unless it is out there already; returns when its id is in the journal."""
        assert self.service is not None
        service, pace = self.service, _Pace(until, f"sending {attempt.label}")
        job = None if fresh else self._find(attempt.label, until)  # sent before a crash?
        while job is None:
            try:
                service.limit(pace.left())
                job = service.submit(problem, attempt.label, params)
            except ServiceError as error:
                if error.refused and error.fatal:
                    self.journal.voided(attempt, str(error))
                    raise StepError(f"the service refused the job: {error}") from None
                settled = 0.0 if error.refused else self.settle
                job = self._find(attempt.label, until, settled) if settled else None
                if job is None:
                    pace.wait(error)
        self.journal.accepted(attempt, job)

    def _find(self, label: str, until: float, settle: float = 0.0) -> str | None:
        """The id of the job with this label, if it turns up within ``settle`` seconds."""
        assert self.service is not None
        service, patience = self.service, time.monotonic() + settle
        while True:
            status = self._persist(lambda: service.find(label), until, f"the search for {label}")
            if status is not None:
                return status.id
            if time.monotonic() >= patience:
                return None
            time.sleep(PAUSE)

    def _final_state(self, job: str, until: float) -> str:
        assert self.service is not None
        service, pace = self.service, _Pace(until, f"job {job}")
        while True:
            wait = int(min(30.0, 0.5 * service.request_timeout, max(pace.left() - 1, 0)))
            state = self._persist(lambda wait=wait: service.status(job, wait), until, f"job {job}").state  # type: ignore[misc]
            if state in ("COMPLETED", "FAILED", "CANCELLED"):
                return state
            pace.wait(ServiceError(f"it is still {state.lower()}"))

    def _persist(self, request: Callable[[], T], until: float, what: str) -> T:
        """The result of a request that does no harm if it is made again."""
        assert self.service is not None
        pace = _Pace(until, what)
        while True:
            try:
                self.service.limit(pace.left())
                return request()
            except ServiceError as error:
                if error.fatal:
                    raise StepError(f"{what}: {error}") from None
                pace.wait(error)


class _Pace:
    """The pauses of a loop: longer and longer, never past the deadline."""

    def __init__(self, until: float, what: str) -> None:
        self.until, self.what, self.pause = until, what, PAUSE

    def left(self) -> float:
        return self.until - time.monotonic()

    def wait(self, error: ServiceError) -> None:
        pause = min(max(self.pause, error.retry_after), self.left())
        if self.left() <= PAUSE:
            raise StepError(f"{self.what} came to no end within the deadline; at last: {error}")
        time.sleep(pause)
        self.pause = min(1.5 * self.pause, LONGEST_PAUSE)


def fingerprint(problem: Programmed, params: dict[str, Any]) -> list[Any]:
    """Tells problems apart, and how they are asked, but not by the last bits of their numbers.

    A replay on another machine meets the same problems up to rounding.
    """
    digest = hashlib.sha256(repr(sorted(params.items())).encode())
    digest.update(np.ascontiguousarray(problem.qubits).tobytes())
    random = np.random.default_rng(0)
    values = np.concatenate([problem.h, problem.J])
    views = [float(values @ random.choice((-1.0, 1.0), len(values))) for _ in range(4)]
    return [digest.hexdigest()[:16], float(np.linalg.norm(values)), *views]


def same_problem(one: list[Any], other: list[Any]) -> bool:
    return bool(
        one[0] == other[0] and np.allclose(one[1:], other[1:], rtol=0, atol=1e-4 * max(one[1], 1e-30))
    )
