"""Does QPU training stay exactly-once, within budget and silent about its token, whatever goes wrong?"""

import json
import logging
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad.qpu import BudgetError, Chip, Journal, QPUService, QPUSolver, ServiceError, StepError
from spingrad.qpu.packing import Ising, Page, Programmed
from spingrad.qpu.service import AnswerError, decoded, encoded
from spingrad.testing import random_problem
from spingrad.testing.sapi import Sapi
from spingrad.testing.sapi.annealer import Annealer
from spingrad.testing.sapi.chip import working_chip
from spingrad.testing.sapi.faults import ANSWER, STAGES, TRANSPORT, Fault, mutated
from spingrad.testing.sapi.wire import decode_problem
from spingrad_lab.methods import ONE_BATCH
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab, groups, where

Numbers = dict[str, float]
Plan = tuple[str, str, dict[str, Any]]

CHIP: dict[str, Any] = {"size": 2, "broken": 0.0, "num_sweeps": 5}
REQUEST_TIMEOUT, SETTLE, DEADLINE = 1.0, 1.0, 8.0
CODES = (400, 401, 403, 404, 408, 409, 429, 500, 503)


# The pieces of a run


@contextmanager
def emulator(**changes: Any) -> Iterator[Sapi]:
    """An emulated QPU; D-Wave's settings of this machine are left out."""
    with tempfile.TemporaryDirectory() as folder, Sapi(**(CHIP | changes)) as sapi:
        config = Path(folder, "dwave.conf")
        config.touch()
        names = [name for name in os.environ if name.startswith("DWAVE_")]
        own = {"DWAVE_API_TOKEN": sapi.token, "DWAVE_CONFIG_FILE": str(config), "XDG_CACHE_HOME": folder}
        before = {name: os.environ.pop(name, None) for name in {*names, *own}}
        os.environ.update(own)
        try:
            yield sapi
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def connect(sapi: Sapi, **settings: Any) -> QPUService:
    return QPUService(endpoint=sapi.url, **({"request_timeout": REQUEST_TIMEOUT} | settings))


def solver_at(service: QPUService, journal: Path, budget: float = 1e6, **settings: Any) -> QPUSolver:
    limits: dict[str, Any] = {"num_reads": 4, "settle": SETTLE, "deadline": DEADLINE}
    return QPUSolver(journal, budget, service=service, **(limits | settings))


def take(solver: QPUSolver, step: int) -> None:
    """One step: a small layer whose problem belongs to it."""
    solver.solve(random_problem(6, 4, 2, step), seed=step)


def key_of(label: str | None) -> str:
    """The step that a job was sent for; its label ends in what tells attempts apart."""
    return str(label).split("/")[1]


@contextmanager
def stranger() -> Iterator[tuple[str, list[str]]]:
    """Another server on this machine, and the tokens that arrived there."""
    tokens: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers.get("X-Auth-Token", ""))
            self.send_error(404)

        do_POST = do_DELETE = do_CONNECT = do_GET  # noqa: N815, names of http.server

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", tokens
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Exactly once, under faults


def plans(elsewhere: str, codes: Sequence[int] = CODES, scale: float = 1.0) -> list[Plan]:
    """Every kind of fault at every stage, with the details that tell cases apart."""
    found: list[Plan] = []
    for stage in ("solvers", "submit", "poll", "load", "list"):
        found += [(stage, "status", {"code": code}) for code in codes]
        found += [(stage, "status", {"code": c, "headers": {"Retry-After": "1"}}) for c in (429, 503)]
        found += [
            (stage, kind, {}) for kind in TRANSPORT if kind not in ("status", "redirect", "slow", "drip")
        ]
        found += [(stage, kind, {"seconds": 1.5 * scale}) for kind in ("slow", "drip")]
        found += [(stage, "redirect", {"to": elsewhere})]
    found += [("submit", "late", {"seconds": 0.4 * scale})]
    found += [("batch", "error", {"code": code}) for code in (400, 429, 500)]
    found += [("run", kind, {}) for kind in STAGES["run"]]
    for stage in ("answer", "transit"):
        found += [(stage, kind, {}) for kind in ANSWER if kind != "missing"]
        keys = ("energies", "solutions", "active_variables", "num_occurrences", "timing", "format")
        found += [(stage, "missing", {"key": key}) for key in keys]
    return found


