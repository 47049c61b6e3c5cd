"""One job per problem, even if the network fails: no answer is lost, none is paid twice.

The service offers no key that would make a submission idempotent. So before a job is sent, its cost is
reserved and a new label is written to the journal, and no label is sent twice. If a request fails in a way
that leaves its outcome open, the service is asked for the label. If the job is not found, another job is sent
under a new label, with its own reserved cost; as soon as one of them has answered, the others are cancelled,
or counted as paid if it is too late for that. An answer that does not fit the problem is fetched again by the
id of its job, not bought again. A job that is still queued at the deadline stays in the queue: taking the
step again continues to wait for it.

Two cases cannot be excluded. If the service accepts a job later than ``settle`` seconds after its request
failed, the job is not found in time and a second one is sent; the first is counted if it appears before the
second has answered. And if the service has stored a damaged answer, that answer is lost: the job is counted,
the call raises :class:`StepError`, and taking the step again pays again. Jobs that failed or were cancelled
are assumed to cost nothing.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Event
from typing import Any, TypeVar

import numpy as np

from spingrad.qpu.chip import Chip
from spingrad.qpu.journal import Attempt, Journal
from spingrad.qpu.packing import Programmed
from spingrad.qpu.service import ROUNDING, Answer, AnswerError, QPUService, ServiceError

T = TypeVar("T")
PAUSE = 0.25  # least seconds between two requests of a loop: at most four requests per second
LONGEST_PAUSE = 10.0
SAME = 1e-4  # largest relative difference between problems that differ only by rounding


class StepError(RuntimeError):
    """A call to the QPU that got no answer; taking the step again continues where it stopped.

    Example:
        >>> import tempfile
        >>> from spingrad.qpu import QPUSolver
        >>> from spingrad.testing import random_problem
        >>> from spingrad.testing.sapi import Sapi
        >>> with tempfile.TemporaryDirectory() as folder, Sapi(size=4) as sapi, sapi.configured():
        ...     sapi.inject("run", "stuck")
        ...     with QPUSolver(f"{folder}/run.journal", budget=1.0, deadline=0.3, settle=0) as solver:
        ...         solver.solve(random_problem(r=8, n=4, m=2, seed=0))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        spingrad.qpu.submission.StepError: job ... did not finish within the deadline; ...
    """


class GraphChangedError(StepError):
    """The QPU's working graph has changed since the problem was laid out; the service has the new one."""


class InterruptedStepError(RuntimeError):
    """A call that was stopped before its answer came; taking the step again continues where it stopped."""


class Submission:
    """Sends problems and waits for their answers.

    Args:
        service: The QPU; ``None`` to replay a journal.
        journal: The journal, in which everything is written down first.
        deadline: Seconds that a call may take, including its time in the queue.
        settle: Seconds to look for a job whose submission failed.
        attempts: Most jobs per call, if jobs fail, are cancelled or are lost on the way.
        fetches: Number of times that an answer is fetched before it is given up as damaged.
    """

    def __init__(
        self,
        service: QPUService | None,
        journal: Journal,
        deadline: float = 600.0,
        settle: float = 10.0,
        attempts: int = 5,
        fetches: int = 6,
    ) -> None:
        self.service, self.journal = service, journal
        self.deadline, self.settle, self.attempts, self.fetches = deadline, settle, attempts, fetches
        self._busy: set[str] = set()
        self._freed = Condition()

    def sample(
        self,
        problem: Programmed,
        chip: Chip,
        key: str,
        cost_us: float,
        params: dict[str, Any],
        stopped: Event | None = None,
        **facts: Any,
    ) -> Answer:
        """Samples of a problem, from the journal if it has them.

        Args:
            problem: The problem to send.
            chip: The working graph that it was made for.
            key: Name of the call, the same in every process that takes this step.
            cost_us: Microseconds that the call will be charged.
            params: Parameters of the QPU.
            stopped: Once it is set by :meth:`stop`, the call raises :class:`InterruptedStepError`.
            **facts: Written to the journal together with the job.
        """
        stopped = stopped or Event()
        if not (np.isfinite(problem.h).all() and np.isfinite(problem.J).all()):
            raise ValueError("a bias or coupling is not finite; nothing was sent")
        print_, until = fingerprint(problem, params), time.monotonic() + self.deadline
        with self.alone(key, until, stopped):
            same = [a for a in self.journal.attempts_of(key) if same_problem(a.fingerprint, print_)]
            for attempt in same:
                if (known := attempt.answer) is not None:
                    return known
            if self.service is None:
                raise StepError(f"the journal has no answer for {key}; the run or its problem has changed")
            requests = _Requests(self, self.service, problem, chip, params, until, stopped)
            answer = requests.resumed(same) or requests.bought(key, cost_us, print_, facts)
        requests.clear()
        return answer

    def stop(self, stopped: Event) -> None:
        """Stop the calls that were given this event; what they have sent is in the journal."""
        stopped.set()
        with self._freed:
            self._freed.notify_all()
        if self.service is not None:
            self.service.interrupt()

    @contextmanager
    def alone(self, key: str, until: float, stopped: Event) -> Iterator[None]:
        """Let one thread at a time work on a call; the next thread finds its answer in the journal."""
        with self._freed:
            free = self._freed.wait_for(
                lambda: key not in self._busy or stopped.is_set(), until - time.monotonic()
            )
            _check_not(stopped)
            if not free:
                raise StepError(f"another thread did not finish {key} within the deadline")
            self._busy.add(key)
        try:
            yield
        finally:
            with self._freed:
                self._busy.remove(key)
                self._freed.notify_all()


