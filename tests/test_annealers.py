import importlib.util
import os
import signal
import subprocess
import sys
import threading
import unittest
from dataclasses import replace

import dimod
import numpy as np
import pytest
import torch
from dwave.samplers import SimulatedAnnealingSampler, SteepestDescentSampler, TabuSampler

from spingrad.solvers import (
    BlockDescentSampler,
    BlockDescentSolver,
    DimodSolver,
    ExactSolver,
    GurobiSolver,
    SignSolver,
    derive_seed,
    gurobi,
)
from spingrad.testing import check_solver, random_problem

needs_gurobi = pytest.mark.skipif(
    importlib.util.find_spec("gurobipy") is None, reason="needs the extra gurobi"
)
needs_openjij = pytest.mark.skipif(
    importlib.util.find_spec("openjij") is None, reason="needs the extra openjij"
)


def openjij_sampler(name):
    return getattr(pytest.importorskip("openjij"), name)()


ANNEALERS = {
    "gurobi": GurobiSolver,
    "openjij annealing": lambda: DimodSolver(openjij_sampler("SASampler"), num_reads=4, num_sweeps=100),
    "openjij quantum annealing": lambda: DimodSolver(
        openjij_sampler("SQASampler"), num_reads=4, num_sweeps=100, beta=20.0
    ),
    "d-wave annealing": lambda: DimodSolver(SimulatedAnnealingSampler(), num_reads=4, num_sweeps=50),
    "d-wave tabu": lambda: DimodSolver(TabuSampler(), timeout=2_000, num_restarts=1),
    "d-wave steepest descent": lambda: DimodSolver(SteepestDescentSampler(), num_reads=2),
    "our descent": lambda: DimodSolver(BlockDescentSampler(), num_reads=4),
}


@pytest.mark.parametrize("name", ANNEALERS)
def test_every_annealer_keeps_the_contract(name):
    if name == "gurobi":
        pytest.importorskip("gurobipy")
    check_solver(ANNEALERS[name]())


def test_importing_spingrad_imports_no_annealer():
    code = (
        "import sys, spingrad, spingrad.solvers as s; s.GurobiSolver;"
        "assert not {'dimod', 'dwave', 'gurobipy', 'openjij'} & set(sys.modules);"
        "s.BlockDescentSampler; assert 'dimod' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Gurobi


@needs_gurobi
def test_the_objective_of_gurobi_is_the_energy_so_that_gaps_are_fractions_of_it(monkeypatch):
    def optimize(model):
        plain(model)
        found.append(model.ObjVal)

    found, plain = [], gurobi._optimize
    monkeypatch.setattr(gurobi, "_optimize", optimize)
    solution = GurobiSolver().solve(random_problem(6, 5, 3, seed=0))
    assert found == pytest.approx(solution.energy.tolist(), rel=1e-5)


@pytest.mark.slow
@needs_gurobi
def test_gurobi_proves_the_optimum_of_the_exact_solver():
    for seed, (r, n, rank) in enumerate([(3, 1, None), (20, 10, 4), (10, 25, None), (40, 25, None)]):
        problem = random_problem(r, n, 3, seed=seed, rank=rank, dtype=torch.float64)
        problem = replace(problem, offset=torch.tensor([0.0, 1.0, 2.0]), H=problem.H + problem.H.flip(0))
        solution, exact = GurobiSolver().solve(problem), ExactSolver().solve(problem)
        assert solution.info["proved"].all()
        assert exact.info["proved"].all()
        torch.testing.assert_close(solution.info["gap"], torch.zeros(3).double(), rtol=0, atol=1e-9)
        torch.testing.assert_close(solution.energy, exact.energy, rtol=1e-9, atol=1e-12)


@needs_gurobi
def test_a_stopped_search_says_how_far_the_optimum_can_be():
    problem = random_problem(100, 50, 2, seed=0, dtype=torch.float64)
    optimum = ExactSolver().solve(problem).energy
    solution = GurobiSolver(WorkLimit=0.05).solve(problem)
    assert not solution.info["proved"].any()
    assert (solution.info["gap"] > 0).all()
    assert (solution.energy * (1 - solution.info["gap"]) <= optimum).all()
    assert (solution.energy >= optimum - 1e-9).all()


@needs_gurobi
def test_a_proof_within_a_gap_is_a_proof_within_that_gap():
    problem = random_problem(40, 25, 1, seed=0)
    info = GurobiSolver(MIPGap=0.2).solve(problem).info
    assert info["proved"].all()
    assert 0 < info["gap"].item() <= 0.2


@needs_gurobi
def test_a_unit_gets_the_same_spins_alone_and_among_others():
    problem = random_problem(100, 50, 3, seed=0)
    solver = GurobiSolver(WorkLimit=0.05)
    together = solver.solve(problem, seed=2**31 - 1).spins
    for unit in range(3):
        assert torch.equal(
            solver.solve(problem.units(unit, unit + 1), seed=2**31 - 1).spins[:, 0], together[:, unit]
        )


@needs_gurobi
def test_without_time_for_any_spins_gurobi_gives_the_sign_of_the_fields():
    problem = random_problem(100, 100, 2, seed=0)
    solution = GurobiSolver(time_limit=1e-9).solve(problem)
    assert torch.equal(solution.spins, SignSolver().solve(problem).spins)
    assert solution.info["gap"].isinf().all()
    assert not solution.info["proved"].any()


def licence_is_limited():
    import gurobipy

    with gurobipy.Env(params={"OutputFlag": 0}) as env, gurobipy.Model(env=env) as model:
        model.addMVar(2001)
        try:
            model.optimize()
        except gurobipy.GurobiError:
            return True
    return False


@needs_gurobi
@pytest.mark.usefixtures("one_thread")
def test_the_licence_decides_how_many_spins_are_too_many():
    solver = GurobiSolver(WorkLimit=0.01)
    assert solver.solve(random_problem(20, 200, 1, seed=0)).spins.shape == (200, 1)
    too_large = random_problem(20, 201, 1, seed=0)
    if licence_is_limited():
        with pytest.raises(ValueError, match=r"limited in size, got 201 spins .* takes 200.*full licence"):
            solver.solve(too_large)
    else:
        assert solver.solve(too_large).spins.shape == (201, 1)


@needs_gurobi
def test_an_interrupt_is_not_swallowed():
    problem = random_problem(200, 150, 1, seed=0)
    solver = GurobiSolver(time_limit=30)
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))

    def solve_and_interrupt():
        interrupt.start()
        solver.solve(problem)

    with pytest.raises(KeyboardInterrupt):
        solve_and_interrupt()


