"""Annealing of whole layers, and of any dimod model."""

import unittest

import dimod
import numpy as np
import pytest
import torch
from helpers import computed_by

from spingrad.kernels import cpu, plain
from spingrad.kernels.compiled import HAS_NUMBA
from spingrad.solvers import AnnealingSampler, AnnealingSolver, BlockDescentSolver, DimodSolver, ExactSolver
from spingrad.solvers.annealing import logistic
from spingrad.testing import check_solver, random_problem

KERNELS = [plain, *([cpu] if HAS_NUMBA else [])]


@pytest.fixture(params=KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
def kernels(request):
    with computed_by(request.param):
        yield request.param


def test_the_contract_holds_in_numba_and_in_torch(kernels):
    check_solver(AnnealingSolver(num_reads=3, num_sweeps=4))


def test_narrow_layers_are_solved_to_the_proven_optimum(kernels):
    problem = random_problem(12, 24, 40, seed=1)
    exact = ExactSolver().solve(problem)
    assert bool(exact.info["proved"].all())
    spins = AnnealingSolver(*((100, 20) if kernels is plain else ())).solve(problem).spins
    best, found = (problem.double().energy(own.double()) for own in (exact.spins, spins))
    assert float((found <= best + 1e-6).float().mean()) >= 0.95


def test_a_wide_layer_ends_lower_than_restarted_descent(kernels):
    problem = random_problem(16, 200, 33, seed=2)
    descent = BlockDescentSolver(num_sweeps=50, num_reads=8).solve(problem).energy
    assert AnnealingSolver().solve(problem).energy.mean() < descent.mean()


@pytest.mark.parametrize(
    "solver", [BlockDescentSolver(), AnnealingSolver()], ids=lambda own: type(own).__name__
)
def test_a_layer_without_units_has_nothing_to_solve(solver):
    problem = random_problem(10, 40, 3, seed=0).units(0, 0)
    assert solver.solve(problem).spins.shape == (40, 0)


@pytest.mark.needs("numba")
def test_the_number_of_threads_changes_nothing():
    problem, before = random_problem(8, 70, 130, seed=3), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            found.append(AnnealingSolver(2, 3).solve(problem, seed=5).spins)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_other_seeds_give_other_spins(kernels):
    problem = random_problem(40, 80, 8, seed=4)
    found = [AnnealingSolver(1, 1).solve(problem, seed=seed).spins for seed in (1, 2)]
    assert not torch.equal(*found)


def test_the_noise_makes_a_heat_bath():
    field, temperature = 0.7, 0.5
    up = field + temperature * logistic(np.random.default_rng(0), 200_000) >= 0
    assert up.mean() == pytest.approx(1 / (1 + np.exp(-field / temperature)), abs=0.005)


def test_counts_below_one_are_refused():
    for settings in ({"num_reads": 0}, {"num_sweeps": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} is a whole number of at least 1"):
            AnnealingSolver(**settings)


@dimod.testing.load_sampler_bqm_tests(AnnealingSampler)
class TestAnnealingSampler(unittest.TestCase):
    def test_it_has_the_interface_of_a_dimod_sampler(self):
        dimod.testing.assert_sampler_api(AnnealingSampler())


def spin_glass(seed):
    random = np.random.default_rng(seed)
    return dimod.BinaryQuadraticModel(
        random.normal(size=14), np.triu(random.normal(size=(14, 14)), 1), "SPIN"
    )


@pytest.mark.parametrize("vartype", ["SPIN", "BINARY"])
def test_the_sampler_finds_the_ground_state_of_spin_glasses(vartype):
    for seed in range(3):
        model = spin_glass(seed).change_vartype(vartype, inplace=False)
        found = AnnealingSampler().sample(model, num_reads=10, num_sweeps=200, seed=seed).first.energy
        assert found == pytest.approx(dimod.ExactSolver().sample(model).first.energy)


def test_the_sampler_keeps_a_ground_state_that_it_begins_at_cold():
    model = spin_glass(0)
    best = dimod.ExactSolver().sample(model).first.sample
    samples = AnnealingSampler().sample(
        model, num_reads=3, num_sweeps=5, beta_range=(1e3, 1e3), initial_states=best
    )
    assert all(dict(sample) == dict(best) for sample in samples.samples())


def test_the_sampler_solves_a_layer_and_takes_starts():
    problem = random_problem(6, 10, 3, seed=5)
    solver = DimodSolver(AnnealingSampler(), num_reads=10, num_sweeps=100)
    best = ExactSolver().solve(problem)
    for initial in (None, best.spins):
        torch.testing.assert_close(solver.solve(problem, initial=initial).energy, best.energy)


def test_the_sampler_refuses_what_it_cannot_use():
    model = spin_glass(0)
    for settings, message in (
        ({"num_reads": 0}, "at least 1"),
        ({"beta_range": (2, 1)}, "the smaller first"),
        ({"initial_states": {0: 1}}, "all variables"),
    ):
        with pytest.raises(ValueError, match=message):
            AnnealingSampler().sample(model, **settings)
