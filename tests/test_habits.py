"""What torch users do in their training scripts: each row of the table in docs/training.md is a test.

Where a habit changes gradients or passes, the weights after the step are those of :func:`expected`, a plain
computation from gradients and inputs.
"""

import copy
import inspect
import math
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.nn.utils import parametrizations, parametrize, prune

from spingrad import (
    QPSBGD,
    BinaryConv2d,
    BinaryLinear,
    Sign,
    binary_parameters,
    real_parameters,
)
from spingrad.baselines import Bop, SignSGD
from spingrad.problem import BinaryQuadratic
from spingrad.sketch import sketch_of
from spingrad.solvers import BlockDescentSolver, DimodSolver, Solution, Solver
from spingrad.solvers.base import derive_seed
from spingrad.testing import check_solver, random_problem

PAGE = Path(__file__).parents[1] / "docs/training.md"
HABITS = {}
ON_SEVERAL_RANKS = {  # these need processes of their own: the tests are in test_ranks.py
    "`DistributedDataParallel(model)`": "ddp_and_fully_shard_are_used_as_with_any_optimizer",
    "`fully_shard(model)` (FSDP2)": "ddp_and_fully_shard_are_used_as_with_any_optimizer",
    "several processes without DDP or FSDP2": (
        "gradients_that_no_engine_has_averaged_are_an_error_that_names_ddp"
    ),
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
    return F.cross_entropy(model(x).float(), y)


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


# What a step must be


def spins(weight):
    return torch.where(weight >= 0, 1.0, -1.0).to(weight)


def rows_of(passes, exact):
    """The rows of the quadratic term, all or the sum of the passes' samples, and the number of all."""
    if exact:
        rows = torch.cat([x[V.any(1)] for x, V in passes])
        return rows, len(rows)
    n = passes[0][0].shape[1]
    shape = torch.Size([1, min(128, 4 * n) + 1, n])
    [table] = sum(sketch_of(x, V, shape, torch.float64, "rows", ()) for x, V in passes)
    return table[:-1][table[:-1].any(1)], int(table[-1, 0])


def expected(weight, passes, grad=None, *, exact=False, lr=3e-3):
    """A weight after its first step.

    Args:
        weight: Before the step.
        passes: Inputs and output gradients of every backward pass.
        grad: ``weight.grad``, if it is not the sum over the passes.
        exact: All rows count (``rank=None``), not a sample of them.
        lr: Learning rate.
    """
    grad = sum(V.T @ x for x, V in passes) if grad is None else grad
    rows, count = rows_of(passes, exact)
    n, s = rows.shape[1], len(rows)

    products = rows @ rows.T
    norms = products.diag()
    others = (products.square().sum() - norms.square().sum()) / (s * (s - 1))
    shared = (norms.square().mean() + (count - 1) * others) / norms.mean().square()

    length = grad.norm(dim=1)
    live = length > 1e-6 * length.max()
    cut = length.clamp(max=3 * length[live].median())
    size = 0.35 * (shared * count / n).sqrt() / cut.square().mean().sqrt() * cut / length
    H = (size[:, None] * grad).where(live[:, None], 0)

    problem = BinaryQuadratic.of(rows * (count / n) ** 0.5 / rows.norm(), H.T)
    G = BlockDescentSolver().solve(problem, seed=derive_seed(0, 0)).spins.T
    return (weight - lr * G).clamp(-1, 1).where(live[:, None], weight)


class OneStep:
    """The network of :func:`small` in double precision before its first step, and the same in plain torch."""

    def __init__(self, exact=False):
        self.exact, self.model = exact, small().double()
        rank = None if exact else 32  # of 24 inputs: no direction is left out
        self.optimizer = QPSBGD(binary_parameters(self.model), rank=rank)
        self.latent = [weight for _, weight in binary_parameters(self.model)]
        self.before = weights(self.model)

    @staticmethod
    def batch(rows=32, seed=1):
        x, y = data(rows, seed)
        return x.double(), y

    def loss(self, *batch, of=F.cross_entropy):
        x, y = batch or self.batch()
        return of(self.model(x), y)

    def plain(self, *batch, of=F.cross_entropy):
        """Inputs and output gradients of both layers, without a binary layer."""
        x, y = batch or self.batch()
        first, second = map(spins, self.before)
        one = F.linear(x, first).requires_grad_()
        hidden = F.hardtanh(one * 12**-0.5)
        two = F.linear(hidden, second)
        V = torch.autograd.grad(of(two * 24**-0.5, y), (one, two))
        return [(x, V[0]), (hidden.detach(), V[1])]

    def grads(self):
        return [V.T @ x for x, V in self.plain()]

    def check(self, *passes, grads=(None, None), step=None):
        """Take the step: it must be that of these passes and gradients."""
        (step or self.optimizer.step)()
        for i, own in enumerate(zip(*(passes or [self.plain()]), strict=True)):
            wanted = expected(self.before[i], own, grads[i], exact=self.exact)
            torch.testing.assert_close(self.latent[i].detach(), wanted, rtol=0, atol=1e-9)


def one_step():
    """With a sample of the rows, and with all of them."""
    return OneStep(), OneStep(exact=True)


def check_one_layer(layer, passes, grad=None, **settings):
    """Take the step of a model with one weight: it must be that of these passes."""
    optimizer, before = settings.pop("optimizer"), layer.weight.detach().clone()
    optimizer.step()
    wanted = expected(before, passes, grad, **settings)
    torch.testing.assert_close(layer.weight.detach(), wanted, rtol=0, atol=1e-9)


# The loop


@habit("`zero_grad()`, `backward()`, `step()`")
def _():
    for own in one_step():
        for set_to_none in (True, False):
            own.loss(*own.batch(seed=9)).backward()
            own.optimizer.zero_grad(set_to_none=set_to_none)
        own.loss().backward()
        own.check()


@habit("a discarded pass: `model.zero_grad()`, `weight.grad = None`, `weight.grad.zero_()`")
def _():
    def each(clear):
        return lambda own: [clear(weight) for weight in own.latent]

    clears = [lambda own: own.model.zero_grad(), lambda own: own.model.zero_grad(set_to_none=False)]
    clears += [each(lambda weight: setattr(weight, "grad", None)), each(lambda weight: weight.grad.zero_())]
    for clear in clears:
        for own in one_step():
            discarded = own.batch(16, seed=9)
            own.loss(*discarded).backward()
            clear(own)
            own.loss().backward()
            own.check(own.plain(*discarded), own.plain(), grads=own.grads())


@habit("gradient accumulation over several `backward()`, of unequal batches too")
def _():
    def part_of_the_mean(out, y):
        return F.cross_entropy(out, y, reduction="sum") / 32

    for sizes in ([16, 16], [3, 20, 9]):
        for own in one_step():
            parts = list(zip(*(tensor.split(sizes) for tensor in own.batch()), strict=True))
            for part in parts:
                own.loss(*part, of=part_of_the_mean).backward()
            own.check(*(own.plain(*part, of=part_of_the_mean) for part in parts))
            if own.exact:
                whole = OneStep(exact=True)
                whole.loss().backward()
                whole.optimizer.step()
                assert equal(weights(own.model), weights(whole.model))


@habit("`step(closure)`")
def _():
    results = []
    for own in one_step():

        def closure(own=own):
            own.optimizer.zero_grad()
            loss = own.loss()
            loss.backward()
            return loss

        loss = own.loss().item()
        own.check(step=lambda own=own, closure=closure: results.append(own.optimizer.step(closure).item()))
        assert results.pop() == loss


@habit("`loss.backward(retain_graph=True)` and several losses")
def _():
    for own in one_step():
        loss = own.loss()
        loss.backward(retain_graph=True)
        (0.1 * loss).backward()
        own.check(own.plain(), own.plain(of=lambda out, y: 0.1 * F.cross_entropy(out, y)))


@habit("`clip_grad_norm_` over all parameters")
def _():
    for own in one_step():
        own.loss().backward()
        norm = nn.utils.clip_grad_norm_(own.model.parameters(), 1e-3)
        torch.testing.assert_close(norm, torch.cat([grad.flatten() for grad in own.grads()]).norm())
        own.check()  # as without clipping


@habit("`clip_grad_value_`")
def _():
    for own in one_step():
        own.loss().backward()
        nn.utils.clip_grad_value_(own.model.parameters(), 1e-3)
        clipped = [grad.clamp(-1e-3, 1e-3) for grad in own.grads()]
        assert not equal(clipped, own.grads())
        own.check(grads=clipped)


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
    for own in one_step():
        own.model[0](own.batch()[0]).square().mean().backward()
        own.optimizer.step()
        assert moved(own.model, own.before) == [True, False]


@habit("`step()` without `backward()`")
def _():
    model, optimizer = ready()
    before = weights(model)
    optimizer.step()
    assert not any(moved(model, before))
    assert optimizer.run["step"] == 0


@habit("some layers in `eval()`, or all of them")
def _():
    for place in (0, 1, 2):
        for own in one_step():
            own.model[place].eval()
            own.loss().backward()
            own.check()
    own = OneStep()
    own.model.eval()
    own.loss().backward()
    own.check()


@habit("`QPSBGD(model.parameters())` with real-valued parameters among them")
def _():
    model = nn.Sequential(BinaryLinear(12, 8), nn.BatchNorm1d(8), BinaryLinear(8, 4))
    binary_parameters(model)
    with pytest.raises(ValueError, match=r"layer 1 .*real_parameters\(model\)"):
        QPSBGD(model.parameters())


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
    kinds = [torch.optim.Adam, torch.optim.SGD, torch.optim.Rprop, torch.optim.Adafactor, torch.optim.LBFGS]
    for kind in kinds:
        model, kept = ready()
        before, optimizer = weights(model), kind(model.parameters(), lr=1e-2)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        optimizer.step(closure)
        assert all(moved(model, before))
        plain = small()
        optimizer = kind(plain.parameters(), lr=1e-2)
        optimizer.step(lambda plain=plain, optimizer=optimizer: closure(plain, optimizer))
        assert equal(weights(model), weights(plain))  # whether a QPSBGD lives or not
        del kept


@habit("another torch optimizer on the same weights")
def _():
    for own in one_step():
        sgd = torch.optim.SGD(own.model.parameters(), lr=0.1, weight_decay=0.5)
        own.loss().backward()
        own.check()
        between = weights(own.model)
        sgd.step()
        for now, was, grad in zip(weights(own.model), between, own.grads(), strict=True):
            torch.testing.assert_close(now, was - 0.1 * (grad + 0.5 * was))


@habit("`weight_decay=…`")
def _():
    with pytest.raises(TypeError, match="weight_decay"):
        ready(weight_decay=1e-4)
    (_, first), (_, second) = binary_parameters(small())
    with pytest.raises(ValueError, match=r"weight_decay is not a setting of QPSBGD"):
        QPSBGD([{"params": [first], "weight_decay": 1e-4}, {"params": [second]}])
    QPSBGD([{"params": [first], "weight_decay": 0.0}])


@habit("a misspelt setting of a parameter group")
def _():
    with pytest.raises(ValueError, match="'momentun' is no setting"):
        QPSBGD([{"params": [weight for _, weight in binary_parameters(small())], "momentun": 0.5}])


@habit("a penalty on latent weights")
def _():
    for own in one_step():
        penalty = 1e-2 * sum(weight.abs().sum() for weight in own.latent)
        (own.loss() + penalty).backward()
        signs = [weight.sign() for weight in own.before]
        own.check(grads=[grad + 1e-2 * sign for grad, sign in zip(own.grads(), signs, strict=True)])
    own.optimizer.zero_grad()
    own.latent[0].square().sum().backward()
    with pytest.raises(RuntimeError, match="no backward pass has left a sketch"):
        own.optimizer.step()


@habit("one weight in a binary and a real layer")
def _():
    words = torch.randint(12, (30,), generator=torch.Generator().manual_seed(0))
    for exact in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(12, 8), BinaryLinear(8, 12)).double()
        model[0].weight = model[1].weight
        optimizer = QPSBGD(binary_parameters(model), rank=None if exact else 32)
        weight = model[1].weight.detach()
        F.cross_entropy(model(words), words.roll(1)).backward()

        table, x = weight.clone().requires_grad_(), F.embedding(words, weight)
        out = (F.embedding(words, table) @ spins(weight).T).requires_grad_()
        own, V = torch.autograd.grad(F.cross_entropy(out / 8**0.5, words.roll(1)), (table, out))
        check_one_layer(model[1], [(x, V)], V.T @ x + own, optimizer=optimizer, exact=exact)


