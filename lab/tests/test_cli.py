"""The contract of ``spingrad-lab``: exit codes, one line per error, any terminal, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time

import pytest

import spingrad
from spingrad_lab.cli import main


def test_the_version_of_lab_and_library_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert f"spingrad {spingrad.__version__}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run", "nothing"],
        ["run", "karate", "--seeds", "-1"],
        ["run", "karate", "--seeds", "0"],
        ["run", "karate", "--solver", "x"],
        ["run", "karate", "--workers", "-2"],
        ["run", "karate", "--workers", "many"],
        ["run", "karate", "--out", "file"],
        ["run", "karate", "--address", "127.0.0.1:6379"],
        ["report", "file"],
        ["bench", "step", "--device", "foo"],
        ["bench", "step", "--repeats", "0"],
        ["bench", "step", "--beside", "file"],
    ],
    ids=" ".join,
)
def test_a_wrong_argument_ends_with_exit_code_2(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("my only copy")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("--help")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["report", "none"], "holds no finished runs"),
        (["docs", "none"], "expected a checkout of spingrad, got none"),
        (["run", "karate", "--out", "file/below"], "Not a directory"),
        (["bench", "step", "--device", "cuda:999"], "--device cuda:999 cannot be used on this machine"),
        (["bench", "step", "--beside", "."], "is no checkout of this project"),
    ],
)
def test_a_command_that_fails_says_why_in_one_line(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("my only copy")
    with pytest.raises(SystemExit, match=says) as stop:
        main(arguments)
    assert isinstance(stop.value.code, str)  # printed by Python, with exit code 1
    assert "\n" not in stop.value.code


SLEEPER = """
import sys, time
from spingrad_lab import cli, experiments
from sleeper import Sleeper
experiments.EXPERIMENTS["sleeper"] = Sleeper()
cli.main()
"""

SLEEPER_MODULE = """
import time
from spingrad_lab.report.sections import Section
from spingrad_lab.runs import Experiment

class Sleeper(Experiment):
    title = source = "a run that takes long"

    def plan(self, lab):
        lab.run([{"seconds": 0}, {"seconds": 0.01}])
        lab.run([{"seconds": 600}, {"seconds": 601}])

    def compute(self, job):
        time.sleep(job["seconds"])
        return {}

    def show(self, runs):
        return Section()
"""


@pytest.mark.skipif(os.name != "posix", reason="Windows has no process groups with SIGINT")
def test_ctrl_c_ends_a_run_and_its_workers_and_keeps_what_is_finished(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER_MODULE)
    command = [sys.executable, "-c", SLEEPER, "run", "sleeper", "--workers", "2", "--out", str(tmp_path)]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "ascii"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        results = tmp_path / "sleeper.jsonl"
        while not results.exists() or results.read_text().count("\n") < 3:
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)  # also waits for the workers, which hold the pipes
    finally:
        process.kill()
    assert process.returncode == 130
    assert said == f"stopped; 2 runs are kept in {results}, the same command goes on\n"
