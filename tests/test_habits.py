"""What torch users do in their training scripts: each row of the table in docs/training.md is a test."""

import copy
import inspect
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from spingrad import (
    QPSBGD,
    BinaryConv2d,
    BinaryLinear,
    Sign,
    binary_parameters,
    real_parameters,
    record_of,
)
from spingrad.baselines import Bop, SignSGD
from spingrad.solvers import BlockDescentSolver, DimodSolver, Solution, Solver
from spingrad.testing import check_solver, random_problem

PAGE = Path(__file__).parents[1] / "docs/training.md"
HABITS = {}
ON_SEVERAL_RANKS = {  # these need processes of their own: the tests are in test_ranks.py
    "`DistributedDataParallel(model)` and `QPSBGD`": (
        "raw_ddp_works_and_plain_qpsbgd_or_sharded_weights_raise"
    ),
    "`DistributedDataParallel(model)` and `DistributedQPSBGD`": (
        "raw_ddp_works_and_plain_qpsbgd_or_sharded_weights_raise"
    ),
    "`fully_shard(model)` (FSDP2)": "raw_ddp_works_and_plain_qpsbgd_or_sharded_weights_raise",
    "Lightning's DDP strategy, Accelerate on several processes": (
        "lightning_and_accelerate_on_two_ranks_take_the_steps_of_a_plain_loop"
    ),
    "workers that differ in a setting, a shape, a dtype, a version or a weight": (
        "a_difference_on_one_rank_is_an_error_on_every_rank_that_names_rank_and_setting"
    ),
    "a worker that dies or hangs": "a_rank_that_dies_or_stops_is_named_by_the_others",
}


def habit(row):
    def register(test):
        HABITS[row] = test
        return test

    return register


def rows_of_the_page():
    table = PAGE.read_text().split("| habit |")[1]
    return [line.split("|")[1].strip() for line in table.splitlines()[2:] if line.startswith("| ")]


def test_the_page_has_a_row_for_every_habit():
    assert rows_of_the_page() == [*HABITS, *ON_SEVERAL_RANKS]
    tests = Path(__file__).with_name("test_ranks.py").read_text()
    assert all(f"def test_{name}(" in tests for name in ON_SEVERAL_RANKS.values())


def small():
    torch.manual_seed(0)
    return nn.Sequential(BinaryLinear(12, 24), nn.Hardtanh(), BinaryLinear(24, 4))


def data(rows=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 12, generator=generator), torch.randint(4, (rows,), generator=generator)


def loss_of(model, batch=None):
    x, y = batch or data()
    return nn.functional.cross_entropy(model(x).float(), y)


def weights(model):
    return [weight.detach().clone() for _, weight in binary_parameters(model)]


def moved(model, before):
    return [not torch.equal(a, b) for a, b in zip(weights(model), before, strict=True)]


def train(model, optimizer, steps=4, schedule=None, step=None):
    """The weights after some steps; ``step`` takes the place of ``optimizer.step``."""
    for seed in range(steps):
        optimizer.zero_grad()
        loss_of(model, data(seed=seed)).backward()
        (step or optimizer.step)()
        if schedule:
            schedule.step()
    return weights(model)


def ready(**settings):
    model = small()
    return model, QPSBGD(binary_parameters(model), **settings)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# The loop


@habit("`optimizer.zero_grad()`, `model.zero_grad()`, with `set_to_none=False` too")
def _():
    expected = train(*ready())
    for clear in ("optimizer", "model"):
        for set_to_none in (True, False):
            model, optimizer = ready()
            for seed in range(4):
                loss_of(model).backward()  # a pass that must be forgotten
                {"optimizer": optimizer, "model": model}[clear].zero_grad(set_to_none=set_to_none)
                loss_of(model, data(seed=seed)).backward()
                optimizer.step()
            assert equal(weights(model), expected)


@habit("`weight.grad` set to zero in other ways: `.zero_()`, `.data.zero_()`, `*= 0`, zeros in its place")
def _():
    def put(weight):
        weight.grad = torch.zeros_like(weight)

    clears = [lambda w: w.grad.data.zero_(), lambda w: w.grad.detach().zero_(), lambda w: w.grad.fill_(0)]
    clears += [lambda w: torch.zero_(w.grad), lambda w: torch._foreach_zero_([w.grad]), put]
    clears += [lambda w: w.grad.mul_(0), lambda w: w.grad.__imul__(0)]
    expected = train(*ready(), steps=1)
    for clear in clears:
        model, optimizer = ready()
        loss_of(model, data(seed=9)).backward()
        for _, weight in binary_parameters(model):
            clear(weight)
        loss_of(model, data(seed=0)).backward()
        optimizer.step()
        assert equal(weights(model), expected)


