import copy
import pickle

import pytest
import torch
from torch import nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, Gain, binary_parameters


def network():
    return nn.Sequential(
        BinaryConv2d(1, 4, 3), Gain(), nn.Hardtanh(), nn.Flatten(), BinaryLinear(4 * 36, 10), Gain(3)
    )


def rms(x):
    return float(x.detach().square().mean().sqrt())


@pytest.mark.parametrize("strength", [1e-6, 1.0, 1e6])
def test_the_first_batch_sets_the_strength_and_later_ones_do_not(strength):
    torch.manual_seed(0)
    model, x = network(), strength * torch.rand(16, 1, 8, 8)
    assert rms(model(x)) == pytest.approx(3)
    assert rms(model[:2](x)) == pytest.approx(1)
    factors = [float(gain.factor) for gain in (model[1], model[5])]
    model(100 * x)
    assert [float(gain.factor) for gain in (model[1], model[5])] == factors
    assert rms(model[:2](100 * x)) == pytest.approx(100)


def test_a_gain_is_part_of_the_state():
    torch.manual_seed(0)
    model, x = network(), torch.rand(16, 1, 8, 8)
    model(x)
    for other in (network(), copy.deepcopy(network())):
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.eval()(3 * x), model.eval()(3 * x))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied.eval()(x), model.eval()(x))


def test_a_measured_gain_that_loads_an_unmeasured_state_measures_again():
    torch.manual_seed(0)
    model, fresh, x = network(), network().state_dict(), torch.rand(16, 1, 8, 8)
    model(x)
    model.load_state_dict(fresh)
    assert rms(model(5 * x)) == pytest.approx(3)


def test_what_cannot_be_measured_is_said():
    with pytest.raises(ValueError, match="rms is positive, got 0"):
        Gain(0)
    gain = Gain()
    for x in (torch.zeros(3), torch.tensor([1.0, torch.inf])):
        with pytest.raises(ValueError, match=r"root mean square of (nan|inf)"):
            gain(x)
    gain(torch.ones(3))  # nothing has been set by the attempts
    assert float(gain.factor) == 1


def test_an_evaluation_before_training_leaves_nothing_behind():
    torch.manual_seed(0)
    model, x = network(), torch.rand(16, 1, 8, 8)
    assert rms(model.eval()(7 * x)) == pytest.approx(3)
    assert model[1].factor.isnan()
    model.train()(x)
    assert rms(model.eval()(x)) == pytest.approx(3)


def test_background_does_not_count():
    signal = torch.tensor([3.0, -4.0])
    alone, among = Gain(), Gain()
    alone(signal)
    among(torch.cat([signal, torch.zeros(100)]))
    assert float(among.factor) == float(alone.factor) == pytest.approx((2 / 25) ** 0.5)


def test_gradients_pass_and_the_step_learns():
    torch.manual_seed(0)
    model, x, y = network(), torch.rand(64, 1, 8, 8), torch.randint(10, (64,))
    optimizer, losses = QPSBGD(binary_parameters(model), lr=3e-3), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert not list(model[1].parameters())
    assert losses[-1] < 0.8 * min(losses[:3])


def test_a_gain_from_nowhere_is_measured_after_a_reset():
    with torch.device("meta"):
        gain = Gain(2.0)
    gain = gain.to_empty(device="cpu")
    gain.reset_parameters()
    assert rms(gain(torch.rand(8, 3))) == pytest.approx(2)
