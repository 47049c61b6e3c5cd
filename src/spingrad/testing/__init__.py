"""Checks for anyone's solver: the contract that the optimizer relies on."""

from dataclasses import replace
from typing import Any

import torch

from spingrad.problem import BinaryQuadratic
from spingrad.solvers.base import Solution, Solver


def random_problem(
    r: int, n: int, m: int, seed: int, rank: int | None = None, dtype: torch.dtype = torch.float32
) -> BinaryQuadratic:
    """Gaussian ``Z`` (of a given rank) and noise targets about as large as what spins can reach.

    Example:
        >>> problem = random_problem(r=8, n=6, m=3, seed=0)
        >>> problem.Z.shape, problem.H.shape
        (torch.Size([8, 6]), torch.Size([6, 3]))
    """
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randn(r, n, generator=generator, dtype=torch.float64)
    if rank is not None:
        Z = torch.randn(r, rank, generator=generator, dtype=torch.float64) @ Z[:rank]
    V = torch.randn(r, m, generator=generator, dtype=torch.float64)
    return BinaryQuadratic.least_squares(Z.to(dtype) / n**0.5, V.to(dtype))


def check_solver(solver: Solver, *, max_spins: int = 24, deterministic: bool = True) -> None:
    """Raise an ``AssertionError`` that says which part of the contract a solver breaks.

    Spins are -1 or +1 in the problem's shape, dtype and device; equal seeds give equal answers; the problem
    and torch's global generator are left alone; no energy lies below the lower bound; ``solve_all`` answers
    every problem in order; and where every spin decides for itself the answer is the sign of its field. A
    solver that promises it (``keeps_starts``) never makes a start worse.

    Args:
        solver: The solver to test.
        max_spins: Largest fan-in to try, for solvers with a limit.
        deterministic: Whether equal seeds must give equal answers. Solvers with a time limit, and machines
            without seeds such as a QPU, cannot promise it.

    Example:
        >>> from spingrad.solvers import SignSolver
        >>> check_solver(SignSolver())
    """
    n = max_spins
    problem = random_problem(8, min(n, 6), 3, seed=10)
    Z = random_problem(4, min(n, 3), 1, seed=7).Z
    problems = {
        "a single spin": random_problem(1, 1, 1, seed=1),
        "more rows than spins": random_problem(2 * n, (n + 1) // 2, 3, seed=2),
        "fewer rows than spins": random_problem((n + 2) // 3, n, 2, seed=3),
        "dependent inputs": random_problem(n, n, 2, seed=4, rank=(n + 2) // 3),
        "double precision": random_problem(5, min(n, 6), 2, seed=5, dtype=torch.float64),
        "an input that is always zero": _with_zero_input(6, min(n, 5), 2),
        "fields that are no target's": replace(problem, H=problem.H + problem.H.flip(0)),
        "fields of zero": BinaryQuadratic.least_squares(Z, torch.zeros(4, 2)),
        "idle units": replace(problem, idle=torch.tensor([True, False, True])),
    }
    for name, problem in problems.items():
        _check_one(solver, problem, f"{type(solver).__name__} on {name}", deterministic)
        if solver.keeps_starts:
            _check_start(solver, problem, f"{type(solver).__name__} on {name}")
    _check_independent_spins(solver, min(n, 8))
    answers = solver.solve_all(list(problems.values()), seed=3)
    assert len(answers) == len(problems), f"solve_all: {len(problems)} problems, {len(answers)} answers"
    for (name, problem), answer in zip(problems.items(), answers, strict=True):
        _check_spins(problem, answer, f"{type(solver).__name__}.solve_all on {name}")


def _check_spins(problem: BinaryQuadratic, solution: Solution, where: str) -> None:
    spins, H = solution.spins, problem.H
    assert spins.shape == H.shape, f"{where}: spins have shape {tuple(spins.shape)}, not {tuple(H.shape)}"
    assert spins.dtype == H.dtype, f"{where}: spins are {spins.dtype}, the problem is {H.dtype}"
    assert spins.device == H.device, f"{where}: spins are on {spins.device}, the problem on {H.device}"
    assert bool((spins.abs() == 1).all()), f"{where}: spins other than -1 and +1"
    torch.testing.assert_close(
        solution.energy,
        problem.energy(spins),
        rtol=1e-4,
        atol=1e-5,
        msg=lambda m: f"{where}: the energy is not that of the spins\n{m}",
    )


def _check_one(solver: Solver, problem: BinaryQuadratic, where: str, deterministic: bool) -> None:
    Z, H, generator = problem.Z.clone(), problem.H.clone(), torch.get_rng_state()
    solution = solver.solve(problem, seed=7)
    assert torch.equal(problem.Z, Z), f"{where}: the solver changed the rows"
    assert torch.equal(problem.H, H), f"{where}: the solver changed H"
    _check_spins(problem, solution, where)
    true_energy = problem.double().energy(solution.spins.double())
    below = true_energy < problem.lower_bound() - 1e-9
    assert not bool(below.any()), f"{where}: an energy below the lower bound"
    if deterministic:
        again = solver.solve(problem, seed=7).spins
        assert torch.equal(solution.spins, again), (
            f"{where}: equal seeds gave different spins. A solver that stops at a time limit, or that has no "
            "seed, is checked with check_solver(solver, deterministic=False)"
        )
    untouched = torch.equal(torch.get_rng_state(), generator)
    assert untouched, f"{where}: the solver drew from torch's global generator"


def _check_start(solver: Any, problem: BinaryQuadratic, where: str) -> None:
    generator = torch.Generator().manual_seed(11)
    random = torch.randint(2, problem.H.shape, generator=generator).mul(2).sub(1).to(problem.H)
    double, best = problem.double(), solver.solve(problem, seed=7).spins
    for name, start in (("random spins", random), ("its own answer", best)):
        kept = start.clone()
        found = solver.solve(problem, initial=start, seed=7)
        _check_spins(problem, found, f"{where}, from {name}")
        assert torch.equal(start, kept), f"{where}: the solver changed the start"
        before, after = (double.energy(spins.double()) for spins in (start, found.spins))
        worse = after > before + 1e-5 * (1 + before.abs())
        assert not bool(worse.any()), f"{where}: worse than the start, {name}"


def _check_independent_spins(solver: Solver, n: int) -> None:
    problem = random_problem(n, n, 4, seed=8)
    Q, _ = torch.linalg.qr(problem.Z)
    fields = problem.H
    fields = fields + 0.5 * torch.where(fields >= 0, 1.0, -1.0)  # no field too weak for an annealer
    spins = solver.solve(BinaryQuadratic.of(Q, fields), seed=9).spins
    expected = torch.where(fields >= 0, 1.0, -1.0)
    assert torch.equal(spins, expected), "orthonormal rows: the answer is the sign of H, got other spins"


def _with_zero_input(r: int, n: int, m: int) -> BinaryQuadratic:
    generator = torch.Generator().manual_seed(6)
    Z, V = torch.randn(r, n, generator=generator), torch.randn(r, m, generator=generator)
    Z[:, 0] = 0
    return BinaryQuadratic.least_squares(Z / n**0.5, V)
