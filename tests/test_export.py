import numpy as np
import pytest
import torch
from torch import nn

from spingrad import BinaryConv2d, BinaryLinear, Gain, Sign
from spingrad.export import PackedModel, pack, verify
from spingrad.export.stages import Linear, Rescale, Threshold, bits_of_spins, spins_of_bits

BACKENDS = [pytest.param("numba", marks=pytest.mark.needs("numba")), "numpy"]


def batch_norm(size, kind=nn.BatchNorm1d):
    """Every case of folding: slopes and offsets of both signs, and zero."""
    norm = kind(size)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm.running_mean.normal_(0, 2)
    norm.running_var.uniform_(0.1, 3)
    norm.weight.data[:4] = 0
    norm.bias.data[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
    return norm


def steep_norm(size):
    norm = nn.BatchNorm1d(size)
    nn.init.constant_(norm.weight, 1e12)
    return norm


def mlp():
    return nn.Sequential(BinaryLinear(784, 100), Sign(), BinaryLinear(100, 70), Sign(), BinaryLinear(70, 10))


def mlp_with_norm():
    return nn.Sequential(
        BinaryLinear(784, 100), batch_norm(100), Sign(),
        BinaryLinear(100, 70, scale=False), batch_norm(70), Sign(), nn.Dropout(), BinaryLinear(70, 10),
    )  # fmt: skip


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        BinaryConv2d(1, 8, 3, stride=2, padding=1), Sign(),
        BinaryConv2d(8, 12, 3, padding=(1, 0), groups=2), nn.MaxPool2d(2), Sign(),
        nn.Flatten(), BinaryLinear(12 * 7 * 6, 10),
    )  # fmt: skip


def convolutional_with_norm():
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Sequential(BinaryConv2d(1, 8, 3, padding=(0, 1), dilation=(1, 2)), batch_norm(8, nn.BatchNorm2d)),
        nn.MaxPool2d(2), Sign(), nn.Identity(),
        BinaryConv2d(8, 12, (3, 5), padding=2), nn.MaxPool2d(3, 2), batch_norm(12, nn.BatchNorm2d), Sign(),
        nn.Flatten(), BinaryLinear(12 * 42, 10),
    )  # fmt: skip


def with_biases():
    """Biases before a sign, BatchNorm and pooling; scales per unit; a bias of the last layer."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        BinaryConv2d(1, 8, 3, stride=2, bias=True, scale=torch.rand(8) + 0.01), nn.MaxPool2d(2), Sign(),
        BinaryConv2d(8, 12, 3, bias=True), batch_norm(12, nn.BatchNorm2d), Sign(),
        nn.Flatten(), BinaryLinear(12 * 16, 70, bias=True), Sign(),
        BinaryLinear(70, 10, bias=True, scale=torch.rand(10) + 0.5),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, BinaryConv2d | BinaryLinear):
            nn.init.normal_(layer.bias)
    model[1].bias.data *= 255
    return model


SIGN_NETWORKS = [mlp, mlp_with_norm, convolutional, convolutional_with_norm, with_biases]


def made(network, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return network().eval()


def images(count, seed=0):
    """Bytes with large dark areas, so that some sums are zero, where the sign is a tie."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 256, (count, 784)) * (rng.random((count, 784)) < 0.2)).astype(np.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("network", SIGN_NETWORKS, ids=lambda n: n.__name__)
