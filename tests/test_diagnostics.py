"""What a journal says about the samples of a chip, on emulated chips whose errors are known."""

import numpy as np
import pytest
import torch

from spingrad.problem import BinaryQuadratic
from spingrad.qpu import Journal, QPUSolver
from spingrad.qpu.diagnostics import diagnosis, optimum, reads_for_99
from spingrad.qpu.packing import Ising
from spingrad.solvers import ExactSolver
from spingrad.testing import random_problem
from spingrad.testing.sapi import Sapi


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def diagnosed(path, steps=6, num_sweeps=100, **noise):
    """The diagnosis of some steps that solve different problems, as a mapping."""
    reversal = noise.pop("spin_reversal", False)
    chip = Sapi(size=4, broken=0.0, num_sweeps=num_sweeps, **noise)
    with (
        chip as sapi,
        sapi.configured(),
        QPUSolver(path, 10.0, num_reads=20, spin_reversal=reversal) as solver,
    ):
        for seed in range(steps):
            solver.solve(random_problem(12, 8, 3, seed), seed=seed)
    return dict(diagnosis(Journal(path, read_only=True)))


def number(text):
    return float(text.replace("correlate by ", "").split()[0].rstrip(","))


def test_a_good_chip_finds_optima_and_a_hurried_one_fewer(sapi_env, tmp_path):
    good, hurried = diagnosed(tmp_path / "good"), diagnosed(tmp_path / "hurried", num_sweeps=1)
    name = "P(opt), cliques of 8"
    assert number(good[name]) > 1.5 * number(hurried[name])
    for key in ("median distance", "β_eff · max|J|", "TTS99"):
        assert f"{key}, cliques of 8" in good
    assert number(good["β_eff · max|J|, cliques of 8"]) > number(hurried["β_eff · max|J|, cliques of 8"])
    distances = [number(own["median distance, cliques of 8"]) for own in (good, hurried)]
    assert 0 <= distances[0] < distances[1]
    assert any(name.startswith("broken chains of 2") for name in good)


def test_errors_that_last_show_as_a_bias_over_gauges(sapi_env, tmp_path):
    kept = diagnosed(tmp_path / "kept", persistent_noise=(1.5, 0), spin_reversal=True, steps=12)
    none = diagnosed(tmp_path / "none", spin_reversal=True, steps=12)
    name = "bias of a qubit over gauges"
    assert number(kept[name]) > number(none[name])
    assert name not in diagnosed(tmp_path / "plain", steps=2)
    assert "errors of successive calls" in kept


def test_the_optimum_of_a_unit_is_that_of_its_problem():
    problem = random_problem(20, 14, 2, 0).double()
    best = ExactSolver().solve(problem)
    for unit in range(2):
        h, J, _ = (part.numpy() for part in problem.to_ising(unit))
        own = torch.from_numpy(optimum(Ising(h, J)))[:, None]
        alone = BinaryQuadratic.of(problem.Z, problem.H[:, [unit]], problem.offset[[unit]])
        torch.testing.assert_close(alone.energy(own)[0], best.energy[unit])


def test_more_reads_are_needed_where_the_optimum_is_rare():
    needed = [reads_for_99(chance) for chance in (0.9, 0.5, 0.01)]
    assert needed == sorted(needed)
    assert 1 - (1 - 0.01) ** needed[-1] == pytest.approx(0.99, abs=1e-4)
    assert np.isinf(reads_for_99(0))