def chaos(
    folder: Path,
    steps: int,
    times: int,
    threads: int = 4,
    probability: float = 0.02,
    codes: Sequence[int] = CODES,
    scale: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> Numbers:
    """Steps on several threads, each fault ``times`` times, and what the ledgers say in the end.

    A smaller ``scale`` makes everyone less patient, and the faults shorter. Calls are timed by ``clock``.
    """
    with stranger() as (elsewhere, tokens), emulator() as sapi:
        service = connect(sapi, request_timeout=scale * REQUEST_TIMEOUT)
        limits = {"settle": scale * SETTLE, "deadline": scale * DEADLINE}
        solver = solver_at(service, folder / "chaos.journal", **limits)
        run = _Run(sapi, solver, clock)
        run.take(0)  # finds the layout, which takes its time
        run.longest = 0.0
        cases = plans(elsewhere, codes, scale)
        random.Random(0).shuffle(cases)
        for stage, kind, details in cases:
            rare = stage in ("list", "solvers")  # asked only when something else went wrong
            sapi.inject(stage, kind, times, min(5 * probability, 1.0) if rare else probability, **details)
        to_come = times * sum(stage != "solvers" for stage, *_ in cases)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run.take, range(1, steps)))
            while _struck(sapi) < to_come:
                sapi.inject("submit", "reset", threads)  # so that jobs are searched for
                to_come += threads
                list(pool.map(run.take, range(run.taken, run.taken + threads)))
        failures = _connect_through_faults(sapi, to_come + times * sum(s == "solvers" for s, *_ in cases))
        run.take(run.taken)  # in peace, and clears up after the others
        solver.close()
        harmless = times * (("answer", "missing", {"key": "timing"}) in cases)
        damaged = sum(n for (stage, _), n in sapi.fired.items() if stage == "answer") - harmless
        return run.numbers(damaged) | {
            "faults": sum(sapi.fired.values()),
            "kinds of faults not met": len(missed(sapi.fired) - {("cancel", kind) for kind in TRANSPORT}),
            "failures to connect": failures,
            "tokens at another host": sum(sapi.token in token for token in tokens),
        }


def missed(fired: "Counter[tuple[str, str]]") -> set[tuple[str, str]]:
    """Faults that the emulator knows and that did not strike."""
    stages = {stage: kinds for stage, kinds in STAGES.items() if stage != "upload"}  # of hybrid solvers
    return {(stage, kind) for stage, kinds in stages.items() for kind in kinds} - set(fired)


def _struck(sapi: Sapi) -> int:
    """Faults so far, without those of a connection that is made."""
    return sum(n for (stage, _), n in sapi.fired.items() if stage != "solvers")


def _connect_through_faults(sapi: Sapi, to_come: int) -> int:
    """Make services until all faults have struck; how many failed, which costs nothing."""
    failures = 0
    while sum(sapi.fired.values()) < to_come:
        try:
            connect(sapi)
        except (ServiceError, RuntimeError):  # the latter where the list of QPUs is empty
            failures += 1
    return failures


