"""``spingrad-lab bench``: every benchmark at its quick size, and what it measures."""

import json

import pandas as pd
import pytest
import torch

from spingrad._timing import in_turns, threads
from spingrad_lab.bench.memory import measure
from spingrad_lab.bench.timing import exponent, larger_half
from spingrad_lab.cli import main


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("step", ["QP-SBGD, one batch alone", "products of QP-SBGD alone", "step-ratios.svg"]),
        ("solvers", ["error feedback (default)", "dwave SA, 100 sweeps †", "accurate", "Gurobi"]),
        ("growth", ["rows B", "units m", "growth-growth.svg"]),
        ("memory", ["SignSGD", "3 × 3 convolution, 32 → 32"]),
    ],
)
def test_every_benchmark_runs_prints_and_resumes(name, expected, data_folder, tmp_path, capsys):
    main(["bench", name, "--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert all(part in printed for part in expected)
    lines = (tmp_path / "quick" / f"{name}.jsonl").read_text().splitlines()
    main(["bench", name, "--quick", "--out", str(tmp_path)])
    assert (tmp_path / "quick" / f"{name}.jsonl").read_text().splitlines() == lines
    if name == "step":
        assert all(json.loads(line)["metrics"]["SignSGD"]["ratio"] == 1 for line in lines)


def test_unknown_benchmarks_are_named():
    with pytest.raises(SystemExit, match="no benchmark 'speed'; choose from: step, solvers, growth, memory"):
        main(["bench", "speed"])


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
