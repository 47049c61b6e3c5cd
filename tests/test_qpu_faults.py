"""A QPU run when things go wrong: each step once, within budget, and the token nowhere but at D-Wave's.

Many faults at once, kills and long runs are the lab's: ``spingrad-lab bench qpu-faults``.
"""

import base64
import copy
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from helpers import ONE_BATCH
from qpu_helpers import an_answer, stranger, texts

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad.qpu import BudgetError, Journal, JournalError, QPUService, QPUSolver, ServiceError, StepError
from spingrad.qpu.packing import Programmed
from spingrad.qpu.service import AnswerError, _checked_endpoint, decoded
from spingrad.qpu.submission import LONGEST_PAUSE, PAUSE, Submission, _Pace
from spingrad.solvers import SignSolver
from spingrad.testing import random_problem
from spingrad.testing.sapi import Sapi

pytestmark = pytest.mark.usefixtures("sapi_env")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "layouts"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sapi(monkeypatch):
    with Sapi(size=2, broken=0.0, num_sweeps=5) as sapi:
        monkeypatch.setenv("DWAVE_API_TOKEN", sapi.token)
        yield sapi


@pytest.fixture
def run(sapi, tmp_path):
    """Makes solvers at the emulator, one after the other on the same journal."""
    open_ones = []

    def make(journal="journal", budget=1e6, request_timeout=2.0, **settings):
        while open_ones:
            open_ones.pop().close()
        service = QPUService(endpoint=sapi.url, request_timeout=request_timeout)
        limits = {"num_reads": 4, "settle": 0.3, "deadline": 20.0} | settings
        open_ones.append(QPUSolver(tmp_path / journal, budget, service=service, **limits))
        return open_ones[-1]

    yield make
    while open_ones:
        open_ones.pop().close()


def step(solver, number=0):
    return solver.solve(random_problem(6, 4, 2, number), seed=number).spins


def paid(sapi):
    return sum(charge.cost_us > 0 for charge in sapi.ledger())


def books_agree(solver, sapi):
    return solver.qpu_seconds == pytest.approx(1e-6 * sapi.charged_us, abs=1e-9)


class Training:
    """A small network whose batches follow from the step alone."""

    def __init__(self, solver, seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(BinaryLinear(4, 2), torch.nn.Hardtanh(), BinaryLinear(2, 2))
        self.optimizer = QPSBGD(binary_parameters(self.model), lr=0.1, solver=solver, **ONE_BATCH)

    def steps(self, first, last):
        for number in range(first, last):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
            self.optimizer.zero_grad()
            (self.model(x) - 1).square().mean().backward()
            self.optimizer.step()
        return self

    def checkpoint(self, path):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return self

    def weights(self):
        return [weight.detach().clone() for weight in self.model.parameters()]


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.weights(), other.weights(), strict=True))


# Exactly once


@pytest.mark.parametrize("stage", ["poll", "load"])
def test_a_step_that_raised_goes_on_with_the_job_that_was_sent(sapi, run, stage):
    solver = run()
    sapi.inject(stage, "status", code=401)
    with pytest.raises(StepError, match="injected"):
        step(solver)
    step(solver)
    assert len(sapi.ledger()) == 1
    assert books_agree(solver, sapi)


def test_a_resumed_step_takes_the_answer_of_a_problem_that_differs_by_rounding(sapi, run):
    solver = run()
    sapi.inject("load", "status", code=401)
    with pytest.raises(StepError):
        step(solver)
    problem = random_problem(6, 4, 2, 0)
    nearly = replace(problem, Z=problem.Z / (1 + 1e-7))
    run().solve(nearly, seed=0)
    assert len(sapi.ledger()) == 1


def test_a_refusal_after_a_lost_request_does_not_release_what_may_still_be_paid(sapi, run):
    solver = run(settle=0.2)
    sapi.inject("submit", "late", seconds=1.0)
    sapi.inject("submit", "status", code=401)  # the answer to the second attempt
    with pytest.raises(StepError):
        step(solver)
    assert solver.qpu_seconds > 0  # the first may still arrive
    time.sleep(1.0)
    step(solver)
    assert len(sapi.ledger()) == 1
    assert books_agree(solver, sapi)