class _Run:
    """Steps that are taken until they succeed, and what is known of them from outside."""

    def __init__(self, sapi: Sapi, solver: QPUSolver, clock: Callable[[], float] = time.monotonic) -> None:
        self.sapi, self.solver, self.clock = sapi, solver, clock
        self.taken, self.lost, self.errors = 0, 0, 0
        self.longest = 0.0

    def take(self, step: int) -> None:
        self.taken += 1
        for _ in range(200):
            begin = self.clock()
            try:
                take(self.solver, step)
                return
            except StepError as error:
                problem = str(error)
            finally:
                self.longest = max(self.longest, self.clock() - begin)
            self.errors += 1
            if "in progress" in problem:
                self.sapi.service.fail_running()  # as the operators do with a job that hangs
            time.sleep(0.25)
        self.lost += 1

    def numbers(self, damaged: int = 0) -> Numbers:
        """What the two ledgers say; jobs whose answers the service damaged are paid to no use."""
        journal = Journal(self.solver._journal.path, read_only=True)
        paid = sum(charge.cost_us > 0 for charge in self.sapi.ledger())
        answered = {attempt.key for attempt in journal.attempts.values() if attempt.is_answered}
        jobs = journal.attempts.values()
        given_up = sum(job.charged_us is not None and not job.is_answered for job in jobs)
        return {
            "steps": self.taken,
            "steps lost": self.lost + self.taken - len(answered),
            "jobs paid": paid,
            "answers given up": given_up,
            "… but not damaged where they are stored": max(given_up - damaged, 0),
            "paid twice": paid - given_up - len(answered),
            "server ledger, s": self.sapi.charged_us * 1e-6,
            "client ledger, s": journal.spent_us * 1e-6,
            "ledgers differ by, s": abs(journal.spent_us - self.sapi.charged_us) * 1e-6,
            "step errors": self.errors,
            "longest call / deadline": self.longest / self.solver._submission.deadline,
            "requests a second in a loop": busiest(self.sapi),
        }


def busiest(sapi: Sapi) -> int:
    """The most requests of one stage for one step within a second."""
    key_of_id = {charge.id: key_of(charge.label) for charge in sapi.ledger()}
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for request in sapi.requests:
        if request.subject:
            key = key_of_id.get(request.subject) or key_of(request.subject)
            times[request.stage, key].append(request.time)
    most = 0
    for moments in times.values():
        moments.sort()
        for i in range(len(moments)):
            most = max(most, int(np.searchsorted(moments, moments[i] + 1.0)) - i)
    return most


# Late acceptance


def late(folder: Path, steps: int, lateness: float, settle: float, queue_seconds: float = 0.0) -> Numbers:
    """Every submission fails and is accepted later all the same; how often is a step paid?"""
    name = f"late-{lateness}-{settle}-{queue_seconds}.journal"
    with emulator(queue_seconds=queue_seconds) as sapi:
        service = connect(sapi, request_timeout=8.0)  # so that it polls with patience
        solver = solver_at(service, folder / name, settle=settle, deadline=60.0)  # time to withdraw
        sapi.inject("submit", "late", steps, seconds=lateness)
        if queue_seconds:
            for kind in TRANSPORT:  # withdrawing has its faults too
                sapi.inject("cancel", kind, seconds=0.5, to=sapi.url)
        run = _Run(sapi, solver)
        with ThreadPoolExecutor(steps) as pool:
            list(pool.map(run.take, range(steps)))
        time.sleep(lateness)
        solver.close()
        ledger = sapi.ledger()
        return {
            "steps": steps,
            "jobs paid": sum(charge.cost_us > 0 for charge in ledger),
            "jobs withdrawn": sum(charge.status == "CANCELLED" for charge in ledger),
            "ledgers differ by, s": abs(solver.qpu_seconds - 1e-6 * sapi.charged_us),
            "faults": sum(sapi.fired.values()),
            "faults of withdrawing": sum(n for (stage, _), n in sapi.fired.items() if stage == "cancel"),
        }


# Exactly once, killed


def kills(folder: Path, steps: int, kills: int, threads: int = 4) -> Numbers:
    """A process that takes steps is killed at random moments and started again, until all are taken."""
    journal = folder / "kills.journal"
    with emulator() as sapi:
        for kind in ("reset_after", "reset", "late", "truncate"):
            sapi.inject("submit", kind, math.inf, 0.05, seconds=0.3)
        sapi.inject("load", "reset_after", math.inf, 0.1)
        numbers = (str(number) for number in (steps, kills, threads))
        command = [sys.executable, "-m", "spingrad_lab.bench.qpu_faults", sapi.url, str(journal), *numbers]
        child = subprocess.run(command, check=True, capture_output=True, text=True)
        solver = solver_at(connect(sapi), journal)
        run = _Run(sapi, solver)
        run.taken = steps
        solver.close()
        from_outside = ("step errors", "longest call / deadline")  # nobody has measured them in the child
        found = {name: value for name, value in run.numbers().items() if name not in from_outside}
        return found | {"kills": json.loads(child.stdout)["kills"]}


