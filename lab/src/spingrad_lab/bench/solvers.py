"""Time, energy and certified gap of solvers on real layer problems, captured from the default optimizer."""

import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import pandas as pd
import torch
from dwave.samplers import SimulatedAnnealingSampler, TabuSampler
from torch import Tensor

from spingrad import BinaryQuadratic
from spingrad._timing import in_turns, threads
from spingrad.solvers import (
    BlockDescentSolver,
    DimodSolver,
    ExactSolver,
    GurobiSolver,
    SignSolver,
    Solver,
)
from spingrad_lab.bench.captured import BATCH, NARROW, WIDE, captured, energy
from spingrad_lab.report.sections import Section, Table, three_digits
from spingrad_lab.runs import Experiment, Job, Lab, groups, where

STEPS = (200,)
WHOLE: dict[str, Callable[[], Solver]] = {
    "sign of the gradient": SignSolver,
    "one sweep": lambda: BlockDescentSolver(num_sweeps=1),
    "two sweeps (default)": BlockDescentSolver,
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
SOLVERS: dict[str, Callable[[], Solver]] = {
    "default": BlockDescentSolver,
    "accurate": BlockDescentSolver.accurate,
    "exact decoder": ExactSolver,
    **SAMPLERS,
}
if find_spec("gurobipy"):
    SOLVERS["Gurobi"] = GurobiSolver
FAN_INS, UNITS = (16, 32, 48, 64), 10


class Solvers(Experiment):
    """Wide layers against a bound that no spins can pass, narrow ones against the proven optimum."""

    title = "Solvers"
    source = "layers of MLPs after 200 steps on MNIST, captured from the default optimizer"
    revision = 2  # problems of 32 directions and with momentum

    def plan(self, lab: Lab) -> None:
        wide = [
            {"stage": "wide", "layer": layer, "solver": name}
            for layer in (0, 1)
            for name in ((*WHOLE, "dwave SA, 100 sweeps") if lab.quick else (*WHOLE, *SAMPLERS))
        ]
        lab.run(wide, "wide layers")
        fan_ins = FAN_INS[:1] if lab.quick else FAN_INS
        lab.run([{"stage": "narrow", "n": n, "solver": s} for n in fan_ins for s in SOLVERS], "narrow layers")

    def compute(self, job: Job) -> dict[str, Any]:
        with threads(1):
            return _wide(job) if job["stage"] == "wide" else _narrow(job)

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
            counts = ", ".join(str(narrow["units"][narrow["n"] == n].iloc[0]) for n in fan_ins)
            caption = f"Narrow layers: % above the proven optimum, ms for all units ({counts}) together"
            tables.append(Table(header, rows, caption))
        return Section(list(_NOTES), tables)


def _wide(job: Job) -> dict[str, Any]:
    problem = captured(*(((784, 64, 64, 10), (3,)) if job["quick"] else (WIDE, STEPS)))[job["layer"]]
    (r, n), m = problem.Z.shape, problem.num_units
    x, weight = torch.ones(BATCH, n), torch.ones(m, n)
    if job["solver"] in WHOLE:
        units, solver = m, WHOLE[job["solver"]]()
        own = problem
        repeats = 3 if job["quick"] else 15
        calls = {"solve": lambda: solver.solve(problem), "product": lambda: x @ weight.T}
        seconds = {k: sorted(v)[len(v) // 2] for k, v in in_turns(calls, repeats, turn=3).items()}
        spins = solver.solve(problem).spins
    else:
        units = 1 if job["quick"] else 3
        own = problem.units(0, units)
        calls = {"product": lambda: x @ weight.T}
        seconds = {k: sorted(v)[len(v) // 2] for k, v in in_turns(calls, 15, turn=3).items()}
        solver, begin = SAMPLERS[job["solver"]](), time.perf_counter()
        spins = solver.solve(own).spins
        seconds["solve"] = (time.perf_counter() - begin) * m / units
    found, bound = energy(own, spins), own.lower_bound()
    return {
        "r": r, "n": n, "m": m, "units": units,
        "ms": round(1e3 * seconds["solve"], 4),
        "products": round(seconds["solve"] / seconds["product"], 3),
        "energy": round(float(found.mean()), 5),
        "gap %": round(100 * float(((found - bound) / bound.abs()).mean()), 5),
    }  # fmt: skip


@cache
def _proved(n: int, quick: bool) -> tuple[BinaryQuadratic, Tensor]:
    """Some units of the layer with this many inputs whose optimum is proved, and these optima."""
    problems = captured(*(((784, 16, 10), (3,)) if quick else (NARROW, STEPS)))
    problem = next(problem for problem in problems if problem.num_spins == n).units(0, UNITS)
    exact = ExactSolver().solve(problem)
    own = exact.info["proved"]
    proved = BinaryQuadratic.of(problem.Z, problem.H[:, own], problem.offset[own])
    return proved, energy(proved, exact.spins[:, own])


def _narrow(job: Job) -> dict[str, Any]:
    problem, optimum = _proved(job["n"], job["quick"])
    solver = SOLVERS[job["solver"]]()
    solver.solve(problem)  # compile
    begin = time.perf_counter()
    spins = solver.solve(problem).spins
    elapsed = time.perf_counter() - begin
    above = 100 * (energy(problem, spins) - optimum) / optimum.abs()
    return {
        "units": problem.num_units,
        "ms": round(1e3 * elapsed, 4),
        "mean %": round(float(above.mean()), 5),
        "worst %": round(float(above.max()), 5),
    }


_NOTES = (
    "784-512-512-10 and 784-64-48-32-24-16-10 train with QP-SBGD, the default; the problems of one step are "
    "then given to every solver, one thread. *Bare products* are multiples of one matrix product of the "
    "layer with its batch of 100, in the same run. † Annealers take units one by one: three were solved and "
    "the time multiplied up, conversion included. The bound is the box relaxation's, in double precision: no "
    "spins can go below it. Gurobi's bundled licence ends at 200 variables, so it has no row for wide "
    "layers.",
    f"A narrow layer has its first {UNITS} units, or those of them whose optimum the exact decoder proves.",
)