def test_a_job_that_was_found_and_has_failed_is_sent_again_and_costs_nothing(sapi, run):
    solver = run()
    sapi.inject("submit", "reset_after")
    sapi.inject("run", "FAILED")
    step(solver)
    assert [charge.status for charge in sapi.ledger()] == ["FAILED", "COMPLETED"]
    assert books_agree(solver, sapi)


def test_jobs_that_always_fail_end_in_an_error_at_a_gentle_pace(sapi, run):
    solver = run()
    solver._submission.attempts = 3
    sapi.inject("run", "FAILED", math.inf)
    with pytest.raises(StepError, match="3 jobs"):
        step(solver)
    assert solver.qpu_seconds == 0
    times = [request.time for request in sapi.requests if request.stage in ("submit", "poll")]
    assert all(times[i + 5] - times[i] >= 1.0 for i in range(len(times) - 5))


@pytest.mark.parametrize("stage", ["poll", "load"])
def test_a_request_that_fails_once_is_made_again(sapi, run, stage):
    solver = run()
    sapi.inject(stage, "status", code=503)
    step(solver)
    assert len(sapi.ledger()) == 1


def test_a_request_that_got_lost_costs_nothing_once_another_job_has_answered(sapi, run):
    solver = run()
    sapi.inject("submit", "reset")
    step(solver)
    attempts = solver._journal.attempts.values()
    assert (len(attempts), len(sapi.ledger())) == (2, 1)
    assert not any(attempt.is_open for attempt in attempts)
    assert books_agree(solver, sapi)


def test_threads_that_take_the_same_step_share_one_job(sapi, run):
    solver = run()
    with ThreadPoolExecutor(4) as pool:
        spins = list(pool.map(lambda _: step(solver), range(4)))
    assert len(sapi.ledger()) == 1
    assert all(torch.equal(own, spins[0]) for own in spins)


def test_a_thread_that_waits_for_a_call_goes_on_as_soon_as_the_call_is_over():
    submission, until = Submission(None, None), time.monotonic() + 60
    entered = threading.Event()

    def second():
        with submission.alone("call", until, threading.Event()):
            entered.set()

    with submission.alone("call", until, threading.Event()):
        threading.Thread(target=second, daemon=True).start()
        assert not entered.wait(0.1)
    assert entered.wait(10)


def test_pauses_between_requests_grow_and_include_the_time_of_the_request():
    class Waits(threading.Event):
        def wait(self, seconds):
            waited.append(seconds)

    waited = []
    pace = _Pace(time.monotonic() + 1000, Waits(), "a call", PAUSE)
    for _ in range(15):
        pace.wait(ServiceError("busy"))
    assert waited[:3] == pytest.approx([PAUSE, 1.5 * PAUSE, 2.25 * PAUSE], abs=0.1)
    assert waited[-1] == pytest.approx(LONGEST_PAUSE, abs=0.1)
    pace.last -= 8.0  # the request took eight seconds
    pace.wait(ServiceError("busy"))
    assert waited[-1] == pytest.approx(LONGEST_PAUSE - 8.0, abs=0.1)


def test_a_job_still_queued_at_the_deadline_is_kept_and_picked_up_later(sapi, run):
    sapi.service.queue_seconds = 5.0
    solver = run(deadline=1.0, settle=0.2)
    with pytest.raises(StepError, match=r"it is (pending|in progress)"):
        step(solver)
    assert solver.qpu_seconds > 0
    step(run(deadline=60.0))  # in another process, perhaps
    assert len(sapi.ledger()) == 1


def test_a_job_left_behind_for_another_batch_is_withdrawn_or_counted(sapi, run):
    sapi.service.queue_seconds = 4.0
    solver = run(deadline=0.8, settle=0.2)
    with pytest.raises(StepError):
        step(solver)
    solver = run()
    solver.solve(random_problem(6, 4, 2, seed=1), seed=0)  # the same step, but other data
    assert books_agree(solver, sapi)
    assert all(not attempt.is_open for attempt in solver._journal.attempts.values())


