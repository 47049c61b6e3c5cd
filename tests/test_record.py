import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from helpers import dense_record
from torch import nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters, record_of, start_recording
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


@pytest.mark.filterwarnings("default")  # of torch.compile itself
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_compiled_model_records_as_it_does_uncompiled(backend):
    torch.manual_seed(0)
    model = nn.Sequential(BinaryConv2d(1, 3, 2), nn.Hardtanh(), nn.Flatten(), BinaryLinear(27, 2))
    QPSBGD(binary_parameters(model))
    x = torch.randn(5, 1, 4, 4)

    def records(net):
        net(x).square().sum().backward()
        found = [record_of(w).layers()[0] for _, w in binary_parameters(model)]
        model.zero_grad()
        return [(own.rows.dense(), own.grad) for own in found]

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(records(compiled), records(model))


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
