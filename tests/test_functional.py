"""The mathematics of a step without a model, and what it reads back to the host."""

import pytest
import torch
from helpers import dense_record
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters
from spingrad.optim.functional import average, move_, pose, scale
from spingrad.solvers import BlockDescentSolver


def test_the_target_is_the_gradient_at_the_asked_strength():
    torch.manual_seed(0)
    record = dense_record(torch.randn(20, 6), torch.randn(20, 3) * torch.tensor([1.0, 1e-3, 0.0]))
    Z, factor, rms = scale(record, target_rms=0.5)
    torch.testing.assert_close((Z.dense() * 6**0.5).square().sum(1).mean(), torch.tensor(1.0))
    torch.testing.assert_close(rms, torch.tensor([0.5, 0.5, 0.0]))
    torch.testing.assert_close((record.grad * factor).square().mean(0).sqrt(), rms)


def test_the_average_has_no_bias_to_a_zero_at_the_start():
    torch.manual_seed(0)
    record = dense_record(torch.randn(20, 6), torch.randn(20, 3))
    Z, factor, _ = scale(record)
    first = average(Z, record.grad, factor, 0.9, None, 0)
    again = average(Z, record.grad, factor, 0.9, first, 1)
    torch.testing.assert_close(again, first)


def test_a_problem_without_momentum_is_the_least_squares_problem():
    torch.manual_seed(0)
    record = dense_record(torch.randn(20, 6), torch.randn(20, 3))
    problem = pose(record, target_rms=0.7)
    Z, factor, _ = scale(record, target_rms=0.7)
    G = torch.randint(2, (6, 3)) * 2.0 - 1
    expected = (record.grad * factor - Z.dense() @ G).square().sum(0)
    torch.testing.assert_close(problem.energy(G), expected)


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_units_move_by_lr_within_the_clamp_and_idle_ones_stay(clamp):
    torch.manual_seed(0)
    weight = torch.rand(700, 300) - 0.5
    before, spins = weight.clone(), torch.randint(2, weight.shape) * 2.0 - 1
    idle = torch.rand(700) < 0.3
    move_(weight, spins, idle, 0.1, clamp)
    expected = before - 0.1 * spins
    expected = expected if clamp is None else expected.clamp(-clamp, clamp)
    assert torch.equal(weight, torch.where(idle[:, None], before, expected))


class Reads(TorchDispatchMode):
    """Counts what a device would have to wait for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = ("_local_scalar_dense", "nonzero", "masked_select", "item", "unique")
        if any(name in str(function) for name in names):
            self.count += 1
        return function(*args, **(kwargs or {}))


NETWORKS = {
    "mlp": (
        lambda: nn.Sequential(BinaryLinear(40, 50), nn.Hardtanh(), BinaryLinear(50, 4)),
        (30, 40),
    ),
    "convolutional": (
        lambda: nn.Sequential(
            BinaryConv2d(2, 6, 3, padding=1),
            nn.Hardtanh(),
            BinaryConv2d(6, 8, 3, groups=2),
            nn.Hardtanh(),
            nn.Flatten(),
            BinaryLinear(8 * 16, 4),
        ),
        (5, 2, 6, 6),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_reads_one_value_back_to_the_host(name, monkeypatch):
    """As on an accelerator: without numba, whose kernels run on the CPU."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    optimizer = QPSBGD(binary_parameters(model), solver=BlockDescentSolver(backend="torch"))
    read_backs = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: read_backs.append(self) or tolist(self))
    for _ in range(3):
        nn.functional.cross_entropy(model(torch.randn(shape)), torch.arange(shape[0]) % 4).backward()
        read_backs.clear()
        with Reads() as reads:
            optimizer.step()
        assert reads.count + len(read_backs) == 1
