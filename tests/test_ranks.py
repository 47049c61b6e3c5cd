"""What a training script on several ranks may do: it works, or the error says what to do."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from workers import run_workers

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters
from spingrad.distributed import DistributedQPSBGD
from spingrad.solvers import SignSolver


def mlp(*widths):
    torch.manual_seed(0)
    widths = widths or (40, 32, 4)
    layers = [BinaryLinear(n, m) for n, m in itertools.pairwise(widths)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Hardtanh())][:-1])


def weights(model):
    return torch.cat([weight.detach().double().flatten() for _, weight in binary_parameters(model)])


def told(attempt, *args):
    """The error of an attempt, or an empty string."""
    try:
        attempt(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def plain_qpsbgd(rank, size):
    model = mlp()
    made = told(QPSBGD, binary_parameters(model))
    own = QPSBGD(binary_parameters(model), per_rank=True)
    model(torch.ones(8, 40)).square().mean().backward()
    own.step()
    return {"made": made}


def test_plain_qpsbgd_on_several_ranks_names_what_to_use_instead(tmp_path):
    for seen in run_workers(plain_qpsbgd, 2, tmp_path):
        assert "RuntimeError: QPSBGD" in seen["made"]
        assert "spingrad.distributed.DistributedQPSBGD" in seen["made"]
        assert "per_rank=True" in seen["made"]


def test_a_process_group_that_appears_after_construction_is_noticed_at_the_first_step(monkeypatch):
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model))
    model(torch.ones(8, 40)).square().mean().backward()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="has 2 ranks"):
        optimizer.step()


DIFFERENT_FROM_THE_START = {  # what rank 1 does differently, and what every rank is told
    "lr": ({"lr": 1e-2}, "rank 1 has lr=0.01, {others} lr=0.003"),
    "clamp": ({"clamp": 0.02}, "rank 1 has clamp=0.02, {others} clamp=1"),
    "seed": ({"seed": 5}, "rank 1 has seed=5, {others} seed=0"),
    "momentum": ({"momentum": 0.0}, "rank 1 has momentum=0, {others} momentum=0.9"),
    "rank": ({"rank": 4}, "rank 1 has rank=4, {others} rank=8"),
    "rows": ({"rows": "normalized"}, "rank 1 has rows='normalized', {others} rows='uniform'"),
    "target_rms": ({"target_rms": None}, "rank 1 has target_rms=None, {others} target_rms='auto'"),
    "on_nonfinite": ({"on_nonfinite": "skip"}, "rank 1 has on_nonfinite=skip, {others} on_nonfinite=raise"),
    "keep_grad": ({"keep_grad": True}, "rank 1 has keep_grad=True, {others} keep_grad=False"),
    "check_every": ({"check_every": 7}, "rank 1 has check_every=7, {others} check_every=100"),
    "solver": ({"solver": SignSolver()}, "rank 1 has solver=SignSolver(), {others} solver=BlockDescent"),
    "invalid": ({"lr": -1.0}, "rank 1 raised ValueError: lr"),
    "reduction": ({"reduction": None}, "rank 1 has reduction="),  # the other one
    "width": (
        (40, 48, 4),
        "rank 1 has weight 0 '0.weight'=torch.float32 of shape (48, 40), {others} weight 0",
    ),
    "depth": (
        (40, 32, 32, 4),
        "has weight 2 '4.weight'=torch.float32 of shape (4, 32), {others} no weight 2",
    ),
    "double": (torch.float64, "rank 1 has weight 0 '0.weight'=torch.float64 of shape (32, 40)"),
}


def differ_from_the_start(reduction, odd, difference):
    """An optimizer for ``difference`` on the odd rank, and for the ordinary settings on the others."""
    model, settings = mlp(), {"reduction": reduction}
    if odd and isinstance(difference, tuple):
        model = mlp(*difference)
    elif odd and isinstance(difference, torch.dtype):
        model.to(difference)
    elif odd:
        other = "vote" if reduction == "gather" else "gather"
        settings |= difference | ({"reduction": other} if "reduction" in difference else {})
    DistributedQPSBGD(binary_parameters(model), **settings)


DIFFERENT_LATER = {
    "scheduler": "rank 1 has lr=0.5, {others} lr=0.003",
    "frozen": "float32 of shape (4, 32), requires_grad=False, {others} weight 1 '2.weight'=torch.float32",
    "dtype": "the same step with the same model and settings: rank 1 has weight 0 '0.weight'=torch.float64",
    "loaded": "rank 1 has step=1, {others} step=3",
    "group": "rank 1 has call=add_param_group(), {others} call=step()",
    "no backward": "layer '0': no backward pass has left a record on rank 1",
    "unused": "layer '2': no backward pass has left a record on rank 1",
    "nan": "FloatingPointError: rank 1: layer '0': the layer's input or output gradient is not finite",
    "inputs": "rank 1 has a record of layer '0'=torch.float32 with inputs of shape (1, 6, 6) and",
    "in place": "rank 1 raised RuntimeError: an input of a binary layer was modified by an in-place",
    "weights": "step 4 the weights are not the same on all ranks; something changed them on some ranks only: "
    "rank 1 has digest of weight 1 '2.weight'=",
}


def train(rank, reduction, mode, steps=6):
    """A few steps; before one of them, rank 1 does something else."""
    if mode == "inputs":
        return train_on_images(rank, reduction)
    model = mlp()
    optimizer = DistributedQPSBGD(binary_parameters(model), reduction=reduction, check_every=2)
    start = optimizer.state_dict()
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        odd = rank == 1 and step == 3
        x = torch.randn(8, 40, generator=generator)
        if step == 1:
            start = optimizer.state_dict()
        if mode == "unused everywhere":
            model[0](x).square().mean().backward()
        else:
            disturb_forward(odd, mode, model, x)
        if odd:
            disturb_step(mode, model, optimizer, x, start)
        optimizer.step()
    return model


def train_on_images(rank, reduction):
    model = nn.Sequential(BinaryConv2d(1, 2, 3))
    optimizer = DistributedQPSBGD(binary_parameters(model), reduction=reduction)
    model(torch.ones(4, 1, 6 if rank == 1 else 8, 6)).square().mean().backward()
    optimizer.step()


def disturb_forward(odd, mode, model, x):
    if odd and mode == "nan":
        x[0, 0] = torch.nan
    if mode == "huge":
        x *= 1e15
    output = model[0](x) if odd and mode == "unused" else model(x)
    if not (odd and mode == "no backward"):
        output.square().mean().backward()


def disturb_step(mode, model, optimizer, x, start):
    if mode == "scheduler":
        optimizer.param_groups[0]["lr"] = 0.5
    if mode == "frozen":
        model[2].weight.requires_grad_(False)
    if mode == "dtype":
        model.double()
    if mode == "loaded":
        optimizer.load_state_dict(start)
    if mode == "group":
        optimizer.add_param_group({"params": [("more.weight", BinaryLinear(3, 2).weight)]})
    if mode == "in place":
        x.zero_()
    if mode == "weights":
        model[2].weight.data[1, 2] += 1e-6


def all_differences(rank, size):
    """What this rank is told of each difference, and the weights of the runs that end well."""
    seen = {}
    for reduction in ("gather", "vote"):
        for name, (difference, _) in DIFFERENT_FROM_THE_START.items():
            seen[reduction, name] = told(differ_from_the_start, reduction, rank == 1, difference)
        for name in DIFFERENT_LATER:
            seen[reduction, name] = told(train, rank, reduction, name)
        for name in ("nothing", "huge", "unused everywhere"):
            seen[reduction, name] = weights(train(rank, reduction, name))
        seen[reduction, "added"] = weights(add_a_group(rank, reduction))
    return seen


def add_a_group(rank, reduction):
    torch.manual_seed(rank)
    model = nn.Sequential(BinaryLinear(40, 32), nn.Hardtanh(), BinaryLinear(32, 4))
    first, second = binary_parameters(model)
    optimizer = DistributedQPSBGD([first], reduction=reduction)
    optimizer.add_param_group({"params": [second], "lr": 1e-2})
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_difference_on_one_rank_is_an_error_on_every_rank_that_names_rank_and_setting(tmp_path, size):
    ranks = run_workers(all_differences, size, tmp_path)
    others = "rank 0 has" if size == 2 else "ranks 0, 2, 3 have"
    expected = {name: text for name, (_, text) in DIFFERENT_FROM_THE_START.items()} | DIFFERENT_LATER
    for reduction in ("gather", "vote"):
        for name, text in expected.items():
            first, *rest = [seen[reduction, name] for seen in ranks]
            assert text.format(others=others) in first, (reduction, name)
            assert all(other == first for other in rest), (reduction, name, rest)
        for name in ("nothing", "huge", "unused everywhere", "added"):
            first, *rest = [seen[reduction, name] for seen in ranks]
            assert all(torch.equal(other, first) for other in rest), (reduction, name)
