import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad.cli import main
from spingrad.qpu import Journal, QPUService, QPUSolver, plan
from spingrad.qpu.inspect import answered_calls, breaks_by_size, picture, places, summary
from spingrad.qpu.packing import Ising, packed, unpacked
from spingrad.testing.sapi import Sapi

ROOT = Path(__file__).parent.parent
WIDTHS = [12, 4, 2]
STEPS = 3

pytestmark = pytest.mark.usefixtures("sapi_env")


def network():
    torch.manual_seed(0)
    layers = [BinaryLinear(12, 4), nn.Hardtanh(), BinaryLinear(4, 2)]
    return nn.Sequential(*layers)


def train(solver, steps=STEPS):
    model = network()
    optimizer = QPSBGD(binary_parameters(model), lr=0.1, solver=solver)
    x = torch.randn(30, 12, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache for the layouts of this file's small chips, instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=["pegasus", "zephyr"])
def run(request, sapi_env, cache, tmp_path_factory):
    """A few steps on a small chip with control errors that break chains; the emulator and the journal."""
    path = tmp_path_factory.mktemp("run") / "run.journal"
    size = {"pegasus": 5, "zephyr": 3}[request.param]
    with Sapi(request.param, size, noise=(0.3, 0.3)) as sapi, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DWAVE_API_TOKEN", sapi.token)
        patch.setenv("DWAVE_API_ENDPOINT", sapi.url)
        solver = QPUSolver(path, budget=10.0, service=QPUService(), num_reads=20)
        train(solver)
        solver.close()
        yield sapi, path


def test_the_plan_agrees_with_what_the_service_charged(run):
    sapi, path = run
    planned = plan(WIDTHS, 30, 30, STEPS, chip=QPUService().chip, num_reads=20)
    assert sapi.charged_us * 1e-6 == pytest.approx(planned.step_seconds * STEPS, rel=0.01)
    assert Journal(path, read_only=True).spent_us == pytest.approx(sapi.charged_us)


def test_with_connect_the_plan_is_for_the_chip_of_the_service(run, capsys):
    sapi, _ = run
    options = ["--batch-size", "10", "--num-examples", "95", "--epochs", "3", "--num-reads", "20"]
    main(["qpu", "plan", "12-4-2", *options, "--connect"])
    printed = capsys.readouterr().out
    assert f"{sapi.solver_name}, {len(sapi.chip.qubits)} working qubits" in printed
    assert "(10 steps)" in printed
    assert "(3 epochs)" in printed


def test_a_plan_without_connect_sends_nothing(cache, capsys, monkeypatch):
    monkeypatch.setattr(QPUService, "__init__", lambda *_: pytest.fail("the service was asked"))
    options = ["--batch-size", "50", "--num-examples", "1000", "--annealing-time", "50"]
    main(["qpu", "plan", "4-4-2", *options, "--topology", "zephyr", "--block-size", "3"])
    printed = capsys.readouterr().out
    assert "ideal zephyr of size 12, 4800 working qubits" in printed
    assert re.search(r"calls per step\s+2, in 2 rounds", printed)


@pytest.mark.parametrize("widths", ["16", "16-0", "16-x-2", "16--2"])
def test_malformed_widths_are_refused(widths, capsys):
    with pytest.raises(SystemExit):
        main(["qpu", "plan", widths, "--batch-size", "1", "--num-examples", "1"])
    assert "expected" in capsys.readouterr().err


def test_a_service_that_cannot_be_reached_is_an_error_message_without_the_token(monkeypatch):
    monkeypatch.setenv("DWAVE_API_TOKEN", "CANARY")
    monkeypatch.setenv("DWAVE_API_ENDPOINT", "http://127.0.0.1:9/")
    with pytest.raises(SystemExit, match="found no QPU to plan for") as stop:
        main(["qpu", "plan", "4-2", "--batch-size", "1", "--num-examples", "1", "--connect"])
    assert "CANARY" not in str(stop.value)


def test_problems_come_back_from_the_journal_as_they_were():
    rng = np.random.default_rng(0)
    shared, own = (np.triu(rng.normal(size=(n, n)), 1) for n in (5, 1))
    problems = [Ising(rng.normal(size=5), shared), Ising(rng.normal(size=1), own), Ising(np.ones(5), shared)]
    kept = json.loads(json.dumps(packed(problems)))
    assert kept["layer_of"] == [0, 1, 0]
    for before, after in zip(problems, unpacked(kept), strict=True):
        np.testing.assert_allclose(after.h, before.h, rtol=1e-6)
        np.testing.assert_allclose(after.J, before.J, rtol=1e-6)


def test_no_sample_is_below_the_best_of_its_unit(run):
    _, path = run
    calls = answered_calls(Journal(path, read_only=True))
    assert len(calls) == STEPS
    for call in calls:
        excess = call.excess_energies()
        units = len(set(call.units))
        assert sum(int((values == 0).sum()) for values in excess.values()) >= units
        assert all((values >= 0).all() for values in excess.values())
        assert sum(map(len, excess.values())) == call.answer.occurrences.sum() * len(call.page.cliques)
    assert [sorted(set(call.layers.tolist())) for call in calls] == [[0, 1]] * STEPS


def test_chain_breaks_are_counted_over_all_reads(run):
    _, path = run
    call = answered_calls(Journal(path, read_only=True))[0]
    position = {qubit: i for i, qubit in enumerate(call.page.qubits.tolist())}
    broken = np.zeros(len(call.page.cliques))
    for spins, times in zip(call.answer.spins, call.answer.occurrences, strict=True):
        for k, clique in enumerate(call.page.cliques):
            split = [len({spins[position[q]] for q in chain}) > 1 for chain in clique]
            broken[k] += times * np.mean(split) / call.answer.occurrences.sum()
    np.testing.assert_allclose(call.chain_breaks, broken)
    assert broken.any()
    assert list(breaks_by_size([call])) == [12]  # four spins need no chains


def test_the_summary_says_what_was_paid(run):
    sapi, path = run
    shown = dict(summary(Journal(path, read_only=True)))
    assert shown["calls answered"] == str(STEPS)
    assert shown["QPU time charged"] == f"{sapi.charged_us * 1e-6:.3f} s"
    assert float(shown["broken chains, cliques of 12"].split()[0]) > 0


def test_every_working_qubit_has_a_place_of_its_own(run):
    sapi, path = run
    at = places(next(iter(Journal(path, read_only=True).chips.values())))
    assert set(at) == set(sapi.chip.qubits.tolist())
    assert len(set(at.values())) == len(at)


def test_a_run_is_drawn_from_its_journal_alone(run, tmp_path, capsys):
    _, path = run
    out = tmp_path / "call.svg"
    main(["qpu", "inspect", str(path), "--call", "2", "--out", str(out)])
    assert str(out) in capsys.readouterr().out.replace("\n", "")
    calls = answered_calls(Journal(path, read_only=True))
    texts = {text.get_text() for text in picture(calls, 2).findobj(lambda a: hasattr(a, "get_text"))}
    assert {"samples of each layer, %", "broken chains, %", "call"} <= texts
    assert any(text.startswith("4 units of 12 spins") for text in texts)
    assert out.stat().st_size < 400_000
    with pytest.raises(SystemExit, match="calls 1 to 3, got 4"):
        main(["qpu", "inspect", str(path), "--call", "4", "--out", str(out)])


def test_a_run_is_printed_without_matplotlib_which_only_the_picture_needs(run, monkeypatch, capsys):
    _, path = run
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    main(["qpu", "inspect", str(path)])
    assert "QPU time charged" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r'pip install "spingrad\[plot\]"'):
        main(["qpu", "inspect", str(path), "--call", "1"])


