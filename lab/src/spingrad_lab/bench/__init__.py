"""Benchmarks for the user's own machine: ``spingrad-lab bench``. Times are ratios within one run."""

from spingrad_lab.bench.growth import Growth
from spingrad_lab.bench.memory import Memory
from spingrad_lab.bench.solvers import Solvers
from spingrad_lab.bench.step import Step
from spingrad_lab.runs import Experiment

STEP = Step()
BENCHMARKS: dict[str, Experiment] = {
    "step": STEP,
    "solvers": Solvers(),
    "growth": Growth(),
    "memory": Memory(),
}
