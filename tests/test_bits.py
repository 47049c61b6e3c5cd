import itertools

import pytest
import torch
from torch import nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, Bits, binary_parameters
from spingrad.solvers import ExactSolver


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_layer_behind_bits_has_weights_of_as_many_bits(count):
    torch.manual_seed(0)
    bits, layer = Bits(count), BinaryLinear(count * 5, 7)
    x = torch.randn(4, 5)
    values = bits.values(layer.binary_weight)
    assert len(values.unique()) <= 2**count
    assert values.abs().max() <= 2 - 2.0 ** (1 - count)
    expected = x @ values.T * bits.scale / (5 * count) ** 0.5
    torch.testing.assert_close(bits(x) @ layer.binary_weight.T * layer.scale, expected)
    torch.testing.assert_close(layer(bits(x)).detach(), expected)


def test_the_variance_of_the_output_does_not_depend_on_the_bits():
    torch.manual_seed(0)
    x = torch.randn(500, 400)
    spreads = [float(BinaryLinear(k * 400, 50)(Bits(k)(x)).detach().std()) for k in (1, 2, 3)]
    assert spreads == pytest.approx([1, 1, 1], rel=0.1)


@pytest.mark.slow
def test_more_bits_come_nearer_to_a_real_weight():
    losses: dict[int, list[float]] = {1: [], 3: []}
    for seed, count in itertools.product(range(4), losses):
        torch.manual_seed(seed)
        x, teacher = torch.randn(200, 8), torch.empty(8, 1).uniform_(-1, 1)
        model = nn.Sequential(Bits(count), BinaryLinear(count * 8, 1, scale=False))
        optimizer = QPSBGD(binary_parameters(model), lr=3e-3, solver=ExactSolver())
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(x) / model[0].scale - x @ teacher).square().mean()
            loss.backward()
            optimizer.step()
            cosine.step()
        losses[count].append(loss.item())
    assert sum(losses[3]) < 0.75 * sum(losses[1])


def test_no_bits_at_all_is_refused():
    with pytest.raises(ValueError, match=r"count is a whole number from 1 to 24.*got 0"):
        Bits(0)


def test_channels_of_images_have_bits_too():
    torch.manual_seed(0)
    bits, layer = Bits(2, dim=1), BinaryConv2d(2 * 3, 4, 3, scale=False)
    x = torch.randn(2, 3, 8, 8)
    expected = nn.functional.conv2d(x, bits.values(layer.binary_weight)) * bits.scale
    torch.testing.assert_close(layer(bits(x)).detach(), expected)