def test_a_journal_without_answers_or_a_missing_one_is_an_error(tmp_path):
    Journal(tmp_path / "empty.journal").close()
    with pytest.raises(SystemExit, match="no answered call"):
        main(["qpu", "inspect", str(tmp_path / "empty.journal")])
    with pytest.raises(SystemExit, match="No such file"):
        main(["qpu", "inspect", str(tmp_path / "none.journal")])


@pytest.mark.slow
def test_the_emulator_prints_what_a_shell_needs_serves_and_ends_without_a_word(monkeypatch):
    code = "from spingrad.cli import main; main()"
    command = [sys.executable, "-c", code, "qpu", "emulate", "--size", "3", "--topology", "zephyr"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        try:
            lines = [process.stdout.readline() for _ in range(3)]
            for name, value in (line.removeprefix("export ").strip().split("=", 1) for line in lines):
                monkeypatch.setenv(name, value)
            assert QPUService().chip.topology == "zephyr"
        finally:
            for _ in range(3):  # as someone in a hurry
                process.send_signal(signal.SIGINT)
                process.terminate()
        assert process.communicate() == ("", "")
        assert process.returncode == 0


def test_unknown_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["qpu", "inspect", "x.journal", "--colour"])
    assert "unrecognized arguments: --colour" in capsys.readouterr().err


@pytest.fixture
def example(one_thread, cache, monkeypatch, capsys):
    """A function that runs an example as a script in this process and returns what it prints."""

    def run(name, *arguments, last_words="", answer=""):
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("DWAVE_API_TOKEN", os.environ.get("DWAVE_API_TOKEN", ""))  # restored at the end
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        with pytest.raises(SystemExit, match=last_words) if last_words else nullcontext():
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def number(name, printed):
    return float(re.search(rf"{name} +([\d.]+)", printed)[1])


@pytest.mark.slow
def test_the_example_trains_through_the_emulator_and_replays(data_folder, example, tmp_path):
    short = ["--epochs", 2, "--journal", tmp_path / "run.journal", "--seed", 2]
    printed = example("qpu.py", *short, "--size", 6)
    assert (
        number("test accuracy, exact solver", printed) > 0.55
    )  # also what a QPU without a single error gets
    assert number("calls answered", printed) == 20
    planned = number("QPU time of the run", printed)
    assert number("QPU time charged", printed) == pytest.approx(planned, abs=0.05)
    assert 0.55 < number("test accuracy, QPU", printed) <= 1
    again = example("qpu.py", *short, "--replay")
    assert number("test accuracy, QPU", again) == number("test accuracy, QPU", printed)


@pytest.mark.parametrize("answer", ["", "n\n"])
def test_nothing_is_sent_to_a_real_qpu_until_its_user_agrees(data_folder, run, example, tmp_path, answer):
    sapi, _ = run
    before = len(sapi.ledger())
    arguments = ["--real", "--journal", tmp_path / "real.journal", "--num-reads", 20]
    printed = example("qpu.py", *arguments, last_words="nothing was sent", answer=answer)
    assert "of QPU time will be charged" in printed
    assert len(sapi.ledger()) == before
    assert not (tmp_path / "real.journal").exists()


def test_the_contract_asks_all_its_questions_in_less_than_a_second_of_qpu_time(example, tmp_path):
    out = tmp_path / "contract.json"
    example("qpu_contract.py", "--size", 4, "--out", out)
    report = json.loads(out.read_text())
    assert 0 < report["qpu_seconds"] < 1
    assert len(report["findings"]) == 24
    assert not [finding for finding in report["findings"] if finding["holds"] is False]