@habit("gradient accumulation over several `backward()`")
def _():
    whole, optimizer = ready(target_rms=1.0)
    loss_of(whole, data(32)).backward()
    optimizer.step()
    parts, optimizer = ready(target_rms=1.0)
    x, y = data(32)
    for half in (slice(0, 16), slice(16, 32)):
        (loss_of(parts, (x[half], y[half])) / 2).backward()
    optimizer.step()
    assert equal(weights(parts), weights(whole))


@habit("`step(closure)`")
def _():
    model, optimizer = ready()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    before = weights(model)
    expected = loss_of(model).item()
    assert optimizer.step(closure).item() == expected
    assert all(moved(model, before))


@habit("`loss.backward(retain_graph=True)` and several losses")
def _():
    model, optimizer = ready()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    (0.1 * loss).backward()
    before = weights(model)
    optimizer.step()
    assert all(moved(model, before))


@habit("`clip_grad_norm_` over all parameters")
def _():
    expected = train(*ready())
    model, optimizer = ready()

    def clip_and_step():
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    assert equal(train(model, optimizer, step=clip_and_step), expected)


@habit("a schedule: `CosineAnnealingLR`, `OneCycleLR`, `ReduceLROnPlateau`, warm-up by `SequentialLR`")
def _():
    schedules = torch.optim.lr_scheduler
    model, optimizer = ready(lr=1e-2)
    train(model, optimizer, 3, schedules.CosineAnnealingLR(optimizer, 10))
    assert optimizer.param_groups[0]["lr"] < 1e-2
    model, optimizer = ready()
    train(model, optimizer, 3, schedules.OneCycleLR(optimizer, 1e-2, total_steps=10))
    model, optimizer = ready(lr=1e-2)
    warm = schedules.LinearLR(optimizer, 0.1, total_iters=2)
    train(
        model, optimizer, 4, schedules.SequentialLR(optimizer, [warm, schedules.ConstantLR(optimizer)], [2])
    )
    model, optimizer = ready(lr=1e-2)
    plateau = schedules.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0, 3.0):
        plateau.step(loss)
    assert optimizer.param_groups[0]["lr"] < 1e-2


@habit("parameter groups with settings of their own; `add_param_group`")
def _():
    model = small()
    first, second = binary_parameters(model)
    optimizer = QPSBGD([{"params": [first[1]], "lr": 0.0}, {"params": [second[1]]}], lr=1e-2)
    before = weights(model)
    loss_of(model).backward()
    optimizer.step()
    assert moved(model, before) == [False, True]


@habit("freezing: `weight.requires_grad_(False)`")
def _():
    model, optimizer = ready()
    model[0].weight.requires_grad_(False)
    before = weights(model)
    loss_of(model).backward()
    optimizer.step()
    assert moved(model, before) == [False, True]
    model, before = small(), weights(small())
    model[0].weight.requires_grad_(False)
    optimizer = QPSBGD(binary_parameters(model))  # frozen before the optimizer was made
    loss_of(model).backward()
    optimizer.step()
    assert moved(model, before) == [False, True]
    copy.deepcopy((model, optimizer))
    model[0].weight.requires_grad_(True)
    loss_of(model).backward()
    optimizer.step()
    assert moved(model, before) == [True, True]


@habit("a layer that the forward pass did not use")
def _():
    model, optimizer = ready()
    before = weights(model)
    model[0](data()[0]).square().mean().backward()
    optimizer.step()
    assert moved(model, before) == [True, False]


@habit("`step()` without `backward()`, or in `model.eval()`")
def _():
    model, optimizer = ready()
    with pytest.raises(RuntimeError, match=r"no backward pass.*model\.train\(\)"):
        optimizer.step()
    loss_of(model.eval()).backward()
    with pytest.raises(RuntimeError, match=r"model\.train\(\)"):
        optimizer.step()
    model.zero_grad()
    loss_of(model.train()).backward()
    optimizer.step()


@habit("some layers in `eval()`, others in training")
def _():
    model, optimizer = ready()
    before = weights(model)
    model[0].eval()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"layer '0': a backward pass .* evaluation mode"):
        optimizer.step()
    assert moved(model, before) == [False, False]
    torch.autograd.grad(loss_of(model), model[2].weight)
    model.zero_grad()
    torch.autograd.grad(model[0](data()[0].requires_grad_()).sum(), model[0].weight, allow_unused=True)
    model[2](torch.randn(8, 24)).square().mean().backward()
    optimizer.step()  # gradients that were not accumulated leave nothing
    assert moved(model, before) == [False, True]


