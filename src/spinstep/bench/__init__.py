"""Benchmarks for the user's own machine: ``spinstep bench``. Times are ratios within one run."""

from spinstep.bench.growth import Growth
from spinstep.bench.memory import Memory
from spinstep.bench.solvers import Solvers
from spinstep.bench.step import Step
from spinstep.paper.lab import Experiment

STEP = Step()
BENCHMARKS: dict[str, Experiment] = {
    "step": STEP,
    "solvers": Solvers(),
    "growth": Growth(),
    "memory": Memory(),
}