@habit("a change of `weight.grad`: `neg_()`, a mask, noise, a gradient of your own")
def _():
    noise = torch.Generator().manual_seed(3)
    changes = [torch.neg, lambda grad: grad * 1e-8, lambda grad: 1e8 * grad]
    changes += [lambda grad: grad * (torch.rand(grad.shape, generator=noise) < 0.5)]
    changes += [lambda grad: grad + 1e-3 * torch.randn(grad.shape, generator=noise)]
    changes += [lambda grad: torch.randn(grad.shape, generator=noise).double()]
    for change in changes:
        for in_place in (False, True):
            for own in one_step():
                own.loss().backward()
                changed = [change(grad) for grad in own.grads()]
                for weight, grad in zip(own.latent, changed, strict=True):
                    if in_place:
                        weight.grad.copy_(grad)
                    else:
                        weight.grad = grad.clone()
                own.check(grads=changed)


@habit("a gradient that is scaled: not one move differs")
def _():
    own, turned = OneStep(), OneStep()
    own.loss().backward()
    own.optimizer.step()
    steps = [now - was for now, was in zip(weights(own.model), own.before, strict=True)]
    for factors in ((1e-10, 1e-10), (1e10, 1e10), (1e-10, 1e10)):
        scaled = OneStep()
        scaled.loss().backward()
        for weight, factor in zip(scaled.latent, factors, strict=True):
            weight.grad *= factor
        scaled.optimizer.step()
        assert equal(weights(scaled.model), weights(own.model))
    turned.loss().backward()
    for weight in turned.latent:
        weight.grad.neg_()
    turned.optimizer.step()
    for now, was, step in zip(weights(turned.model), turned.before, steps, strict=True):
        assert torch.equal((now - was).sign(), -step.sign())


