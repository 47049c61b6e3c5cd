import copy
import functools

import pytest
import torch
from helpers import ONE_BATCH
from torch import nn
from torch.optim.swa_utils import AveragedModel

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad.baselines import BinaryConnect, Bop, ProxQuant, SignSGD
from spingrad.nn.sign import spins_of
from spingrad.solvers import SignSolver

METHODS = {
    "QPSBGD": functools.partial(QPSBGD, lr=0.01),
    "QPSBGD, all directions": functools.partial(QPSBGD, lr=0.01, target_rms=1.0, rank=None),
    "QPSBGD, one batch alone": functools.partial(QPSBGD, lr=0.01, **ONE_BATCH),
    "BinaryConnect SGD": functools.partial(BinaryConnect, optimizer=torch.optim.SGD, lr=0.3),
    "BinaryConnect Adam": functools.partial(BinaryConnect, optimizer=torch.optim.Adam, lr=0.01),
    "SignSGD": functools.partial(SignSGD, lr=0.003),
    "Signum": functools.partial(SignSGD, lr=0.003, momentum=0.9),
    "ProxQuant": functools.partial(ProxQuant, lr=0.02, regularization=0.02),
    "Bop": functools.partial(Bop, lr=0.1, threshold=1e-4),
}


def task():
    """Two noisy clusters per class in 20 dimensions; a linear rule does not separate them."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(8, 20, generator=generator) * 1.5
    which = torch.randint(8, (512,), generator=generator)
    return centers[which] + torch.randn(512, 20, generator=generator), which % 2


def network(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(BinaryLinear(20, 32), nn.Hardtanh(), BinaryLinear(32, outputs))


def train(model, optimizer, steps=150, scheduler=None):
    x, y = task()
    for step in range(steps):
        rows = torch.arange(64) + 64 * (step % 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    if isinstance(optimizer, ProxQuant):
        optimizer.project()
    with torch.no_grad():
        return (model.eval()(x).argmax(1) == y).float().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_with_a_schedule(name):
    model = network()
    optimizer = METHODS[name](binary_parameters(model))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=150)
    assert train(model, optimizer, scheduler=scheduler) > 0.85
    assert scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_continues_from_its_state_dict(name):
    model = network()
    optimizer = METHODS[name](binary_parameters(model))
    train_some = functools.partial(train, steps=5)
    if name == "ProxQuant":
        optimizer.project = lambda: None
    train_some(model, optimizer)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train_some(model.train(), optimizer)
    twin = network()
    twin_optimizer = METHODS[name](binary_parameters(twin))
    if name == "ProxQuant":
        twin_optimizer.project = lambda: None
    twin.load_state_dict(states[0])
    twin_optimizer.load_state_dict(states[1])
    train_some(twin, twin_optimizer)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_copied_with_its_model(name):
    model = network()
    optimizer = METHODS[name](binary_parameters(model))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, steps=3)
    train(twin, twin_optimizer, steps=3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_sign_sgd_is_qp_sbgd_with_the_sign_solver():
    model = network(outputs=16)  # with two, many a unit has equal outgoing weights, no gradient, and rests
    twin = copy.deepcopy(model)
    train(model, SignSGD(binary_parameters(model), lr=0.003), steps=10)
    train(twin, QPSBGD(binary_parameters(twin), lr=0.003, momentum=0.0, solver=SignSolver()), steps=10)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a == b).float().mean() > 0.999  # a gradient within rounding of zero may differ


def test_binary_connect_clamps_and_stays_in_step_with_its_inner_optimizer():
    model = network()
    optimizer = BinaryConnect(binary_parameters(model), torch.optim.SGD, lr=100.0)
    train(model, optimizer, steps=5)
    assert max(p.abs().max() for p in model.parameters()) == 1
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    train(model.train(), optimizer, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_proxquant_computes_with_real_weights_until_it_projects():
    model = network()
    x, _ = task()
    binary = model(x)
    optimizer = ProxQuant(binary_parameters(model), lr=1e-3)
    real = model(x)
    assert not torch.allclose(real, binary)
    torch.testing.assert_close(
        real[:, 0], model[1](x @ model[0].weight.T / 20**0.5) @ model[2].weight[0] / 32**0.5
    )
    optimizer.project()
    assert all((p.abs() == 1).all() for p in model.parameters())
    torch.testing.assert_close(model(x), binary)


def test_the_proximal_map_moves_weights_towards_their_sign_and_not_past_it():
    layer = BinaryLinear(4, 1)
    optimizer = ProxQuant(binary_parameters(layer), regularization=1.0, optimizer=torch.optim.SGD, lr=0.1)
    layer.weight.data.copy_(torch.tensor([[0.5, -0.95, 1.2, -0.02]]))
    layer(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([[0.6, -1.0, 1.1, -0.12]]))


def test_bop_flips_where_the_average_gradient_agrees_with_the_weight():
    layer = BinaryLinear(3, 1)
    layer.weight.data.copy_(torch.tensor([[0.3, -0.2, 0.4]]))
    optimizer = Bop(binary_parameters(layer), lr=0.5, threshold=0.2)
    assert layer.weight.tolist() == [[1, -1, 1]]
    layer.weight.grad = torch.tensor([[1.0, 1.0, 0.1]])
    optimizer.step()
    assert layer.weight.tolist() == [[-1, -1, 1]]  # agrees and is strong; disagrees; too weak


@pytest.mark.parametrize("name", METHODS)
def test_weights_can_join_later(name):
    model = network()
    first, second = binary_parameters(model)
    optimizer = METHODS[name]([first])
    optimizer.add_param_group({"params": [second]})
    before = second[1].detach().clone()
    x, y = task()
    for _ in range(3):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not torch.equal(before, second[1])


def test_another_method_after_proxquant_computes_with_binary_weights():
    model = network()
    x, _ = task()
    binary = model(x)
    ProxQuant(binary_parameters(model), lr=1e-3)
    SignSGD(binary_parameters(model))
    assert torch.equal(model(x), binary)


def test_a_copy_of_a_projected_network_stays_binary():
    model = network()
    x, _ = task()
    optimizer = ProxQuant(binary_parameters(model), lr=1e-3)
    optimizer.project()
    twin, _ = copy.deepcopy((model, optimizer))
    twin[0].weight.data.mul_(0.5)
    assert torch.equal(twin(x), model(x))


def test_a_baseline_takes_over_weights_that_qp_sbgd_recorded():
    model = network()
    _optimizer = QPSBGD(binary_parameters(model))
    optimizer = SignSGD(binary_parameters(model), lr=0.01)
    before = spins_of(model[0].weight.detach())
    train(model, optimizer, steps=20)
    assert not torch.equal(before, spins_of(model[0].weight.detach()))


def test_wrong_arguments_are_explained():
    params = binary_parameters(network())
    with pytest.raises(ValueError, match=r"momentum is in \[0, 1\), got 1"):
        SignSGD(params, momentum=1)
    with pytest.raises(ValueError, match="threshold is a finite number of at least 0, got -1"):
        Bop(params, threshold=-1)
    with pytest.raises(ValueError, match="lr is a finite number of at least 0, got -1"):
        SignSGD(params, lr=-1)


@pytest.mark.parametrize("baseline", [SignSGD, Bop, ProxQuant])
def test_a_baseline_that_follows_qpsbgd_trains_its_weights(baseline):
    model = BinaryLinear(4, 2)
    optimizer = QPSBGD(binary_parameters(model))
    model(torch.ones(3, 4)).sum().backward()
    del optimizer
    other = baseline([model.weight])
    model(torch.ones(3, 4)).sum().backward()
    assert model.companion.sketch is None
    before = model.weight.detach().clone()
    other.step()
    assert not torch.equal(model.weight, before)


def test_a_copy_of_a_network_that_proxquant_trains_computes_with_real_weights_too():
    model = BinaryLinear(4, 2)
    optimizer = ProxQuant(binary_parameters(model), regularization=1e-3, lr=1e-2)
    x = torch.ones(3, 4)
    for copied in (copy.deepcopy(model), AveragedModel(model).module):
        assert torch.equal(copied(x), model(x))
    optimizer.project()
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert not torch.equal(copied(x), model(x))