@habit("`QPSBGD(model.parameters())` with real-valued parameters among them")
def _():
    model = nn.Sequential(BinaryLinear(12, 8), nn.BatchNorm1d(8), BinaryLinear(8, 4))
    optimizer = QPSBGD(model.parameters())
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"real_parameters\(model\)"):
        optimizer.step()


@habit("two optimizers: `binary_parameters` here, `real_parameters` in Adam")
def _():
    torch.manual_seed(0)
    model = nn.Sequential(BinaryLinear(12, 8, bias=True), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizers = [
        QPSBGD(binary_parameters(model)),
        torch.optim.Adam([p for _, p in real_parameters(model)], lr=1e-2),
    ]
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model).backward()
    for optimizer in optimizers:
        optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
    assert all(changed)


@habit("any torch optimizer on latent weights: `Adam(model.parameters())`")
def _():
    model = small()
    before = weights(model)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2), 1)
    assert all(moved(model, before))


@habit("another optimizer once QPSBGD is gone")
def _():
    model, optimizer = ready()
    before = train(model, optimizer, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    assert all(moved(model, before))
    model, kept = ready()  # which lives on
    for settings in ({}, {"foreach": True}, {"fused": True}):
        with pytest.raises(RuntimeError, match=r"reads weight\.grad .*stop_recording\(weight\)"):
            train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, **settings), 1)
    for settings in ({}, {"foreach": True}):
        with pytest.raises(RuntimeError, match=r"weight decay reads weight\.grad"):
            train(model, torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1, **settings), 1)
    del kept


@habit("`weight_decay=…`")
def _():
    with pytest.raises(TypeError, match="weight_decay"):
        ready(weight_decay=1e-4)
    (_, first), (_, second) = binary_parameters(small())
    with pytest.raises(ValueError, match=r"weight_decay is not a setting of QPSBGD"):
        QPSBGD([{"params": [first], "weight_decay": 1e-4}, {"params": [second]}])
    QPSBGD([{"params": [first], "weight_decay": 0.0}])


@habit("a penalty on latent weights, or a weight tied to a real layer")
def _():
    model, optimizer = ready()
    for backward in (1, 2):  # gradients are accumulated in another way then
        optimizer.zero_grad()
        for _ in range(backward):
            loss_of(model).backward(retain_graph=True)
        (loss_of(model) + model[0].weight.square().sum()).backward()
        with pytest.raises(RuntimeError, match=r"layer '0': weight\.grad holds more"):
            optimizer.step()
    model.zero_grad()
    train(model, optimizer)
    tied = nn.Sequential(nn.Embedding(20, 16), BinaryLinear(16, 20))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="'0', Embedding: it shares its weight"):
        binary_parameters(tied)


@habit("a change of `weight.grad`: a mask, noise, a gradient of your own")
def _():
    model, optimizer = ready()
    weight = model[0].weight
    loss_of(model).backward()

    def masked():
        weight.grad.mul_(torch.ones(24, 1))

    def assigned():
        weight.grad.data = weight.grad * 0.5

    changes = [weight.grad.neg_, masked, lambda: weight.grad.add_(0.1), lambda: weight.grad.mul_(-1)]
    changes += [assigned, lambda: torch._foreach_mul_([weight.grad], [torch.ones(24, 1)])]
    changes += [lambda: torch._foreach_neg_([weight.grad]), lambda: weight.grad.copy_(torch.ones(24, 12))]
    for change in changes:
        with pytest.raises(RuntimeError, match=r"on weight\.grad .* no effect"):
            change()
    for keep_grad in (False, True):
        for change in (torch.randn_like, torch.neg, lambda grad: grad * 0.5 + 1e-3, torch.clone):
            model, optimizer = ready(keep_grad=keep_grad)
            loss_of(model).backward()
            model[0].weight.grad = change(model[0].weight.grad)
            with pytest.raises(RuntimeError, match=r"weight\.grad was changed"):
                optimizer.step()


@habit("`weight.register_hook`, also to watch gradients")
def _():
    model, optimizer = ready()
    handle = model[0].weight.register_hook(torch.neg)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"layer '0': it has a hook by weight.register_hook"):
        optimizer.step()
    handle.remove()
    optimizer.step()
    model, optimizer = ready(keep_grad=True)
    seen = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.norm()))
    expected = train(*ready())
    assert equal(train(model, optimizer), expected)
    assert len(seen) == 4
    model[0].weight.register_hook(torch.neg)
    optimizer.zero_grad()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"weight\.grad was changed"):
        optimizer.step()


