"""Do requests to the QPU service end in time and stay small, and does a run end within a second of Ctrl-C?"""

import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pandas as pd

from spingrad.qpu import Journal, QPUService, ServiceError, StepError
from spingrad.qpu.calls import calls_for
from spingrad.testing.sapi.hostile import KINDS, full_server, hostile_server
from spingrad_lab.bench.memory import peak
from spingrad_lab.bench.qpu_faults import Numbers, emulator, key_of, solver_at, take
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab, where

DEADLINE = 2.0
INTERRUPTED = 130  # exit code
TLS = {"TLS drips": "TLS drips", "TLS is silent": "silent"}
FULL, STEP, INTERRUPTS = "connections do not come about", "replies of a step drip", "Ctrl-C"
SERVERS = [*(kind for kind in KINDS if kind not in TLS), *TLS, FULL, STEP]


@contextmanager
def server(name: str) -> Iterator[str]:
    """The address of a hostile server; for a whole step, an emulator whose replies drip."""
    if name == STEP:
        with emulator() as sapi:
            sapi.inject("poll", "drip", math.inf, seconds=60.0)
            yield sapi.url
    elif name == FULL:
        with full_server() as port:
            yield f"http://127.0.0.1:{port}"
    else:
        with hostile_server(TLS.get(name, name)) as port:
            yield f"{'https' if name in TLS else 'http'}://127.0.0.1:{port}"


def bounded(name: str) -> Numbers:
    """Ask a hostile server, from another process."""
    with server(name) as url:
        child, results = _child(ask, name, url)
        found: Numbers = results.recv()
        child.join()
        return found


def _child(work: Callable[..., None], *arguments: Any) -> tuple[Any, "Connection[Any, Any]"]:
    """A process that works for us, and the end of a pipe from it."""
    processes = get_context("forkserver")  # so that all that is needed is imported only once
    processes.set_forkserver_preload([__name__])
    receiver, sender = processes.Pipe(duplex=False)
    settings = os.environ | {"DWAVE_API_TOKEN": "CANARY-spingrad-emulator-token"}
    child = processes.Process(target=_live, args=(settings, work, sender, *arguments))
    child.start()
    return child, receiver


def _live(
    settings: dict[str, str], work: Callable[..., None], sender: "Connection[Any, Any]", *rest: Any
) -> None:
    os.environ.update(settings)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work(sender, *rest)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def ask(results: "Connection[Any, Any]", name: str, url: str) -> None:
    """Send what one request, or a step, takes of time and memory."""
    request: Callable[[], Any]
    if name == STEP:
        journal, service = Path(tempfile.mkdtemp(), "journal"), QPUService(endpoint=url)
        calls_for(service.chip, (4, 4), 4)  # finds the layout, which takes its time
        solver = solver_at(service, journal, deadline=DEADLINE, settle=0.5)
        request = lambda: take(solver, 0)  # noqa: E731
    else:
        _failure(lambda: QPUService(endpoint="http://127.0.0.1:1"))  # imports all that is needed
        request = lambda: QPUService(endpoint=url, request_timeout=DEADLINE)  # noqa: E731
    memory, begin = peak(), time.monotonic()
    _failure(request)
    results.send({"seconds": time.monotonic() - begin, "MB": (peak() - memory) / 2**20})


def _failure(request: Callable[[], Any]) -> ServiceError | StepError:
    try:
        request()
    except (ServiceError, StepError) as error:
        return error
    raise RuntimeError("the request succeeded")


def interrupted(folder: Path, interrupts: int, steps: int) -> Numbers:
    """A run that is interrupted at random moments and started again, until all its steps are taken."""
    journal, rng = folder / "interrupted.journal", random.Random(0)
    seconds: list[float] = []
    with emulator(queue_seconds=0.2) as sapi:
        for kind in ("reset_after", "reset", "late", "slow"):
            sapi.inject("submit", kind, math.inf, 0.05, seconds=0.5)
        while True:
            child, ready = _child(run, sapi.url, journal, steps)
            ready.recv()
            if len(seconds) < interrupts:
                time.sleep(rng.uniform(0.0, 3.0))
                if not child.is_alive():
                    raise RuntimeError("all steps were taken before the last interrupt; take more steps")
                begin = time.monotonic()
                os.kill(child.pid, signal.SIGINT)
                child.join()
                seconds.append(time.monotonic() - begin)
                if child.exitcode != INTERRUPTED:
                    raise RuntimeError(f"expected exit code {INTERRUPTED} after Ctrl-C, got {child.exitcode}")
            else:
                child.join()
                break
        book = Journal(journal, read_only=True)
        answered = {attempt.key for attempt in book.attempts.values() if attempt.is_answered}
        paid = [charge for charge in sapi.ledger() if charge.cost_us > 0]
        return {
            "interrupts": len(seconds),
            "longest, s": max(seconds),
            "steps": steps,
            "steps lost": steps - len(answered),
            "jobs lost": len({charge.label for charge in paid} - book.attempts.keys()),
            "paid twice": len(paid) - len({key_of(charge.label) for charge in paid}),
            "ledgers differ by, s": abs(book.spent_us - sapi.charged_us) * 1e-6,
        }


def run(ready: "Connection[Any, Any]", url: str, journal: Path, steps: int) -> None:
    """A run that is interrupted: it takes all steps from the first, as after an old checkpoint."""
    with solver_at(QPUService(endpoint=url), journal, settle=2.0, deadline=600.0) as solver:
        ready.send("the journal is open")
        for step in range(steps):
            take(solver, step)


class QPULimits(Experiment):
    """Servers that would hold a client for ever or fill its memory, and Ctrl-C at random moments."""

    title = "Limits of requests to the QPU service"
    source = "servers on this machine that are made to be hostile, and the emulator of D-Wave's service"

    def plan(self, lab: Lab) -> None:
        lab.run([{"server": name} for name in (*SERVERS, INTERRUPTS)])

    def compute(self, job: Job) -> dict[str, Any]:
        if job["server"] != INTERRUPTS:
            return bounded(job["server"])
        with tempfile.TemporaryDirectory() as folder:
            return interrupted(Path(folder), *((3, 40) if job["quick"] else (10, 100)))

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for name in SERVERS:
            own = where(runs, server=name).iloc[0]
            ratio = own["seconds"] / DEADLINE
            rows.append(
                [name, f"{DEADLINE:g}", f"{own['seconds']:.2f}", f"{ratio:.2f}", f"{max(own['MB'], 0):.0f}"]
            )
        header = ["server", "deadline, s", "seconds", "seconds / deadline", "memory grows by, MB"]
        ending = where(runs, server=INTERRUPTS).iloc[0]
        names = ["interrupts", "longest, s", "steps", "steps lost", "jobs lost", "paid twice"]
        names += ["ledgers differ by, s"]
        notes = [
            "Every request must end within 1.2 times its deadline and add at most 64 MB. A run must end "
            "within a second of Ctrl-C, lose nothing and pay nothing twice.",
        ]
        return Section(
            notes, [Table(header, rows), Table(["Ctrl-C", ""], [[n, f"{ending[n]:.3g}"] for n in names])]
        )