@needs_gurobi
def test_wrong_arguments_of_gurobi_are_named_when_the_solver_is_made():
    import gurobipy

    with pytest.raises(gurobipy.GurobiError, match="Unknown parameter 'Nonsense'"):
        GurobiSolver(Nonsense=1)
    with pytest.raises(ValueError, match="positive number of seconds, got 0"):
        GurobiSolver(time_limit=0)


@needs_gurobi
def test_gurobi_says_nothing(capfd):
    GurobiSolver(time_limit=1, MIPFocus=1).solve(random_problem(4, 5, 2, seed=0))
    assert capfd.readouterr() == ("", "")


def test_a_missing_gurobi_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    with pytest.raises(ImportError, match=r'pip install "spingrad\[gurobi\]"'):
        GurobiSolver()


# OpenJij


@needs_openjij
@pytest.mark.parametrize("name", ["SASampler", "SQASampler"])
def test_openjij_finds_optima_of_small_layers(name):
    problem = random_problem(12, 8, 6, seed=0)
    settings = {"beta": 20.0} if name == "SQASampler" else {}
    solver = DimodSolver(openjij_sampler(name), num_reads=20, num_sweeps=100, **settings)
    torch.testing.assert_close(solver.solve(problem).energy, ExactSolver().solve(problem).energy)


@needs_openjij
@pytest.mark.parametrize("name", ["SASampler", "SQASampler"])
def test_each_read_of_openjij_is_what_its_seed_gives_through_dictionaries(name):
    problem = random_problem(20, 30, 1, seed=0)
    bqm = problem.to_bqm(0)
    reads = [
        openjij_sampler(name).sample(bqm, seed=derive_seed(7, read), num_sweeps=20, sparse=False)
        for read in range(4)
    ]
    assert len({read.record.sample.tobytes() for read in reads}) > 1
    best = min(reads, key=lambda read: read.first.energy).first.sample
    solver = DimodSolver(openjij_sampler(name), seed=7, num_reads=4, num_sweeps=20)
    assert solver.solve(problem).spins[:, 0].tolist() == [best[i] for i in range(30)]