def test_sums_of_every_layer_are_those_of_torch(network, backend):
    model, x = made(network), images(300)
    packed = pack(model, scale=1.0)
    expected = verify.from_torch(model, torch.from_numpy(x).float())
    found = packed.sums(x, backend=backend)
    assert len(found) == len(packed.products)
    for ours, theirs in zip(found, expected.sums, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(packed.classes(x, backend=backend), expected.classes)


@pytest.mark.parametrize("network", SIGN_NETWORKS, ids=lambda n: n.__name__)
def test_threads_change_nothing(network):
    packed, x = pack(made(network)), images(600)
    np.testing.assert_array_equal(packed.scores(x, threads=3), packed.scores(x, threads=1))


@pytest.mark.parametrize("seed", range(4))
def test_folded_batch_norm_has_torchs_sign_at_every_integer(seed):
    torch.manual_seed(seed)
    layer, norm = BinaryLinear(60, 200), batch_norm(200).eval()
    norm.running_mean[4:100] = torch.randint(-60, 61, (96,)) * float(
        layer.scale
    )  # changes its sign at an integer
    norm.bias.data[4:100] = 0
    packed = pack(nn.Sequential(layer, norm, Sign(), BinaryLinear(200, 2)), kind="spins")
    threshold = packed.stages[1]
    sums = torch.arange(-60, 61)[:, None].expand(-1, 200)
    with torch.no_grad():
        expected = norm(sums.float() * layer.scale) >= 0
    found = sums.numpy() * threshold.directions >= threshold.thresholds
    np.testing.assert_array_equal(found, expected.numpy())


def test_a_shift_of_the_pixels_is_folded_into_thresholds():
    model, x = made(mlp), images(200)
    packed = pack(model, scale=1 / 64, shift=-0.5)  # exact in binary, so that torch does not round
    expected = verify.from_torch(model, torch.from_numpy(x).float() / 64 - 0.5)
    for ours, theirs in zip(packed.sums(x)[1:], expected.sums[1:], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(packed.classes(x), expected.classes)


def test_zeros_around_shifted_pixels_are_zeros_and_not_the_shift():
    torch.manual_seed(0)
    layers = BinaryConv2d(1, 8, 3, padding=1), Sign(), nn.Flatten(), BinaryLinear(288, 10)
    model = nn.Sequential(*layers)
    x = torch.randint(256, (200, 1, 6, 6), generator=torch.Generator().manual_seed(0))
    packed = pack(model, (1, 6, 6), scale=1 / 64, shift=-0.5)
    with torch.no_grad():
        expected = model(x / 64 - 0.5).argmax(1)
    np.testing.assert_array_equal(packed.classes(x.numpy().astype(np.uint8)), expected.numpy())


def test_sums_that_float32_could_not_hold_are_made_smaller():
    model = nn.Sequential(BinaryLinear(70_000, 2))
    nn.init.ones_(model[0].weight)
    packed = pack(model)
    sums = packed.sums(np.full((1, 70_000), 255, np.uint8))[-1]  # 255 · 70,000 is more than 2²⁴
    assert 2**22 < np.abs(sums).max() < 2**24


def test_hardtanh_of_a_square_fan_in_is_exact():
    model = made(lambda: nn.Sequential(BinaryLinear(16, 4), nn.Hardtanh(), BinaryLinear(4, 2)))
    inputs = ((np.arange(2**16)[:, None] >> np.arange(16)) & 1) * 2 - 1  # all possible inputs
    packed = pack(model, kind="spins")
    rescale = packed.stages[1]
    assert (rescale.high, rescale.shift) == (4, 0)
    with torch.no_grad():
        scores = model(torch.from_numpy(inputs).float()).numpy()
    np.testing.assert_array_equal(packed.scores(inputs) / 8, scores)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_norm", [False, True])
def test_hardtanh_scores_are_torchs_to_four_digits(with_norm, backend):
    def network():
        norm = [batch_norm(50)] if with_norm else []
        last = [batch_norm(10)] if with_norm else []
        return nn.Sequential(
            BinaryLinear(784, 50), *norm, nn.Hardtanh(), BinaryLinear(50, 50), nn.Hardtanh(),
            BinaryLinear(50, 10), *last,
        )  # fmt: skip

    model, x = made(network), images(200)
    with torch.no_grad():
        expected = model(torch.from_numpy(x).float() / 255).numpy()
    found = pack(model).scores(x, backend=backend)
    unit = (found * expected).sum() / (expected * expected).sum()
    np.testing.assert_allclose(found / unit, expected, atol=3e-4)


def test_an_average_is_a_sum_of_smaller_numbers():
    model = made(
        lambda: nn.Sequential(
            BinaryConv2d(1, 8, 3, scale=False),
            nn.AvgPool2d(2),
            Sign(),
            nn.AvgPool2d((1, 2)),
            nn.Flatten(),
            BinaryLinear(8 * 13 * 6, 10),
        )
    )
    x = images(100).reshape(-1, 1, 28, 28)
    with torch.no_grad():
        scores = model(torch.from_numpy(x).float()).numpy()
    packed = pack(model, (1, 28, 28), scale=1.0)
    unit = 2 * (8 * 13 * 6) ** 0.5
    np.testing.assert_allclose(packed.scores(x), scores * unit, atol=1e-2)
    np.testing.assert_array_equal(packed.classes(x), scores.argmax(1))


def test_the_first_of_equal_scores_wins():
    bits = bits_of_spins(np.array([[-1, 1], [1, -1], [1, -1]]))
    packed = PackedModel("pixels", (2,), (Linear(bits, 2),))
    assert packed.classes(np.array([[3, 3], [4, 1]], np.uint8)).tolist() == [0, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fan_in", [1, 7, 8, 63, 64, 65, 1023, 1025, 3000])
@pytest.mark.parametrize("kind", ["spins", "pixels"])
def test_any_fan_in_adds_up(kind, fan_in, backend):
    rng = np.random.default_rng(fan_in)
    spins = rng.choice([-1, 1], (70, fan_in))
    x = rng.choice([-1, 1], (67, fan_in)) if kind == "spins" else rng.integers(0, 256, (67, fan_in), np.uint8)
    packed = PackedModel(kind, (fan_in,), (Linear(bits_of_spins(spins), fan_in),))
    np.testing.assert_array_equal(packed.scores(x, backend=backend), x.astype(np.int64) @ spins.T)
    np.testing.assert_array_equal(packed.scores(x * 0 + 1, backend=backend)[0], spins.sum(1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", [Sign, nn.Hardtanh])
def test_gains_are_folded(activation, backend):
    def network():
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)), BinaryConv2d(1, 8, 3, stride=2), Gain(), activation(), nn.Flatten(),
            BinaryLinear(8 * 169, 10), Gain(3),
        )  # fmt: skip

    model, x = made(network), images(200)
    pixels = torch.from_numpy(x).float()
    model.train()(pixels)
    expected = model.eval()(pixels).detach().numpy()
    found = pack(model, scale=1.0).scores(x, backend=backend)
    if activation is Sign:
        np.testing.assert_array_equal(found, verify.from_torch(model, pixels).sums[-1])
    unit = (found * expected).sum() / (expected * expected).sum()
    np.testing.assert_allclose(found / unit, expected, atol=3e-3)


def test_bits_and_spins_are_inverse():
    spins = np.random.default_rng(0).choice([-1, 1], (5, 19))
    np.testing.assert_array_equal(spins_of_bits(bits_of_spins(spins), 19), spins)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: nn.Sequential(BinaryConv2d(4, 2, 1)), "shape of one example"),
        (
            lambda: nn.Sequential(BinaryLinear(4, 4), nn.GELU(), BinaryLinear(4, 2)),
            "1, GELU.*cannot be packed",
        ),
        (
            lambda: nn.Sequential(BinaryLinear(4, 4), nn.Sequential(nn.Softmax(1)), BinaryLinear(4, 2)),
            r"1\.0, Softmax",
        ),
        (lambda: nn.Sequential(BinaryLinear(4, 4), nn.Hardtanh(1, 6), BinaryLinear(4, 2)), "that hold zero"),
        (lambda: nn.Sequential(BinaryLinear(4, 4), Sign(), BinaryLinear(5, 2)), "of 5 inputs"),
        (
            lambda: nn.Sequential(BinaryLinear(4, 4), nn.BatchNorm1d(3), Sign(), BinaryLinear(4, 2)),
            "3 features",
        ),
        (
            lambda: nn.Sequential(
                BinaryLinear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), Sign(), BinaryLinear(4, 2)
            ),
            "running mean",
        ),
        (
            lambda: nn.Sequential(BinaryLinear(4, 4), steep_norm(4), nn.Hardtanh(), BinaryLinear(4, 2)),
            "steep",
        ),
        (lambda: nn.Sequential(BinaryLinear(4, 4), Gain(), Sign(), BinaryLinear(4, 2)), "a factor of nan"),
        (lambda: nn.Sequential(Gain(), BinaryLinear(4, 2)), "shape of one example"),
    ],
)
def test_what_cannot_be_packed_is_named(network, message):
    with pytest.raises(ValueError, match=message):
        pack(made(network))