@habit("a gradient of your own and no backward pass")
def _():
    model, optimizer = ready()
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    with pytest.raises(RuntimeError, match="no backward pass has left a sketch"):
        optimizer.step()


@habit("`weight.register_hook`, `register_post_accumulate_grad_hook`")
def _():
    def negate(weight):
        weight.grad.neg_()

    def halve_the_first(grad):
        return torch.cat([grad[:1] / 2, grad[1:]])

    for own in one_step():
        seen = []
        for weight in own.latent:
            weight.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
            weight.register_hook(halve_the_first)
            weight.register_post_accumulate_grad_hook(negate)
        own.loss().backward()
        for one, other in zip(seen[::-1], own.grads(), strict=True):
            torch.testing.assert_close(one, other)
        own.check(grads=[-halve_the_first(grad) for grad in own.grads()])


@habit("`register_post_accumulate_grad_hook` that steps, one optimizer per layer")
def _():
    for exact in (False, True):
        own = OneStep(exact)
        for weight in own.latent:
            optimizer = QPSBGD([weight], rank=None if exact else 32)
            weight.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        own.loss().backward()
        for i, passes in enumerate(own.plain()):
            wanted = expected(own.before[i], [passes], exact=exact)
            torch.testing.assert_close(own.latent[i].detach(), wanted, rtol=0, atol=1e-9)


