import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from helpers import dense_record
from torch import nn
from torch.func import functional_call

from spingrad import (
    QPSBGD,
    BinaryConv2d,
    BinaryLinear,
    Sign,
    binary_parameters,
    convert,
    real_parameters,
    record_of,
    start_recording,
)
from spingrad.baselines import SignSGD
from spingrad.record import checks


@pytest.fixture
def recorded():
    torch.manual_seed(0)
    layer = BinaryLinear(4, 2)
    return layer, start_recording(layer.weight), torch.randn(3, 4, requires_grad=True)


def rows_of(record):
    return sum(len(layer.rows) for layer in record.layers())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["x", "grad"])
def test_a_single_bad_entry_is_seen(value, field):
    tensors = {"x": torch.randn(30, 4), "grad": torch.randn(30, 5)}
    assert checks([dense_record(**tensors)])[0][0][0].finite
    tensors[field][17, 2] = value
    assert not checks([dense_record(**tensors)])[0][0][0].finite


def test_large_finite_entries_are_not_called_infinite():
    assert checks([dense_record(torch.full((9, 4), 3e38), torch.full((9, 5), -3e38))])[0][0][0].finite


@pytest.mark.parametrize("clear", ["clear", "zero_grad", "zero_grad in place", "grad = None"])
def test_clearing_forgets_every_pass(recorded, clear):
    layer, record, x = recorded
    layer(x).sum().backward()
    assert rows_of(record) == 3
    if clear == "clear":
        record.clear()
    elif clear == "grad = None":
        layer.weight.grad = None
    else:
        layer.zero_grad(set_to_none=clear == "zero_grad")
    assert record.layers() == []
    layer(x).sum().backward()
    assert rows_of(record) == 3


def test_clipping_and_scaling_gradients_leave_the_record(recorded):
    layer, record, x = recorded
    layer(x).sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    layer.weight.grad.mul_(0.5)
    assert rows_of(record) == 3


def test_only_what_torch_accumulates_into_the_weight_is_recorded(recorded):
    layer, record, x = recorded
    torch.autograd.grad(layer(x).sum(), x)
    layer(x).sum().backward(inputs=[x])
    assert record.layers() == []
    layer(x).sum().backward(inputs=[layer.weight])
    assert rows_of(record) == 3
    torch.autograd.grad(layer(x).sum(), x)
    (layer(x).sum() + layer(2 * x).sum()).backward()
    assert rows_of(record) == 9


def test_a_discarded_input_gradient_does_not_change_training():
    """A saliency map or an attack in the loop."""

    def trained(attack):
        torch.manual_seed(0)
        model = nn.Sequential(BinaryLinear(16, 32), nn.Hardtanh(), BinaryLinear(32, 4))
        optimizer = QPSBGD(binary_parameters(model), lr=1e-2)
        x, y = torch.randn(40, 16), torch.arange(40) % 4
        for _ in range(3):
            optimizer.zero_grad()
            if attack:
                own = x.clone().requires_grad_()
                torch.autograd.grad(-nn.functional.cross_entropy(model(own), y), own)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model[0].weight.detach()

    assert torch.equal(trained(attack=False), trained(attack=True))


def test_an_input_changed_in_place_is_an_error_before_and_after_the_backward_pass(recorded):
    layer, record, _ = recorded
    x = torch.randn(3, 4)
    out = layer(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    layer(x).sum().backward()
    x.add_(1)
    with pytest.raises(
        RuntimeError, match=r"in-place operation between backward.* version 2, expected version 1"
    ):
        record.layers()


@pytest.mark.parametrize("make", [lambda: BinaryLinear(4, 2), lambda: BinaryConv2d(1, 2, 2)])
def test_layer_record_and_graph_are_freed_without_the_collector(make):
    layer = make()
    record = start_recording(layer.weight)
    x = torch.randn(3, 4) if isinstance(layer, BinaryLinear) else torch.randn(2, 1, 4, 4)
    out = layer(x)
    out.sum().backward()
    gone = [weakref.ref(thing) for thing in (layer, layer.weight, record)]
    gc.disable()
    try:
        del layer, record, out, x
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = BinaryConv2d(1, 4, 3, padding=1, bias=True)
        self.body = nn.Sequential(
            BinaryConv2d(4, 4, 3, padding="same", padding_mode="circular"), nn.BatchNorm2d(4), nn.Hardtanh(),
            BinaryConv2d(4, 4, 2, padding="same", scale=torch.rand(4)),
        )  # fmt: skip
        self.head = nn.Sequential(Sign(), nn.Flatten(), BinaryLinear(64, 2))

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.body(x))


COMPILED = {
    "mlp": (lambda: nn.Sequential(BinaryLinear(4, 6, bias=True), nn.Hardtanh(), BinaryLinear(6, 2)), (5, 4)),
    "residual network": (Residual, (5, 1, 4, 4)),
    "transformer block": (
        lambda: convert(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), scale="mean"),
        (3, 5, 8),
    ),
}


