"""Every experiment and benchmark by its name on the command line."""

from spingrad_lab.bench import (
    elastic,
    endurance,
    export,
    growth,
    kills,
    memory,
    qpu_faults,
    qpu_limits,
    qpu_wide_layer,
    ray_farm,
    runtime,
    slow_link,
    solvers,
    vote_accuracy,
)
from spingrad_lab.bench import step as step_bench
from spingrad_lab.beyond import annealers, bits, directions, images, mnist_methods, regimes, step
from spingrad_lab.paper import (
    digits,
    direction,
    embedding,
    graphs,
    qubo_evolution,
    readings,
    rosenbrock,
    sampling,
    small,
    spectral_gap,
)
from spingrad_lab.runs import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "logistic": small.LOGISTIC_REGRESSION,
    "adult-two-layer": small.ADULT_TWO_LAYERS,
    "adult-ten-layer": small.ADULT_TEN_LAYERS,
    "adult-small": small.ADULT_SMALL,
    "mnist-pairs": small.MNIST_PAIRS,
    "karate": graphs.KARATE,
    "cora": graphs.CORA,
    "pubmed": graphs.PUBMED,
    "feature-extraction": digits.FEATURE_EXTRACTION,
    "classified-digits": digits.CLASSIFIED_DIGITS,
    "direction-test": direction.DIRECTION_TEST,
    "readings": readings.READINGS,
    "ablation": graphs.ABLATION,
    "energy-histogram": sampling.ENERGY_HISTOGRAM,
    "similarity": sampling.SIMILARITY,
    "qubo-evolution": qubo_evolution.QUBO_EVOLUTION,
    "embedding": embedding.EMBEDDING,
    "spectral-gap": spectral_gap.SPECTRAL_GAP,
    "rosenbrock": rosenbrock.ROSENBROCK,
    "runtime": runtime.RUNTIME,
    "mnist": images.MNIST,
    "fashion": images.FASHION,
    "citeseer": graphs.CITESEER,
    "cora-raw": graphs.CORA_RAW,
    "pubmed-raw": graphs.PUBMED_RAW,
    "regimes": regimes.REGIMES,
    "step": step.StepExperiment(),
    "bits": bits.BitsExperiment(),
    "annealers": annealers.ANNEALERS,
    "mnist-methods": mnist_methods.MnistMethods(),
    "directions": directions.Directions(),
}
"""In the paper's order; what goes beyond the paper comes last."""

BENCHMARKS: dict[str, Experiment] = {
    "step": step_bench.Step(),
    "solvers": solvers.Solvers(),
    "growth": growth.Growth(),
    "memory": memory.Memory(),
    "endurance": endurance.Endurance(),
    "runtime": runtime.RUNTIME,
    "export": export.Export(),
    "qpu-wide-layer": qpu_wide_layer.QPUWideLayer(),
    "qpu-faults": qpu_faults.QPUFaults(),
    "qpu-limits": qpu_limits.QPULimits(),
    "vote-accuracy": vote_accuracy.VoteAccuracy(),
    "elastic": elastic.Elastic(),
    "kills": kills.Kills(),
    "slow-link": slow_link.SlowLink(),
    "ray-farm": ray_farm.RayFarm(),
}
"""Each runs one job at a time, or they would time each other."""