@habit("`torch.nn.utils.prune`, `weight_norm` and other parametrizations")
def _():
    model = small()
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(ValueError, match=r"layer '0': its weight is computed"):
        binary_parameters(model)
    with pytest.raises(RuntimeError, match="its weight is pruned"):  # with another optimizer, too
        loss_of(model)


@habit("step hooks and forward or backward hooks")
def _():
    model, optimizer = ready()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    train(model, optimizer, 1)
    assert seen == ["forward", "backward", "before", "after"]


@habit("the same seed twice")
def _():
    assert equal(train(*ready()), train(*ready()))


# Gradients for something else


@habit("`torch.autograd.grad(loss, x)`: saliency, adversarial examples")
def _():
    expected = train(*ready())
    model, optimizer = ready()
    for seed in range(4):
        x, y = data(seed=seed)
        x.requires_grad_()
        optimizer.zero_grad()
        torch.autograd.grad(loss_of(model, (x, y)), x)
        loss_of(model, (x, y)).backward()
        torch.autograd.grad(loss_of(model, (x, y)), x)
        optimizer.step()
    assert equal(weights(model), expected)
    jacobians = [
        torch.autograd.functional.jacobian(own, data(2)[0], vectorize=vectorize)
        for own in (model, copy.deepcopy(model))
        for vectorize in (False, True)
    ]
    assert all(torch.allclose(own, jacobians[0], atol=1e-6) for own in jacobians)
    assert not record_of(model[0].weight).layers()


@habit("`torch.autograd.grad(loss, weight)` of a binary weight")
def _():
    model = small()
    (expected,) = torch.autograd.grad(loss_of(model), model[0].weight)
    optimizer = QPSBGD(binary_parameters(model))
    (found,) = torch.autograd.grad(loss_of(model), model[0].weight)
    assert found.is_sparse
    assert found._nnz() == 0
    optimizer = QPSBGD(binary_parameters(model), keep_grad=True)
    (found,) = torch.autograd.grad(loss_of(model), model[0].weight)
    torch.testing.assert_close(found.to_dense(), expected)
    del optimizer


@habit("`loss.backward(inputs=[x])`")
def _():
    model, optimizer = ready()
    x, y = data()
    x.requires_grad_()
    loss_of(model, (x, y)).backward(inputs=[x])
    with pytest.raises(RuntimeError, match="no backward pass"):
        optimizer.step()


@habit("a gradient penalty: `create_graph=True`, double backward")
def _():
    model, optimizer = ready()
    x, y = data()
    x.requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model, (x, y)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="SignSGD"):
        slope.square().sum().backward()
    model = small()
    optimizer = SignSGD(binary_parameters(model), lr=1e-2)
    (slope,) = torch.autograd.grad(loss_of(model, (x, y)), x, create_graph=True)
    before = weights(model)
    slope.square().sum().backward()
    optimizer.step()
    assert all(moved(model, before))


@habit("`torch.func.functional_call` with `torch.func.grad`")
def _():
    model, _ = ready()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = torch.func.grad(lambda p: loss_of(lambda x: torch.func.functional_call(model, p, (x,))))(params)
    plain = small()
    loss_of(plain).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)


