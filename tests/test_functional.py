"""The mathematics of a step without a model, and what it reads back to the host."""

import pytest
import torch
from helpers import dense_record
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters
from spingrad.optim.functional import average, move_, pose, scale, whiten
from spingrad.scaling import whitened
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


def exactly_whitened(H, strength):
    """The formula, by eigenvalues."""
    H = H.double()
    values, vectors = torch.linalg.eigh(H.T @ H)
    weaker = H @ (vectors * (1 + strength * values.clamp(min=0) / values.mean()).rsqrt()) @ vectors.T
    return weaker * (H.norm(dim=0) / weaker.norm(dim=0).clamp(min=1e-300))


@pytest.mark.parametrize("strength", [0.0, 0.125, 1.0, 50.0])
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
def test_whitening_weakens_what_units_share_and_keeps_their_lengths(strength, size):
    torch.manual_seed(0)
    H = torch.randn(40, 1) + 0.3 * torch.randn(40, 12)  # almost parallel
    H[:, 5] = 0
    found = whitened(H * size, strength) / size
    torch.testing.assert_close(found, exactly_whitened(H, strength).float(), rtol=1e-3, atol=1e-3)
    assert not whitened(torch.zeros(4, 3), strength).any()


def test_whitening_of_many_units_changes_their_leading_directions():
    torch.manual_seed(0)
    common = torch.randn(300, 4) @ torch.randn(4, 200)
    H = 3 * common + torch.randn(300, 200)
    found, expected = whitened(H, 0.125), exactly_whitened(H, 0.125)
    assert (found - expected).norm() < 0.02 * (H - expected).norm()


def test_a_whitened_step_averages_the_linear_term_as_it_was():
    x, y = torch.randn(30, 12, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 4
    averages, weights = [], []
    for whitening in (0.0, 1.0):
        torch.manual_seed(0)
        model = nn.Sequential(BinaryLinear(12, 24), nn.Hardtanh(), BinaryLinear(24, 4))
        optimizer = QPSBGD(binary_parameters(model), lr=1e-6, whitening=whitening)  # no sign changes
        for _ in range(3):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        averages.append([state["exp_avg"] for state in optimizer.state.values()])
        weights.append([weight.detach() for weight in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*averages, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_whitened_problem_of_one_batch_has_the_energy_of_its_fields():
    torch.manual_seed(0)
    problem = pose(dense_record(torch.randn(20, 6), torch.randn(20, 3)))
    other, G = whiten(problem, 0.5), torch.randint(2, (6, 3)) * 2.0 - 1
    expected = (problem.rows @ G).square().sum(0) - 2 * (other.H * G).sum(0)
    torch.testing.assert_close(other.energy(G), expected)


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


@pytest.mark.parametrize("whitening", [0.0, 0.125])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_reads_one_value_back_to_the_host(name, whitening, monkeypatch):
    """As on an accelerator: without numba, whose kernels run on the CPU."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    solver = BlockDescentSolver(backend="torch")
    optimizer = QPSBGD(binary_parameters(model), whitening=whitening, solver=solver)
    read_backs = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: read_backs.append(self) or tolist(self))
    for _ in range(3):
        nn.functional.cross_entropy(model(torch.randn(shape)), torch.arange(shape[0]) % 4).backward()
        read_backs.clear()
        with Reads() as reads:
            optimizer.step()
        assert reads.count + len(read_backs) == 1


def test_a_state_of_version_0_2_0_goes_on_without_whitening():
    model = BinaryLinear(6, 3)
    state = QPSBGD(binary_parameters(model)).state_dict()
    del state["param_groups"][0]["whitening"]
    optimizer = QPSBGD(binary_parameters(model), whitening=0.125)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["whitening"] == 0
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
