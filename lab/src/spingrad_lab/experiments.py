"""Every experiment by its name on the command line."""

from spingrad_lab.bench import runtime
from spingrad_lab.beyond import annealers, bits, images, regimes, step
from spingrad_lab.paper import (
    direction,
    embedding,
    graphs,
    qubo_evolution,
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
    "direction-test": direction.DIRECTION_TEST,
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
}
"""In the paper's order; what goes beyond the paper comes last."""