@habit("per-sample gradients: `vmap(grad(…))`")
def _():
    model = small()
    params = {name: p.detach() for name, p in model.named_parameters()}
    x, y = data(8)

    def loss(p, own_x, own_y):
        return nn.functional.cross_entropy(torch.func.functional_call(model, p, (own_x[None],)), own_y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
    loss_of(model, (x, y)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(each[name].mean(0), p.grad)


@habit("an input changed in place between `backward()` and `step()`")
def _():
    model, optimizer = ready()
    x, y = data()
    loss_of(model, (x, y)).backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        optimizer.step()


# Precision


@habit("`torch.autocast` in bfloat16")
def _():
    model, optimizer = ready()
    before = weights(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    optimizer.step()
    assert all(moved(model, before))


@habit("`step()` under autocast, as in Lightning's manual optimization")
def _():
    expected = train(*ready())
    model, optimizer = ready()
    under_autocast = torch.autocast("cpu", torch.bfloat16)(optimizer.step)
    assert equal(train(model, optimizer, step=under_autocast), expected)


@habit("`torch.amp.GradScaler`, with `unscale_` and clipping")
def _():
    expected = train(*ready(target_rms=None))
    model, optimizer = ready(target_rms=None)  # with a target of its own size, a wrong scale would show
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for seed in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, data(seed=seed))).backward()
        if seed % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert equal(weights(model), expected)


@habit("`GradScaler` skips a step whose gradients overflow")
def _():
    model, optimizer = ready()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    before = weights(model)
    (scaler.scale(loss_of(model)) * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not any(moved(model, before))
    assert scaler.get_scale() == 2.0**11


@habit("`model.bfloat16()`, `model.half()`, `dtype=torch.bfloat16`")
def _():
    model = small().bfloat16()
    with torch.no_grad():
        model[0].weight.fill_(0.9)
    optimizer = QPSBGD(binary_parameters(model), lr=1e-4)
    before = weights(model)
    x, y = data()
    nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
    optimizer.step()
    assert all(moved(model, before))
    assert (weights(model)[0] != 0.9).all()


@habit("`model.double()`")
def _():
    model = small().double()
    optimizer = QPSBGD(binary_parameters(model))
    x, y = data()
    loss_of(lambda x: model(x.double()), (x, y)).backward()
    optimizer.step()
    assert model[0].weight.dtype == torch.float64


@habit("a loss that is not finite")
def _():
    model, optimizer = ready()
    (loss_of(model) * math.nan).backward()
    with pytest.raises(FloatingPointError, match=r"layer '0'.*not finite"):
        optimizer.step()
    model, optimizer = ready(on_nonfinite="skip")
    before = weights(model)
    (loss_of(model) * math.nan).backward()
    optimizer.step()
    assert not any(moved(model, before))
    assert optimizer.run["skipped"] == 1


@habit("inputs as large as 1e36, or as small as 1e-36")
def _():
    for size in (1e36, 1e-36):
        for layer, shape in ((BinaryLinear(12, 4), (8, 12)), (BinaryConv2d(2, 4, 3), (2, 2, 6, 6))):
            taken = []
            for factor in (1.0, size):
                torch.manual_seed(0)
                layer.reset_parameters()
                optimizer = QPSBGD(layer.parameters())
                x = torch.randn(shape)
                out = layer(x * factor)
                out.backward(torch.randn(out.shape))
                optimizer.step()
                taken.append(layer.weight.detach().clone())
            assert torch.equal(*taken)


# Settings and states


@habit(
    "`lr`, `clamp`, `momentum`, `whitening`, `target_rms`, `rank` out of range: in the constructor, a group, "
    "a schedule"
)
def _():
    wrong = [("lr", math.nan), ("lr", math.inf), ("lr", -1.0), ("clamp", math.nan), ("clamp", -1.0)]
    wrong += [("clamp", 0.0), ("momentum", math.nan), ("momentum", 1.0), ("target_rms", math.nan)]
    wrong += [("target_rms", math.inf), ("target_rms", 0.0), ("target_rms", "automatic"), ("rank", 0)]
    wrong += [("whitening", -0.1), ("whitening", math.nan), ("whitening", math.inf), ("whitening", None)]
    for name, value in wrong:
        with pytest.raises(ValueError, match=name):
            ready(**{name: value})
        with pytest.raises(ValueError, match=name):
            QPSBGD([{"params": [small()[0].weight], name: value}])
        model, optimizer = ready()
        before = weights(model)
        loss_of(model).backward()
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=name):
            optimizer.step()
        assert not any(moved(model, before))
    model, optimizer = ready()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: math.nan if step else 1.0)
    with pytest.raises(ValueError, match="lr"):
        train(model, optimizer, 2, schedule)


@habit("`rank` without momentum")
def _():
    ranks = [train(*ready(momentum=0.0, rank=rank, target_rms=0.5)) for rank in (1, None)]
    assert not equal(*ranks)


@habit("NaN in a latent weight")
def _():
    model, optimizer = ready()
    loss_of(model).backward()
    model[2].weight.data[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="layer '2': the latent weight"):
        optimizer.step()
    with pytest.raises(ValueError, match="layer '2': the latent weight"):
        QPSBGD(binary_parameters(model))
    for training in (True, False):
        assert loss_of(model.train(training)).isnan()  # while it records
        assert loss_of(copy.deepcopy(model)).isnan()  # and where it does not
    for kind in (SignSGD, Bop):
        net = nn.Sequential(nn.Linear(12, 8), Sign(), BinaryLinear(8, 4))
        net[0].weight.data[0, 0] = math.nan
        optimizer = kind(binary_parameters(net))
        loss = loss_of(net)  # behind a sign, too
        assert loss.isnan()
        loss.backward()
        assert net[2].weight.isfinite().all()
        optimizer.step()
        assert net[2].weight.isnan().any()


