"""How much faster four Ray actors solve a step than one, and what the death of an actor costs."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch

from spingrad.solvers import ExactSolver, GurobiSolver, Solver
from spingrad.testing import random_problem
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab

ACTORS = (1, 2, 4)
SOLVERS: dict[str, Callable[[], Solver]] = {"gurobi": GurobiSolver, "exact": ExactSolver}


class RayFarm(Experiment):
    """The problems of a step, solved to the proven optimum by 1, 2 and 4 actors in turns."""

    title = "A farm of Ray actors"
    source = "two layers of 32 rows, 40 inputs and 12 units"
    rounds = 5

    def plan(self, lab: Lab) -> None:
        lab.run([{"solver": lab.solver or ("exact" if lab.quick else "gurobi"), "repeat": 0}])

    def compute(self, job: Job) -> dict[str, Any]:
        from spingrad.distributed.ray import RaySolver, connect

        # Unless told, Ray's workers have niceness 15: below everything else on the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray = connect()
        inputs, rounds = (16, 2) if job["quick"] else (40, self.rounds)
        problems = [random_problem(32, inputs, 12, seed=i) for i in range(2)]
        farms = {count: RaySolver(SOLVERS[job["solver"]], count) for count in ACTORS}
        spins = [farm.solve_all(problems)[0].spins for farm in farms.values()]  # the first call warms up
        seconds: dict[int, list[float]] = {count: [] for count in ACTORS}
        for _ in range(rounds):
            for count, farm in farms.items():
                begin = time.perf_counter()
                farm.solve_all(problems)
                seconds[count].append(time.perf_counter() - begin)
        median = {count: float(np.median(times)) for count, times in seconds.items()}
        farm = farms[4]
        threading.Timer(median[4] / 2, ray.kill, [farm._actors[0]]).start()
        again = farm.solve_all(problems)[0].spins
        return {
            "cores": os.cpu_count(),
            "tasks": sum(problem.num_units for problem in problems),
            "seconds": {str(count): time for count, time in median.items()},
            "speed-up": {str(count): median[1] / time for count, time in median.items()},
            "repeated after a kill": farm.repeated,
            "same spins": all(torch.equal(other, again) for other in spins),
        }

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for _, run in runs.iterrows():
            speed = [f"{run['seconds'][str(n)]:.2f} ({run['speed-up'][str(n)]:.2f} ×)" for n in ACTORS]
            same = "yes" if run["same spins"] else "no"
            rows.append([run["solver"], str(run["cores"]), *speed, str(run["repeated after a kill"]), same])
        header = ["solver", "cores", *(f"{n} actor{'s' * (n > 1)}: s" for n in ACTORS)]
        header += ["tasks repeated after a kill", "same spins"]
        notes = [
            "Every unit is a task, solved to the proven optimum. Times are medians over rounds in which the "
            "numbers of actors take turns, with the speed-up over one actor in brackets; in a further step "
            "one of four actors is killed.",
        ]
        return Section(notes, [Table(header, rows)])