def test_an_answer_stored_in_a_damaged_state_is_counted_and_bought_again_only_on_demand(sapi, run):
    solver = run(deadline=8.0)
    solver._submission.fetches = 3
    sapi.inject("answer", "flip")
    with pytest.raises(StepError, match=r"was charged.*again sends another"):
        step(solver)
    assert paid(sapi) == 1
    assert books_agree(solver, sapi)
    step(solver)
    assert paid(sapi) == 2
    assert books_agree(solver, sapi)


def test_an_answer_that_is_never_there_is_given_up(sapi, run):
    solver = run(deadline=8.0)
    solver._submission.fetches = 2
    sapi.inject("load", "empty", 2)
    with pytest.raises(StepError, match="holds no answer"):
        step(solver)
    step(solver)
    assert books_agree(solver, sapi)


def test_an_answer_damaged_on_its_way_is_fetched_again_and_not_bought_again(sapi, run):
    for kind in ("flip", "nan", "short"):
        sapi.inject("transit", kind)
    step(solver := run())
    assert len(sapi.ledger()) == 1
    assert books_agree(solver, sapi)


@pytest.mark.parametrize("stage", ["submit", "poll", "load"])
def test_a_service_that_is_down_ends_the_step_by_its_deadline_at_a_gentle_pace(sapi, run, stage):
    solver = run(deadline=600.0)
    step(solver, 1)  # finds the layout
    solver._submission.deadline = 1.5
    sapi.inject(stage, "status", math.inf, code=503)
    before = len(sapi.requests)
    with pytest.raises(StepError):
        step(solver)
    times = [request.time for request in sapi.requests[before:] if request.stage == stage]
    assert all(times[i + 5] - times[i] >= 1.0 for i in range(len(times) - 5))


def test_replies_that_drip_end_the_step_by_its_deadline_and_the_next_try_takes_the_job(sapi, run):
    solver = run(deadline=2.0, request_timeout=60.0)
    sapi.inject("poll", "drip", seconds=30.0)
    with pytest.raises(StepError, match=r"did not finish within the deadline.*none or only a part"):
        step(solver)
    step(solver)
    assert len(sapi.ledger()) == 1


def test_a_service_that_asks_for_an_hour_gets_an_error_instead(sapi, run):
    solver = run()
    sapi.inject("submit", "status", code=429, headers={"Retry-After": "3600"})
    with pytest.raises(StepError, match="deadline"):
        step(solver)
    assert solver.qpu_seconds == 0
    sapi.inject("submit", "status", code=429, headers={"Retry-After": "²"})
    step(solver)


def test_a_request_that_never_left_sets_nothing_aside(sapi, run):
    solver = run(deadline=1.0)
    solver._service.endpoint = "http://127.0.0.1:9"  # nobody listens there
    solver._service._sessions["Problems"].clear()
    with pytest.raises(StepError, match="deadline"):
        step(solver)
    assert solver.qpu_seconds == 0


def test_settle_is_shorter_than_the_deadline(run):
    with pytest.raises(ValueError, match="settle"):
        run(settle=30.0)


# Answers


def test_a_bill_counts_only_if_its_parts_add_up():
    problem, answer = an_answer()
    bill = answer["timing"]
    assert decoded(answer, problem, 12).charged_us == bill["qpu_access_time"]
    for lie in ({"qpu_access_time": 1.0}, {"qpu_access_time": math.nan}, {"qpu_access_time": 10**400}):
        assert decoded(answer | {"timing": bill | lie}, problem, 12).charged_us is None
    for lie in (None, [], "free", {}, {"qpu_access_time": {}}):
        assert decoded(answer | {"timing": lie}, problem, 12).charged_us is None


def test_an_answer_that_is_no_answer_is_refused():
    problem, answer = an_answer()
    for other in (None, [], "text", {}, answer | {"solutions": 7}, answer | {"format": "bq"}):
        with pytest.raises(AnswerError):
            decoded(other, problem, 12)


