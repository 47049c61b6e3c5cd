"""Does a start help a solver? Energy and time from the sign, Babai's spins and the last step's spins."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pandas as pd
import torch
from dwave.samplers import SimulatedAnnealingSampler, TabuSampler
from torch import Tensor

from spingrad import BinaryQuadratic
from spingrad._timing import threads
from spingrad.rounding import babai
from spingrad.solvers import AnnealingSolver, BlockDescentSolver, DimodSolver, ExactSolver, SignSolver
from spingrad_lab.bench.captured import NARROW, captured, energy
from spingrad_lab.report.sections import Section, Table, three_digits
from spingrad_lab.runs import Experiment, Job, Lab, groups

PAIRS = (199, 200, 399, 400, 599, 600)
STARTS = ("cold", "sign", "Babai", "last step")
SOLVERS: dict[str, Callable[[], Any]] = {
    "descent, 1 read of 8 sweeps": lambda: BlockDescentSolver(num_sweeps=8, num_reads=1),
    "AnnealingSolver, 5 reads of 10 sweeps": lambda: AnnealingSolver(num_reads=5, num_sweeps=10),
    "exact": ExactSolver,
    "dwave SA, 100 sweeps": lambda: DimodSolver(SimulatedAnnealingSampler(), num_reads=1, num_sweeps=100),
    "dwave SA, 100 cold sweeps": lambda: DimodSolver(
        SimulatedAnnealingSampler(), num_reads=1, num_sweeps=100, beta_range=(1e3, 1e5)
    ),
    "dwave tabu, 5 ms": lambda: DimodSolver(TabuSampler(), num_reads=1, timeout=5),
}


class Starts(Experiment):
    """Solvers on the narrow layers of one network, cold and from three kinds of start."""

    title = "Starts"
    source = "layers of 16 to 48 inputs of an MLP on MNIST, captured from the default optimizer"

    def plan(self, lab: Lab) -> None:
        lab.run([{"solver": name} for name in ([*SOLVERS][:2] if lab.quick else SOLVERS)])

    def compute(self, job: Job) -> dict[str, Any]:
        with threads(1):
            return _compute(job)

    def show(self, runs: pd.DataFrame) -> Section:
        header = ["solver", *(f"{start}: % above the best" for start in STARTS)]
        header += [f"{start}: ms" for start in STARTS]
        rows = []
        for name, own in groups(runs, "solver"):
            run = own.iloc[0]
            energies = [f"{run[f'{start}: above best %']:.3f}" for start in STARTS]
            rows.append([name, *energies, *(three_digits(run[f"{start}: ms"]) for start in STARTS)])
        count = int(runs["units"].iloc[0]) if len(runs) else 0
        alone = (
            [f"{runs[f'{start} alone: above best %'].iloc[0]:.3f}" for start in STARTS[1:]] if count else []
        )
        if alone:
            rows.append(["the start itself", "–", *alone, *["–"] * 4])
        return Section(list(_NOTES), [Table(header, rows, f"{count} problems of 16 to 48 inputs")])


@cache
def _cases(quick: bool) -> list[tuple[BinaryQuadratic, Tensor, dict[str, Tensor]]]:
    """Problems with their best energies and starts."""
    sizes, steps = ((784, 16, 10), (1, 2)) if quick else (NARROW, PAIRS)
    by_step: dict[int, list[BinaryQuadratic]] = {}
    for problem in captured(sizes, steps):
        if problem.num_spins <= 48:
            by_step.setdefault(problem.origin["step"], []).append(problem)
    cases = []
    for before, now in zip(steps[::2], steps[1::2], strict=True):
        for past, problem in zip(by_step[before], by_step[now], strict=True):
            if past.H.shape != problem.H.shape:  # a unit was idle in one of the two
                continue
            best = energy(problem, ExactSolver().solve(problem).spins)
            starts = {
                "sign": SignSolver().solve(problem).spins,
                "Babai": babai(problem),
                "last step": BlockDescentSolver().solve(past).spins,
            }
            cases.append((problem, best, starts))
    return cases


def _compute(job: Job) -> dict[str, Any]:
    solver, cases = SOLVERS[job["solver"]](), _cases(job["quick"])
    metrics: dict[str, Any] = {"units": sum(problem.num_units for problem, _, _ in cases)}
    for problem, _, _ in cases:
        solver.solve(problem.units(0, 1))  # compile
    for start in STARTS:
        above, alone, seconds = [], [], 0.0
        for problem, best, starts in cases:
            initial = {} if start == "cold" else {"initial": starts[start]}
            begin = time.process_time()
            spins = solver.solve(problem, **initial).spins
            seconds += time.process_time() - begin
            above.append((energy(problem, spins) - best) / best.abs())
            if initial:
                alone.append((energy(problem, initial["initial"]) - best) / best.abs())
        metrics[f"{start}: above best %"] = round(100 * float(torch.cat(above).mean()), 5)
        metrics[f"{start}: ms"] = round(1e3 * seconds, 3)
        if alone:
            metrics[f"{start} alone: above best %"] = round(100 * float(torch.cat(alone).mean()), 5)
    return metrics


_NOTES = (
    "The problems of 784-64-48-32-24-16-10 at steps 200, 400 and 600, without the layers of more than 48 "
    "inputs. The last step's spins are those that the default solver gave one step before. The best energies "
    "are those of the exact decoder. Processor time of all problems together, one thread, without the time "
    "of making the start. *Cold sweeps* of dwave SA begin at a low temperature and keep to the start.",
)