def child(url: str, journal: str, steps: int, kills: int, threads: int) -> None:
    """Fork, let the fork take steps, kill it; the last one is left to finish."""
    rng = random.Random(0)
    done = 0
    while True:
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            _live(url, journal, steps, threads, writing)
        os.close(writing)
        os.read(reading, 1)  # the journal is open
        os.close(reading)
        if done < kills:
            time.sleep(rng.uniform(0.0, 0.6))
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if os.WIFSIGNALED(status):
            done += 1
        elif os.waitstatus_to_exitcode(status) or done >= kills:
            print(json.dumps({"kills": done}))
            sys.exit(os.waitstatus_to_exitcode(status))
        else:
            steps_left = kills - done
            raise RuntimeError(f"all steps were taken with {steps_left} kills to come; take more steps")


def _live(url: str, journal: str, steps: int, threads: int, ready: int) -> None:
    """A life of the child: take every step from the first, as after an old checkpoint."""
    code = 1
    try:
        service = QPUService(endpoint=url, request_timeout=REQUEST_TIMEOUT)
        solver = solver_at(service, Path(journal), settle=0.5)
        os.write(ready, b".")

        def persist(step: int) -> None:
            while True:
                try:
                    return take(solver, step)
                except StepError:
                    time.sleep(0.25)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(persist, range(steps)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# Budget


def budget(folder: Path, jobs: int, affordable: int, threads: int = 8, faults: float = 0.0) -> Numbers:
    """Threads that want more than the budget holds, some replies without a bill, a restart in the middle."""
    with emulator() as sapi:
        service = connect(sapi)
        solver = solver_at(service, folder / "price.journal")
        take(solver, jobs)
        price = solver.qpu_seconds
        solver.close()
        before, overspent, refused = sapi.charged_us, 0, 0
        sapi.inject("answer", "missing", math.inf, 0.3, key="timing")
        for stage, kind in (
            ("submit", "reset_after"),
            ("submit", "reset"),
            ("submit", "late"),
            ("run", "FAILED"),
        ):
            sapi.inject(stage, kind, math.inf, faults, seconds=0.3)
        most = (affordable + 0.5) * price
        for part in (range(jobs // 2), range(jobs // 2, jobs)):
            solver = solver_at(service, folder / f"budget-{faults}.journal", budget=most)

            def attempt(step: int, solver: QPUSolver = solver) -> bool:
                try:
                    take(solver, step)
                except BudgetError:
                    return True
                return False

            with ThreadPoolExecutor(threads) as pool:
                refused += sum(pool.map(attempt, part))
            overspent += sapi.charged_us - before > 1e6 * most
            solver.close()
        return {
            "jobs wanted": jobs,
            "jobs affordable": affordable,
            "jobs paid": sum(charge.cost_us > 0 for charge in sapi.ledger()) - 1,
            "jobs refused": refused,
            "faults": sum(n for (stage, _), n in sapi.fired.items() if stage in ("submit", "run")),
            "times over budget": overspent,
            "client ledger short of the server's by, s": max(
                1e-6 * (sapi.charged_us - before) - solver.qpu_seconds, 0.0
            ),
        }


# Answers


def an_answer(num_reads: int = 12) -> tuple[Programmed, dict[str, Any]]:
    """A problem with chains, and what the emulator would answer."""
    chip = working_chip("pegasus", 2, 0.0, 0)
    own = Chip(str(chip.identity["name"]), None, chip.properties)
    from spingrad.qpu.embedding import _search

    page = Page.of(own, list(_search(own, {5: 2, 3: 1})))
    rng = np.random.default_rng(0)
    sizes = [len(clique) for clique in page.cliques]
    programmed = page.program([Ising(rng.normal(size=n), np.triu(rng.normal(size=(n, n)), 1)) for n in sizes])
    params = {"num_reads": num_reads, "auto_scale": False}
    annealer = Annealer(chip, num_sweeps=2)
    answer = annealer.answer(decode_problem("ising", encoded(programmed, own), chip), params, rng)
    timing = {"qpu_access_time": 15341.25, "qpu_programming_time": 15108.0, "qpu_sampling_time": 233.25}
    return programmed, answer | {"timing": timing}


def damaged_answers(count: int) -> Numbers:
    """Answers with bytes changed, in their parts or as they travel; is any of them accepted, and wrong?"""
    problem, answer = an_answer()
    truth = decoded(answer, problem, 12)
    assert truth.charged_us == answer["timing"]["qpu_access_time"]
    text, rng, tally = json.dumps(answer).encode(), random.Random(0), Counter[str]()
    kinds = [kind for kind in ANSWER if kind not in ("mutate", "missing")]
    for number in range(count):
        if number % 10 == 9:
            case: Any = Fault("answer", kinds[number // 10 % len(kinds)], seed=number).damaged(answer)
        elif number % 2:
            case = Fault("answer", "mutate", seed=number).damaged(answer)
        else:
            try:
                case = json.loads(mutated(text, rng))
            except ValueError:
                tally["no JSON"] += 1
                continue
        try:
            found = decoded(case, problem, 12)
        except AnswerError:
            tally["refused"] += 1
            continue
        same = np.array_equal(found.spins, truth.spins)
        counts = same and np.array_equal(found.occurrences, truth.occurrences)
        billed = found.charged_us in (None, truth.charged_us)
        tally["accepted, and right" if counts else "wrong counts" if same else "accepted, but wrong"] += 1
        tally["wrong bill believed"] += not billed
    names = ("no JSON", "refused", "accepted, and right", "accepted, but wrong")
    return {"answers": count, **{k: tally[k] for k in (*names, "wrong counts", "wrong bill believed")}}


def damaged_replies(folder: Path, count: int) -> Numbers:
    """The same over HTTP: one job, its reply damaged anew each time."""
    with emulator() as sapi:
        service = connect(sapi)
        solver = solver_at(service, folder / "replies.journal")
        seen: list[Any] = []
        answer_of = service.answer

        def overhear(*request: Any) -> Any:
            seen.append(request[:3])
            return answer_of(*request)

        service.answer = overhear  # type: ignore[method-assign, assignment]
        take(solver, 0)
        solver.close()
        job, problem, reads = seen[0]
        truth, tally = answer_of(job, problem, reads), Counter[str]()
        kinds = [kind for kind in ANSWER if kind != "missing"]
        for number in range(count):
            sapi.inject("transit", "mutate" if number % 2 else kinds[number // 2 % len(kinds)])
            try:
                found = answer_of(job, problem, reads)
            except ServiceError:
                tally["refused"] += 1
            else:
                tally["right" if np.array_equal(found.spins, truth.spins) else "wrong"] += 1
        return {
            "replies": count,
            "refused": tally["refused"],
            "accepted, and right": tally["right"],
            "accepted, but wrong": tally["wrong"],
        }


# The token


class _Listener(logging.Handler):
    """Keeps all that any logger says, tracebacks included."""

    def __init__(self) -> None:
        super().__init__(level=1)
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text += [self.format(record), repr(record.__dict__)]


@contextmanager
def everything_logged(level: int) -> Iterator[_Listener]:
    """Every logger there is, at the given level; torch's have nothing to do with the service."""
    listener = _Listener()
    names = [name for name in [*logging.Logger.manager.loggerDict, ""] if name.split(".")[0] != "torch"]
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, logger.disabled) for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
        logger.disabled = False
    logging.getLogger().addHandler(listener)
    try:
        yield listener
    finally:
        logging.getLogger().removeHandler(listener)
        for logger, (old, disabled) in zip(loggers, before, strict=True):
            logger.setLevel(old)
            logger.disabled = disabled


def canary(folder: Path, steps: int, level: int = 1, probability: float = 0.2) -> Numbers:
    """Training with faults and every logger open; where does the token turn up?"""
    with everything_logged(level) as listener, stranger() as (elsewhere, tokens), emulator() as sapi:
        service = connect(sapi)
        solver = solver_at(service, folder / "canary.journal", deadline=3.0, settle=0.3)
        for stage, kind, details in plans(elsewhere):
            if stage not in ("run", "answer"):
                sapi.inject(stage, kind, 1, probability, **details)
        torch.manual_seed(0)
        model = nn.Sequential(BinaryLinear(4, 2), nn.Hardtanh(), BinaryLinear(2, 2))
        optimizer = QPSBGD(binary_parameters(model), solver=solver, **ONE_BATCH)
        errors: list[BaseException] = []
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            try:
                optimizer.step()
            except StepError as error:
                errors.append(error)
        errors += [*_direct_errors(service, sapi), *_copies(service, solver, optimizer)]
        torch.save(optimizer.state_dict(), folder / "canary.pt")
        solver.close()
        cache = Path(os.environ["XDG_CACHE_HOME"])
        files = [path for root in (folder, cache) for path in root.rglob("*") if path.is_file()]
        shown = [repr(thing) for thing in (service, solver, optimizer, solver._journal)]
        places = {
            "log lines": listener.text,
            "exceptions": [text for error in errors for text in _texts(error)],
            "representations": shown,
        }
        hits = {name: sum(sapi.token in text for text in texts) for name, texts in places.items()}
        return {
            "log level": level,
            **{name: len(texts) for name, texts in places.items()},
            "files": len(files),
            "log lines with the token taken out": sum("<token>" in text for text in listener.text),
            "token in any of them": sum(hits.values())
            + sum(sapi.token.encode() in path.read_bytes() for path in files),
            "token at another host": sum(sapi.token in token for token in tokens),
        }


def _direct_errors(service: QPUService, sapi: Sapi) -> list[BaseException]:
    """What single requests raise, before anything is made of it."""
    errors: list[BaseException] = []
    for kind in TRANSPORT:
        sapi.inject("list", kind, code=401, message=f"bad token {sapi.token}", seconds=1.5, to=sapi.url)
        try:
            service.find("a label")
        except ServiceError as error:
            errors.append(error)
    return errors


def _copies(*things: object) -> list[BaseException]:
    """The errors of pickling what must not be pickled; a copy with the token in it would be a hit."""
    import copy

    errors: list[BaseException] = []
    for thing in things:
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            try:
                text = str(attempt(thing))
                errors.append(RuntimeError(f"{type(thing).__name__} was copied: {text}"))
            except Exception as error:
                errors.append(error)
    return errors


def _texts(error: BaseException) -> list[str]:
    """An error in every form in which it is shown or sent on, with those behind it."""
    texts = ["".join(traceback.format_exception(error))]
    seen: BaseException | None = error
    while seen is not None:
        texts += [str(seen), repr(seen), repr(vars(seen))]
        texts += [pickle.dumps(seen).decode("latin1")] if isinstance(seen, ServiceError | StepError) else []
        seen = seen.__cause__ or seen.__context__
    return texts


# The table


def parts(quick: bool) -> dict[str, Callable[[Path], Numbers]]:
    """What is run, each in a folder of its own."""
    few: dict[str, Any] = {"threads": 12, "probability": 0.5, "codes": (401,), "scale": 0.3}
    return {
        "faults": lambda to: chaos(to, 24, times=1, **few) if quick else chaos(to, 500, times=8),
        "kill -9": lambda to: kills(to, *((20, 3) if quick else (500, 25))),
        "accepted late, within settle": lambda to: late(to, 8, lateness=1.0, settle=2.0),
        "accepted later than settle": lambda to: late(to, 8, lateness=1.0, settle=0.3),
        "… while the queue is long": lambda to: late(to, 12, lateness=1.8, settle=0.3, queue_seconds=1.5),
        "budget": lambda to: budget(to, 20 if quick else 60, 10),
        "budget, under faults": lambda to: budget(to, 20 if quick else 60, 10, faults=0.15),
        "damaged answers": lambda to: damaged_answers(1_000 if quick else 10_000),
        "damaged replies": lambda to: damaged_replies(to, 40 if quick else 400),
        "token": lambda to: canary(to, 4 if quick else 40),
    }


ONCE = {
    "steps lost": "= 0",
    "… but not damaged where they are stored": "= 0",
    "paid twice": "= 0",
    "ledgers differ by, s": "≤ 1e-06",
    "requests a second in a loop": "≤ 5",
}
WITHIN = {"times over budget": "= 0", "client ledger short of the server's by, s": "≤ 1e-06"}
ASKED: dict[str, dict[str, str]] = {
    "faults": ONCE
    | {"steps": "≥ 500", "faults": "≥ 1000", "kinds of faults not met": "= 0"}
    | {"longest call / deadline": "≤ 1.1", "tokens at another host": "= 0"},
    "kill -9": ONCE | {"kills": "≥ 25"},
    "accepted late, within settle": {"jobs paid": "= 8", "ledgers differ by, s": "≤ 1e-06"},
    "accepted later than settle": {"jobs paid": "≤ 16"},
    "… while the queue is long": {"jobs withdrawn": "≥ 1", "ledgers differ by, s": "≤ 1e-06"}
    | {"faults of withdrawing": f"= {len(TRANSPORT)}"},
    "budget": WITHIN | {"jobs paid": "= 10"},
    "budget, under faults": WITHIN | {"jobs paid": "≤ 10"},
    "damaged answers": {"accepted, but wrong": "= 0", "answers": "≥ 10000", "wrong bill believed": "= 0"},
    "damaged replies": {"accepted, but wrong": "= 0"},
    "token": {"token in any of them": "= 0", "token at another host": "= 0"},
}
"""What is asked of the numbers of each part; those with ≥ are about full sizes."""


def holds(value: float, asked: str) -> bool:
    sign, wanted = asked.split()
    return {"=": value == float(wanted), "≤": value <= float(wanted), "≥": value >= float(wanted)}[sign]


class QPUFaults(Experiment):
    """What can go wrong between a run and D-Wave's service, and what the ledgers say in the end."""

    title = "Faults of the QPU service"
    source = "the emulator of D-Wave's service, through D-Wave's own client"

    def plan(self, lab: Lab) -> None:
        lab.run([{"part": part} for part in ASKED])

    def compute(self, job: Job) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return parts(job["quick"])[job["part"]](Path(folder))

    def show(self, runs: pd.DataFrame) -> Section:
        rows, failed, quick = [], 0, runs["quick"].any()
        for part, own in groups(runs, "part"):
            numbers = where(own).drop(columns=["part", "quick", "run_seconds"]).iloc[0]
            for place, (name, value) in enumerate(numbers.items()):
                asked = ASKED[part].get(str(name), "")
                asked = "" if quick and "≥" in asked else asked
                good = not asked or holds(value, asked)
                failed += not good
                told = f"{value:,.6g}" + ("" if good else " **failed**")
                rows.append(["" if place else part, str(name), asked, told])
        notes = [
            "The emulator's ledger is the truth about money. Fault rates are far above those of any real "
            "service: the numbers say that the mechanism holds, not what to expect.",
            f"{failed or 'None'} of the numbers that something is asked of {'is' if failed == 1 else 'are'} "
            "not as asked.",
        ]
        return Section(notes, [Table(["part", "number", "asked", "measured"], rows)])


if __name__ == "__main__":  # the process that is killed and started again
    child(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