@needs_openjij
def test_openjij_reads_once_unless_told_otherwise():
    solver = DimodSolver(openjij_sampler("SASampler"), keep_samples=True)
    assert len(solver.solve(random_problem(6, 5, 1, seed=0)).info["samples"][0]) == 1


# Our descent as a sampler


@dimod.testing.load_sampler_bqm_tests(BlockDescentSampler)
class TestBlockDescentSampler(unittest.TestCase):
    """dimod's own tests of a sampler, on empty and small models of every kind."""

    def test_it_has_the_interface_of_a_sampler(self):
        dimod.testing.assert_sampler_api(BlockDescentSampler())


def random_bqm(n, vartype, seed):
    """Gaussian biases, and Gaussian couplings between half of all pairs; labels that are no numbers."""
    rng = np.random.default_rng(seed)
    J = np.triu(rng.normal(size=(n, n)) * (rng.random((n, n)) < 0.5), 1)
    bqm = dimod.BinaryQuadraticModel(rng.normal(size=n), J, 1.5, vartype)
    return bqm.relabel_variables({i: ("spin", str(i)) for i in range(n)}, inplace=False)


@pytest.mark.parametrize("vartype", ["SPIN", "BINARY"])
def test_many_reads_of_our_sampler_find_the_optimum(vartype):
    for seed in range(5):
        bqm = random_bqm(12, vartype, seed)
        samples = BlockDescentSampler().sample(bqm, num_reads=100, seed=seed)
        assert len(samples) == 100
        assert samples.vartype is bqm.vartype
        dimod.testing.assert_sampleset_energies(samples, bqm)
        assert samples.first.energy == pytest.approx(dimod.ExactSolver().sample(bqm).first.energy)


@pytest.mark.parametrize("vartype", ["SPIN", "BINARY"])
def test_no_single_flip_lowers_the_energy_of_a_sample(vartype):
    bqm = random_bqm(40, vartype, seed=0)
    samples = BlockDescentSampler().sample(bqm, num_reads=10, seed=0)
    again = SteepestDescentSampler().sample(bqm, initial_states=samples)
    np.testing.assert_allclose(again.record.energy, samples.record.energy, rtol=1e-9)


def test_sampling_leaves_the_model_as_it_is():
    bqm = random_bqm(5, "BINARY", seed=0)
    before = bqm.copy()
    BlockDescentSampler().sample(bqm, seed=0)
    assert bqm == before
    assert bqm.vartype is before.vartype


def test_equal_seeds_give_equal_samples():
    bqm = random_bqm(30, "SPIN", seed=0)
    first, again, other = (
        BlockDescentSampler().sample(bqm, num_reads=5, seed=seed).record.sample for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_first_read_is_the_descent_of_the_layer_solver():
    problem = random_problem(40, 50, 1, seed=0, dtype=torch.float64)
    sample = BlockDescentSampler().sample(problem.to_bqm(0), num_sweeps=3).record.sample[0]
    solver = BlockDescentSolver(num_sweeps=3, num_reads=1)
    assert solver.solve(problem).spins[:, 0].tolist() == sample.tolist()


def test_our_sampler_is_as_good_as_steepest_descent_at_equal_reads():
    kinds = [(100, "SPIN"), (100, "BINARY"), (200, "SPIN")]
    ours, theirs = [], []
    for seed, (n, vartype) in enumerate(kinds * 5):
        bqm = random_bqm(n, vartype, seed)
        for sampler, means in ((BlockDescentSampler(), ours), (SteepestDescentSampler(), theirs)):
            energy = sampler.sample(bqm, num_reads=50, seed=seed).record.energy
            means.append(energy.mean() / n)
    assert np.mean(ours) <= np.mean(theirs) + 0.01 * abs(np.mean(theirs))


def test_wrong_arguments_of_the_sampler_are_explained():
    bqm = random_bqm(3, "SPIN", seed=0)
    with pytest.raises(ValueError, match="at least 1, got 0 and 100"):
        BlockDescentSampler().sample(bqm, num_reads=0)
    with pytest.warns(dimod.exceptions.SamplerUnknownArgWarning, match="beta_range"):
        BlockDescentSampler().sample(bqm, beta_range=(0, 1))
