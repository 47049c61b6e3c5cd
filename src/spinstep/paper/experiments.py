"""Every experiment by its name on the command line."""

from spinstep.paper import direction, graphs, images, quantum, regimes, rosenbrock, runtime, small
from spinstep.paper.lab import Experiment

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
    "energy-histogram": quantum.ENERGY_HISTOGRAM,
    "similarity": quantum.SIMILARITY,
    "qubo-evolution": quantum.QUBO_EVOLUTION,
    "embedding": quantum.EMBEDDING,
    "spectral-gap": quantum.SPECTRAL_GAP,
    "rosenbrock": rosenbrock.ROSENBROCK,
    "runtime": runtime.RUNTIME,
    "mnist": images.MNIST,
    "fashion": images.FASHION,
    "citeseer": graphs.CITESEER,
    "cora-raw": graphs.CORA_RAW,
    "pubmed-raw": graphs.PUBMED_RAW,
    "regimes": regimes.REGIMES,
}
"""In the paper's order; what goes beyond the paper comes last."""
