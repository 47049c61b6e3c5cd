"""The problems that a batch poses: to the layers of a network, or by the rows and targets themselves."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from spingrad import QPSBGD, BinaryQuadratic, binary_parameters
from spingrad.optim import capture
from spingrad.solvers import SignSolver


def posed(network: nn.Module, loss: Callable[[Any], Tensor], **settings: Any) -> list[BinaryQuadratic]:
    """The problem of each binary layer in a step of one batch. The network stays as it is.

    In double precision: spins of equal energy stay equal, and couplings of zero are zero up to 1e-15.

    Args:
        network: Of layers that compute with the first of its inputs.
        loss: Of a batch, as a function of the network.
        **settings: Of the optimizer, without momentum.
    """
    own = deepcopy(network).double()
    optimizer = QPSBGD(binary_parameters(own), solver=SignSolver(), momentum=0.0, **settings)
    with capture(optimizer, steps=[0]) as problems:
        loss(lambda x: own(x.double())).backward()
        optimizer.step()
    return problems


def scaled(x: Tensor, grad: Tensor) -> BinaryQuadratic:
    """Rows with a gradient, of equal weight and one scale, and targets of root mean square 1.

    Args:
        x: Rows, shape ``(r, n)``.
        grad: Gradients by what the rows give, shape ``(r, m)``; each column has one.
    """
    live = grad.any(1)
    x, grad = x[live], grad[live]
    Z = x / (x.norm() * (x.shape[1] / len(x)) ** 0.5)
    return BinaryQuadratic.least_squares(Z, grad / grad.square().mean(0).sqrt())


def target_squares(problem: BinaryQuadratic) -> Tensor:  # (m,)
    """``‖V‖²`` of targets of root mean square 1, to which the optimizer has scaled a problem; 0 if idle."""
    return problem.num_spins * problem.Z.square().sum() * ~problem.idle


def moving(problem: BinaryQuadratic) -> BinaryQuadratic:
    """The units of a problem that a step moves."""
    own = ~problem.idle
    return replace(problem, H=problem.H[:, own], offset=problem.offset[own], idle=problem.idle[own])
