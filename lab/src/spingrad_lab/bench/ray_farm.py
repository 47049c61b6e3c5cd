"""How much faster four Ray actors solve a step than one, and what the death of an actor costs.

    python benchmarks/ray_farm.py --out benchmarks/results/ray_farm.json

A step's problems of 32 rows, 40 inputs and 12 units each, two layers, solved to the proven optimum by Gurobi
(``--solver exact`` for the exact decoder) with 1, 2 and 4 actors; one actor is killed in the middle of a
further step. Times are medians over the rounds, in which the numbers of actors take turns.
"""

import argparse
import json
import os
import statistics
import threading
import time
from pathlib import Path

import torch

from spingrad.distributed.ray import RaySolver, connect
from spingrad.solvers import ExactSolver, GurobiSolver
from spingrad.testing import random_problem

ACTORS = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--solver", choices=["gurobi", "exact"], default="gurobi")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inputs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("ray_farm.json"))
    args = parser.parse_args()
    make = GurobiSolver if args.solver == "gurobi" else ExactSolver
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 unless told, below everything else on the machine
    ray = connect()
    problems = [random_problem(32, args.inputs, 12, seed=i) for i in range(2)]
    farms = {count: RaySolver(make, count) for count in ACTORS}
    spins = [farm.solve_all(problems)[0].spins for farm in farms.values()]  # and warms up
    seconds: dict[int, list[float]] = {count: [] for count in ACTORS}
    for _ in range(args.rounds):
        for count, farm in farms.items():
            begin = time.perf_counter()
            farm.solve_all(problems)
            seconds[count].append(time.perf_counter() - begin)
    farm = farms[4]
    threading.Timer(statistics.median(seconds[4]) / 2, ray.kill, [farm._actors[0]]).start()
    again = farm.solve_all(problems)[0].spins
    median = {count: statistics.median(times) for count, times in seconds.items()}
    result = {
        "solver": args.solver,
        "cores": os.cpu_count(),
        "tasks": sum(problem.num_units for problem in problems),
        "seconds": median,
        "speed-up": {count: median[1] / time for count, time in median.items()},
        "repeated after a kill": farm.repeated,
        "same spins": all(torch.equal(other, again) for other in spins),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