@habit("a second `backward()` through a graph from before the step")
def _():
    for kind in (QPSBGD, SignSGD):
        model = small()
        optimizer = kind(binary_parameters(model))
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@habit("`optimizer.load_state_dict` with the weights in another order")
def _():
    torch.manual_seed(0)
    model = nn.Sequential(BinaryLinear(12, 12), BinaryLinear(12, 12), BinaryLinear(12, 4))
    optimizer = QPSBGD(binary_parameters(model))
    train(model, optimizer)
    weights_with_names = binary_parameters(model)
    other = QPSBGD([weights_with_names[i] for i in (1, 0, 2)])
    with pytest.raises(ValueError, match=r"another order, \['0.weight', '1.weight', '2.weight'\]"):
        other.load_state_dict(optimizer.state_dict())
    wrapped = nn.ModuleDict({"module": model})  # whose names have a prefix
    other = QPSBGD(binary_parameters(wrapped))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"][0] == "module.0.weight"


@habit("`optimizer.load_state_dict` with NaN, or with settings out of range")
def _():
    for spoil in (
        lambda state: state["state"][0]["exp_avg"].fill_(math.nan),
        lambda state: state["param_groups"][0].update(lr=math.inf),
        lambda state: state["param_groups"][0].pop("clamp"),
        lambda state: state.pop("run"),
    ):
        model, optimizer = ready()
        train(model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        spoil(state)
        with pytest.raises(ValueError, match=r"not finite|lr|clamp|run"):
            optimizer.load_state_dict(state)
        train(model, optimizer, 1)


@habit("`torch.save` of `state_dict()`s, `torch.load(weights_only=True)`, resume")
def _(tmp_path):
    model, optimizer = ready()
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    expected = train(model, optimizer)
    model, optimizer = ready(lr=1.0)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert equal(train(model, optimizer), expected)


@habit("`model.load_state_dict(…, assign=True)` after the optimizer was made")
def _():
    model, optimizer = ready()
    model.load_state_dict(small().state_dict(), assign=True)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="no backward pass has left a record"):
        optimizer.step()


@habit("`copy.deepcopy(model)`, `torch.save(model)`")
def _(tmp_path):
    model, optimizer = ready()
    train(model, optimizer)
    torch.save(model, tmp_path / "model.pt")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert equal(weights(twin), weights(model))
        train(twin, QPSBGD(binary_parameters(twin)), 1)


@habit("EMA: `torch.optim.swa_utils.AveragedModel`")
def _():
    model, optimizer = ready()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    expected = weights(model)
    for i in range(3):
        now = train(model, optimizer, 1)
        average.update_parameters(model)
        expected = [torch.lerp(own, new, 0.1 if i else 1.0) for own, new in zip(expected, now, strict=True)]
    for own, other in zip(weights(average.module), expected, strict=True):
        torch.testing.assert_close(own, other)
    spins = [torch.where(own >= 0, 1.0, -1.0) for own in weights(average.module)]
    assert equal([average.module[i].binary_weight for i in (0, 2)], spins)


# Layers and models


@habit("`bias`, `device`, `dtype` of `nn.Linear`, in torch's order")
def _():
    layer = BinaryLinear(12, 4, False, "cpu", torch.float64)
    assert layer.bias is None
    layer = BinaryLinear(12, 4, bias=True)
    assert [name for name, _ in binary_parameters(layer)] == ["weight"]
    assert [name for name, _ in real_parameters(layer)] == ["bias"]
    meta = BinaryLinear(12, 4, device="meta").to_empty(device="cpu")
    meta.reset_parameters()
    assert meta.weight.abs().max() <= 0.01


@habit('`padding="same"`, `padding_mode`, `groups`, `dilation` of `nn.Conv2d`')
def _():
    layer = BinaryConv2d(4, 8, 3, padding="same", padding_mode="reflect", groups=2, dilation=2, bias=True)
    optimizer = QPSBGD(binary_parameters(layer))
    before = weights(layer)
    out = layer(torch.randn(2, 4, 9, 9))
    assert out.shape == (2, 8, 9, 9)
    out.square().mean().backward()
    optimizer.step()
    assert all(moved(layer, before))


@habit("inputs without a batch dimension")
def _():
    for layer, shape in ((BinaryLinear(12, 4), (12,)), (BinaryConv2d(2, 4, 3), (2, 6, 6))):
        optimizer = QPSBGD(binary_parameters(layer))
        before = weights(layer)
        x = torch.randn(shape)
        single, batched = layer(x), layer(x[None])
        assert torch.equal(single, batched[0])
        single.square().mean().backward()
        optimizer.step()
        assert all(moved(layer, before))


