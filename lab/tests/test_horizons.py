import itertools

import numpy as np
import pandas as pd
import pytest
import torch

from spingrad import BinaryQuadratic
from spingrad.solvers import ExactSolver
from spingrad.testing import check_solver
from spingrad_lab.beyond.controlled import KEPT, DisturbedSolver, EnumeratingSolver
from spingrad_lab.beyond.horizons import CELLS, COARSE, DEFAULT, EXACT, concluded, decisions
from spingrad_lab.report.statistics import Estimate


def problem(n, units, seed=0):
    generator = torch.Generator().manual_seed(seed)
    Z, V = torch.randn(2 * n, n, generator=generator), torch.randn(2 * n, units, generator=generator)
    return BinaryQuadratic.least_squares(Z, n**0.5 * V)


@pytest.mark.parametrize("kept", KEPT)
def test_disturbed_solutions_have_the_mean_distance_asked_for(kept):
    solver = DisturbedSolver(0.2, kept)
    for step in range(20):
        solver.solve_all([problem(20, 60, step), problem(4, 60, step)], seed=step)
    assert np.mean(solver.reached[5:]) == pytest.approx(0.2, rel=0.3)


def test_kept_errors_move_the_same_spins_in_every_step_and_gauges_do_not():
    own, best = problem(12, 40), ExactSolver().solve(problem(12, 40)).spins
    again = {}
    for kept in KEPT:
        solver = DisturbedSolver(0.2, kept)
        wrong = [solver.solve(own, seed=step).spins != best for step in range(30)]
        again[kept] = np.mean([(a & b).sum() / a.sum() for a, b in itertools.pairwise(wrong[20:])])
    assert again["kept"] > 0.9
    assert max(again[kept] for kept in KEPT if kept != "kept") < 0.7


def test_enumeration_is_exact_and_solves_equal_units_once():
    check_solver(EnumeratingSolver())
    own = problem(9, 3)
    both = BinaryQuadratic.of(own.Z, own.H[:, [0, 1, 0, 2, 1]])
    torch.testing.assert_close(EnumeratingSolver().solve(both).energy, ExactSolver().solve(both).energy)


def finals(accuracy):
    """Twenty paired seeds of some rows, given their means and the spread of their difference."""
    rows = []
    for name, (mean, spread) in accuracy.items():
        for seed in range(20):
            rows.append({"method": name, "seed": seed, "test_accuracy": mean + spread * (-1) ** seed})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("default", "coarse", "said"),
    [
        ((0.89, 0.001), (0.85, 0.001), "An annealer helps in 18 of 18"),
        ((0.90, 0.001), (0.85, 0.001), "An annealer cannot help at these sizes"),
        ((0.90, 0.001), (0.90, 0.001), "no distance of 20 % costs accuracy"),
        ((0.90, 0.05), (0.85, 0.001), "18 of 18 cells are too wide"),
    ],
)
def test_the_conclusion_follows_the_rule_that_was_written_before(default, coarse, said):
    own = finals({EXACT: (0.9, 0), DEFAULT: default, **dict.fromkeys(COARSE, coarse)})
    every = dict.fromkeys(CELLS, own)
    control = finals({EXACT: (0.9, 0), **dict.fromkeys(COARSE, (0.85, 0.001))})
    assert said in concluded(decisions(every), every, control)
    assert "can show nothing" in concluded(decisions(every), every, finals({EXACT: (0.9, 0)}))
    few = dict(list(every.items())[:2])
    assert "cannot help" not in concluded(decisions(few), few, control)
    assert isinstance(decisions(few)[CELLS[0]][0], Estimate)