def test_a_sample_that_is_listed_twice_is_refused():
    problem, answer = an_answer()
    names = {"solutions": "u1", "energies": "<f8", "num_occurrences": "<i4"}
    parts = {name: np.frombuffer(base64.b64decode(answer[name]), dtype) for name, dtype in names.items()}
    count = len(parts["energies"])
    rows = {name: part.reshape(count, -1)[[0, 0]] for name, part in parts.items()}
    rows["num_occurrences"] = np.array([5, 7], "<i4")
    twice = {name: base64.b64encode(part.tobytes()).decode() for name, part in rows.items()}
    with pytest.raises(AnswerError, match="its samples are not distinct"):
        decoded(answer | twice, problem, 12)


def test_samples_are_unpacked_only_if_their_number_is_right(monkeypatch):
    problem, answer = an_answer(12)
    monkeypatch.setattr(np, "unpackbits", None)  # it takes many times the size of the reply
    with pytest.raises(AnswerError, match="numbers of reads"):
        decoded(answer, problem, 11)
    with pytest.raises(AnswerError, match="not those of the problem"):
        decoded(answer, problem._replace(qubits=problem.qubits + 1), 12)


def test_an_id_that_is_an_address_is_refused(sapi, run):
    service = run()._service
    with stranger() as (elsewhere, tokens):
        for job in (f"{elsewhere}/x", "//127.0.0.1/x", "../solvers", ""):
            with pytest.raises(ServiceError, match="not a valid id"):
                service.cancel(job)
    assert not tokens


# Interrupted


@contextmanager
def interrupted():
    """Expect the KeyboardInterrupt of a Ctrl-C in half a second, and no thread left behind."""
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    timer.join()
    patience = time.monotonic() + 10
    while (own := [t for t in threading.enumerate() if t.name.startswith("spingrad")]) and (
        time.monotonic() < patience
    ):
        time.sleep(0.01)
    assert not own


def test_ctrl_c_ends_the_wait_for_a_queue_and_the_next_try_takes_the_job(sapi, run):
    sapi.service.queue_seconds = 1.0
    solver = run(deadline=600.0, request_timeout=60.0, block_size=2, calls_in_flight=2)
    begin = time.monotonic()
    with interrupted():
        step(solver)
    assert time.monotonic() - begin < 300  # the deadline is 600
    (attempt,) = solver._journal.attempts.values()
    assert attempt.id
    step(solver)
    assert len(sapi.ledger()) == 2  # one for each block
    assert books_agree(solver, sapi)


def test_ctrl_c_during_a_submission_leaves_a_label_by_which_the_job_is_found(sapi, run):
    solver = run(deadline=600.0, request_timeout=60.0)
    sapi.inject("submit", "slow", seconds=1.5)
    with interrupted():
        step(solver)
    (attempt,) = solver._journal.attempts.values()
    assert attempt.is_open
    assert attempt.id is None
    time.sleep(1.5)
    step(solver)
    assert len(sapi.ledger()) == 1
    assert books_agree(solver, sapi)


def test_ctrl_c_ends_the_wait_between_two_tries(sapi, run):
    solver = run(deadline=600.0)
    sapi.inject("submit", "status", code=503, headers={"Retry-After": "300"})
    with interrupted():
        step(solver)
    step(solver)
    assert len(sapi.ledger()) == 1


# Budget


