"""``spingrad-lab bench``: every benchmark at its quick size, and what it measures."""

import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import spingrad
from spingrad._timing import in_turns, threads
from spingrad_lab.bench import step
from spingrad_lab.bench.memory import measure
from spingrad_lab.bench.timing import exponent, larger_half
from spingrad_lab.cli import main
from spingrad_lab.experiments import BENCHMARKS
from spingrad_lab.runs import Line, read_lines, to_frame

OTHERS = ["export", "qpu-wide-layer", "qpu-faults", "qpu-limits", "vote-accuracy", "kills", "endurance"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("step", ["QP-SBGD, one batch alone", "products of QP-SBGD alone", "step-ratios.svg"]),
        ("solvers", ["two sweeps (default)", "dwave SA, 100 sweeps †", "accurate", "Gurobi"]),
        ("annealers", ["AnnealingSolver", "dwave SA, 100 sweeps", "units solved to the proven optimum"]),
        ("starts", ["descent, 1 read of 8 sweeps", "last step: ms", "the start itself"]),
        ("growth", ["rows B", "units m", "growth-growth.svg"]),
        ("memory", ["SignSGD", "3 × 3 convolution, 32 → 32"]),
    ],
)
def test_every_benchmark_runs_prints_and_resumes(name, expected, data_folder, tmp_path, capsys):
    main(["bench", name, "--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert all(part in printed for part in expected)
    path = tmp_path / "quick" / "bench" / f"{name}.jsonl"
    before = path.read_text()
    main(["bench", name, "--quick", "--out", str(tmp_path)])
    assert path.read_text() == before
    if name == "step":
        assert all(line.metrics["SignSGD"]["ratio"] == 1 for line in read_lines(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_benchmark_runs_on_real_data(name, data_folder, tmp_path, capsys):
    main(["bench", name, "--quick", "--repeats", "1", "--out", str(tmp_path)])
    assert "failed" not in capsys.readouterr().out
    lines = read_lines(tmp_path / "quick" / "bench" / f"{name}.jsonl")
    section = BENCHMARKS[name].show(to_frame(lines))
    for table in section.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_committed_results_are_shown_without_running_anything(name):
    folder = Path(__file__).parents[1] / "results" / ("" if name == "runtime" else "bench")
    lines = read_lines(folder / f"{name}.jsonl")
    assert lines
    assert BENCHMARKS[name].show(to_frame(lines)).tables


def test_another_version_is_timed_in_the_same_run(data_folder, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    shutil.copytree(Path(spingrad.__file__).parent, other / "src" / "spingrad")
    monkeypatch.setattr("spingrad_lab.bench.step.WIDE", "784-16-10")  # another small network
    monkeypatch.setattr("spingrad_lab.bench.step.SIZES", (784, 16, 10))
    monkeypatch.setitem(step.BATCH, "784-16-10", 20)
    experiment = step.Step(beside=other)
    job = {"network": "784-16-10", "threads": 1, "repeat": 0, "here": "a", "beside": "b", "quick": True}
    metrics = experiment.compute(job)
    assert metrics.keys() == {"SignSGD", "QP-SBGD", "SignSGD, beside", "QP-SBGD, beside"}
    (table,) = experiment.show(to_frame([Line(job, metrics, 0.0, {})])).tables
    assert [row[0] for row in table.rows] == ["SignSGD", "QP-SBGD"]
    assert {len(row) for row in table.rows} == {len(table.header)}


def test_a_folder_without_this_project_is_refused_before_anything_is_timed(tmp_path):
    with pytest.raises(SystemExit, match="is no checkout of this project"):
        main(["bench", "step", "--quick", "--beside", str(tmp_path), "--out", str(tmp_path / "out")])


def test_unknown_benchmarks_are_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "speed"])
    assert (
        "no benchmark 'speed'; choose from: all, step, solvers, annealers, starts, devices"
        in capsys.readouterr().err
    )


def test_candidates_take_turns_and_the_first_turn_is_not_counted():
    calls = []
    seconds = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=4, turn=2)
    assert "".join(calls) == "aabb" * 3
    assert {name: len(times) for name, times in seconds.items()} == {"a": 4, "b": 4}


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_exponents_and_peaks():
    sizes = (256, 512, 1024, 2048)
    assert exponent(pd.Series([3e-6 * size for size in sizes], sizes)) == pytest.approx(1)
    sizes = (1, 2, 2**20, 2**21)
    points = pd.Series([1e-3 + 1e-12 * size**2 for size in sizes], sizes)
    assert exponent(larger_half(points)) == pytest.approx(2, abs=0.01)
    found = measure("linear, 512 × 512, B = 64", "QP-SBGD")
    assert found["peak"] >= found["imported"] > 10**7


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it():
    size = 2**30
    child = "import sys; from spingrad_lab.bench.memory import peak; print(peak())"
    parent = (
        f"import subprocess, sys; from spingrad_lab.bench.memory import peak; held = bytearray({size}); "
        f"held[::4096] = b'1' * ({size} // 4096); print(peak()); sys.stdout.flush(); "
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    run = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    own, childs = map(int, run.stdout.split())
    assert own > size
    assert childs < own - size // 2
