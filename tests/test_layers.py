import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spingrad import BinaryConv2d, BinaryLinear, Sign, binary_parameters, real_parameters, sign
from spingrad.recording import record_of, start_recording, stop_recording


def test_the_sign_of_every_zero_is_plus_one():
    x = torch.tensor([-3.0, -1e-30, -0.0, 0.0, 1e-30, 3.0])
    assert sign(x).tolist() == [-1, -1, 1, 1, 1, 1]


def test_sign_passes_the_gradient_of_hardtanh():
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    weights = torch.arange(9.0)
    (sign(x) * weights).sum().backward()
    assert torch.equal(x.grad, weights * (x.detach().abs() <= 1))
    assert torch.equal(Sign()(x), sign(x))


def reference(layer, x):
    """The same layer in torch's own operations, with a straight-through weight."""
    weight = layer.weight.detach().clone().requires_grad_()
    straight = weight + (layer.binary_weight - weight).detach()
    bias = 0 if layer.bias is None else layer.bias
    if isinstance(layer, BinaryLinear):
        return weight, F.linear(x, straight) * layer.scale + bias
    out = F.conv2d(x, straight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    if isinstance(layer.scale, torch.Tensor):
        return weight, out * layer.scale[:, None, None] + bias[:, None, None]
    return weight, out * layer.scale


def with_bias(layer):
    nn.init.normal_(layer.bias)
    return layer


LAYERS = {
    "linear": (lambda: BinaryLinear(6, 4), (5, 6)),
    "linear over time": (lambda: BinaryLinear(6, 4), (5, 3, 6)),
    "unscaled": (lambda: BinaryLinear(6, 4, scale=False), (5, 6)),
    "linear with bias": (lambda: with_bias(BinaryLinear(6, 4, True)), (5, 6)),
    "linear with a scale": (lambda: BinaryLinear(6, 4, scale=0.3), (5, 6)),
    "linear with scales": (lambda: with_bias(BinaryLinear(6, 4, True, scale=torch.rand(4))), (5, 3, 6)),
    "conv with bias and scales": (
        lambda: with_bias(BinaryConv2d(3, 4, 3, bias=True, scale=torch.rand(4))),
        (2, 3, 8, 8),
    ),
    "conv": (lambda: BinaryConv2d(3, 4, 3), (2, 3, 8, 8)),
    "conv with all options": (
        lambda: BinaryConv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
        (2, 4, 9, 8),
    ),
    "depthwise": (lambda: BinaryConv2d(4, 4, 3, padding=1, groups=4), (2, 4, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_forward_and_gradients_are_those_of_torch_with_signed_weights(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight, expected = reference(layer, x)
    grad = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, (x, weight), grad)
    out = layer(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, (x, layer.weight), grad), grads)


@pytest.mark.parametrize("name", LAYERS)
def test_the_record_is_the_gradient_in_two_factors(name):
    """Σ over rows of grad ⊗ x is the weight gradient before the scale: nothing is lost or doubled."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    weight, expected = reference(layer, x)
    record = start_recording(layer.weight)
    out = layer(x)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    matrices = [own.dense() for own in record.layers()]
    product = torch.cat([own.grad.T @ own.rows.dense() for own in matrices])
    torch.testing.assert_close(product.view_as(weight), weight.grad)
    assert not layer.weight.grad.any()


def test_passes_add_up_over_gradient_accumulation():
    torch.manual_seed(0)
    layer, x = BinaryLinear(6, 4), torch.randn(10, 6)
    record = start_recording(layer.weight)
    for part in x.split(4):
        layer(part).sum().backward()
    (whole,) = record.layers()
    assert torch.equal(whole.rows.dense(), x)
    assert whole.grad.shape == (10, 4)


def test_a_layer_used_twice_records_twice():
    layer = BinaryLinear(4, 4)
    record = start_recording(layer.weight)
    layer(layer(torch.randn(3, 4))).sum().backward()
    assert len(record.layers()[0].rows) == 6


def test_nothing_is_recorded_in_eval_or_without_gradients_or_when_frozen():
    layer = BinaryLinear(4, 2)
    record = start_recording(layer.weight)
    x = torch.randn(3, 4, requires_grad=True)
    layer.eval()(x).sum().backward()
    with torch.no_grad():
        layer.train()(x)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert record.layers() == []
    assert not layer.weight.grad.any()  # the mark of the pass in evaluation
    assert x.grad is not None


def test_the_weight_gradient_is_computed_only_when_asked_for():
    layer = BinaryLinear(4, 2)
    x = torch.randn(3, 4)
    start_recording(layer.weight)
    layer(x).sum().backward()
    assert not layer.weight.grad.any()
    start_recording(layer.weight, keep_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad.any()
    layer.weight.grad = None
    stop_recording(layer.weight)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert record_of(layer.weight) is None


def test_the_record_survives_an_in_place_activation_and_autocast():
    model = nn.Sequential(BinaryLinear(4, 3), nn.Hardtanh(inplace=True), BinaryLinear(3, 2))
    records = [start_recording(weight) for _, weight in binary_parameters(model)]
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(5, 4)).sum().backward()
    for record in records:
        (layer,) = record.layers()
        assert layer.rows.dtype == layer.grad.dtype == torch.float32


def test_a_copied_layer_starts_with_ordinary_gradients():
    layer = BinaryLinear(4, 2)
    start_recording(layer.weight)
    twin = copy.deepcopy(layer)
    twin(torch.randn(3, 4)).sum().backward()
    assert twin.weight.grad is not None


def test_binary_and_real_parameters_part_the_model():
    shared = BinaryLinear(4, 4)
    model = nn.Sequential(BinaryConv2d(1, 2, 3), nn.BatchNorm2d(2), shared, shared, nn.Linear(4, 2))
    assert [name for name, _ in binary_parameters(model)] == ["0.weight", "2.weight"]
    assert [n for n, _ in real_parameters(model)] == ["1.weight", "1.bias", "4.weight", "4.bias"]


def test_wrong_arguments_are_explained():
    with pytest.raises(ValueError, match="groups must divide in_channels and out_channels, got groups=2"):
        BinaryConv2d(3, 4, 3, groups=2)
    with pytest.raises(TypeError, match="scale is fixed and does not train, got a Parameter"):
        BinaryLinear(4, 3, scale=nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError, match=r"a scale per unit has shape \(3,\) and is finite and not negative"):
        BinaryLinear(4, 3, scale=torch.ones(4))
    with pytest.raises(ValueError, match="scale is True, False, a positive number or a tensor, got -1"):
        BinaryLinear(4, 3, scale=-1)


def test_arguments_come_in_the_order_of_torch():
    assert BinaryLinear(4, 3).bias is None
    layer = BinaryLinear(4, 3, True, "meta", torch.float64)
    assert layer.weight.is_meta
    assert layer.weight.dtype == layer.bias.dtype == torch.float64
    conv = BinaryConv2d(4, 8, 3, 2, 1, 1, 2, True, "zeros", "meta", torch.float64)
    assert (conv.stride, conv.padding, conv.groups) == ((2, 2), (1, 1), 2)
    assert conv.bias.is_meta


def test_a_bias_is_a_real_parameter_that_starts_at_zero():
    model = nn.Sequential(BinaryLinear(4, 3, bias=True), BinaryConv2d(1, 2, 3, bias=True))
    assert [name for name, _ in binary_parameters(model)] == ["0.weight", "1.weight"]
    assert [name for name, _ in real_parameters(model)] == ["0.bias", "1.bias"]
    assert not model[0].bias.any()


LOWER = {
    "dtype=": lambda: BinaryLinear(4, 3, bias=True, dtype=torch.bfloat16),
    "bfloat16()": lambda: BinaryLinear(4, 3, bias=True).bfloat16(),
    "to(dtype)": lambda: nn.Sequential(BinaryLinear(4, 3, bias=True)).to(torch.bfloat16)[0],
}


@pytest.mark.parametrize("how", LOWER)
@pytest.mark.parametrize("recording", [False, True])
def test_latent_weights_stay_in_float32_and_the_layer_computes_in_the_dtype_of_its_input(how, recording):
    layer = LOWER[how]()
    assert layer.weight.dtype == torch.float32
    assert layer.bias.dtype == torch.bfloat16
    if recording:
        start_recording(layer.weight)
    x = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32
    layer.half()  # with a gradient
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    layer.double()
    assert layer.weight.dtype == layer.bias.dtype == torch.float64
    assert layer.half().weight.dtype == torch.float64


def test_under_autocast_the_output_has_the_dtype_that_torchs_layer_gives():
    x = torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ours = BinaryLinear(4, 3, bias=True, scale=torch.ones(3))(x)
        theirs = nn.Linear(4, 3)(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16


def test_a_scale_per_unit_is_part_of_the_state():
    layer = BinaryLinear(4, 3, scale=torch.tensor([1.0, 2.0, 3.0]))
    other = BinaryLinear(4, 3, scale=torch.ones(3))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(5, 4)
    assert torch.equal(other(x), layer(x))
    assert "scale" not in BinaryLinear(4, 3).state_dict()


class Shifted(BinaryLinear):
    def inputs(self, x):
        return 2 * x + 1


def test_the_rows_are_made_from_what_inputs_returns():
    layer, x = Shifted(4, 3), torch.randn(5, 4)
    record = start_recording(layer.weight)
    layer(x).sum().backward()
    assert torch.equal(record.layers()[0].rows.dense(), 2 * x + 1)