@pytest.mark.filterwarnings("default")  # of torch.compile itself
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_model_records_and_steps_as_it_does_uncompiled(name, backend):
    make, shape = COMPILED[name]
    torch.manual_seed(0)
    model = make()
    optimizer = QPSBGD(binary_parameters(model), lr=0.005)
    real = torch.optim.SGD([p for _, p in real_parameters(model)], 0.1)
    start, x = copy.deepcopy(model.state_dict()), torch.randn(shape)

    def step(net):
        model.load_state_dict(start)
        optimizer.state.clear()
        optimizer.run["step"] = 0  # the same seed
        out = net(x)
        (out.square() * torch.linspace(0, 1, out.numel()).view_as(out)).sum().backward()
        found = [record_of(w).layers()[0] for _, w in binary_parameters(model)]
        optimizer.step()
        real.step()
        real.zero_grad()
        return [(own.rows.dense(), own.grad) for own in found], copy.deepcopy(model.state_dict())

    records, state = step(model)
    torch.compiler.reset()
    their_records, their_state = step(torch.compile(model, backend=backend, fullgraph=True))
    torch.testing.assert_close(their_records, records)
    for key, value in state.items():  # where two spins are as good, rounding decides between them
        assert torch.isclose(value, their_state[key], atol=1e-4).float().mean() > 0.97, key


def test_passes_of_another_kind_of_backward_do_not_mix(recorded):
    layer, record, x = recorded
    out = layer(x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert rows_of(record) == 6


def test_a_checkpointed_part_with_its_own_backward_pass_loses_nothing():
    """Reentrant checkpointing runs a backward pass inside the backward pass, on the same weight."""
    torch.manual_seed(0)
    layer = BinaryLinear(4, 4)
    record = start_recording(layer.weight)
    x = torch.randn(3, 4, requires_grad=True)
    out = layer(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True))
    out.sum().backward()
    assert rows_of(record) == 6


def test_passes_that_accumulate_nothing_hold_no_memory(recorded):
    layer, record, x = recorded
    for _ in range(3):
        torch.autograd.grad(layer(x).sum(), x)
    assert not record._pending


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), BinaryConv2d(1, 3, 2, bias=True), Sign(), nn.Flatten(), nn.Tanh(),
        BinaryLinear(27, 6), Sign(), BinaryLinear(6, 2),
    )  # fmt: skip


def copies(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def loss_of(model, parameters, x):
    return functional_call(model, parameters, (x,)).square().mean()


@pytest.mark.parametrize("recording", [False, True])
def test_functional_calls_with_copies_have_ordinary_gradients(recording):
    model, x = network(), torch.randn(5, 16)
    model(x).square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    if recording:
        _optimizer = QPSBGD(binary_parameters(model))
    found = torch.func.grad(partial(loss_of, model))(copies(model), x)
    torch.testing.assert_close(found, expected)
    each = torch.func.vmap(torch.func.grad(partial(loss_of, model)), (None, 0))(copies(model), x[:, None])
    torch.testing.assert_close({name: grad.mean(0) for name, grad in each.items()}, expected)
    assert all(record_of(w).layers() == [] for _, w in binary_parameters(model) if recording)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, in the first use of a jvp
def test_gradients_by_the_input_in_a_transform_leave_no_record():
    model, x = network(), torch.randn(5, 16)
    expected = torch.func.vmap(torch.func.grad(lambda own: model(own[None]).sum()))(x)
    _optimizer = QPSBGD(binary_parameters(model))
    found = torch.func.vmap(torch.func.grad(lambda own: model(own[None]).sum()))(x)
    torch.testing.assert_close(found, expected)
    _, along = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(along.sum(1), expected.sum(1))
    assert all(record_of(weight).layers() == [] for _, weight in binary_parameters(model))


def test_a_model_that_is_mapped_over_a_batch_records_as_one_that_is_given_the_batch():
    model, x = network(), torch.randn(3, 5, 16)
    _optimizer = QPSBGD(binary_parameters(model))

    def records(out):
        out.square().mean().backward()
        found = [record_of(weight).layers()[0].dense() for _, weight in binary_parameters(model)]
        model.zero_grad()
        return [(own.rows.dense(), own.grad) for own in found]

    expected = records(model(x.flatten(0, 1)))
    torch.testing.assert_close(records(torch.func.vmap(model)(x)), expected)
    torch.testing.assert_close(records(torch.func.vmap(model, in_dims=1)(x.transpose(0, 1))), expected)


def penalty(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().sum()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, in the first use of a jvp
def test_a_second_derivative_through_a_record_is_an_error_that_names_what_works():
    model, x = nn.Sequential(BinaryLinear(4, 6), nn.Tanh(), BinaryLinear(6, 2)), torch.randn(5, 4)
    SignSGD(binary_parameters(model))
    penalty(model, x).backward()
    assert all(weight.grad.any() for _, weight in binary_parameters(model))
    _optimizer = QPSBGD(binary_parameters(model))
    with pytest.raises(RuntimeError, match=r"SignSGD.*finite differences.*functional_call"):
        penalty(model, x).backward()
    with pytest.raises(RuntimeError, match="hold first derivatives only"):
        (
            model(x).sum() + penalty(model[0], x)
        ).backward()  # a gradient that depends on nothing but the weight
    own = copies(model)
    by_input = torch.func.hessian(lambda own_x: functional_call(model, own, (own_x,)).sum())(x[0])
    assert by_input.abs().sum() > 0
    with pytest.raises(RuntimeError, match="hold first derivatives only"):
        torch.func.grad(lambda own_x: model(own_x).square().sum())(x).square().sum().backward()


def test_a_penalty_of_finite_differences_is_recorded():
    model, x = nn.Sequential(BinaryLinear(4, 6), nn.Tanh(), BinaryLinear(6, 2)), torch.randn(5, 4)
    optimizer = QPSBGD(binary_parameters(model))
    ((model(x + 1e-2 * torch.randn_like(x)) - model(x)) / 1e-2).square().mean().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_the_gradient_that_nobody_uses_changes_nothing(recorded):
    layer, record, x = recorded
    layer(x).square().sum().backward(create_graph=True)
    (own,) = record.layers()
    assert not own.grad.requires_grad
    assert rows_of(record) == 3
