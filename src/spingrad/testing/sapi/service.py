"""The emulated service: accepts problems, runs them one at a time, and records what it charges."""

import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from spingrad.testing.sapi.admission import admit
from spingrad.testing.sapi.annealer import Annealer, is_reverse
from spingrad.testing.sapi.chip import IGNORED
from spingrad.testing.sapi.faults import Faults
from spingrad.testing.sapi.hybrid import NAME, Hybrid, Model
from spingrad.testing.sapi.wire import Problem

log = logging.getLogger(__name__)

FINAL = ("COMPLETED", "FAILED", "CANCELLED")


@dataclass(frozen=True)
class Charge:
    """An entry of the ledger; failed and cancelled jobs cost nothing.

    Example:
        >>> from dwave.system import DWaveSampler
        >>> from spingrad.testing.sapi import Sapi
        >>> with Sapi(size=2) as sapi, sapi.configured(), DWaveSampler() as qpu:
        ...     samples = qpu.sample_ising({qpu.nodelist[0]: 1.0}, {}, num_reads=10, label="mine").resolve()
        ...     [charge] = sapi.ledger()
        >>> charge.label, charge.num_reads, charge.status, charge.cost_us > 0
        ('mine', 10, 'COMPLETED', True)
    """

    id: str
    label: str | None
    cost_us: float
    status: str
    digest: str
    num_reads: int


@dataclass
class Job:
    """A problem that the service has accepted."""

    body: dict[str, Any]
    problem: Problem | Model
    cost_us: float
    digest: str  # a name of the problem: equal biases on equal qubits or variables have equal digests
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: str = "PENDING"
    submitted: datetime = field(default_factory=lambda: datetime.now(UTC))
    solved: datetime | None = None
    error_message: str | None = None
    answer: dict[str, Any] | None = None

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("params") or {}

    @property
    def label(self) -> str | None:
        return self.body.get("label")

    @property
    def is_qpu(self) -> bool:
        return isinstance(self.problem, Problem)

    @property
    def charge(self) -> Charge:
        num_reads = self.params.get("num_reads", 1)
        return Charge(self.id, self.label, self.cost_us, self.status, self.digest, num_reads)

    def to_dict(self) -> dict[str, Any]:
        """The job's status in the format of the API."""
        status = {
            "id": self.id,
            "type": self.body["type"],
            "solver": self.body["solver"],
            "label": self.label,
            "status": self.status,
            "submitted_on": self.submitted.isoformat(),
            "solved_on": self.solved and self.solved.isoformat(),
            "error_message": self.error_message,
        }
        return {key: value for key, value in status.items() if value is not None}