@habit("`torch.nn.utils.prune`, `weight_norm` and other parametrizations")
def _():
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    puts = [lambda layer: prune.l1_unstructured(layer, "weight", 0.5), parametrizations.weight_norm]
    puts += [lambda layer: parametrize.register_parametrization(layer, "weight", Twice())]
    for put in puts:
        model = small()
        put(model[0])
        with pytest.raises(ValueError, match=r"layer '0': its weight is computed"):
            binary_parameters(model)
        model, optimizer = ready()
        put(model[0])
        with pytest.raises(RuntimeError, match=r"its weight is computed"):
            loss_of(model)
        del optimizer


@habit("`prune.remove(module, 'weight')`")
def _():
    own = OneStep()
    prune.l1_unstructured(own.model[0], "weight", 0.5)
    prune.remove(own.model[0], "weight")
    own.before = weights(own.model)
    own.loss().backward()
    own.check()


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


# Layers that are used several times


@habit("tied layers: one weight in two places")
def _():
    for exact in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(BinaryLinear(12, 12), nn.Hardtanh(), BinaryLinear(12, 12)).double()
        model[2].weight = model[0].weight
        optimizer = QPSBGD(binary_parameters(model), rank=None if exact else 32)
        x, G = OneStep.batch()[0], spins(model[0].weight.detach())
        model(x).square().sum().backward()
        one = F.linear(x, G).requires_grad_()
        hidden = F.hardtanh(one * 12**-0.5)
        two = F.linear(hidden, G)
        V = torch.autograd.grad((two * 12**-0.5).square().sum(), (one, two))
        passes = [(hidden.detach(), V[1]), (x, V[0])]
        check_one_layer(model[0], passes, optimizer=optimizer, exact=exact)


