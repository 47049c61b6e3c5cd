import numpy as np
import pytest
import torch

from spingrad import BinaryQuadratic
from spingrad.solvers import BlockDescentSolver, ExactSolver
from spingrad.testing import check_solver
from spingrad_lab.beyond.controlled import WAYS, Checked, ControlledSolver, Measured, Posed, flipped


def problem(n, units, seed=0):
    generator = torch.Generator().manual_seed(seed)
    Z, V = torch.randn(2 * n, n, generator=generator), torch.randn(2 * n, units, generator=generator)
    return BinaryQuadratic.least_squares(Z, n**0.5 * V)


@pytest.mark.parametrize("n", [4, 15, 16, 24])
def test_the_best_known_spins_are_the_optimum(n):
    own = problem(n, 6)
    found = Posed(own, 0).best.T
    assert torch.equal(found.float(), ExactSolver().solve(own).spins)


def test_random_spins_have_a_mean_distance_of_one():
    posed = Posed(problem(16, 2000), 0)
    spins = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], (2000, 16)))
    assert posed.distances(spins).mean() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("distance", [0.01, 0.2, 1.0])
def test_random_flips_have_the_mean_distance_asked_for(distance):
    posed = Posed(problem(16, 2000), 0)
    spins = flipped(posed, distance, np.random.default_rng(0))
    assert posed.distances(spins).mean() == pytest.approx(distance, rel=0.15)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("distance", [0.01, 0.2])
def test_every_way_reaches_the_distance_in_the_mean_over_steps(way, distance):
    solver = ControlledSolver(distance, way)
    for step in range(20):
        solver.solve_all([problem(20, 60, step), problem(4, 60, step)], seed=step)
    assert np.mean(solver.reached[5:]) == pytest.approx(distance, rel=0.3)


def test_the_best_known_spins_keep_the_contract_of_solvers():
    check_solver(ControlledSolver(0.0))


def test_a_solver_is_measured_and_the_best_known_spins_are_checked():
    measured, checked = Measured(BlockDescentSolver(), every=2), Checked(every=2)
    for step in range(4):
        measured.solve(problem(24, 3, step))
        checked.solve(problem(24, 3, step))
    assert len(measured.reached) == 2
    assert min(measured.reached) >= 0
    assert checked.reached == [0.0] * 4
    assert len(checked.above[24]) == 6
    assert 0 <= min(checked.above[24]) <= max(checked.above[24]) < 0.1
