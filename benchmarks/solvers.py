"""Time, energy and certified gap of solvers on real layer problems, recorded from MNIST training.

    python benchmarks/solvers.py --threads 1

The network trains with QP-SBGD; after some steps its layer problems are kept and given to every solver.
Annealers take units one by one, so they solve a few units and their time is multiplied up to the layer
(marked ×m/k); conversion to dimod is part of it. The gap is the energy above the box relaxation's rigorous
lower bound, which no spins can go below.
"""

import argparse
import itertools
import json
import platform
import statistics
import time

import torch
from dwave.samplers import SimulatedAnnealingSampler, TabuSampler
from torch import nn

from spinstep import QPSBGD, BinaryLeastSquares, BinaryLinear, binary_parameters
from spinstep.data import mnist
from spinstep.record import record_of
from spinstep.solvers import BlockDescentSolver, DimodSolver, SignSolver, Solver

WHOLE_LAYER: dict[str, Solver] = {
    "sign": SignSolver(),
    "error feedback (default)": BlockDescentSolver(),
    "2 sweeps": BlockDescentSolver(num_sweeps=2),
    "5 sweeps": BlockDescentSolver(num_sweeps=5),
    "20 sweeps": BlockDescentSolver(num_sweeps=20),
}
UNIT_BY_UNIT: dict[str, Solver] = {
    "dwave SA, 100 sweeps": DimodSolver(SimulatedAnnealingSampler(), num_reads=1, num_sweeps=100),
    "dwave SA, 1000 sweeps": DimodSolver(SimulatedAnnealingSampler(), num_reads=1, num_sweeps=1000),
    "dwave tabu, 100 ms": DimodSolver(TabuSampler(), num_reads=1, timeout=100),
}


def recorded_problems(sizes: list[int], batch: int, steps: int) -> list[BinaryLeastSquares]:
    """The problems of every layer but the last, after some steps of training."""
    data = mnist("train")
    x, y = data.pixels() / data.pixels().square().mean().sqrt(), data.labels
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [BinaryLinear(fan_in, fan_out), nn.Hardtanh()]
    model = nn.Sequential(*layers[:-1])
    optimizer = QPSBGD(binary_parameters(model))
    for step in range(steps + 1):
        rows = torch.randint(len(x), (batch,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        if step < steps:
            optimizer.step()
    records = [record_of(weight) for _, weight in binary_parameters(model)[:-1]]
    return [BinaryLeastSquares.from_record(r.layers()[0], target_rms=1.0) for r in records if r is not None]


def live_units(problem: BinaryLeastSquares) -> BinaryLeastSquares:
    return BinaryLeastSquares(problem.Z, problem.V[:, problem.V.abs().amax(0) > 0])


def seconds(solver: Solver, problem: BinaryLeastSquares, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        solver.solve(problem)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def compare(problem: BinaryLeastSquares, units: int) -> list[dict[str, float | str]]:
    m = problem.num_units
    W = torch.ones(m, problem.num_spins)
    product = statistics.median(_timed(lambda: problem.Z @ W.T) for _ in range(50))
    bound = problem.lower_bound()
    rows: list[dict[str, float | str]] = []
    few = BinaryLeastSquares(problem.Z, problem.V[:, :units])
    for name, solver in WHOLE_LAYER.items():
        solver.solve(problem)  # compile
        energy = problem.double().energy(solver.solve(problem).spins.double())
        rows.append(_row(name, seconds(solver, problem, 15), energy, bound))
    for name, solver in UNIT_BY_UNIT.items():
        begin = time.perf_counter()
        spins = solver.solve(few).spins
        elapsed = (time.perf_counter() - begin) * m / units
        rows.append(_row(f"{name} ×{m}/{units}", elapsed, few.double().energy(spins.double()), bound[:units]))
    default = next(row for row in rows if "default" in str(row["solver"]))
    for row in rows:
        row["products"] = float(row["ms"]) / (1e3 * product)
        row["times default"] = float(row["ms"]) / float(default["ms"])
    return rows


def _timed(function: object) -> float:
    begin = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - begin


def _row(name: str, elapsed: float, energy: torch.Tensor, bound: torch.Tensor) -> dict[str, float | str]:
    gap = float(((energy - bound) / bound).mean())
    return {"solver": name, "ms": 1e3 * elapsed, "energy": float(energy.mean()), "gap %": 100 * gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[784, 512, 512, 10])
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200, help="training steps before the record")
    parser.add_argument("--units", type=int, default=3, help="units that each annealer solves")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="also write the numbers here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tables = {}
    for problem in map(live_units, recorded_problems(args.sizes, args.batch, args.steps)):
        (r, n), m = problem.Z.shape, problem.num_units
        print(f"\nlayer {n} × {m}, {r} rows, step {args.steps} of training, {args.threads} thread(s)")
        print(f"{'solver':34} {'ms':>12} {'products':>10} {'× default':>10} {'energy':>9} {'gap':>9}")
        tables[f"{n}x{m}"] = rows = compare(problem, args.units)
        for row in rows:
            print(
                f"{row['solver']:34} {row['ms']:12,.2f} {row['products']:10,.1f} "
                f"{row['times default']:10,.2f} {row['energy']:9.3f} {row['gap %']:8.4f}%"
            )
    if args.out:
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        with open(args.out, "w") as file:
            json.dump({"settings": settings, "versions": versions, "tables": tables}, file, indent=1)


if __name__ == "__main__":
    main()