@habit("a layer used eight times: an RNN")
def _():
    for exact in (False, True):
        torch.manual_seed(0)
        layer = BinaryLinear(12, 12).double()
        optimizer = QPSBGD(binary_parameters(layer), rank=None if exact else 32)
        state, G = OneStep.batch(5)[0], spins(layer.weight.detach()).requires_grad_()
        plain, inputs, outs = state, [], []
        for _ in range(8):
            state = torch.tanh(layer(state))
            inputs.append(plain)
            outs.append(F.linear(plain, G))
            plain = torch.tanh(outs[-1] * 12**-0.5)
        state.square().sum().backward()
        V = torch.autograd.grad(plain.square().sum(), outs)
        passes = [(x.detach(), own) for x, own in zip(inputs, V, strict=True)]
        check_one_layer(layer, passes[::-1], optimizer=optimizer, exact=exact)


@habit("one convolution's weight with two strides or dilations")
def _():
    torch.manual_seed(0)
    layers = [
        BinaryConv2d(3, 4, 3, padding=1),
        BinaryConv2d(3, 4, 3, padding=2, dilation=2),
        BinaryConv2d(3, 4, 3, stride=2),
    ]
    for layer in layers:
        layer.weight = layers[0].weight
        layer.double()
    model, x = nn.ModuleList(layers), torch.randn(2, 3, 8, 8).double()
    optimizer = QPSBGD(binary_parameters(model), rank=None)
    sum(layer(x).square().sum() for layer in layers).backward()
    passes, weight = [], spins(layers[0].weight.detach()).flatten(1)
    for layer in layers:
        unfolded = F.unfold(x, 3, layer.dilation, layer.padding, layer.stride)  # (2, 27, places)
        rows = unfolded.transpose(1, 2).flatten(0, 1)
        passes.append((rows, 2 * rows @ weight.T / 27))
    before = layers[0].weight.detach().flatten(1)
    wanted = expected(before.clone(), passes, exact=True)
    optimizer.step()
    torch.testing.assert_close(layers[0].weight.detach().flatten(1), wanted, rtol=0, atol=1e-9)
    layers = [BinaryConv2d(4, 8, 3, groups=2), BinaryConv2d(2, 8, 3)]
    layers[1].weight = layers[0].weight
    with pytest.raises(ValueError, match="different groups"):
        binary_parameters(nn.ModuleList(layers))


