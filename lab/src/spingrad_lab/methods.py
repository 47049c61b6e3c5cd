"""The methods that are compared, each with the same number of hyper-parameter trials."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from spingrad import QPSBGD, BinaryQuadratic
from spingrad.baselines import BinaryConnect, Bop, ProxQuant, SignSGD
from spingrad.solvers import BlockDescentSolver, DimodSolver, ExactSolver, SignSolver, Solver

Params = list[tuple[str, nn.Parameter]]
Settings = dict[str, Any]

NUM_TRIALS = 8


def grid(**values: Iterable[Any]) -> list[Settings]:
    """Every combination of the given values.

    Example:
        >>> grid(lr=(1, 2), momentum=(0,))
        [{'lr': 1, 'momentum': 0}, {'lr': 2, 'momentum': 0}]
    """
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


SOLVER_LABELS = {
    "sign": "sign of the gradient",
    "feedback": "error feedback, 1 sweep",
    "block": "block descent",
    "annealing": "simulated annealing",
    "exact": "exact",
}
"""What tables and figures call the solvers that they compare."""


class OneSweep(BlockDescentSolver):
    """The default solver of version 0.1.0: one sweep in layers of more than 32 inputs."""

    def _effort(self, problem: BinaryQuadratic) -> tuple[int, int]:
        return (8, 8) if problem.num_spins <= 32 else (1, 1)


def make_solver(name: str) -> Solver:
    """A solver by name.

    ``block`` (the default solver of version 0.1.0), ``sweeps`` (five sweeps of descent), ``feedback`` (one
    sweep), ``exact``, ``sign``, ``annealing`` or ``tabu``.
    """
    if name in ("annealing", "tabu"):
        from dwave.samplers import SimulatedAnnealingSampler, TabuSampler

        if name == "tabu":
            return DimodSolver(TabuSampler(), num_reads=1, timeout=5)
        return DimodSolver(SimulatedAnnealingSampler(), num_reads=10, num_sweeps=100)
    if name == "feedback":
        return BlockDescentSolver(num_sweeps=1, num_reads=1)
    if name == "sweeps":
        return BlockDescentSolver(num_sweeps=5)
    solvers: dict[str, type[Solver]] = {"block": OneSweep, "exact": ExactSolver, "sign": SignSolver}
    if name not in solvers:
        raise ValueError(f"solver is block, sweeps, exact, sign, annealing, tabu or feedback, got {name!r}")
    return solvers[name]()


ONE_BATCH: Settings = {"target_rms": 1.0, "momentum": 0.0, "rank": None}
"""A step from one batch, without momentum, in all directions: not the default of ``QPSBGD``."""


def _default(params: Params, seed: int, lr: float, solver: str = "block") -> Optimizer:
    """The class as it comes: only the learning rate is ours, and a solver if another one is asked for."""
    if solver == "block":
        return QPSBGD(params, lr, seed=seed)
    return QPSBGD(params, lr, seed=seed, solver=make_solver(solver))


def _all_directions(params: Params, seed: int, solver: str = "block", **settings: float) -> Optimizer:
    return QPSBGD(params, solver=make_solver(solver), seed=seed, **{**ONE_BATCH, **settings})


def _published(params: Params, seed: int, lr: float, solver: str = "sweeps") -> Optimizer:
    return QPSBGD.as_published(params, lr, solver=make_solver(solver))


def _sgd(params: Params, seed: int, lr: float, momentum: float) -> Optimizer:
    return BinaryConnect(params, torch.optim.SGD, lr=lr, momentum=momentum)


def _sign_sgd(params: Params, seed: int, lr: float, momentum: float) -> Optimizer:
    return SignSGD(params, lr=lr, momentum=momentum)


def _adam(params: Params, seed: int, lr: float, beta2: float) -> Optimizer:
    return BinaryConnect(params, torch.optim.Adam, lr=lr, betas=(0.9, beta2))


def _proxquant(params: Params, seed: int, lr: float, regularization: float) -> Optimizer:
    for _, weight in params:  # real weights begin where binary ones are: at magnitude one
        nn.init.uniform_(weight, -1, 1)
    return ProxQuant(params, regularization=regularization, lr=lr)


def _bop(params: Params, seed: int, lr: float, threshold: float) -> Optimizer:
    return Bop(params, lr=lr, threshold=threshold)


def _frozen(params: Params, seed: int) -> Optimizer:
    return torch.optim.SGD([weight for _, weight in params], lr=0.0)


def _real(params: Params, seed: int, lr: float, beta2: float) -> Optimizer:
    for _, weight in params:
        nn.init.uniform_(weight, -1, 1)
    return ProxQuant(params, regularization=0, lr=lr, betas=(0.9, beta2))


@dataclass(frozen=True)
class Reading:
    """How a network is trained where the paper leaves it open.

    Args:
        reduction: Whether the loss of a batch is the mean or the sum over its rows.
        scale: Whether layers divide their outputs by √fan-in.
    """

    reduction: Literal["mean", "sum"] = "mean"
    scale: bool = True

    def __str__(self) -> str:
        return f"{self.reduction}, {'scaled' if self.scale else 'unscaled'}"


USUAL = Reading()
PAPER_READING = Reading("sum", scale=False)
"""The reading in which the paper's claims hold best (see the experiment ``readings``)."""