@habit("`nn.Conv1d`, `nn.Conv3d`, `nn.ConvTranspose2d`")
def _():
    from spingrad import BinaryConv1d, BinaryConv3d, BinaryConvTranspose2d

    for kind, shape in (
        (BinaryConv1d, (2, 3, 9)),
        (BinaryConv3d, (2, 3, 5, 5, 5)),
        (BinaryConvTranspose2d, (2, 3, 5, 5)),
    ):
        layer = kind(3, 4, 3, stride=2, padding=1)
        optimizer = QPSBGD(binary_parameters(layer))
        before = weights(layer)
        layer(torch.randn(shape)).square().mean().backward()
        optimizer.step()
        assert all(moved(layer, before))


@habit("a torch model with attention: `convert(nn.TransformerEncoderLayer(…))`")
def _():
    from spingrad import convert

    torch.manual_seed(0)
    model = convert(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
    assert len(binary_parameters(model)) >= 4
    optimizer = QPSBGD(binary_parameters(model))
    before = weights(model)
    x = torch.randn(2, 5, 16)
    out = model(x)
    out.square().mean().backward()
    optimizer.step()
    assert all(moved(model, before))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), model.train()(x))


@habit("binary layers put into `nn.TransformerEncoderLayer` by hand")
def _():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    for bias in (True, False):
        model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        model.linear1, model.linear2 = BinaryLinear(16, 32, bias), BinaryLinear(32, 16, bias)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), model.train()(x))


@habit("a trained torch model made binary: `convert(model, keep=…)`")
def _():
    from spingrad import convert

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    trained = model[2].weight.detach().clone()
    model = convert(model, keep=["first", "last"])
    assert isinstance(model[0], nn.Conv2d)
    assert isinstance(model[4], nn.Linear)
    assert torch.equal(model[2].binary_weight, torch.where(trained >= 0, 1.0, -1.0))


@habit("tied layers: one weight in two places")
def _():
    model = nn.Sequential(BinaryLinear(12, 12), nn.Hardtanh(), BinaryLinear(12, 12))
    model[2].weight = model[0].weight
    optimizer = QPSBGD(binary_parameters(model))
    before = weights(model)
    model(data()[0]).square().mean().backward()
    optimizer.step()
    assert moved(model, before) == [True]


@habit("one convolution's weight with two strides or dilations")
def _():
    torch.manual_seed(0)
    layers = [
        BinaryConv2d(3, 4, 3, padding=1),
        BinaryConv2d(3, 4, 3, padding=2, dilation=2),
        BinaryConv2d(3, 4, 3, stride=2),
    ]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    model, x = nn.ModuleList(layers), torch.randn(2, 3, 8, 8)

    def loss():
        return sum(layer(x).square().sum() for layer in layers)

    (expected,) = torch.autograd.grad(loss(), layers[0].weight)
    optimizer = QPSBGD(binary_parameters(model))
    loss().backward()
    (record,) = record_of(layers[0].weight).layers()
    torch.testing.assert_close(record.rows.pull_back(record.grad).view_as(expected), expected)
    optimizer.step()


@habit("`channels_last`")
def _():
    taken = []
    for memory in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layer = BinaryConv2d(4, 8, 3).to(memory_format=memory)
        optimizer = QPSBGD(binary_parameters(layer))
        layer(torch.randn(2, 4, 6, 6).to(memory_format=memory)).square().mean().backward()
        optimizer.step()
        taken.append(layer.weight.detach().contiguous())
    assert torch.equal(*taken)


@habit("activation checkpointing: `torch.utils.checkpoint`")
def _():
    expected = train(*ready())
    for reentrant in (True, False):
        model, optimizer = ready()
        for seed in range(4):
            x, y = data(seed=seed)
            optimizer.zero_grad()
            out = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            nn.functional.cross_entropy(out, y).backward()
            optimizer.step()
        assert equal(weights(model), expected)


@habit("`torch.compile(model, fullgraph=True)`")
def _():
    expected = train(*ready())
    model, optimizer = ready()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(4):
        optimizer.zero_grad()
        loss_of(compiled, data(seed=seed)).backward()
        optimizer.step()
    assert equal(weights(model), expected)


@habit("a compiled training step: `torch.compile(optimizer.step)`")
def _():
    expected = train(*ready())
    model, optimizer = ready()
    assert equal(train(model, optimizer, step=torch.compile(optimizer.step, backend="eager")), expected)


