"""A layer wider than any clique, block by block through an emulated QPU, with the certificate beside it.

    python benchmarks/qpu_wide_layer.py --units 50

The problem is the second layer of 784-512-512-10, recorded from MNIST training. The emulator's annealer is
simulated annealing on the embedded problem; what it charges follows D-Wave's timing model.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch

from spingrad import BinaryLeastSquares
from spingrad.qpu import QPUService, QPUSolver
from spingrad.solvers import BlockDescentSolver, SignSolver, Solver
from spingrad.testing.sapi import Sapi
from spingrad_lab.bench.timing import recorded_problems

NOISE = (0.05, 0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[784, 512, 512, 10])
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200, help="training steps before the record")
    parser.add_argument("--units", type=int, default=50, help="units of the layer that are solved")
    parser.add_argument("--num-reads", type=int, default=100)
    parser.add_argument("--out", help="also write the numbers here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    problem = recorded_problems(tuple(args.sizes), args.batch, args.steps)[-1]
    problem = BinaryLeastSquares(problem.Z, problem.V[:, : args.units])
    local: dict[str, Solver] = {"sign": SignSolver(), "default": BlockDescentSolver()}
    local["2 sweeps"] = BlockDescentSolver(num_sweeps=2)
    rows = [measure(name, solver, problem) for name, solver in local.items()]
    for noise in ((0.0, 0.0), NOISE):
        for sweeps in (1, 2):
            rows.append(through_the_emulator(problem, noise, sweeps, args.num_reads))
    default = next(row for row in rows if row["solver"] == "default")
    (r, n), m = problem.Z.shape, problem.num_units
    print(f"layer of {n} inputs, {m} units, {r} rows, step {args.steps} of training")
    print(
        f"{'solver':42} {'energy':>8} {'of default':>10} {'gap':>8} {'breaks':>7} {'calls':>6} {'QPU s':>7}"
    )
    for row in rows:
        row["of default"] = float(row["energy"]) / float(default["energy"])
        print(
            f"{row['solver']:42} {row['energy']:8.3f} {row['of default']:10.4f} {row['gap %']:7.3f}% "
            f"{row['breaks %']:6.2f}% {row['calls']:6} {row['qpu seconds']:7.2f}"
        )
    if args.out:
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        with open(args.out, "w") as file:
            json.dump({"settings": settings, "versions": versions, "result": rows}, file, indent=1)


def measure(name: str, solver: Solver, problem: BinaryLeastSquares) -> dict[str, float | str]:
    begin = time.perf_counter()
    solution = solver.solve(problem)
    elapsed = time.perf_counter() - begin
    energy, bound = problem.double().energy(solution.spins.double()), problem.lower_bound()
    breaks = float(solution.info["chain_breaks"].mean()) if "chain_breaks" in solution.info else 0.0
    return {
        "solver": name,
        "energy": float(energy.mean()),
        "gap %": 100 * float(((energy - bound) / bound).mean()),
        "breaks %": 100 * breaks,
        "calls": 0,
        "qpu seconds": 0.0,
        "seconds": elapsed,
    }


def through_the_emulator(
    problem: BinaryLeastSquares, noise: tuple[float, float], sweeps: int, num_reads: int
) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as folder, Sapi(noise=noise) as sapi, sapi.configured():
        service = QPUService(sapi.solver_name)
        solver = QPUSolver(
            Path(folder, "journal"), 1e6, service=service, num_reads=num_reads, num_sweeps=sweeps
        )
        name = f"emulated QPU, {sweeps} sweep(s), noise {noise[0]:g} and {noise[1]:g}"
        row = measure(name, solver, problem)
        solver.close()
        return row | {"calls": len(sapi.ledger()), "qpu seconds": sapi.charged_us * 1e-6}


if __name__ == "__main__":
    main()