class _Requests:
    """The requests of one call, all of them before its deadline."""

    def __init__(
        self,
        rules: Submission,
        service: QPUService,
        problem: Programmed,
        chip: Chip,
        params: dict[str, Any],
        until: float,
        stopped: Event,
    ) -> None:
        self.rules, self.service, self.journal, self.stopped = rules, service, rules.journal, stopped
        self.problem, self.chip, self.params, self.until = problem, chip, params, until
        self.rounding = ROUNDING

    def resumed(self, attempts: list[Attempt]) -> Answer | None:
        """The answer of a job that was sent earlier, by this process or another."""
        self.rounding = 10 * ROUNDING  # the problem that was sent may differ in its last digits
        for attempt in attempts:
            if attempt.is_open and (attempt.id or self._found(attempt, self.rules.settle)):
                answer = self._awaited(attempt)
                if answer is not None:
                    return answer
        return None

    def bought(self, key: str, cost_us: float, print_: list[Any], facts: dict[str, Any]) -> Answer:
        """The answer of a new job."""
        self.rounding = ROUNDING
        pace = self._pace(f"the call {key}", 2 * PAUSE)
        for number in range(self.rules.attempts):
            if number:
                pace.wait(ServiceError("a job failed, was cancelled or was lost on the way"))
            attempt = self.journal.reserve(key, cost_us, print_, **facts)
            answer = self._awaited(attempt) if self._sent(attempt) else None
            if answer is not None:
                return answer
        raise StepError(f"{self.rules.attempts} jobs for {key} failed, were cancelled or were lost")

    def clear(self) -> None:
        """Cancel all other jobs of calls that have their answer, or count them as paid."""
        pace = self._pace("clearing up")
        for attempt in self.journal.superfluous():
            # If this fails, the cost stays reserved and the next step tries again.
            with suppress(StepError), self.rules.alone(attempt.key, time.monotonic(), self.stopped):
                pace.wait(ServiceError("more than one job was sent"), longest=PAUSE)
                self._withdraw(attempt)

    def _withdraw(self, attempt: Attempt) -> None:
        if not attempt.is_open:  # another thread has done it
            return
        if attempt.id is None and not self._found(attempt, 0.0):
            self.journal.voided(attempt, "it never arrived")
            return
        job = str(attempt.id)
        self._persist(lambda left: self.service.cancel(job, left), f"cancelling job {job}")
        state = self._persist(lambda left: self.service.status(job, 0, left), f"job {job}").state
        if state in ("FAILED", "CANCELLED"):
            self.journal.voided(attempt, state)
        else:
            self.journal.wasted(attempt, "another job had answered before")

    def _sent(self, attempt: Attempt) -> bool:
        """Send the job; returns whether it is known to have arrived."""
        try:
            job = self._persist(
                lambda left: self.service.submit(self.problem, self.chip, attempt.label, self.params, left),
                f"sending {attempt.label}",
                may_repeat=lambda error: error.refused,
            )
        except StepError as error:
            reason = error.__cause__
            assert isinstance(reason, ServiceError)
            if reason.refused:
                self.journal.voided(attempt, str(reason))
            if reason.refused and reason.fatal:
                self._check_graph()
            if reason.refused or reason.fatal:
                raise
            return self._found(attempt, self.rules.settle)
        self.journal.accepted(attempt, job)
        return True

    def _check_graph(self) -> None:
        """Raise :class:`GraphChangedError` if a job was refused because of a new working graph."""
        try:
            chip = self._persist(self.service.fetch_chip, "the definition of the QPU")
        except StepError:
            return
        if chip.graph_id != self.chip.graph_id:
            self.service.chip = chip
            raise GraphChangedError(
                f"the working graph of {chip.name} is now {chip.graph_id}, no longer {self.chip.graph_id}"
            )

    def _found(self, attempt: Attempt, settle: float) -> bool:
        """Look for the job of an attempt for up to ``settle`` seconds; returns whether it was found."""
        pace = self._pace(f"the search for {attempt.label}")
        patience = time.monotonic() + settle
        while True:
            pace.wait(ServiceError("it was not found"), longest=max(patience - time.monotonic(), PAUSE))
            last = time.monotonic() >= patience
            status = self._persist(lambda left: self.service.find(attempt.label, left), pace.what)
            if status is not None:
                self.journal.accepted(attempt, status.id)
                return True
            if last:
                return False

    def _awaited(self, attempt: Attempt) -> Answer | None:
        """The answer of a job that has arrived, or ``None`` if the job failed or was cancelled."""
        job = str(attempt.id)
        state = self._final_state(job)
        if state != "COMPLETED":
            self.journal.voided(attempt, state)
            return None
        answer = self._fetched(attempt, job)
        self.journal.answered(attempt, answer)
        return answer

    def _final_state(self, job: str) -> str:
        pace = self._pace(f"job {job}")
        while True:
            wait = int(max(min(30.0, 0.5 * self.service.request_timeout, pace.left() - 1), 0))
            request = _asking(self.service.status, job, wait)
            state = self._persist(request, pace.what).state
            if state in ("COMPLETED", "FAILED", "CANCELLED"):
                return state
            pace.wait(ServiceError(f"it is {state.lower().replace('_', ' ')}"))

    def _fetched(self, attempt: Attempt, job: str) -> Answer:
        reads = int(self.params.get("num_reads", 1))
        request = _asking(self.service.answer, job, self.problem, reads, self.rounding)
        pace = self._pace(f"the answer of job {job}")
        while True:
            try:
                return self._persist(request, pace.what)
            except AnswerError as error:
                attempt.misfits += 1  # over all calls, so that it ends also with a short deadline
                if attempt.misfits < self.rules.fetches:
                    pace.wait(error)
                    continue
                self.journal.wasted(attempt, str(error))
                raise StepError(
                    f"job {job} was charged, but its answer was fetched {attempt.misfits} times and never "
                    f"fitted: {error}. Taking the step again sends another job."
                ) from error

    def _persist(
        self,
        request: Callable[[float], T],
        what: str,
        may_repeat: Callable[[ServiceError], bool] = lambda error: True,
    ) -> T:
        """The result of a request, repeated while it fails with an error after which it may be repeated."""
        pace = self._pace(what)
        while True:
            _check_not(self.stopped)
            try:
                return request(pace.left())
            except AnswerError:
                raise
            except ServiceError as error:
                _check_not(self.stopped)
                if error.fatal or not may_repeat(error):
                    raise StepError(f"{what}: {error}") from error
                pace.wait(error)

    def _pace(self, what: str, pause: float = PAUSE) -> "_Pace":
        return _Pace(self.until, self.stopped, what, pause)


