"""The annealer of whole layers beside those that take a unit at a time: time, energy, share of optima."""

import time
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import pandas as pd
import torch
from dwave.samplers import SimulatedAnnealingSampler
from torch import Tensor

from spingrad import BinaryQuadratic
from spingrad._timing import threads
from spingrad.solvers import AnnealingSolver, BlockDescentSolver, DimodSolver, ExactSolver, Solution, Solver
from spingrad_lab.bench.captured import NARROW, WIDE, captured, energy
from spingrad_lab.report.sections import Section, Table, three_digits
from spingrad_lab.runs import Experiment, Job, Lab, groups, where

STEPS, UNITS = (200, 400), 8
Make = Callable[[], Solver]


class Bifurcation(Solver):
    """The package simulated-bifurcation, unit by unit; a unit without an answer gets the signs it ends at."""

    def __init__(self, mode: Literal["ballistic", "discrete"], agents: int, max_steps: int) -> None:
        self.mode, self.agents, self.max_steps = mode, agents, max_steps

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        import simulated_bifurcation

        gram, spins = problem.gram(), []
        settings = {"mode": self.mode, "agents": self.agents, "max_steps": self.max_steps}
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that not all agents have converged
            torch.manual_seed(seed)
            for h in problem.H.T:
                found, _ = simulated_bifurcation.minimize(
                    gram, -2 * h, 0.0, domain="spin", verbose=False, **settings
                )
                spins.append(found)
        return Solution(problem, torch.stack(spins, 1).to(problem.H))


def _dwave(num_reads: int, num_sweeps: int) -> Make:
    return lambda: DimodSolver(SimulatedAnnealingSampler(), num_reads=num_reads, num_sweeps=num_sweeps)


def _openjij() -> Solver:
    import openjij

    return DimodSolver(openjij.SASampler(), num_reads=1, num_sweeps=1000)


OURS: dict[str, Make] = {
    "default solver": BlockDescentSolver,
    "AnnealingSolver, 5 reads": lambda: AnnealingSolver(num_reads=5),
    "AnnealingSolver": AnnealingSolver,
    "AnnealingSolver, 60 reads": lambda: AnnealingSolver(num_reads=60),
}
OTHERS: dict[str, Make] = {
    "dwave SA, 100 sweeps": _dwave(1, 100),
    "dwave SA, 1000 sweeps": _dwave(1, 1000),
    "dwave SA, 10 reads of 1000 sweeps": _dwave(10, 1000),
}
if find_spec("openjij"):
    OTHERS["OpenJij SA, 1000 sweeps"] = _openjij
if find_spec("simulated_bifurcation"):
    OTHERS["simulated-bifurcation, ballistic"] = lambda: Bifurcation("ballistic", 128, 1000)
    OTHERS["simulated-bifurcation, discrete"] = lambda: Bifurcation("discrete", 128, 1000)


class Annealers(Experiment):
    """A wide layer against the best energies known, narrow layers against proven optima."""

    title = "Annealers of whole layers"
    source = "layers of MLPs on MNIST, captured from the default optimizer"

    def plan(self, lab: Lab) -> None:
        few = ("default solver", "AnnealingSolver")
        others = [*OTHERS][:1] if lab.quick else [*OTHERS]
        wide = (*(few if lab.quick else OURS), *others)
        lab.run([{"stage": "wide", "solver": name} for name in wide], "a wide layer")
        narrow = [*few, *(name for name in others if "bifurcation" not in name)]  # which takes minutes here
        lab.run([{"stage": "narrow", "solver": name} for name in narrow], "narrow layers")

    def compute(self, job: Job) -> dict[str, Any]:
        with threads(1):
            return _wide(job) if job["stage"] == "wide" else _narrow(job)

    def show(self, runs: pd.DataFrame) -> Section:
        wide, narrow = where(runs, stage="wide"), where(runs, stage="narrow")
        tables = []
        if len(wide):
            ours = wide["seconds"][wide["solver"] == "AnnealingSolver"].iloc[0]
            rows = [
                [
                    run["solver"],
                    three_digits(run["seconds"]),
                    three_digits(run["seconds"] / ours),
                    f"{run['above bound %']:.4f}",
                    f"{run['above best %']:.4f}",
                    _or_dash(run.get("layer above best %"), ".4f"),
                ]
                for _, run in wide.iterrows()
            ]
            header = ["solver", "seconds", "× AnnealingSolver", "% above the bound"]
            header += ["% above the best", "% above the best, all units"]
            shape = "{r} rows, {n} inputs, {m} units".format(**wide.iloc[0])
            tables.append(Table(header, rows, f"A wide layer: {shape}"))
        if len(narrow):
            sizes = sorted(
                {int(name.removeprefix("hits ")) for name in map(str, narrow) if name.startswith("hits ")}
            )
            rows = []
            for name, own in groups(narrow, "solver"):
                run = own.iloc[0]
                hits = [f"{run[f'hits {n}']:.0f} / {run[f'units {n}']:.0f}" for n in sizes]
                share = sum(run[f"hits {n}"] for n in sizes) / sum(run[f"units {n}"] for n in sizes)
                rows.append([name, *hits, f"{100 * share:.1f}", three_digits(run["seconds"])])
            header = ["solver", *(f"n = {n}" for n in sizes), "% of all", "seconds"]
            tables.append(Table(header, rows, "Narrow layers: units solved to the proven optimum"))
        return Section(list(_NOTES), tables)


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None or pd.isna(value) else f"{value:{form}}"


