"""Time, energy and certified gap of solvers on real layer problems, recorded from training on MNIST."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pandas as pd
import torch
from dwave.samplers import SimulatedAnnealingSampler, TabuSampler

from spingrad import BinaryQuadratic
from spingrad._timing import in_turns, threads
from spingrad.rows import DenseRows
from spingrad.solvers import (
    BlockDescentSolver,
    DimodSolver,
    ExactSolver,
    GurobiSolver,
    SignSolver,
    Solver,
)
from spingrad_lab.bench.timing import recorded_problems
from spingrad_lab.report.sections import Section, Table, three_digits
from spingrad_lab.runs import Experiment, Job, Lab, groups, where

SIZES, BATCH, STEPS = (784, 512, 512, 10), 100, 200
WHOLE: dict[str, Callable[[], Solver]] = {
    "sign of the gradient": SignSolver,
    "error feedback (default)": BlockDescentSolver,
    "2 sweeps": lambda: BlockDescentSolver(num_sweeps=2),
    "5 sweeps": lambda: BlockDescentSolver(num_sweeps=5),
    "20 sweeps": lambda: BlockDescentSolver(num_sweeps=20),
}


def _openjij() -> Solver:
    import openjij

    return DimodSolver(openjij.SASampler(), num_reads=1, num_sweeps=100)


SAMPLERS: dict[str, Callable[[], Solver]] = {
    "dwave SA, 100 sweeps": lambda: DimodSolver(SimulatedAnnealingSampler(), num_reads=1, num_sweeps=100),
    "dwave SA, 1000 sweeps": lambda: DimodSolver(SimulatedAnnealingSampler(), num_reads=1, num_sweeps=1000),
    "dwave tabu, 100 ms": lambda: DimodSolver(TabuSampler(), num_reads=1, timeout=100),
}
if find_spec("openjij"):
    SAMPLERS["OpenJij SA, 100 sweeps"] = _openjij
NARROW: dict[str, Callable[[], Solver]] = {
    "default": BlockDescentSolver,
    "accurate": BlockDescentSolver.accurate,
    "exact decoder": ExactSolver,
    **SAMPLERS,
}
if find_spec("gurobipy"):
    NARROW["Gurobi"] = GurobiSolver
FAN_INS, UNITS = (16, 32, 48, 64), 20


class Solvers(Experiment):
    """Wide layers against a bound that no spins can pass, narrow ones against the proven optimum."""

    title = "Solvers"
    source = "layers of 784-512-512-10 after 200 steps on MNIST, batches of 100"

    def plan(self, lab: Lab) -> None:
        wide = [
            {"stage": "wide", "layer": layer, "solver": name}
            for layer in (0, 1)
            for name in ((*WHOLE, "dwave SA, 100 sweeps") if lab.quick else (*WHOLE, *SAMPLERS))
        ]
        lab.run(wide, "wide layers")
        fan_ins = FAN_INS[:1] if lab.quick else FAN_INS
        lab.run([{"stage": "narrow", "n": n, "solver": s} for n in fan_ins for s in NARROW], "narrow layers")

    def compute(self, job: Job) -> dict[str, Any]:
        with threads(1):
            quick = (784, 64, 64, 10), 50, 3
            problems = recorded_problems(*(quick if job["quick"] else (SIZES, BATCH, STEPS)))
            return _wide(problems[job["layer"]], job) if job["stage"] == "wide" else _narrow(problems, job)

    def show(self, runs: pd.DataFrame) -> Section:
        tables = []
        wide, narrow = where(runs, stage="wide"), where(runs, stage="narrow")
        for _, own in groups(wide, "layer"):
            default = own["ms"][own["solver"].str.contains("default")].iloc[0]
            rows = [
                [
                    run["solver"] + (" †" if run["units"] < run["m"] else ""),
                    f"{run['ms']:,.2f}",
                    f"{run['products']:,.1f}",
                    f"{run['ms'] / default:,.2f}",
                    f"{run['energy']:.3f}",
                    f"{run['gap %']:.4f}",
                ]
                for _, run in own.iterrows()
            ]
            shape = "{r} rows, {n} inputs, {m} units".format(**own.iloc[0])
            header = ["solver", "ms", "bare products", "× default", "energy", "% above the bound"]
            tables.append(Table(header, rows, f"A wide layer: {shape}"))
        if len(narrow):
            fan_ins = sorted(set(narrow["n"]))
            header = ["solver", *(f"n = {n}: mean, worst %" for n in fan_ins)]
            header += [f"ms, n = {n}" for n in fan_ins]
            rows = []
            for name, own in groups(narrow.sort_values("n", kind="stable"), "solver"):
                above = [f"{m:.4f}, {w:.3f}" for m, w in zip(own["mean %"], own["worst %"], strict=True)]
                rows.append([name, *above, *(three_digits(ms) for ms in own["ms"])])
            caption = f"Narrow layers: % above the proven optimum, ms for {UNITS} units together"
            tables.append(Table(header, rows, caption))
        return Section(list(_NOTES), tables)


def _wide(problem: BinaryQuadratic, job: Job) -> dict[str, Any]:
    (r, n), m = problem.rows.shape, problem.num_units
    Z = problem.rows.dense()
    weight = torch.ones(m, n)
    if job["solver"] in WHOLE:
        units, solver = m, WHOLE[job["solver"]]()
        own = problem
        repeats = 3 if job["quick"] else 15
        calls = {"solve": lambda: solver.solve(problem), "product": lambda: Z @ weight.T}
        seconds = {k: sorted(v)[len(v) // 2] for k, v in in_turns(calls, repeats, turn=3).items()}
        spins = solver.solve(problem).spins
    else:
        units = 1 if job["quick"] else 3
        own = problem.units(0, units)
        calls = {"product": lambda: Z @ weight.T}
        seconds = {k: sorted(v)[len(v) // 2] for k, v in in_turns(calls, 15, turn=3).items()}
        solver, begin = SAMPLERS[job["solver"]](), time.perf_counter()
        spins = solver.solve(own).spins
        seconds["solve"] = (time.perf_counter() - begin) * m / units
    energy, bound = own.double().energy(spins.double()), own.lower_bound()
    return {
        "r": r, "n": n, "m": m, "units": units,
        "ms": round(1e3 * seconds["solve"], 4),
        "products": round(seconds["solve"] / seconds["product"], 3),
        "energy": round(float(energy.mean()), 5),
        "gap %": round(100 * float(((energy - bound) / bound).mean()), 5),
    }  # fmt: skip


def narrow_problem(problems: list[BinaryQuadratic], n: int, seed: int) -> BinaryQuadratic:
    """Some live inputs of the second layer, drawn at random and scaled as a layer of their own would be."""
    problem = problems[1]
    chosen = torch.randperm(problem.num_spins, generator=torch.Generator().manual_seed(seed))[:n]
    Z = problem.rows.dense()[:, chosen]
    size = Z.norm() * (n / len(Z)) ** 0.5
    own = problem.units(0, UNITS)
    return BinaryQuadratic.of(DenseRows(Z / size), own.H[chosen] / size, own.offset)


def _narrow(problems: list[BinaryQuadratic], job: Job) -> dict[str, Any]:
    problem = narrow_problem(problems, job["n"], seed=job["n"])
    proof = ExactSolver().solve(problem)
    assert bool(torch.as_tensor(proof.info["proved"]).all()), f"the optimum at n = {job['n']} is not proved"
    optimum = problem.double().energy(proof.spins.double())
    solver = NARROW[job["solver"]]()
    solver.solve(problem)  # compile
    begin = time.perf_counter()
    spins = solver.solve(problem).spins
    elapsed = time.perf_counter() - begin
    above = 100 * (problem.double().energy(spins.double()) / optimum - 1)
    return {
        "ms": round(1e3 * elapsed, 4),
        "mean %": round(float(above.mean()), 5),
        "worst %": round(float(above.max()), 5),
    }


_NOTES = (
    "The network trains with QP-SBGD; the problems of its hidden layers are then given to every solver, one "
    "thread. *Bare products* are multiples of one matrix product of the layer in the same run. † Annealers "
    "take units one by one: three were solved and the time multiplied up, conversion included. The bound is "
    "the box relaxation's, in double precision: no spins can go below it. Gurobi's bundled licence ends at "
    "200 variables, so that it has no row for wide layers.",
    "A narrow layer has some random inputs of the second hidden layer, and the optimum of each of its units "
    "is proved by the exact decoder.",
)