def test_a_used_up_budget_moves_nothing_and_more_of_it_lets_the_run_go_on(sapi, run, tmp_path):
    training = Training(run()).steps(0, 1)
    price = training.optimizer.solver.qpu_seconds
    training = Training(run("second", budget=2.5 * price)).steps(0, 2)
    before = training.weights()
    with pytest.raises(BudgetError, match="raise budget"):
        training.steps(2, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
    training.checkpoint(tmp_path / "checkpoint")
    jobs = paid(sapi)
    resumed = Training(run("second", budget=4.5 * price), seed=1).load(tmp_path / "checkpoint")
    resumed.steps(2, 4)
    assert paid(sapi) == jobs + 2


def test_a_fallback_takes_over_when_the_budget_is_used_up(sapi, run, caplog):
    solver = run(budget=1e-9, fallback=SignSolver())
    assert torch.equal(step(solver), SignSolver().solve(random_problem(6, 4, 2, 0)).spins)
    assert "going on with SignSolver" in caplog.text
    assert not sapi.ledger()


def test_a_cost_that_is_no_number_does_not_fit_any_budget(tmp_path):
    journal = Journal(tmp_path / "journal", budget=1.0)
    with pytest.raises(BudgetError):
        journal.reserve("key", math.nan, [])
    journal.close()


def test_a_reply_without_a_bill_counts_what_was_set_aside(sapi, run):
    sapi.inject("answer", "missing", key="timing")
    step(solver := run())
    assert solver.qpu_seconds > 0
    assert books_agree(solver, sapi)


def test_the_ledger_travels_in_the_checkpoint_and_counts_in_a_new_journal(sapi, run, tmp_path):
    training = Training(run()).steps(0, 2)
    spent = training.optimizer.solver.qpu_seconds
    training.checkpoint(tmp_path / "checkpoint")
    resumed = Training(run("new journal", budget=1.2 * spent), seed=1).load(tmp_path / "checkpoint")
    assert resumed.optimizer.solver.qpu_seconds == pytest.approx(spent)
    with pytest.raises(BudgetError):
        resumed.steps(2, 3)
    resumed.load(tmp_path / "checkpoint")  # is not counted again
    assert resumed.optimizer.solver.qpu_seconds == pytest.approx(spent)


# Journal


def test_a_damaged_journal_stops_the_run_before_anything_is_sent(sapi, run, tmp_path):
    step(run())
    run("another")
    damaged = (tmp_path / "journal").read_bytes()[:-1000]
    (tmp_path / "journal").write_bytes(damaged)
    with pytest.raises(JournalError, match="restore it from a copy"):
        run()
    assert (tmp_path / "journal").read_bytes() == damaged
    assert len(sapi.ledger()) == 1


def test_a_journal_serves_one_process_at_a_time(run, tmp_path):
    solver = run()
    with pytest.raises(RuntimeError, match="in use by another run"):
        Journal(tmp_path / "journal")
    step(solver)
    solver.close()
    lock = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); "
    command = [sys.executable, "-c", lock + "print(flush=True); input()", str(tmp_path / "journal.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(RuntimeError, match="in use by another run"):
            Journal(tmp_path / "journal")
        other.kill()
    step(run())


def test_without_room_for_an_event_nothing_is_sent(sapi, run, tmp_path):
    solver = run()
    step(solver)
    before = len(Journal(tmp_path / "journal", read_only=True).attempts)
    solver._journal._database.execute("PRAGMA max_page_count = 1")  # no more pages than it has now
    with pytest.raises(OSError, match="journal could not be written: database or disk is full"):
        solver._journal.reserve("key", 1.0, [], filling="x" * 5000)
    with pytest.raises(RuntimeError, match="closed"):
        step(solver, 2)
    assert len(sapi.ledger()) == 1
    step(run(), 1)
    assert len(Journal(tmp_path / "journal", read_only=True).attempts) == before + 1
    assert len(sapi.ledger()) == 2


def test_a_run_is_replayed_bit_for_bit_without_a_service(sapi, run, tmp_path, monkeypatch):
    solver = run()
    trained = Training(solver).steps(0, 4)
    solver.close()
    requests_before = len(sapi.requests)
    monkeypatch.delenv("DWAVE_API_TOKEN")
    replayed = Training(QPUSolver.replay(tmp_path / "journal")).steps(0, 4)
    assert same_weights(trained, replayed)
    assert len(sapi.requests) == requests_before
    with pytest.raises(StepError, match="no answer"):
        replayed.steps(4, 5)
    with pytest.raises(StepError, match="no answer"):
        Training(QPUSolver.replay(tmp_path / "journal"), seed=1).steps(0, 1)


def test_a_run_resumed_from_an_older_checkpoint_pays_only_for_what_is_new(sapi, run, tmp_path):
    training = Training(run()).steps(0, 2)
    training.checkpoint(tmp_path / "checkpoint")
    training.steps(2, 5)
    assert paid(sapi) == 5
    resumed = Training(run(), seed=1).load(tmp_path / "checkpoint").steps(2, 5)
    assert paid(sapi) == 5
    assert same_weights(training, resumed)
    resumed.steps(5, 6)
    assert paid(sapi) == 6
    assert books_agree(resumed.optimizer.solver, sapi)


def test_answers_stay_in_the_file_until_they_are_asked_for(run):
    solver = run()
    spins = step(solver)
    (attempt,) = solver._journal.attempts.values()
    assert not any(isinstance(value, np.ndarray | tuple | dict) for value in vars(attempt).values())
    assert attempt.answer.spins.dtype == np.int8
    assert attempt.facts["layout"] in solver._journal.layouts
    assert torch.equal(spins, step(solver))


# A new working graph


def test_units_are_laid_out_again_on_a_new_working_graph_and_the_run_goes_on(sapi, run, caplog, tmp_path):
    sapi._lattice = ("pegasus", 2, 0.1)
    training = Training(run()).steps(0, 2)
    training.checkpoint(tmp_path / "checkpoint")
    old = training.optimizer.solver.chip
    sapi.change_graph(seed=3)
    training.steps(2, 4)
    assert "laid out again" in caplog.text
    assert training.optimizer.solver.chip.graph_id != old.graph_id
    assert paid(sapi) == len(sapi.ledger()) == 4
    assert books_agree(training.optimizer.solver, sapi)
    resumed = Training(run()).steps(0, 4)  # from the start: two steps on each graph
    assert paid(sapi) == 4
    assert same_weights(training, resumed)
    resumed.optimizer.solver.close()
    replayed = Training(QPUSolver.replay(tmp_path / "journal")).steps(0, 4)
    assert same_weights(training, replayed)


def test_a_job_refused_for_another_reason_says_which(sapi, run):
    solver = run()
    sapi.inject("batch", "error", code=400, message="no such parameter")
    with pytest.raises(StepError, match="no such parameter"):
        step(solver)
    assert solver.qpu_seconds == 0
    step(solver)
    assert len(sapi.ledger()) == 1


# Safe by default


def test_a_service_is_neither_pickled_nor_copied(run):
    solver = run()
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="token must not be pickled or copied"):
            copied(solver._service)
        with pytest.raises(TypeError):
            copied(solver)
    assert "CANARY" not in repr(vars(solver._service))


@pytest.mark.parametrize("stage", ["solvers", "submit", "poll", "load", "list"])
def test_redirects_are_refused(sapi, run, stage):
    solver = run()
    with stranger() as (elsewhere, tokens):
        if stage == "list":
            sapi.inject("submit", "reset")
        sapi.inject(stage, "redirect", math.inf, to=elsewhere)
        with pytest.raises((StepError, ServiceError), match="redirects are not followed"):
            run() if stage == "solvers" else step(solver)
    assert not tokens


def test_a_proxy_does_not_see_what_stays_on_this_machine(sapi, run, monkeypatch):
    with stranger() as (elsewhere, tokens):
        monkeypatch.setenv("HTTP_PROXY", elsewhere)
        monkeypatch.setenv("http_proxy", elsewhere)
        step(run())
    assert not tokens


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://cloud.dwavesys.com/sapi",
        "http://localhost.evil.example/",
        "ftp://127.0.0.1/",
        "cloud.dwavesys.com",
        "http://127.0.0.1@evil.example/",
    ],
)
def test_the_token_goes_over_https_alone_unless_it_stays_here(endpoint):
    with pytest.raises(ValueError, match="only over https"):
        _checked_endpoint(endpoint, {})


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://evil.example/sapi",
        "https://dwavesys.com.evil.example/",
        "https://evildwavesys.com/",
        "https://cloud.dwavesys.com@evil.example/",
        "https://evil.example\\@cloud.dwavesys.com/",
    ],
)
def test_a_configuration_sends_the_token_to_dwave_alone_unless_the_user_says_so(endpoint):
    with pytest.raises(ValueError, match="is not a host of D-Wave"):
        _checked_endpoint(None, {"endpoint": endpoint})
    assert _checked_endpoint(endpoint, {}) == endpoint
    own = "https://na-west-1.cloud.dwavesys.com/sapi/v2/"
    assert _checked_endpoint(None, {"endpoint": own}) == own