@dataclass(frozen=True)
class Method:
    """How to make an optimizer for binary weights, and the settings that are tried."""

    make: Callable[..., Optimizer]
    trials: list[Settings]
    kind: str = "baseline"
    """``ours``, ``baseline``, or ``control`` (not a rival: it bounds what can be reached)."""
    solver: str | None = None
    """For QP-SBGD, what solves the projection."""
    like: str | None = None
    """Takes the settings chosen for this other method, so that only the solver differs."""
    reading: Reading = USUAL
    """The reading of the paper in which it trains its networks."""


DEFAULT, PUBLISHED = "QP-SBGD", "QP-SBGD as published"
ALL_DIRECTIONS = "QP-SBGD, all directions"
SCALED_MEAN = "QP-SBGD as published, mean loss, scaled layers"
_DEFAULT = grid(lr=(3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1))
_ALL_DIRECTIONS = grid(lr=(1e-3, 3e-3, 1e-2, 3e-2), target_rms=(1, 3))
_PUBLISHED = [{"lr": 10 ** (k / 2 - 4)} for k in range(NUM_TRIALS)]

METHODS = {
    DEFAULT: Method(_default, _DEFAULT, "ours", "block"),
    f"{DEFAULT}, exact": Method(_default, [], "ours", "exact", like=DEFAULT),
    ALL_DIRECTIONS: Method(_all_directions, _ALL_DIRECTIONS, "ours", "block"),
    f"{ALL_DIRECTIONS}, exact": Method(_all_directions, [], "ours", "exact", like=ALL_DIRECTIONS),
    PUBLISHED: Method(_published, _PUBLISHED, "ours", "sweeps", reading=PAPER_READING),
    f"{PUBLISHED}, exact": Method(_published, [], "ours", "exact", like=PUBLISHED, reading=PAPER_READING),
    SCALED_MEAN: Method(_published, _PUBLISHED, "ours", "block"),
    f"{SCALED_MEAN}, exact": Method(_published, [], "ours", "exact", like=SCALED_MEAN),
    "BinaryConnect SGD": Method(_sgd, grid(lr=(0.03, 0.1, 0.3, 1), momentum=(0, 0.9))),
    "BinaryConnect signSGD": Method(_sign_sgd, grid(lr=(3e-4, 1e-3, 3e-3, 1e-2), momentum=(0, 0.9))),
    "BinaryConnect Adam": Method(_adam, grid(lr=(1e-3, 3e-3, 1e-2, 3e-2), beta2=(0.999, 0.99))),
    "ProxQuant": Method(_proxquant, grid(lr=(0.01, 0.03), regularization=(3e-4, 1e-3, 3e-3, 1e-2))),
    "Bop": Method(_bop, grid(lr=(1e-3, 1e-2), threshold=(1e-6, 1e-5, 1e-4, 1e-3))),
    "binary layers frozen": Method(_frozen, [{}], "control"),
    "real weights, Adam": Method(_real, grid(lr=(0.01, 0.03, 0.1, 0.3), beta2=(0.999, 0.99)), "control"),
}
"""Every method by name, with ``NUM_TRIALS`` trials each; a control without settings needs only one.

``QP-SBGD`` is the class as it comes. ``QP-SBGD as published`` is the paper's step in the paper's reading.
``…, all directions`` is the default of an earlier version: a step without momentum (unless the settings
say otherwise) in all directions, its target tuned.
"""

LOGISTIC = "logistic regression"
"""A control that trains no network: scikit-learn's, on the same features."""
USUAL_GCN = "usual GCN, real weights"
"""A control on citation graphs: the network of Kipf and Welling, as they train it."""
