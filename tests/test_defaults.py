"""What users get who set nothing: another default would change their results without any error."""

import inspect

import pytest

from spingrad import QPSBGD
from spingrad.baselines import Bop, ProxQuant, SignSGD
from spingrad.solvers import (
    AnnealingSampler,
    AnnealingSolver,
    BlockDescentSampler,
    BlockDescentSolver,
    ExactSolver,
    GurobiSolver,
    Solver,
)

DEFAULTS = {
    QPSBGD: "lr=0.003, solver=None, target_rms='auto', momentum=0.9, whitening=0.0, rank=16, rows='uniform', "
    "clamp=1.0, seed=0, on_nonfinite='raise', ranks='together', group=None",
    ProxQuant: "regularization=0.001, optimizer=<class 'torch.optim.adam.Adam'>",
    SignSGD: "lr=0.001, momentum=0.0",
    Bop: "lr=0.001, threshold=1e-07",
    BlockDescentSolver: "num_sweeps=None, num_reads=None",
    BlockDescentSampler.sample: "num_reads=1, num_sweeps=100, seed=None",
    AnnealingSolver: "num_reads=None, num_sweeps=None",
    AnnealingSampler.sample: "num_reads=1, num_sweeps=1000, beta_range=None, initial_states=None, seed=None",
    ExactSolver: "max_nodes=10000000, time_limit=None",
    GurobiSolver: "time_limit=None",
}


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(f"{p.name}={p.default!r}" for p in parameters if p.default is not p.empty)


@pytest.mark.parametrize("function", DEFAULTS, ids=lambda function: function.__qualname__)
def test_the_defaults_stay(function):
    assert defaults(function) == DEFAULTS[function]


@pytest.mark.needs("dwave.cloud", "dwave.system")
def test_the_defaults_of_the_qpu_stay():
    from spingrad.qpu import Journal, QPUService, QPUSolver, plan

    assert defaults(QPUSolver) == (
        "service=None, num_reads=100, fallback=None, block_size=32, num_sweeps=1, "
        "chain_strength_prefactor=1.414, spin_reversal=False, "
        "reverse_schedule=((0.0, 1.0), (5.0, 0.45), (15.0, 0.45), (20.0, 1.0)), reinitialize_state=True, "
        "deadline=600.0, settle=10.0, calls_in_flight=4"
    )
    assert defaults(QPUService) == (
        "solver=None, endpoint=None, config_file=None, profile=None, request_timeout=60.0"
    )
    assert defaults(plan) == "epochs=1, chip=None, num_reads=100, block_size=32, num_sweeps=1"
    assert defaults(Journal) == "budget=None, read_only=False"
    assert defaults(QPUSolver.solve_all) == "seed=0"


@pytest.mark.parametrize(
    "solver", [Solver, BlockDescentSolver, ExactSolver], ids=lambda solver: solver.__name__
)
def test_solvers_begin_anywhere_with_the_seed_0(solver):
    assert (defaults(solver.solve), defaults(solver.solve_all)) == ("initial=None, seed=0", "seed=0")


def test_the_accurate_solver_makes_8_sweeps_from_64_starts():
    solver = BlockDescentSolver.accurate()
    assert (solver.num_sweeps, solver.num_reads) == (8, 64)