@habit("activation checkpointing: `torch.utils.checkpoint`")
def _():
    for reentrant in (True, False):
        for own in one_step():
            x, y = own.batch()
            x.requires_grad_()
            out = torch.utils.checkpoint.checkpoint(own.model, x, use_reentrant=reentrant)
            F.cross_entropy(out, y).backward()
            own.check()


@habit("one unit with a gradient a thousand times that of the others")
def _():
    for own in one_step():
        own.loss().backward()
        for weight in own.latent:
            weight.grad[0] *= 1000
        own.check(grads=[torch.cat([1000 * grad[:1], grad[1:]]) for grad in own.grads()])


@habit("rare classes: units without a gradient in a batch")
def _():
    def only_two_logits(out, y):
        return F.cross_entropy(out[:, :2], y % 2)

    for own in one_step():
        own.loss(of=only_two_logits).backward()
        own.check(own.plain(of=only_two_logits))
        assert equal(weights(own.model)[1][2:], own.before[1][2:])
        assert not torch.equal(weights(own.model)[1][:2], own.before[1][:2])


@habit("rows without a gradient: a mask of the loss, padding tokens")
def _():
    for own in one_step():
        x, y = own.batch()
        y = y.where(torch.arange(32) % 3 > 0, -100)
        own.loss(x, y).backward()
        assert own.latent[0].companion.sketch[0, -1, 0] == (y >= 0).sum()
        own.check(own.plain(x, y))


# Gradients for something else


@habit(
    "`torch.autograd.grad(loss, x)`: saliency, adversarial examples, between `backward()` and `step()` too"
)
def _():
    for own in one_step():
        x, y = own.batch()
        x.requires_grad_()
        torch.autograd.grad(own.loss(x, y), x)
        own.loss().backward()
        torch.autograd.grad(own.loss(x, y), x)
        own.check()
    own.optimizer.zero_grad()
    jacobians = [
        torch.autograd.functional.jacobian(model, own.batch(2)[0], vectorize=vectorize)
        for model in (own.model, copy.deepcopy(own.model))
        for vectorize in (False, True)
    ]
    assert all(torch.allclose(jacobian, jacobians[0]) for jacobian in jacobians)
    assert own.latent[0].companion.sketch is None


@habit("`torch.autograd.grad(loss, weights)`, reading `weight.grad`: a Fisher diagonal, a log")
def _():
    for own in one_step():
        for found in (torch.autograd.grad(own.loss(), own.latent), own.grads()):
            for one, other in zip(found, own.grads(), strict=True):
                torch.testing.assert_close(one, other)
        assert own.latent[0].companion.sketch is None
        own.loss().backward()
        own.check()
        for weight, grad in zip(own.latent, own.grads(), strict=True):
            torch.testing.assert_close(weight.grad, grad)  # after the step, too


@habit("`loss.backward(inputs=[x])`")
def _():
    own = OneStep()
    x, y = own.batch()
    x.requires_grad_()
    own.loss(x, y).backward(inputs=[x])
    assert own.latent[0].companion.sketch is None
    own.optimizer.step()
    assert not any(moved(own.model, own.before))


@habit("`loss.backward(inputs=weights)`")
def _():
    own = OneStep()
    own.loss().backward(inputs=own.latent)
    with pytest.raises(RuntimeError, match=r"layer '0': .*not backward\(inputs=weights\)"):
        own.optimizer.step()


