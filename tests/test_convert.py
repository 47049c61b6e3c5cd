"""Any torch model with binary layers in the place of its own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from spingrad import (
    QPSBGD,
    BinaryConv1d,
    BinaryConv2d,
    BinaryConv3d,
    BinaryConvTranspose2d,
    BinaryLayer,
    BinaryLinear,
    binary_parameters,
    convert,
    real_parameters,
    sign,
)
from spingrad.nn import BinaryMultiheadAttention


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3))


def kinds(model):
    return [type(module).__name__ for module in model.modules() if not list(module.children())]


LAYERS = {
    "linear": (nn.Linear(6, 4), BinaryLinear, (5, 6)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding="same", groups=2), BinaryConv1d, (5, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3, 2, 1, padding_mode="reflect", bias=False), BinaryConv2d, (5, 4, 9, 8)),
    "conv3d": (nn.Conv3d(2, 4, 3, dilation=2), BinaryConv3d, (2, 2, 7, 6, 5)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), BinaryConvTranspose2d, (2, 4, 5, 5)),
    "attention": (nn.MultiheadAttention(8, 2), BinaryMultiheadAttention, (5, 3, 8)),
}


@pytest.mark.parametrize("scale", ["fan_in", "mean", 0.3])
@pytest.mark.parametrize("name", LAYERS)
def test_a_converted_layer_computes_as_torchs_with_the_signs_of_its_weights(name, scale):
    theirs, kind, shape = LAYERS[name]
    theirs = copy.deepcopy(theirs)
    weight = next(theirs.parameters())
    weight.data.flatten()[:2] = torch.tensor([0.0, -1e-44])  # zero counts as +1, tiny numbers keep their sign
    ours = convert(copy.deepcopy(theirs), scale=scale)
    assert type(ours) is kind
    for own in theirs.modules():
        for label, real in own.named_parameters(recurse=False):
            if label.endswith("weight"):
                real.data = signed(own, label, real, scale)
    inputs = [torch.randn(shape)] * (3 if name == "attention" else 1)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs), atol=1e-5, rtol=1e-5)


def signed(module, label, weight, scale):
    """The signs of a weight times what a binary layer would multiply its output by."""
    packed = label == "in_proj_weight"
    transposed = isinstance(module, nn.ConvTranspose2d)
    fan_in = weight[0].numel()
    mean = weight.abs().flatten(1).mean(1)
    if transposed:
        fan_in = module.in_channels // module.groups * 9 / 4
        mean = weight.view(2, 2, 3, 3, 3).abs().mean((1, 3, 4)).flatten()  # groups, in, out, height, width
    factor = {"fan_in": fan_in**-0.5, "mean": mean}.get(scale, scale)
    if isinstance(factor, torch.Tensor):
        factor = factor.view(-1, *[1] * (weight.ndim - 1))
        if transposed:
            factor = mean.view(2, 1, 3, 1, 1).expand(2, 2, 3, 1, 1).flatten(0, 1)
    assert not packed or weight.shape[0] == 3 * module.embed_dim
    return sign(weight.data) * factor


def test_latent_weights_keep_signs_and_order_within_those_of_a_new_layer():
    model = nn.Sequential(nn.Linear(20, 30))
    trained = model[0].weight.detach().clone()
    (_, latent), *_ = binary_parameters(convert(model))
    assert torch.equal(sign(latent.detach()), sign(trained))
    assert latent.detach().abs().max().item() == pytest.approx(0.01)
    order = trained.abs().flatten().argsort()
    assert (latent.detach().abs().flatten()[order].diff() >= 0).all()


def test_biases_modes_and_flags_are_kept_and_the_model_is_changed_in_place():
    model = mlp().eval()
    biases = [model[0].bias, model[4].bias]
    model[2].weight.requires_grad_(False)
    assert convert(model) is model
    assert [model[0].bias, model[4].bias] == biases
    assert [name for name, _ in real_parameters(model)] == ["0.bias", "4.bias"]
    assert not model[2].training
    assert not model[2].weight.requires_grad


@pytest.mark.parametrize(
    ("keep", "real"),
    [
        ("first", [0]),
        ("last", [4]),
        (("first", "last"), [0, 4]),
        ("2", [2]),
        (("0", "last"), [0, 4]),
    ],
)
def test_what_is_named_stays_real(keep, real):
    model = convert(mlp(), keep=keep)
    assert [i for i in (0, 2, 4) if type(model[i]) is nn.Linear] == real


def test_types_and_containers_stay_real_with_all_they_contain():
    class Head(nn.Sequential):
        pass

    def model():
        return nn.ModuleDict(
            {"body": nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 4)), "head": Head(nn.Linear(4, 2))}
        )

    assert kinds(convert(model(), keep=Head)) == ["BinaryConv2d", "BinaryLinear", "Linear"]
    assert kinds(convert(model(), keep=(nn.Conv2d, "head"))) == ["Conv2d", "BinaryLinear", "Linear"]
    assert kinds(convert(model(), keep="body")) == ["Conv2d", "Linear", "BinaryLinear"]


def test_shared_modules_and_shared_weights_stay_shared():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, shared, nn.Linear(4, 4), nn.Sequential(shared))
    model[2].weight = shared.weight
    convert(model)
    assert model[0] is model[1] is model[3][0]
    assert model[2].weight is model[0].weight
    assert [name for name, _ in binary_parameters(model)] == ["0.weight"]


def test_random_numbers_are_left_alone():
    model = mlp()
    state = torch.get_rng_state()
    convert(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_bfloat16_model_keeps_latent_weights_in_float32():
    model = convert(mlp().bfloat16(), scale="mean")
    assert {weight.dtype for _, weight in binary_parameters(model)} == {torch.float32}
    assert model(torch.randn(2, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


def hooked():
    model = mlp()
    model[2].register_forward_hook(lambda *_: None)
    return model


def tied():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    return model


class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Masked(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mask", torch.ones(sizes[1]))


def replaced():
    model = mlp()
    model[0].forward = lambda x: x
    return model


def weight_hooked():
    model = mlp()
    model[0].weight.register_hook(lambda grad: 2 * grad)
    return model


def state_hooked():
    model = mlp()
    model[0].register_load_state_dict_pre_hook(lambda *_: None)
    return model


def broken():
    model = mlp()
    model[0].weight.data[0, 0] = float("nan")
    return model


def tied_attention():
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    model[1].weight = model[0].out_proj.weight
    return model


REFUSED = {
    "tied attention": (tied_attention, r"'0.out_proj' shares its weight with '1' \(Linear\)"),
    "hooks": (hooked, r"2 \(Linear\) has hooks"),
    "tied": (tied, r"'2' shares its weight with '0' \(Embedding\).*keep='2'"),
    "weight_norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))),
        r"0 \(ParametrizedLinear\) has a parametrization",
    ),
    "its own forward": (lambda: nn.Sequential(Odd(4, 3)), r"0 \(Odd\) is a Linear with a forward of its own"),
    "a forward of this layer": (replaced, r"0 \(Linear\) is a Linear with a forward of its own"),
    "its own tensors": (
        lambda: nn.Sequential(Masked(4, 3)),
        r"0 \(Masked\) .* tensors of its own, \['mask'\]",
    ),
    "weight hooks": (weight_hooked, r"0 \(Linear\) has hooks on weight"),
    "state hooks": (state_hooked, r"0 \(Linear\) has hooks on its state_dict"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"0 \(LazyLinear\) has no weights yet"),
    "meta": (lambda: nn.Sequential(nn.Linear(3, 3, device="meta")), "meta device"),
    "nan": (broken, r"0 \(Linear\) has weights that are not finite"),
    "nothing": (lambda: nn.Sequential(nn.Tanh()), "nothing to convert"),
    "bias_kv": (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), "the model .* has add_bias_kv=True"),
    "zero_attn": (lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True), "add_zero_attn=True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_by_name_and_nothing_is_changed(case):
    make, message = REFUSED[case]
    model = make()
    with pytest.raises(ValueError, match=message):
        convert(model)
    assert not any(isinstance(module, BinaryLayer) for module in model.modules())


def test_what_torch_leaves_on_a_layer_is_no_reason_to_refuse_it():
    layer = parametrizations.weight_norm(nn.Linear(4, 3))
    parametrize.remove_parametrizations(layer, "weight")
    layer.bias.register_hook(lambda grad: 2 * grad)  # the bias itself is kept
    assert layer._load_state_dict_pre_hooks
    assert isinstance(convert(layer), BinaryLinear)


def test_wrong_arguments_are_explained():
    with pytest.raises(
        ValueError, match=r"keep: 'head' has no layer to keep; the layers are \['0', '2', '4'\]"
    ):
        convert(mlp(), keep="head")
    with pytest.raises(ValueError, match='"fan_in", "mean" or a positive number, got \'max\''):
        convert(mlp(), scale="max")
    with pytest.raises(ValueError, match="nothing to convert"):
        convert(mlp(), keep=nn.Linear)
    assert kinds(convert(tied(), keep="last")) == ["Embedding", "BinaryLinear", "Linear"]


def masks(batch, length, heads):
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, -2:] = True
    return {
        "none": {},
        "causal": {"attn_mask": causal, "is_causal": True},
        "float": {"attn_mask": torch.randn(length, length)},
        "per head": {"attn_mask": torch.randn(batch * heads, length, length)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
    }


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", masks(2, 5, 2))
def test_attention_is_torchs_with_the_same_weights(mask, batch_first):
    own = masks(2, 5, 2)[mask]
    if "key_padding_mask" in own and own.get("attn_mask") is not None:
        own = {name: torch.zeros(m.shape).masked_fill(m, -torch.inf) for name, m in own.items()}
    theirs = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=batch_first)
    ours = convert(copy.deepcopy(theirs), scale=0.2)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(theirs, f"{name}_weight").data = getattr(ours, name).binary_weight * 0.2
    theirs.out_proj.weight.data = ours.out_proj.binary_weight * 0.2
    shape = (2, 5) if batch_first else (5, 2)
    inputs = [torch.randn(*shape, size) for size in (8, 6, 4)]
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        torch.testing.assert_close(ours(*inputs, **own, **options), theirs(*inputs, **own, **options))
    if mask in ("none", "float"):
        single = [x.select(0 if batch_first else 1, 0) for x in inputs]
        torch.testing.assert_close(ours(*single, **own), theirs(*single, **own))


def test_attention_with_wrong_inputs_is_explained():
    attention = BinaryMultiheadAttention(8, 2)
    x = torch.zeros(5, 2, 8)
    with pytest.raises(ValueError, match="3 dimensions, or 2 without a batch, got 3, 2 and 3"):
        attention(x, x[0], x)
    with pytest.raises(ValueError, match="pass attn_mask too"):
        attention(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="num_heads must divide embed_dim, got embed_dim=8, num_heads=3"):
        BinaryMultiheadAttention(8, 3)


@pytest.mark.parametrize("keep", [(), nn.MultiheadAttention], ids=["all", "real attention"])
def test_transformers_give_the_same_in_train_and_eval_and_their_layers_train(keep):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = convert(nn.TransformerEncoder(layer, 2), keep=keep)
    x, padding = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    expected = model.train()(x, src_key_padding_mask=padding).detach()
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            out = model.eval()(x, src_key_padding_mask=padding)
        torch.testing.assert_close(out.detach()[~padding], expected[~padding])
    weights = binary_parameters(model.train())
    assert len(weights) == (4 if keep else 12)
    optimizer = QPSBGD(weights, lr=0.01)
    before = [weight.detach().clone() for _, weight in weights]
    model(x).square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(new, old) for (_, new), old in zip(weights, before, strict=True))


def test_a_decoder_trains_with_masks():
    model = convert(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True))
    optimizer = QPSBGD(binary_parameters(model), lr=0.01)
    x, memory = torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    model(x, memory, tgt_mask=mask, tgt_is_causal=True).square().mean().backward()
    optimizer.step()
    model.eval()
    later = x.clone()
    later[:, 4] = 0
    out = [model(own, memory, tgt_mask=mask, tgt_is_causal=True) for own in (x, later)]
    torch.testing.assert_close(out[0][:, :4], out[1][:, :4])


def test_a_copy_and_its_state_are_those_of_the_converted_model():
    model = convert(mlp(), scale="mean")
    x = torch.randn(4, 6)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    other = convert(mlp(), scale="mean")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


def test_the_mean_of_the_weights_keeps_outputs_near_those_of_the_trained_model():
    model = mlp()
    x = torch.randn(50, 6)
    before = model(x).detach()
    after = convert(model, scale="mean")(x).detach()
    assert F.cosine_similarity(before.flatten(), after.flatten(), 0) > 0.8
