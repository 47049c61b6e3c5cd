import doctest
import os
import signal
import sys
import threading

import pytest
import torch

from spingrad.solvers import ExactSolver, Solution
from spingrad.testing import check_solver, random_problem

ray = pytest.importorskip("ray")

from spingrad.distributed.ray import RaySolver, connect  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A cluster on this machine, gone after the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(
            "RAY_worker_niceness", "0"
        )  # 15 unless told: on a busy machine tests would wait for ever
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import tests
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


class Client(ExactSolver):
    """As D-Wave's: it holds a lock, and does not pickle."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.fixture(scope="module")
def farm(cluster):
    return RaySolver(Client, 2)


def test_a_farm_keeps_the_contract_of_a_solver(farm):
    check_solver(farm, max_spins=12)


def test_a_farm_gives_every_unit_what_one_solver_gives_it_and_says_whether_it_is_proved(farm):
    problems = [random_problem(20, n, 3, seed=n) for n in (14, 6)]
    for problem, solution in zip(problems, farm.solve_all(problems), strict=True):
        assert torch.equal(solution.spins, ExactSolver().solve(problem).spins)
        assert solution.info["proved"].tolist() == [True] * 3


class Mortal(ExactSolver):
    """Dies at its first task, if nobody has died yet."""

    def __init__(self, folder, times):
        super().__init__()
        self.folder, self.times = folder, times

    def solve(self, problem, *, seed=0):
        died = len(list(self.folder.glob("died-*")))
        (self.folder / f"solved-{os.getpid()}-{seed}").touch()
        if died < self.times:
            (self.folder / f"died-{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().solve(problem, seed=seed)


def test_a_killed_actor_costs_one_repeated_task_and_no_other_answer(tmp_path):
    problem = random_problem(10, 8, 5, seed=1)
    farm = RaySolver(lambda: Mortal(tmp_path, 1), 1)
    assert torch.equal(farm.solve(problem).spins, ExactSolver().solve(problem).spins)
    assert farm.repeated == 1
    assert len(list(tmp_path.glob("solved-*"))) == 6  # five units, one of them twice


def test_a_task_that_ends_two_actors_is_an_error(tmp_path):
    farm = RaySolver(lambda: Mortal(tmp_path, 2), 1)
    with pytest.raises(ray.exceptions.RayActorError):
        farm.solve(random_problem(10, 8, 2, seed=1))


class Half(ExactSolver):
    def solve(self, problem, *, seed=0):
        return Solution(problem, torch.full_like(problem.H, 0.5))


def test_a_solver_that_does_not_return_spins_is_an_error_of_the_farm():
    with pytest.raises(ValueError, match=r"Half returned spins .* every entry -1 or \+1"):
        RaySolver(Half, 1).solve(random_problem(10, 8, 2, seed=1))


def test_connect_keeps_the_cluster_there_is():
    address = ray.get_runtime_context().gcs_address
    assert connect().get_runtime_context().gcs_address == address


def test_the_example_of_the_docstring_runs():
    (example,) = doctest.DocTestFinder(recurse=False).find(
        RaySolver, globs=vars(sys.modules[RaySolver.__module__])
    )
    assert doctest.DocTestRunner().run(example).failed == 0
