"""Convolutions of one, two and three dimensions, and transposed ones, beside torch's own."""

import pytest
import torch
from torch import nn

from spingrad import (
    QPSBGD,
    BinaryConv1d,
    BinaryConv2d,
    BinaryConv3d,
    BinaryConvTranspose2d,
    BinaryLinear,
    Sign,
    binary_parameters,
)
from spingrad.export import pack
from spingrad.nn.conv import exchanged

TORCH = {
    BinaryConv1d: nn.Conv1d,
    BinaryConv2d: nn.Conv2d,
    BinaryConv3d: nn.Conv3d,
    BinaryConvTranspose2d: nn.ConvTranspose2d,
}
SIZES = {BinaryConv1d: (11,), BinaryConv2d: (8, 7), BinaryConv3d: (6, 5, 7), BinaryConvTranspose2d: (4, 5)}
OPTIONS = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2, "bias": True},
    "depthwise": {"groups": 4, "padding": 1},
    "same": {"padding": "same", "kernel_size": 4},
    "same, dilated, odd": {"padding": "same", "dilation": 2},
    "valid": {"padding": "valid"},
    "reflect": {"padding": 2, "padding_mode": "reflect", "stride": 2},
    "replicate": {"padding": 2, "padding_mode": "replicate", "groups": 2},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "same, circular": {"padding": "same", "padding_mode": "circular", "kernel_size": 2},
}
TRANSPOSED = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1, "output_padding": 1},
    "kernel below stride": {"stride": (3, 2), "kernel_size": (2, 1)},
    "groups": {"groups": 2, "stride": 2, "bias": True},
    "dilated": {"dilation": (2, 3), "output_padding": (1, 2)},
    "cut off": {"padding": (3, 4), "stride": 2},
}
CASES = [(kind, options) for kind in list(TORCH)[:3] for options in OPTIONS.values()]
CASES += [(BinaryConvTranspose2d, options) for options in TRANSPOSED.values()]


def made(kind, options):
    """A layer, and torch's with the same weights."""
    torch.manual_seed(0)
    arguments = {"in_channels": 4, "out_channels": 8, "kernel_size": 3, "bias": False} | options
    layer, theirs = kind(**arguments), TORCH[kind](**arguments)
    spins = layer.binary_weight
    theirs.weight.data = exchanged(spins, layer.groups) if kind is BinaryConvTranspose2d else spins
    if layer.bias is not None:
        layer.bias.data = torch.randn(8)
        theirs.bias.data = layer.bias.data.clone()
    theirs.weight.data *= layer.scale
    return layer, theirs


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own layer
@pytest.mark.parametrize("batch", [(3,), ()], ids=["batch", "unbatched"])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_outputs_and_gradients_are_torchs(kind, options, batch):
    layer, theirs = made(kind, options)
    _optimizer = QPSBGD(binary_parameters(layer))
    x = torch.randn(*batch, 4, *SIZES[kind], requires_grad=True)
    out, expected = layer(x), theirs(x)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(out)
    out.backward(grad)
    their_x, their_weight = torch.autograd.grad(expected, (x, theirs.weight), grad)
    if kind is BinaryConvTranspose2d:
        their_weight = exchanged(their_weight, layer.groups)
    torch.testing.assert_close(x.grad, their_x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.weight.grad, layer.scale * their_weight, atol=1e-4, rtol=1e-4)
    assert layer.companion.sketch.isfinite().all()


@pytest.mark.parametrize("kind", list(TORCH))
def test_every_kind_trains_and_accumulates_batches_of_different_sizes(kind):
    torch.manual_seed(0)
    layer = kind(4, 8, 3, stride=2)
    optimizer = QPSBGD(binary_parameters(layer), lr=0.02)
    for step in range(2):
        for more in range(2):
            layer(torch.randn(2, 4, *(size + more for size in SIZES[kind]))).square().sum().backward()
        before = layer.binary_weight
        optimizer.step()
        optimizer.zero_grad()
        assert (layer.binary_weight != before).any() or step


@pytest.mark.parametrize("kind", list(TORCH))
def test_wrong_dimensions_are_explained(kind):
    dims = kind.trailing
    with pytest.raises(ValueError, match=rf"{dims + 2} dimensions \(batch, 4 channels, {dims} more\)"):
        kind(4, 2, 3, padding_mode="zeros")(torch.zeros(4, 5) if dims > 1 else torch.zeros(5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "same", "stride": 2}, r'padding="same" needs stride=1, got stride=\(2, 2\)'),
        ({"padding": "some"}, 'padding is sizes, "same" or "valid", got \'some\''),
        ({"padding": (1, 2, 3)}, r"padding is an int of at least 0 or 2 of them, got \(1, 2, 3\)"),
        ({"stride": 1.5}, "stride is an int of at least 1 or 2 of them, got 1.5"),
        ({"padding_mode": "mirror"}, "padding_mode is one of .*'circular'.*, got 'mirror'"),
        ({"groups": 3}, "groups must divide"),
    ],
)
def test_wrong_arguments_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        BinaryConv2d(4, 4, 3, **options)


def test_export_takes_symmetric_zeros_and_refuses_other_padding_by_name():
    def packed(layer):
        return pack(nn.Sequential(layer, Sign(), nn.Flatten(), BinaryLinear(3 * 36, 2)), (1, 6, 6))

    assert packed(BinaryConv2d(1, 3, 3, padding="same")).stages[0].padding == (1, 1)
    with pytest.raises(ValueError, match="padding='same' with padding_mode='circular' cannot be packed"):
        packed(BinaryConv2d(1, 3, 3, padding="same", padding_mode="circular"))
    with pytest.raises(ValueError, match=r"0, BinaryConvTranspose2d\(1, 3.*cannot be packed"):
        packed(BinaryConvTranspose2d(1, 3, 1))


def test_a_scaled_output_keeps_the_size_of_its_input():
    torch.manual_seed(0)
    for layer, shape in [
        (BinaryConv1d(16, 16, 3), (4, 16, 50)),
        (BinaryConv3d(8, 16, 3), (2, 8, 8, 8, 8)),
        (BinaryConvTranspose2d(16, 16, 4, stride=2, padding=1), (4, 16, 12, 12)),
    ]:
        assert 0.85 < float(layer(torch.randn(shape)).detach().square().mean().sqrt()) < 1.15