def _check_not(stopped: Event) -> None:
    if stopped.is_set():
        raise InterruptedStepError("the step was interrupted; taking it again continues where it stopped")


def _asking(request: Callable[..., T], *args: Any) -> Callable[[float], T]:
    return lambda left: request(*args, left)


class _Pace:
    """The pauses of a loop of requests, which grow and never exceed the deadline."""

    def __init__(self, until: float, stopped: Event, what: str, pause: float) -> None:
        self.until, self.stopped, self.what, self.pause = until, stopped, what, pause
        self.last = time.monotonic()

    def left(self) -> float:
        return self.until - time.monotonic()

    def wait(self, error: ServiceError, longest: float = LONGEST_PAUSE) -> None:
        left = self.left()
        if left <= 2 * PAUSE or error.retry_after >= left:
            raise StepError(
                f"{self.what} did not finish within the deadline; the last error: {error}"
            ) from error
        rest = min(self.pause, longest, left - PAUSE) - (time.monotonic() - self.last)
        # The time that a request took counts as pause.
        self.stopped.wait(max(rest, error.retry_after, PAUSE))
        _check_not(self.stopped)
        self.last = time.monotonic()
        self.pause = min(1.5 * self.pause, LONGEST_PAUSE)


def fingerprint(problem: Programmed, params: dict[str, Any]) -> list[Any]:
    """Numbers that identify a problem and its parameters up to rounding.

    A replay on another machine computes the same problems up to rounding.
    """
    digest = hashlib.sha256(repr(sorted(params.items())).encode())
    digest.update(np.ascontiguousarray(problem.qubits).tobytes())
    random = np.random.default_rng(0)
    values = np.concatenate([problem.h, problem.J])
    projections = [float(values @ random.choice((-1.0, 1.0), len(values))) for _ in range(4)]
    return [digest.hexdigest()[:16], float(np.linalg.norm(values)), *projections]


def same_problem(one: list[Any], other: list[Any]) -> bool:
    return bool(
        one[0] == other[0] and np.allclose(one[1:], other[1:], rtol=0, atol=SAME * max(one[1], 1e-30))
    )