@habit("a gradient penalty: `create_graph=True`, double backward")
def _():
    for own in one_step():
        x, y = own.batch()
        x.requires_grad_()
        loss = own.loss(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + 10 * slope.square().sum()).backward()

        first, second = (spins(weight).requires_grad_() for weight in own.before)
        hidden = F.hardtanh(x @ first.T / 12**0.5)
        loss = F.cross_entropy(hidden @ second.T / 24**0.5, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        grads = torch.autograd.grad(loss + 10 * slope.square().sum(), (first, second))
        assert not any(torch.allclose(*pair) for pair in zip(grads, own.grads(), strict=True))
        own.check(own.plain(x.detach(), y), grads=grads)


@habit("`torch.func.functional_call` with `torch.func.grad`, `hessian`")
def _():
    own = OneStep()
    x, y = own.batch(4)
    params = {name: p.detach() for name, p in own.model.named_parameters()}

    def loss(last):
        return F.cross_entropy(torch.func.functional_call(own.model, params | {"2.weight": last}, (x,)), y)

    hidden = own.model[:2](x).detach()

    def plain(last):
        return F.cross_entropy(hidden @ last.T / 24**0.5, y)

    for transform in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(
            transform(loss)(params["2.weight"]), transform(plain)(spins(own.before[1]))
        )
    assert own.latent[1].companion.sketch is None


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


@habit("forward mode: `forward_ad.dual_level`, `torch.func.jvp`")
def _():
    own = OneStep()
    x = own.batch()[0]
    slope = torch.func.jvp(own.model, (x,), (torch.ones_like(x),))[1]
    with forward_ad.dual_level():
        out = own.model(forward_ad.make_dual(x, torch.ones_like(x)))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, slope)
    first, second = map(spins, own.before)
    inside = (x @ first.T / 12**0.5).abs() < 1
    hidden = inside * (torch.ones_like(x) @ first.T) / 12**0.5
    torch.testing.assert_close(slope, hidden @ second.T / 24**0.5)


@habit("an input changed in place between `backward()` and `step()`")
def _():
    for own in one_step():
        x, y = own.batch()
        own.loss(x, y).backward()
        x.zero_()
        own.check()


# Precision


@habit("`torch.autocast` in bfloat16")
def _():
    model, optimizer = ready()
    before = weights(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    sketches = [model[i].companion.sketch[0].double() for i in (0, 2)]
    grads = [weight.grad.double() for weight in model.parameters()]
    assert all(sketch[-1, 0] == 32 for sketch in sketches)
    optimizer.step()
    for i, now in enumerate(weights(model)):
        rows = sketches[i][:-1]
        rows = rows[rows.any(1)]
        wanted = expected(before[i].double(), [(rows, torch.ones(len(rows), 1))], grads[i], exact=True)
        assert (now - wanted).abs().lt(1e-6).double().mean() > 0.999


@habit("`step()` under autocast, as in Lightning's manual optimization")
def _():
    for own in one_step():
        own.loss().backward()
        own.check(step=torch.autocast("cpu", torch.bfloat16)(own.optimizer.step))


@habit("`torch.amp.GradScaler`, with `unscale_` and clipping")
def _():
    for settings in ({}, {"target_rms": None}):  # with the gradient's own size, a wrong scale would show
        expected_weights = train(*ready(**settings))
        model, optimizer = ready(**settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for seed in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, data(seed=seed))).backward()
            if seed % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
        assert equal(weights(model), expected_weights)


@habit("`target_rms=None` takes the size of the gradient: `grad.mul_(0.125)`")
def _():
    def taken(of_loss, of_grad):
        model, optimizer = ready(target_rms=None, momentum=0.0)
        (of_loss * loss_of(model)).backward()
        for weight in model.parameters():
            weight.grad.mul_(of_grad)
        optimizer.step()
        return weights(model)

    assert equal(taken(8.0, 1.0), taken(64.0, 0.125))
    assert not equal(taken(8.0, 1.0), taken(1.0, 1.0))


@habit("`GradScaler` skips a step whose gradients overflow")
def _():
    for set_to_none in (True, False):
        for own in one_step():
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
            (scaler.scale(own.loss()) * math.inf).backward()
            scaler.step(own.optimizer)
            scaler.update()
            assert not any(moved(own.model, own.before))
            assert scaler.get_scale() == 2.0**11
            own.optimizer.zero_grad(set_to_none=set_to_none)
            scaler.scale(own.loss()).backward()
            own.check(step=lambda own=own, scaler=scaler: scaler.step(own.optimizer))


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