def test_the_environment_names_the_service_too(sapi, monkeypatch):
    monkeypatch.setenv("DWAVE_API_ENDPOINT", sapi.url)
    assert QPUService().endpoint == sapi.url
    monkeypatch.setenv("DWAVE_API_ENDPOINT", "https://evil.example/")
    with pytest.raises(ValueError, match="is not a host of D-Wave"):
        QPUService()


def test_a_dwave_conf_in_the_working_directory_is_not_obeyed(sapi, monkeypatch, tmp_path):
    monkeypatch.delenv("DWAVE_CONFIG_FILE")
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    with stranger() as (elsewhere, tokens):
        Path("dwave.conf").write_text(f"[defaults]\nendpoint = {elsewhere}\n")
        monkeypatch.setenv("DWAVE_API_ENDPOINT", "")
        with pytest.warns(UserWarning, match="is ignored"):
            service = QPUService(endpoint=sapi.url)
        assert service.endpoint == sapi.url
        with pytest.warns(UserWarning, match="is ignored"):
            settings = sys.modules["spingrad.qpu.service"].client_settings(None, None)
        assert "endpoint" not in settings
        assert not tokens
        named = sys.modules["spingrad.qpu.service"].client_settings("dwave.conf", None)
    assert named["endpoint"] == elsewhere