def _above(energy: Tensor, reference: Tensor) -> float:
    """By how many per cent of its size the mean energy lies above a reference."""
    return round(100 * float(((energy - reference) / reference.abs()).mean()), 6)


@cache
def _best(quick: bool) -> tuple[BinaryQuadratic, Tensor]:
    """The wide layer, and the lowest energies of long anneals."""
    problem = captured((784, 64, 10), (2,))[1] if quick else captured(WIDE, STEPS[:1])[0]
    effort = (5, 5) if quick else (200, 30)
    runs = [AnnealingSolver(*effort).solve(problem, seed=seed).spins for seed in (11, 12)]
    return problem, torch.stack([energy(problem, spins) for spins in runs]).amin(0)


def _wide(job: Job) -> dict[str, Any]:
    problem, best = _best(job["quick"])
    (r, n), m = problem.Z.shape, problem.num_units
    whole, units = job["solver"] in OURS, 2 if job["quick"] else UNITS
    own = problem if whole else problem.units(0, units)
    solver = (OURS if whole else OTHERS)[job["solver"]]()
    if whole:
        solver.solve(own.units(0, 1))  # compile
    begin = time.process_time()
    spins = solver.solve(own).spins
    seconds = (time.process_time() - begin) * m / own.num_units
    found = energy(own, spins)
    few = found[:units]
    metrics = {
        "r": r, "n": n, "m": m, "seconds": round(seconds, 4),
        "above bound %": _above(few, problem.units(0, units).lower_bound()),
        "above best %": _above(few, best[:units]),
    }  # fmt: skip
    return metrics | ({"layer above best %": _above(found, best)} if whole else {})


@cache
def _proved(quick: bool) -> list[tuple[BinaryQuadratic, Tensor]]:
    """Narrow layers and the optima of their units; units without a proof are left out."""
    sizes, steps = ((784, 16, 10), (2,)) if quick else (NARROW, STEPS)
    found = []
    for problem in captured(sizes, steps):
        if problem.num_spins > 64:
            continue
        exact = ExactSolver(max_nodes=3_000_000).solve(problem)
        own = exact.info["proved"]
        part = BinaryQuadratic.of(problem.Z, problem.H[:, own], problem.offset[own])
        found.append((part, energy(part, exact.spins[:, own])))
    return found


def _narrow(job: Job) -> dict[str, Any]:
    solver, seconds = (OURS | OTHERS)[job["solver"]](), 0.0
    metrics: dict[str, Any] = {}
    for problem, optimum in _proved(job["quick"]):
        solver.solve(problem.units(0, 1))  # compile
        begin = time.process_time()
        spins = solver.solve(problem).spins
        seconds += time.process_time() - begin
        found, n = energy(problem, spins), problem.num_spins
        hits = int((found <= optimum + 1e-6 * optimum.abs()).sum())
        metrics[f"hits {n}"] = metrics.get(f"hits {n}", 0) + hits
        metrics[f"units {n}"] = metrics.get(f"units {n}", 0) + problem.num_units
    return metrics | {"seconds": round(seconds, 4)}


_NOTES = (
    "Processor time of one thread, conversions included. Annealers that take units one by one solve eight of "
    "them, and their time is multiplied up to the layer. Energies are a mean over those eight units, for "
    "every solver; *all units* is a mean over the layer. The best energies are those of two anneals by "
    "`AnnealingSolver` that are thirty times as long as its default, so they are no proof; the bound is one.",
    "Narrow layers are those of 784-64-48-32-24-16-10 at two steps. A unit counts if the exact decoder has "
    "proved its optimum within three million nodes.",
)