@habit("`model.double()`, `model.to(…)`, between `backward()` and `step()` too")
def _():
    torch.manual_seed(0)
    for swap in (False, True):
        own = OneStep()
        own.loss().backward()
        own.model.float()
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            own.model.double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert own.latent[0].companion.sketch.dtype == torch.float64
        grads = [grad.float().double() for grad in own.grads()]
        own.check([(x.float().double(), V) for x, V in own.plain()], grads=grads)


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
                optimizer = QPSBGD(binary_parameters(layer))
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
    model[2].weight.data[0, 0] = math.nan
    loss_of(model).backward()
    with pytest.raises(ValueError, match="layer '2': the latent weight"):
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
        lambda state: state["param_groups"][0].pop("run"),
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
    with pytest.raises(RuntimeError, match="layer '0': the model has another weight in its place"):
        optimizer.step()


@habit("`get_optimizer_state_dict`, `set_optimizer_state_dict` of `torch.distributed.checkpoint`")
def _():
    model, optimizer = ready(seed=5)
    before = weights(model)
    checkpoints.get_optimizer_state_dict(model, optimizer)  # which takes a step by gradients of zero
    assert equal(weights(model), before)
    assert optimizer.run == {"seed": 5, "step": 0, "skipped": 0}
    train(model, optimizer)
    saved = copy.deepcopy(checkpoints.get_state_dict(model, optimizer))
    expected_weights = train(model, optimizer)
    model, optimizer = ready()
    checkpoints.set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    assert optimizer.run == {"seed": 5, "step": 4, "skipped": 0}
    assert equal(train(model, optimizer), expected_weights)


@habit("`copy.deepcopy(model)`, `torch.save(model)`")
def _(tmp_path):
    model, optimizer = ready()
    train(model, optimizer)
    torch.save(model, tmp_path / "model.pt")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert equal(weights(twin), weights(model))
        loss_of(twin).backward()
        assert [weight.companion.sketch for _, weight in binary_parameters(twin)] == [None, None]
        twin.zero_grad()
        twins = train(twin, QPSBGD(binary_parameters(twin), momentum=0.0), 1)
        assert equal(
            twins, train(*(own := copy.deepcopy(model), QPSBGD(binary_parameters(own), momentum=0.0)), 1)
        )


@habit("`copy.deepcopy((model, optimizer))`, pickling both")
def _():
    def grouped():
        torch.manual_seed(0)
        layer = BinaryConv2d(4, 8, 3, groups=2)
        return layer, QPSBGD(binary_parameters(layer))

    def trained(layer, optimizer):
        for seed in range(3):
            optimizer.zero_grad()
            x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))
            layer(x).square().mean().backward()
            optimizer.step()
        return weights(layer)

    for make, continued in ((ready, train), (grouped, trained)):
        for copied in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
            model, optimizer = make()
            continued(model, optimizer)
            twin, other = copied((model, optimizer))
            last, first = copied((optimizer, model))
            expected_weights = continued(model, optimizer)
            assert equal(continued(twin, other), expected_weights)
            assert equal(continued(first, last), expected_weights)


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


@habit("`torch.export.export(model, …)`, `torch.jit.trace`")
def _():
    x = data()[0]
    for model, optimizer in (ready(), (small(), None)):
        for own in (model.train(), model.eval()):
            torch.testing.assert_close(torch.export.export(own, (x,)).module()(x), own(x))
            torch.testing.assert_close(torch.jit.trace(own, x)(x), own(x))
        del optimizer


@habit("`torch.fx.symbolic_trace(model)`")
def _():
    with pytest.raises(torch.fx.proxy.TraceError, match="control flow"):
        torch.fx.symbolic_trace(small())


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