def test_wrong_examples_are_refused():
    packed = pack(made(mlp))
    with pytest.raises(ValueError, match="takes uint8, got float32"):
        packed.scores(np.zeros((1, 784), np.float32))
    with pytest.raises(ValueError, match="shape"):
        packed.scores(np.zeros((1, 783), np.uint8))
    with pytest.raises(ValueError, match="-1 or"):
        pack(made(mlp), kind="spins").scores(np.zeros((1, 784), np.int8))


def test_the_packed_model_is_left_alone_by_further_training():
    model = made(mlp)
    packed, x = pack(model), images(10)
    before = packed.scores(x)
    with torch.no_grad():
        model[0].weight.neg_()
    np.testing.assert_array_equal(packed.scores(x), before)


def test_stages_of_a_sign_network_without_batch_norm_hold_nothing_but_bits():
    packed = pack(made(mlp))
    assert [type(stage) for stage in packed.stages] == [Linear, Threshold, Linear, Threshold, Linear]
    assert all(s.thresholds is None for s in packed.stages if isinstance(s, Threshold))
    assert not any(isinstance(stage, Rescale) for stage in packed.stages)


def test_biases_and_scales_per_unit_before_a_hardtanh_are_those_of_torch():
    torch.manual_seed(0)
    model = nn.Sequential(
        BinaryLinear(784, 40, bias=True, scale=torch.rand(40) / 10), Gain(), nn.Hardtanh(),
        BinaryLinear(40, 10, bias=True), Gain(3),
    )  # fmt: skip
    nn.init.normal_(model[0].bias)
    nn.init.normal_(model[3].bias)
    x = images(300)
    with torch.no_grad():
        expected = model(torch.from_numpy(x) / 255).numpy()
    found = pack(model).scores(x).astype(float)
    found *= np.abs(expected).max() / np.abs(found).max()  # scores are integers in a unit of their own
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())


def test_a_hidden_layer_may_have_one_unit():
    packed = pack(made(lambda: nn.Sequential(BinaryLinear(9, 1), nn.Hardtanh(), BinaryLinear(1, 2))))
    assert packed.scores(np.full((1, 9), 255, np.uint8)).shape == (1, 2)


def test_a_unit_whose_scale_is_zero_is_refused():
    model = nn.Sequential(BinaryLinear(4, 2, scale=torch.tensor([1.0, 0.0])), Sign(), BinaryLinear(2, 2))
    with pytest.raises(ValueError, match="a scale per unit must be positive"):
        pack(model)
