"""The same step on a GPU, and in mixed precision. What this machine cannot run says so."""

import golden
import pytest
import torch
from helpers import computed_by, posed
from torch import nn

from spingrad import (
    QPSBGD,
    BinaryConv2d,
    BinaryLinear,
    BinaryQuadratic,
    binary_parameters,
)
from spingrad.kernels import plain
from spingrad.solvers import BlockDescentSolver, SignSolver
from spingrad.testing import check_solver, random_problem

DEVICES = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}


@pytest.fixture(params=DEVICES)
def device(request):
    if not DEVICES[request.param]:
        pytest.skip(f"not run: this machine has no {request.param} device")
    return torch.device(request.param)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        BinaryConv2d(3, 8, 3, stride=2), nn.Hardtanh(), nn.Flatten(), BinaryLinear(8 * 49, 64), nn.Hardtanh(),
        BinaryLinear(64, 5),
    )  # fmt: skip


def trained(device, momentum, autocast=None, steps=5):
    model = network().to(device)
    optimizer = QPSBGD(binary_parameters(model), momentum=momentum, lr=0.003)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 3, 16, 16, generator=generator).to(device)
        y = torch.randint(5, (32,), generator=generator).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bool(autocast)):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
    return model


def signs(**settings):
    """Of the weights of all golden networks after 20 steps of the default."""
    trained = [golden.train(name, QPSBGD, 20, **settings) for name in golden.NETWORKS]
    return torch.cat([weight.cpu().flatten() >= 0 for weights in trained for weight in weights])


def test_a_gpu_trains_like_the_cpu(device):
    assert (signs() != signs(device=device.type)).float().mean() < 0.001


@pytest.mark.needs("numba")
def test_torch_alone_trains_like_numba():
    with computed_by(plain):
        found = signs()
    assert (signs() != found).float().mean() < 0.001


def test_solvers_keep_their_contract_on_a_gpu(device):
    problem = random_problem(40, 100, 30, seed=0)
    moved = BinaryQuadratic.of(*(own.to(device) for own in (problem.Z, problem.H, problem.offset)))
    for solver in (SignSolver(), BlockDescentSolver(), BlockDescentSolver(num_sweeps=3)):
        here, there = solver.solve(problem), solver.solve(moved)
        assert there.spins.device.type == device.type
        torch.testing.assert_close(there.energy.cpu(), here.energy, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_in_bfloat16_keeps_latent_weights_in_single_precision(momentum):
    model = trained(torch.device("cpu"), momentum, autocast=True)
    assert all(weight.dtype == torch.float32 for _, weight in binary_parameters(model))


@pytest.mark.parametrize("num_sweeps", [1, 2])
def test_inputs_in_bfloat16_cost_next_to_no_energy(num_sweeps):
    """Inputs and gradients rounded to bfloat16, the residual kept in single precision."""
    torch.manual_seed(0)
    weight = torch.randn(200, 10, requires_grad=True)
    x, hidden = torch.randn(100, 256), torch.randn(100, 200, requires_grad=True)
    nn.functional.cross_entropy(hidden.clamp(-1, 1) @ weight, torch.randint(10, (100,))).backward()
    exact, coarse = posed(x, hidden.grad), posed(x.bfloat16().float(), hidden.grad.bfloat16().float())
    solver = BlockDescentSolver(num_sweeps=num_sweeps)
    energy = exact.energy(solver.solve(exact).spins).sum()
    assert exact.energy(solver.solve(coarse).spins).sum() < energy + 1e-4 * energy.abs()


def test_the_contract_holds_in_torch_alone():
    with computed_by(plain):
        check_solver(BlockDescentSolver())