def test_a_region_that_cannot_be_found_is_an_error_and_not_another_region(monkeypatch):
    monkeypatch.setenv("DWAVE_API_TOKEN", "token")
    monkeypatch.setenv("DWAVE_API_REGION", "eu-central-1")
    with stranger() as (elsewhere, _):
        monkeypatch.setenv("DWAVE_METADATA_API_ENDPOINT", elsewhere)
        with pytest.raises(ConnectionError, match="eu-central-1"):
            QPUService()


def test_the_token_is_removed_from_what_the_client_logs(sapi, run, caplog):
    run()
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("dwave.cloud.client").debug("sent with %s", sapi.token)
    assert "sent with <token>" in caplog.text
    assert sapi.token not in caplog.text


@pytest.mark.parametrize(("part", "value"), [("status", "OFFLINE"), ("category", "hybrid")])
def test_a_solver_that_is_no_qpu_or_not_online_is_not_chosen(sapi, monkeypatch, part, value):
    chip = sapi.chip
    monkeypatch.setitem(chip.properties if part == "category" else chip.definition, part, value)
    with pytest.raises(RuntimeError, match="has no QPU online for this token"):
        QPUService(endpoint=sapi.url)


def test_without_a_token_the_error_says_where_to_put_it(sapi, monkeypatch):
    monkeypatch.delenv("DWAVE_API_TOKEN")
    with pytest.raises(ValueError, match="DWAVE_API_TOKEN"):
        QPUService(endpoint=sapi.url)
    assert not sapi.requests


def test_a_wrong_token_is_an_error_without_the_token(sapi, monkeypatch):
    monkeypatch.setenv("DWAVE_API_TOKEN", "another-token")
    with pytest.raises(ServiceError, match="ResourceAuthenticationError") as caught:
        QPUService(endpoint=sapi.url)
    assert "another-token" not in "".join(texts(caught.value))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_biases_that_are_no_numbers_are_refused_before_anything_is_sent_or_set_aside(sapi, run, value):
    solver = run()
    sent = len(sapi.requests)
    problem = Programmed(np.array([0, 1]), np.array([value, 1.0]), np.zeros((0, 2), int), np.zeros(0))
    with pytest.raises(ValueError, match="not finite"):
        solver._submission.sample(problem, solver.chip, "key", 1.0, {"num_reads": 1})
    assert len(sapi.requests) == sent
    assert not solver._journal.attempts


# The emulator


def test_the_emulator_reads_what_is_sent_in_chunks_and_compressed(sapi, run):
    step(run())
    (job,) = sapi.ledger()
    assert job.status == "COMPLETED"
    url, headers = f"{sapi.url}/problems/", {"X-Auth-Token": sapi.token}
    reply = requests.post(url, data=iter([b"[", b"]"]), headers=headers, timeout=10)
    assert reply.json() == []


def test_a_new_graph_of_the_emulator_has_another_name(sapi):
    sapi._lattice = ("pegasus", 2, 0.1)
    before = sapi.chip.identity["version"]
    sapi.change_graph(seed=1)
    assert sapi.chip.identity["version"] != before
