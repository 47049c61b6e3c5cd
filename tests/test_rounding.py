"""Trained real networks, rounded to weights of -1 and +1."""

import copy

import pytest
import torch
from torch import nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters, convert
from spingrad.rounding import babai, round_model
from spingrad.solvers import AnnealingSolver, ExactSolver, SignSolver
from spingrad.testing import random_problem


def network(kind):
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(20, 30), nn.Hardtanh(), nn.Linear(30, 5)), torch.randn(400, 20)
    layers = nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, stride=2, groups=2, bias=False)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 5)), torch.randn(60, 2, 8, 8)


def error(model, real, x):
    return float((model(x) - real(x)).square().mean() / real(x).square().mean())


def test_any_dimod_sampler_rounds():
    model, x = network("linear")
    samplers = pytest.importorskip("dwave.samplers")
    rounded, _ = round_model(model, x[:50], solver=samplers.SteepestDescentSolver())
    assert all((weight.sign().abs() == 1).all() for _, weight in binary_parameters(rounded))


@pytest.mark.parametrize("kind", ["linear", "convolutional"])
def test_outputs_are_nearer_to_the_real_ones_than_with_scaled_signs(kind):
    model, x = network(kind)
    before = copy.deepcopy(model.state_dict())
    rounded, layers = round_model(model, x)
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())
    signs = convert(copy.deepcopy(model), scale="mean")
    with torch.no_grad():
        assert error(rounded, model, x) < 0.7 * error(signs, model, x)
    names = [name for name, own in rounded.named_modules() if isinstance(own, BinaryLinear | BinaryConv2d)]
    assert [layer.name for layer in layers] == names


@pytest.mark.parametrize("kind", ["linear", "convolutional"])
def test_each_layer_comes_with_its_error_and_a_bound_below_it(kind):
    model, x = network(kind)
    rounded, layers = round_model(model, x)
    caught = {}
    real, own = (dict(m.named_modules()) for m in (model, rounded))
    for name in (layers[0].name, layers[-1].name):
        real[name].register_forward_hook(lambda m, i, out, name=name: caught.__setitem__(("real", name), out))
        own[name].register_forward_hook(lambda m, i, out, name=name: caught.__setitem__(("own", name), out))
    with torch.no_grad():
        model(x), rounded(x)
    for layer in layers:
        assert 0 <= layer.bound() <= layer.error < 1
    first = layers[0].name
    shape = (-1, *[1] * (caught["real", first].ndim - 2))
    target, found = (
        caught[who, first] - net[first].bias.detach().view(shape)
        for who, net in (("real", real), ("own", own))
    )
    measured = float((target - found).square().sum() / target.square().sum())
    assert layers[0].error == pytest.approx(measured, rel=1e-3)
    torch.testing.assert_close(caught["real", first].mean(0).mean(), caught["own", first].mean(0).mean())


def test_a_better_solver_has_a_lower_error_and_kept_layers_stay_real():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(300, 12)
    errors = []
    for solver in (SignSolver(), AnnealingSolver(5, 5), ExactSolver()):
        rounded, (layer,) = round_model(model, x, keep="last", solver=solver)
        assert torch.equal(rounded[2].weight, model[2].weight)
        errors.append(layer.error)
    assert errors[0] >= errors[1] * 0.999
    assert errors[2] <= errors[1] * 1.001


def test_a_rounded_network_trains_on():
    model, x = network("linear")
    rounded, _ = round_model(model, x)
    rounded.train()
    optimizer = QPSBGD(binary_parameters(rounded), lr=1e-3)
    before = rounded[0].binary_weight
    for _ in range(5):
        (rounded(x) - 1).square().mean().backward()
        optimizer.step()
    assert not torch.equal(before, rounded[0].binary_weight)


def test_babai_is_nearer_to_the_optimum_than_the_sign():
    problem = random_problem(40, 24, 50, seed=0)
    start, sign, best = babai(problem), SignSolver().solve(problem), ExactSolver().solve(problem)
    assert bool((start.abs() == 1).all())
    assert best.energy.mean() <= problem.energy(start).mean() < sign.energy.mean()


def test_layers_that_cannot_be_rounded_are_named():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(self.used(x))

    x = torch.randn(10, 4)
    with pytest.raises(ValueError, match="used is used twice"):
        round_model(Twice(), x, keep="idle")
    with pytest.raises(ValueError, match="idle is not used in the forward pass"):
        round_model(Twice(), x, keep="used")
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    with pytest.raises(ValueError, match=r"expected nn\.Linear or a convolution"):
        round_model(attention, torch.randn(2, 3, 4))
