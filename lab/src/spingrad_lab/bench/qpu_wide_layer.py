"""A layer wider than any clique, block by block through an emulated QPU, with the certificate beside it."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from spingrad import BinaryQuadratic
from spingrad.qpu import QPUService, QPUSolver
from spingrad.solvers import BlockDescentSolver, SignSolver, Solver
from spingrad.testing.sapi import Sapi
from spingrad_lab.bench.timing import recorded_problems
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab, where

NOISE = (0.05, 0.02)
FULL = {"sizes": [784, 512, 512, 10], "batch": 100, "steps": 200, "units": 50, "num_reads": 100}
QUICK = {"sizes": [784, 256, 256, 10], "batch": 50, "steps": 3, "units": 4, "num_reads": 5}
LOCAL: dict[str, Callable[[], Solver]] = {
    "sign": SignSolver,
    "default": BlockDescentSolver,
    "2 sweeps": partial(BlockDescentSolver, num_sweeps=2),
}
EMULATED = {
    f"emulated QPU, {sweeps} sweep(s), noise {noise[0]:g} and {noise[1]:g}": (noise, sweeps)
    for noise in ((0.0, 0.0), NOISE)
    for sweeps in (1, 2)
}


class QPUWideLayer(Experiment):
    """The second layer of a network, recorded from MNIST training, and some of its units solved."""

    title = "A wide layer on an emulated QPU"
    source = "second layer of 784-512-512-10 after 200 steps on MNIST, batches of 100, 50 units"

    def plan(self, lab: Lab) -> None:
        settings = QUICK if lab.quick else FULL
        lab.run([{"solver": name, **settings} for name in (*LOCAL, *EMULATED)])

    def compute(self, job: Job) -> dict[str, Any]:
        problem = recorded_problems(tuple(job["sizes"]), job["batch"], job["steps"])[-1]
        problem = problem.units(0, job["units"])
        if job["solver"] in LOCAL:
            return measure(LOCAL[job["solver"]](), problem)
        noise, sweeps = EMULATED[job["solver"]]
        with tempfile.TemporaryDirectory() as folder, Sapi(noise=noise) as sapi, sapi.configured():
            service, reads = QPUService(sapi.solver_name), job["num_reads"]
            journal = Path(folder, "journal")
            solver = QPUSolver(journal, 1e6, service=service, num_reads=reads, num_sweeps=sweeps)
            found = measure(solver, problem)
            solver.close()
            return found | {"calls": len(sapi.ledger()), "qpu seconds": sapi.charged_us * 1e-6}

    def show(self, runs: pd.DataFrame) -> Section:
        default = where(runs, solver="default")["energy"].iloc[0]
        rows = [
            [
                run["solver"],
                f"{run['energy']:.3f}",
                f"{run['energy'] / default:.4f}",
                f"{run['gap %']:.3f} %",
                f"{run['breaks %']:.2f} %",
                str(run["calls"]),
                f"{run['qpu seconds']:.2f}",
            ]
            for _, run in runs.iterrows()
        ]
        header = ["solver", "energy", "of default", "above the bound", "chain breaks", "calls", "QPU seconds"]
        note = (
            "The emulator's annealer is simulated annealing on the embedded problem; what it charges follows "
            "D-Wave's timing model. Energies are means over the units, the bound is that of the certificate."
        )
        return Section([note], [Table(header, rows)])


def measure(solver: Solver, problem: BinaryQuadratic) -> dict[str, Any]:
    begin = time.perf_counter()
    solution = solver.solve(problem)
    elapsed = time.perf_counter() - begin
    energy, bound = problem.double().energy(solution.spins.double()), problem.lower_bound()
    breaks = float(solution.info["chain_breaks"].mean()) if "chain_breaks" in solution.info else 0.0
    return {
        "energy": float(energy.mean()),
        "gap %": 100 * float(((energy - bound) / bound).mean()),
        "breaks %": 100 * breaks,
        "calls": 0,
        "qpu seconds": 0.0,
        "seconds": elapsed,
    }
