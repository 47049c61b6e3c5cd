"""Networks with branches, additions, whole-number layers and signals, packed and compared with torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_export import BACKENDS, batch_norm, images, made
from torch import nn
from torch.nn.utils import prune

from spingrad import BinaryConv1d, BinaryConv2d, BinaryLinear, Bits, Sign, binary_parameters, sign
from spingrad.baselines import ProxQuant
from spingrad.export import PackedModel, pack, verify
from spingrad.export.stages import Add, Concat


class Residual(nn.Module):
    """Every sum of branches goes through a sign; fan-ins are squares, so that all sums are whole units."""

    def __init__(self):
        super().__init__()
        self.stem = BinaryConv2d(1, 16, 4, stride=2)
        self.first, self.second = BinaryConv2d(16, 16, 3, padding=1), BinaryConv2d(16, 16, 3, padding=1)
        self.wide = BinaryConv2d(16, 36, 3, padding=1, groups=4)
        self.head = BinaryLinear(36 * 36, 10)

    def forward(self, x):
        x = sign(self.stem(x))
        x = sign(self.second(sign(self.first(x))) + x)
        x = sign(self.wide(F.max_pool2d(x, 2)))
        return self.head(x.flatten(1))


class Normed(nn.Module):
    """BatchNorm before the addition: a stream of real numbers, signs of it, a mean, and whole-number ends."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, stride=2, padding=1), batch_norm(8, nn.BatchNorm2d)
        self.convs = nn.ModuleList(BinaryConv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(batch_norm(8, nn.BatchNorm2d) for _ in range(2))
        self.last = batch_norm(8, nn.BatchNorm2d)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.norm(self.stem(x))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + norm(conv(sign(x)))
        return self.head(F.relu(self.last(x)).mean((2, 3)))


class Joined(nn.Module):
    """Two branches of different layers, joined; channels of zeros beside an average."""

    def __init__(self):
        super().__init__()
        self.left, self.right = BinaryConv2d(1, 8, 3, padding=1), BinaryConv2d(1, 8, 5, padding=2)
        self.both = BinaryConv2d(16, 24, 3, stride=2, padding=1)
        self.head = BinaryLinear(24 * 49, 10)

    def forward(self, x):
        joined = torch.cat([sign(self.left(x)), sign(self.right(x))], dim=1)
        shortcut = F.pad(F.avg_pool2d(joined, 4), (0, 0, 0, 0, 0, 8))
        return self.head(sign(F.max_pool2d(self.both(joined), 2) + shortcut).view(x.shape[0], -1))


class Separable(nn.Module):
    """A depthwise layer directly followed by one of 1 x 1, with a bias."""

    def __init__(self):
        super().__init__()
        self.stem = BinaryConv2d(1, 16, 3, stride=2, padding=1, bias=True)
        self.depth, self.point = BinaryConv2d(16, 16, 3, padding=1, groups=16), BinaryConv2d(16, 25, 1)
        self.norm, self.head = batch_norm(25, nn.BatchNorm2d), BinaryLinear(25, 10, bias=True)
        nn.init.normal_(self.stem.bias)
        nn.init.normal_(self.head.bias)

    def forward(self, x):
        x = sign(self.norm(self.point(self.depth(sign(self.stem(x))))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def signal():
    return nn.Sequential(
        BinaryConv1d(1, 16, 9, stride=2, padding=4), nn.BatchNorm1d(16), nn.MaxPool1d(2), Sign(),
        BinaryConv1d(16, 32, 4, dilation=2), nn.AvgPool1d(4), Sign(), nn.Flatten(), BinaryLinear(32 * 47, 10),
    )  # fmt: skip


EXACT = {
    "residual": (Residual, (1, 28, 28)),
    "joined": (Joined, (1, 28, 28)),
    "separable": (Separable, (1, 28, 28)),
    "signal": (signal, (1, 784)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EXACT)
def test_sums_of_every_layer_are_those_of_torch(name, backend):
    network, shape = EXACT[name]
    model, x = made(network), images(100).reshape(-1, *shape)
    packed = pack(model, shape, scale=1.0)
    expected = verify.from_torch(model, torch.from_numpy(x).float())
    for ours, theirs in zip(packed.sums(x, backend=backend), expected.sums, strict=True):
        unit = theirs.std() / ours.std()  # one, unless a layer reads numbers that are not whole
        exact = theirs if (theirs == theirs.round()).all() else (theirs / unit).round()
        np.testing.assert_array_equal(ours.reshape(theirs.shape), exact)
    np.testing.assert_array_equal(packed.classes(x, backend=backend), expected.classes)


def real_ends():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2), BinaryConv2d(8, 8, 3), nn.Hardtanh(),
        Bits(2, dim=1), BinaryConv2d(16, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("network", [Normed, real_ends], ids=lambda n: n.__name__)
def test_real_ends_are_close_to_torch(network, backend):
    model, x = made(network), images(200).reshape(-1, 1, 28, 28)
    scale, shift = 1 / 64, -0.3  # zeros around the image are zeros after this, not before
    packed = pack(model, (1, 28, 28), scale=scale, shift=shift, calibration=x[:100])
    with torch.no_grad():
        expected = verify.with_int8(model)(torch.from_numpy(x) * scale + shift).numpy()
    found = packed.scores(x, backend=backend) * packed.unit
    assert np.abs(found - expected).max() < 0.02 * expected.std()
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.99


def test_channels_have_scales_and_shifts_of_their_own():
    model = made(
        lambda: nn.Sequential(BinaryConv2d(3, 8, 3, padding=1), nn.Flatten(), BinaryLinear(8 * 64, 4))
    )
    x = np.random.default_rng(0).integers(0, 256, (50, 3, 8, 8), np.uint8)
    scale, shift = np.array([1 / 64, 1 / 50, 1 / 40]), np.array([-2, -1.5, 0.5])
    packed = pack(model, (3, 8, 8), scale=scale, shift=shift)
    numbers = torch.from_numpy(x * scale[:, None, None] + shift[:, None, None]).float()
    expected = model(numbers).detach().numpy()
    np.testing.assert_allclose(packed.scores(x) * packed.unit, expected, atol=0.02)


def test_signed_bytes_are_read():
    model = made(lambda: nn.Sequential(BinaryLinear(64, 30), Sign(), BinaryLinear(30, 4)))
    x = np.random.default_rng(0).integers(-128, 128, (50, 64)).astype(np.int8)
    packed = pack(model, kind="int8", scale=1.0)
    expected = verify.from_torch(model, torch.from_numpy(x).float())
    for ours, theirs in zip(packed.sums(x), expected.sums, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="takes int8, got uint8"):
        packed.classes(x.view(np.uint8))


def test_additions_in_one_unit_are_exact_and_stay_small():
    packed = pack(made(Residual), (1, 28, 28))
    (add,) = [stage for stage in packed.stages if isinstance(stage, Add)]
    assert add.multipliers == (1, 12)  # the sums of a fan-in of 144, in twelfths, and a spin
    assert not any(isinstance(stage, Concat) for stage in packed.stages)


@pytest.mark.needs("safetensors")
@pytest.mark.parametrize("network", [Residual, Normed, Joined], ids=lambda n: n.__name__)
def test_a_saved_graph_is_loaded_as_it_was(network, tmp_path):
    packed, x = pack(made(network), (1, 28, 28)), images(20).reshape(-1, 1, 28, 28)
    packed.save(tmp_path / "net.safetensors")
    loaded = PackedModel.load(tmp_path / "net.safetensors")
    assert (loaded.reads, loaded.unit) == (packed.reads, packed.unit)
    np.testing.assert_array_equal(loaded.scores(x), packed.scores(x))


@pytest.mark.needs("onnxruntime")
@pytest.mark.parametrize(
    "network", [Residual, Normed, Joined, Separable, real_ends], ids=lambda n: n.__name__
)
def test_onnx_computes_the_same_integers(network):
    packed, x = pack(made(network), (1, 28, 28)), images(20).reshape(-1, 1, 28, 28)
    ours = verify.from_onnx(packed, x)
    for mine, other in zip(ours.sums, packed.sums(x), strict=True):
        np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(ours.classes, packed.classes(x))


class Softmax(nn.Module):
    def forward(self, x):
        return torch.softmax(x, 1)


class Decides(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Softmax(), "softmax in 1: cannot be packed. Supported are BinaryLinear"),
        (Decides(), "Sequential: its forward cannot be read as a graph .* must not depend on their values"),
        (nn.Sequential(nn.Identity(), nn.LayerNorm(8)), r"1\.1, LayerNorm.*cannot be packed"),
    ],
)
def test_what_cannot_be_packed_is_named_by_its_path(part, message):
    with pytest.raises(ValueError, match=message):
        pack(nn.Sequential(BinaryLinear(4, 8), part, BinaryLinear(8, 2)))


def test_a_layer_whose_name_would_be_code_is_refused_and_not_run(tmp_path):
    for name in ('a"; b', 'a"); open("x', "a\\", "a\nb"):
        network = nn.Sequential(BinaryLinear(4, 2))
        network.add_module(name, nn.Flatten())
        with pytest.raises(
            ValueError, match="names of layers must not have quotes, backslashes or line ends"
        ):
            pack(network)
    network = nn.Sequential(BinaryLinear(4, 2))
    network.add_module("it's ä µ", nn.Flatten())
    pack(network)


def small():
    return nn.Sequential(BinaryLinear(12, 24), Sign(), BinaryLinear(24, 4))


def negative(*args):
    return -args[-1]


class Negative(BinaryLinear):
    def forward(self, x):
        return -super().forward(x)


class Flipped(BinaryLinear):
    def inputs(self, x):
        return x.flip(-1)


class Doubled(BinaryLinear):
    def product(self, x, weight):
        return 2 * super().product(x, weight)


class Other(Sign):
    def forward(self, x):
        return -super().forward(x)


def hooked(place, before=False):
    model = small()
    module = model.get_submodule(place)
    (module.register_forward_pre_hook if before else module.register_forward_hook)(negative)
    return model


def hooked_around():
    model = nn.DataParallel(small())
    model.register_forward_hook(negative)
    return model


def with_forward(place):
    model = small()
    model.get_submodule(place).forward = negative
    return model


def relaxed():
    model = small()
    ProxQuant(binary_parameters(model), lr=0.1)
    return model


def pruned():
    model = nn.Sequential(nn.Linear(12, 24), Sign(), BinaryLinear(24, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: hooked("0"), r"0 \(BinaryLinear\) has hooks"),
        (lambda: hooked("1", before=True), r"1 \(Sign\) has hooks"),
        (lambda: hooked(""), r"the network \(Sequential\) has hooks"),
        (hooked_around, "DataParallel has hooks"),
        (lambda: with_forward("2"), r"2 \(BinaryLinear\) changes forward of BinaryLinear"),
        (lambda: with_forward(""), r"the network \(Sequential\) changes forward"),
        (lambda: nn.Sequential(Negative(12, 4)), r"0 \(Negative\) changes forward of BinaryLinear"),
        (lambda: nn.Sequential(Flipped(12, 4)), r"0 \(Flipped\) changes inputs"),
        (lambda: nn.Sequential(Doubled(12, 4)), r"0 \(Doubled\) changes product"),
        (lambda: nn.Sequential(small(), Other()), r"1 \(Other\) changes forward of Sign"),
        (relaxed, r"0 \(BinaryLinear\): its weights are still real numbers.*project\(\)"),
        (pruned, r'0 \(Linear\): its weight is computed .* prune\.remove\(module, "weight"\)'),
    ],
)
def test_what_the_graph_would_leave_out_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        pack(model())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = BinaryLinear(12, 24)

    def forward(self, x):
        return self.layer(x)


def test_a_hook_of_a_users_module_is_part_of_the_graph():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(Block(), BinaryLinear(24, 4)),
        np.random.default_rng(0).integers(0, 256, (50, 12)),
    )
    model[0].register_forward_hook(lambda *args: sign(args[-1]))
    expected = model(torch.from_numpy(x).float()).argmax(1).numpy()
    np.testing.assert_array_equal(pack(model, (12,), scale=1.0).classes(x.astype(np.uint8)), expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_hook_of_torch_that_computes_the_weight_is_packed():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(12, 24)), Sign(), BinaryLinear(24, 4))
    with torch.no_grad():
        model(torch.zeros(1, 12))  # leaves a weight that can be copied
    assert pack(model, (12,)).num_weights == 12 * 24 + 24 * 4


