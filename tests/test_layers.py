import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, Sign, binary_parameters, real_parameters, sign


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


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_weight_gradient_is_torchs_own_with_and_without_an_optimizer(name, trains):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    _optimizer = QPSBGD(binary_parameters(layer)) if trains else None
    weight, expected = reference(layer, x)
    for out in (layer(x), layer.eval()(x)):
        grad = torch.randn_like(out)
        out.backward(grad)
        expected.backward(grad, retain_graph=True)
    torch.testing.assert_close(layer.weight.grad, weight.grad)
    assert (layer.companion.sketch is not None) == trains


def test_only_layers_whose_weights_an_optimizer_holds_leave_a_sketch():
    model = nn.Sequential(BinaryLinear(4, 3), BinaryLinear(3, 2))
    (_, second) = binary_parameters(model)
    _optimizer = QPSBGD([second])
    model(torch.randn(5, 4)).sum().backward()
    assert model[0].companion.sketch is None
    assert model[1].companion.sketch is not None


def test_the_sketch_survives_an_in_place_activation_and_autocast():
    model = nn.Sequential(BinaryLinear(4, 3), nn.Hardtanh(inplace=True), BinaryLinear(3, 2))
    _optimizer = QPSBGD(binary_parameters(model))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(5, 4)).sum().backward()
    for _, weight in binary_parameters(model):
        assert weight.grad.dtype == weight.companion.sketch.dtype == torch.float32
        assert weight.companion.sketch[0, -1, 0] == 5


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
@pytest.mark.parametrize("trains", [False, True])
def test_latent_weights_stay_in_float32_and_the_layer_computes_in_the_dtype_of_its_input(how, trains):
    layer = LOWER[how]()
    assert layer.weight.dtype == torch.float32
    assert layer.bias.dtype == torch.bfloat16
    _optimizer = QPSBGD(binary_parameters(layer)) if trains else None
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
    _optimizer = QPSBGD(binary_parameters(layer), rank=None)
    layer(x).sum().backward()
    rows = (2 * x + 1).double()
    torch.testing.assert_close(layer.companion.sketch[0, :4], rows.T @ rows, rtol=1e-5, atol=1e-5)
