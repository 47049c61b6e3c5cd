import copy

import torch

from spingrad._memory import Pool, is_free
from spingrad.solvers import BlockDescentSolver
from spingrad.testing import random_problem


def test_memory_is_free_once_no_view_of_it_is_left():
    tensor = torch.zeros(3, 4)
    assert is_free(tensor)
    column = tensor[:, 0]
    assert not is_free(tensor)
    array = column.numpy()
    del column
    assert not is_free(tensor)
    del array
    assert is_free(tensor)


def test_a_pool_hands_out_no_matrix_twice_while_it_is_looked_at():
    pool, like = Pool(), torch.zeros(1)
    first = pool.empty(2, 3, like)
    kept, place = first[:, :2], first.data_ptr()
    del first
    second = pool.empty(2, 3, like)
    assert second.data_ptr() != place
    del kept, second
    assert pool.empty(2, 3, like).data_ptr() == place
    assert pool.empty(2, 3, like.double()).dtype == torch.float64


def test_solutions_that_are_kept_stay_what_they_were():
    solver = BlockDescentSolver()
    problems = [random_problem(20, 50, 40, seed=seed) for seed in range(4)]
    kept = [solver.solve(problem).spins for problem in problems]
    again = [BlockDescentSolver().solve(problem).spins for problem in problems]
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert torch.equal(copy.deepcopy(solver).solve(problems[0]).spins, kept[0])