class Service:
    """Jobs on one QPU and a hybrid solver, and a ledger of what they cost.

    Args:
        annealer: Solves the problems.
        faults: The faults to inject at the stages ``batch``, ``run`` and ``answer``.
        seed: Determines the samples together with a problem's digest and label, for any order of the jobs.
        queue_seconds: Seconds between acceptance and start of a job.
        quota_us: Microseconds of QPU time that may be charged in total.
    """

    def __init__(
        self, annealer: Annealer, faults: Faults, seed: int, queue_seconds: float, quota_us: float
    ) -> None:
        self.annealer, self.faults, self.seed = annealer, faults, seed
        self.hybrid = Hybrid()
        self.queue_seconds, self.quota_us = queue_seconds, quota_us
        self.closing = threading.Event()
        self._jobs: dict[str, Job] = {}
        self._named: set[str] = set()  # parameters that a warning has named
        self._changed = threading.Condition()
        self._qpu = ThreadPoolExecutor(1, "emulated-qpu")  # a chip runs one job at a time

    def release(self) -> None:
        """End all waiting for jobs, because the service is about to close."""
        self.closing.set()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        self._qpu.shutdown(cancel_futures=True)

    def submit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Accept and charge one problem; the status of its job, or an error."""
        if fault := self.faults.take("batch"):
            return {"error_code": fault.code, "error_msg": fault.message}
        try:
            job = self._job(body)
            with self._changed:  # check and charge under one lock, or two threads could exceed the quota
                if self._charged_us() + job.cost_us > self.quota_us:
                    raise ValueError("Insufficient remaining solver access time in project")
                self._jobs[job.id] = job
        except ValueError as error:
            return {"error_code": 400, "error_msg": str(error)}
        except (AttributeError, KeyError, TypeError) as error:
            return {"error_code": 400, "error_msg": f"malformed problem: {error!r}"}
        status = job.to_dict()
        self._qpu.submit(self._run, job, time.monotonic() + self.queue_seconds)
        return status

    def _job(self, body: dict[str, Any]) -> Job:
        if body["solver"]["name"] == NAME:
            model, cost_us = self.hybrid.admit(body)
            return Job(body, model, cost_us, model.digest)
        problem, cost_us = admit(body, self.annealer)
        self._warn(body.get("params") or {})
        data = body["data"]
        digest = hashlib.sha256(f"{body['type']} {data['lin']} {data['quad']}".encode()).hexdigest()
        return Job(body, problem, cost_us, digest)

    def _warn(self, params: dict[str, Any]) -> None:
        """Name the given parameters that would change the samples of a real chip, each once."""
        # A warning of Python would be raised in a thread of the server, where no test sees it.
        for name in IGNORED:
            if name in params and np.any(params[name]) and name not in self._named:
                self._named.add(name)
                log.warning("%s is checked and charged, and does not change the emulator's samples", name)

    def job(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def wait(self, ids: Iterable[str], timeout: float) -> list[Job]:
        """The known jobs among ``ids``, as soon as one of them has ended or the time is over."""
        jobs = [self._jobs[job_id] for job_id in ids if job_id in self._jobs]

        def some_final() -> bool:
            return self.closing.is_set() or not jobs or any(job.status in FINAL for job in jobs)

        with self._changed:
            self._changed.wait_for(some_final, timeout)
        return jobs

    def find(self, label: str | None, status: str | None, solver: str | None, limit: int) -> list[Job]:
        """Jobs that match the given values, newest first."""
        with self._changed:
            jobs = list(self._jobs.values())[::-1]
        return [
            job
            for job in jobs
            if label in (None, job.label)
            and status in (None, job.status)
            and solver in (None, job.body["solver"]["name"])
        ][:limit]

    def cancel(self, job_id: str) -> Job | None:
        """Cancel a job that has not started; a running job continues and is charged."""
        job = self.job(job_id)
        if job is not None:
            self._finish(job, "CANCELLED", only_from="PENDING")
        return job

    def fail_running(self) -> None:
        """End running jobs, as the operators do with jobs that hang."""
        for job in list(self._jobs.values()):
            self._finish(job, "FAILED", error_message="the job was ended by the operators")

    def ledger(self) -> list[Charge]:
        with self._changed:
            return [job.charge for job in self._jobs.values()]

    @property
    def charged_us(self) -> float:
        with self._changed:
            return self._charged_us()

    def _charged_us(self) -> float:
        return sum(job.cost_us for job in self._jobs.values())

    def _run(self, job: Job, start: float) -> None:
        self.closing.wait(max(0.0, start - time.monotonic()))
        with self._changed:
            if job.status != "PENDING" or self.closing.is_set():
                return
            job.status = "IN_PROGRESS"
        fault = self.faults.take("run")
        if fault is None:
            self._answer(job)
        elif fault.kind != "stuck":
            self._finish(job, fault.kind, error_message=fault.message)

    def _answer(self, job: Job) -> None:
        key = hashlib.sha256(f"{self.seed} {job.digest} {job.label}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(key))
        try:
            answer = self._sampled(job, rng)
        except Exception as error:  # otherwise the client would wait for ever, and the reason would be lost
            self._finish(job, "FAILED", error_message=repr(error))
            return
        if job.is_qpu and (fault := self.faults.take("answer")):
            answer = fault.damaged(answer)
        self._finish(job, "COMPLETED", answer=answer)

    def _sampled(self, job: Job, rng: np.random.Generator) -> dict[str, Any]:
        if isinstance(job.problem, Model):
            return self.hybrid.answer(job.problem, job.cost_us, rng)
        answer = self.annealer.answer(job.problem, job.params, rng)
        return answer | {"timing": timing(job, self.annealer.chip.properties["problem_timing_data"])}

    def _finish(self, job: Job, status: str, only_from: str = "IN_PROGRESS", **result: Any) -> None:
        with self._changed:
            if job.status != only_from:
                return
            job.answer, job.error_message = result.get("answer"), result.get("error_message")
            job.solved = datetime.now(UTC)
            if status != "COMPLETED":
                job.cost_us = 0.0
            job.status = status  # last, since readers take no lock and expect a final job to have its answer
            self._changed.notify_all()


def timing(job: Job, model: dict[str, Any]) -> dict[str, float]:
    """The charged time and its parts, as SAPI reports them."""
    params = job.params
    thermalization = params.get("programming_thermalization", model["default_programming_thermalization"])
    programming = model["typical_programming_time"] + thermalization
    delay = model["qpu_delay_time_per_sample"]
    if is_reverse(params):
        way = "with" if params.get("reinitialize_state", True) else "without"
        programming += model[f"reverse_annealing_{way}_reinit_prog_time_delta"]
        delay += model[f"reverse_annealing_{way}_reinit_delay_time_delta"]
    schedule = params.get("anneal_schedule")
    anneal = schedule[-1][0] if schedule else params.get("annealing_time", model["default_annealing_time"])
    sampling = job.cost_us - programming
    return {
        "qpu_access_time": job.cost_us,
        "qpu_programming_time": programming,
        "qpu_sampling_time": sampling,
        "qpu_anneal_time_per_sample": anneal,
        "qpu_readout_time_per_sample": sampling / params.get("num_reads", 1) - anneal - delay,
        "qpu_delay_time_per_sample": delay,
        "qpu_access_overhead_time": 1000.0,
        "total_post_processing_time": 1.0,
        "post_processing_overhead_time": 1.0,
    }