def test_a_projected_network_is_packed():
    model = small()
    optimizer = ProxQuant(binary_parameters(model), lr=0.1)
    optimizer.project()
    assert pack(model).num_weights == 12 * 24 + 24 * 4


class InPlace(nn.Module):
    """Reads tensors again which an operation has changed in place."""

    def __init__(self, way):
        super().__init__()
        self.way, self.act = way, nn.Hardtanh(inplace=True)
        self.stem, self.body, self.head = BinaryLinear(16, 64), BinaryLinear(64, 64), BinaryLinear(64, 10)

    def forward(self, x):
        h = self.stem(x)
        if self.way == "module":
            return self.head(sign(self.body(self.act(h)) + h))
        if self.way == "function":
            F.relu(h, inplace=True)
        elif self.way == "method":
            h.add_(self.body(sign(h)))
        elif self.way == "operator":
            same = h
            h += self.body(sign(h))
            h = same
        else:
            flat = h.flatten(1)
            F.relu(h, inplace=True)
            h = flat
        return self.head(h)


@pytest.mark.parametrize("way", ["module", "function", "method", "operator"])
def test_who_reads_a_tensor_after_an_in_place_operation_gets_the_result(way):
    torch.manual_seed(0)
    model, x = InPlace(way), torch.randint(256, (200, 16), dtype=torch.uint8)
    classes = model(x.float() / 128).argmax(1)
    examples = x.numpy()
    packed = pack(model, scale=1 / 128, calibration=examples)
    assert (packed.classes(examples) == classes.numpy()).mean() > 0.99  # other activations are rounded


def test_an_in_place_operation_on_a_tensor_with_a_view_is_refused():
    with pytest.raises(ValueError, match="in place that flatten in the network has in another shape"):
        pack(InPlace("view"))


def test_a_network_is_packed_without_what_is_around_it():
    model = nn.Sequential(BinaryLinear(16, 64), Sign(), BinaryLinear(64, 10))
    x = np.zeros((2, 16), np.uint8)
    compiled = torch.compile(model, backend="eager")
    for wrapped in (torch.optim.swa_utils.AveragedModel(model), nn.DataParallel(model), compiled):
        assert (pack(wrapped).classes(x) == pack(model).classes(x)).all()
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got OrderedDict"):
        pack(model.state_dict())


def test_packing_leaves_the_network_as_it_was():
    model = made(Normed).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pack(model, (1, 28, 28), calibration=images(8))
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_scaled_calibration_batch_is_refused():
    with pytest.raises(ValueError, match=r"whole numbers from 0 to 255.* pass them unscaled"):
        pack(made(Normed), (1, 28, 28), calibration=images(8) / 255)