@habit("`torch.export.export(model, …)`")
def _():
    model = small().eval()
    program = torch.export.export(model, (data()[0],))
    torch.testing.assert_close(program.module()(data()[0]), model(data()[0]))


@habit("`torch.inference_mode()` and `torch.no_grad()` for evaluation")
def _():
    expected = train(*ready())
    model, optimizer = ready()
    for seed in range(4):
        with torch.inference_mode():
            loss_of(model)
        with torch.no_grad():
            loss_of(model.eval())
        model.train()
        optimizer.zero_grad()
        loss_of(model, data(seed=seed)).backward()
        optimizer.step()
    assert equal(weights(model), expected)


# Trainers


def _lightning_module(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model
            self.automatic_optimization = False

        def configure_optimizers(self):
            real = [p for _, p in real_parameters(self.model)]
            return QPSBGD(binary_parameters(self.model)), torch.optim.Adam(real)

        def training_step(self, batch, index):
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss_of(self.model, batch))
            for optimizer in optimizers:
                self.clip_gradients(optimizer, 1.0, "norm")
                optimizer.step()

    return lightning, Module()


def _fit(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(BinaryLinear(12, 24), nn.BatchNorm1d(24), nn.Hardtanh(), BinaryLinear(24, 4))
    before = weights(model)
    lightning, module = _lightning_module(model)
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(accelerator="cpu", logger=False, max_epochs=1, **quiet, **settings)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data(64)), batch_size=16)
        trainer.fit(module, loader)
    assert all(moved(model, before))


@habit("Lightning with two optimizers")
def _():
    pytest.importorskip("lightning")
    _fit()


@habit("Lightning's `16-mixed`, with its `GradScaler`")
def _():
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    _fit(plugins=[MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))])


@habit("Accelerate: `prepare(model, optimizer, loader)`")
def _():
    accelerate = pytest.importorskip("accelerate")
    model, optimizer = ready()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data(64)), batch_size=16)
    prepared, wrapped, batches = accelerator.prepare(model, optimizer, loader)
    before = weights(model)
    for batch in batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared, batch))
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            wrapped.step()
            wrapped.zero_grad()
    assert all(moved(model, before))
    assert optimizer.run["step"] == 2


# Solvers


@habit("`QPSBGD(solver=SimulatedAnnealingSampler())`, any dimod sampler")
def _():
    from dwave.samplers import SimulatedAnnealingSampler

    model, optimizer = ready(solver=SimulatedAnnealingSampler())
    train(model, optimizer, 1)
    for wrong in (SimulatedAnnealingSampler, "annealing", object()):
        with pytest.raises(TypeError, match="dimod sampler"):
            ready(solver=wrong)


@habit("a solver of your own that returns something else than spins")
def _():
    class Zeros(Solver):
        def solve(self, problem, *, seed=0):
            return Solution(problem, torch.zeros_like(problem.H))

    model, optimizer = ready(solver=Zeros())
    before = weights(model)
    loss_of(model).backward()
    with pytest.raises(ValueError, match=r"Zeros returned spins .* every entry -1 or \+1"):
        optimizer.step()
    assert moved(model, before) == [False, False]


@habit("every sample of an annealer, its timing and chain breaks: `solution.info`")
def _():
    from dwave.samplers import SimulatedAnnealingSampler

    sampler = SimulatedAnnealingSampler()
    problem = random_problem(6, 5, 3, seed=0)
    info = DimodSolver(sampler, keep_samples=True, num_reads=7).solve(problem).info
    assert [len(samples) for samples in info["samples"]] == [7, 7, 7]
    assert len(info["timing"]) == 3
    assert "samples" not in DimodSolver(sampler).solve(problem).info


@habit("`check_solver` for a solver that does not repeat: `deterministic=False`")
def _():
    class Restless(Solver):
        def __init__(self):
            self.calls = 0

        def solve(self, problem, *, seed=0):
            self.calls += 1
            spins = BlockDescentSolver(num_sweeps=9).solve(problem, seed=seed).spins
            if self.calls > 1 and problem.H.shape == (24, 2):
                spins = spins * torch.tensor([(-1.0) ** self.calls, 1.0])
            return Solution(problem, spins)

    with pytest.raises(AssertionError, match="deterministic=False"):
        check_solver(Restless())
    check_solver(Restless(), deterministic=False)


@pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:The epoch parameter",  # the last: torch 2.6
)
@pytest.mark.parametrize("row", HABITS, ids=str)
def test_habit(row, request):
    names = inspect.signature(HABITS[row]).parameters
    HABITS[row](**{name: request.getfixturevalue(name) for name in names})
