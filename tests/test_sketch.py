"""The sketch beside explicitly unfolded rows: what it holds, that it adds, and when there is none."""

import copy
import gc
import io
import itertools
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import mnist, sketch_shape
from torch import nn
from torch.func import functional_call

from spingrad import (
    QPSBGD,
    BinaryConv1d,
    BinaryConv2d,
    BinaryConv3d,
    BinaryConvTranspose2d,
    BinaryLinear,
    Sign,
    binary_parameters,
    convert,
)
from spingrad.sketch import SLOTS, rows_at, sketch_of
from spingrad.solvers import SignSolver

KINDS = {"rows": {}, "gram": {"rank": None}, "published": {"rows": "normalized", "rank": None}}


def begun(model, kind="rows"):
    """A model whose backward passes leave sketches, and the optimizer that wants them."""
    return model, QPSBGD(binary_parameters(model), solver=SignSolver(), **KINDS[kind])


def count_of(layer):
    return 0 if layer.companion.sketch is None else float(layer.companion.sketch[0, -1, 0])


def gram_of(sketch):  # (g, slots + 1, n) -> (g, n, n)
    return sketch[:, :-1].mT @ sketch[:, :-1]


def unfolded(layer, x):
    """Every row of a convolution by a plain loop: ``(groups, r, n)``, images first, then places."""
    x = layer.inputs(x)
    x = x if x.ndim == layer.trailing + 2 else x[None]
    if isinstance(layer, BinaryConvTranspose2d):  # zeros between the pixels and a border, then a convolution
        sizes = [
            (side - 1) * s - 2 * p + dil * (k - 1) + out + 1
            for side, s, p, dil, k, out in zip(
                x.shape[2:], layer.stride, layer.padding, layer.dilation, layer.kernel_size,
                layer.output_padding, strict=True,
            )
        ]  # fmt: skip
        wide = x.new_zeros(
            *x.shape[:2], *((side - 1) * s + 1 for side, s in zip(x.shape[2:], layer.stride, strict=True))
        )
        wide[..., :: layer.stride[0], :: layer.stride[1]] = x
        reach = [
            dil * (k - 1) - p
            for dil, k, p in zip(layer.dilation, layer.kernel_size, layer.padding, strict=True)
        ]
        border = [
            side for r, o in reversed([*zip(reach, layer.output_padding, strict=True)]) for side in (r, r + o)
        ]
        x, stride = F.pad(wide, border).flip(2, 3), (1, 1)
    else:
        border = [p for p in reversed(layer.border) for _ in range(2)]
        x, stride = F.pad(x, border), layer.stride
        spans = [dil * (k - 1) + 1 for dil, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        sizes = [(side - span) // s + 1 for side, span, s in zip(x.shape[2:], spans, stride, strict=True)]
    rows = []
    for image in x:
        for place in itertools.product(*map(range, sizes)):
            cut = [
                slice(at * s, at * s + dil * (k - 1) + 1, dil)
                for at, s, dil, k in zip(place, stride, layer.dilation, layer.kernel_size, strict=True)
            ]
            rows.append(image[(slice(None), *cut)].unflatten(0, (layer.groups, -1)).flatten(1))
    rows = torch.stack(rows, 1)
    if isinstance(layer, BinaryConvTranspose2d):  # flipped: places and kernels run backwards
        per = math.prod(sizes)
        rows = rows.unflatten(1, (-1, per)).flip(2).flatten(1, 2)
    return rows


def by_group(layer, grad):  # -> (groups, r, units)
    grad = grad if grad.ndim == layer.trailing + 2 else grad[None]
    return grad.flatten(2).unflatten(1, (layer.groups, -1)).movedim(0, 2).flatten(2).mT


LAYERS = {
    "linear": (lambda: BinaryLinear(6, 4), (5, 6)),
    "linear over time": (lambda: BinaryLinear(6, 4), (5, 3, 6)),
    "linear, one input": (lambda: BinaryLinear(6, 4), (6,)),
    "1d": (lambda: BinaryConv1d(2, 3, 3, stride=2, padding=1), (3, 2, 9)),
    "2d": (lambda: BinaryConv2d(2, 3, 3), (2, 2, 6, 5)),
    "3d": (lambda: BinaryConv3d(1, 2, 2, stride=(1, 2, 1), padding=(0, 1, 1)), (2, 1, 3, 4, 3)),
    "strided": (lambda: BinaryConv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2)), (2, 2, 7, 6)),
    "dilated": (lambda: BinaryConv2d(2, 3, 2, dilation=(2, 3), padding=1), (2, 2, 6, 7)),
    "groups": (lambda: BinaryConv2d(4, 6, 3, groups=2, padding=1), (2, 4, 4, 5)),
    "depthwise": (lambda: BinaryConv2d(3, 6, 3, groups=3, padding=1, stride=2), (2, 3, 6, 6)),
    "same": (lambda: BinaryConv2d(2, 3, (2, 4), padding="same"), (2, 2, 4, 5)),
    "reflect": (lambda: BinaryConv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 4, 5)),
    "replicate": (lambda: BinaryConv2d(2, 3, 3, padding=2, padding_mode="replicate"), (2, 2, 4, 5)),
    "circular": (lambda: BinaryConv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 6)),
    "unbatched": (lambda: BinaryConv2d(2, 3, 3), (2, 6, 5)),
    "transposed": (
        lambda: BinaryConvTranspose2d(4, 6, 3, stride=(2, 3), padding=1, output_padding=(1, 2), groups=2),
        (2, 4, 3, 2),
    ),
    "transposed, dilated": (lambda: BinaryConvTranspose2d(2, 3, 2, dilation=2, stride=2), (2, 2, 3, 3)),
    "transposed, unbatched": (lambda: BinaryConvTranspose2d(2, 3, 3, stride=2), (2, 3, 3)),
}  # fmt: skip


def passed(name, kind, memory_format=torch.contiguous_format):
    """One backward pass: gradient and sketch, rows ``(g, r, n)`` and output gradients ``(g, r, units)``."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, _optimizer = begun(make(), kind)
    x = torch.randn(shape)
    x = x.to(memory_format=memory_format) if x.ndim == 4 else x
    out = layer(x)
    grad = torch.randn(out.shape)  # in one order, whatever the memory format
    if isinstance(layer, BinaryLinear):
        grad.view(-1, 4)[1::3] = 0
        out.backward(grad)
        return layer.weight.grad, layer.companion.sketch, x.view(1, -1, 6), layer.scale * grad.view(1, -1, 4)
    grad[..., 1::3] = 0
    out.backward(grad)
    return layer.weight.grad, layer.companion.sketch, unfolded(layer, x), layer.scale * by_group(layer, grad)


@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_is_that_of_the_rows(name):
    found, _, rows, V = passed(name, "rows")
    torch.testing.assert_close(found.flatten(1), (V.mT @ rows).flatten(0, 1))


@pytest.mark.parametrize("name", LAYERS)
def test_every_slot_holds_a_row_that_has_a_gradient_with_a_sign(name):
    _, sketches, rows, V = passed(name, "rows")
    for sketch, own, v in zip(sketches, rows, V, strict=True):
        live = own[(v != 0).any(1)]
        slots, n = min(128, 4 * own.shape[1]), own.shape[1]
        assert sketch.shape == (slots + 1, n)
        assert sketch[-1].tolist() == [len(live), *[0] * (n - 1)]
        size = max(1, len(live) / slots) ** 0.5
        held = sketch[:-1][sketch[:-1].any(1)] / size
        apart = (held[:, None] - live).abs().amax(2), (held[:, None] + live).abs().amax(2)
        assert torch.minimum(*apart).amin(1).max() < 1e-5
        if len(live) <= slots:
            torch.testing.assert_close(sketch[:-1].T @ sketch[:-1], live.T @ live, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_the_exact_kind_is_the_gram_matrix_of_the_rows_with_a_gradient(name):
    _, sketch, rows, V = passed(name, "gram")
    live = rows.double() * (V != 0).any(2, keepdim=True)
    n = rows.shape[2]
    torch.testing.assert_close(sketch[:, :n], live.mT @ live, rtol=1e-6, atol=1e-6)
    assert torch.equal(sketch[:, n, 0], (V != 0).any(2).sum(1).double())


@pytest.mark.parametrize("name", LAYERS)
def test_the_published_kind_has_all_rows_with_weights_of_their_own(name):
    _, sketch, rows, V = passed(name, "published")
    rows, V, n = rows.double(), V.double(), rows.shape[2]
    squares = rows.square().sum(2, keepdim=True)
    Z = rows / squares.where(squares > 0, 1)
    expected = torch.cat([Z.mT @ Z, Z.mT @ V, rows.mT @ V], 2)
    torch.testing.assert_close(sketch[:, :n], expected, rtol=1e-5, atol=1e-6)
    assert (sketch[:, n, 0] == rows.shape[1]).all()
    torch.testing.assert_close(sketch[:, n, n : n + V.shape[2]], V.square().sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["strided", "depthwise", "transposed"])
def test_the_memory_format_of_images_changes_nothing(name, kind):
    here, there = (passed(name, kind, layout)[1] for layout in (torch.contiguous_format, torch.channels_last))
    torch.testing.assert_close(there, here)


def test_patches_are_those_of_torchs_unfold():
    x = torch.randn(3, 2, 8, 7)
    expected = F.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 2), stride=(2, 1))
    output = (4, 9)
    geometry = (2, False, 3, 2, 2, 1, 1, 2, 1, 2)
    rows = rows_at(x, torch.arange(3 * math.prod(output))[None], geometry, output)
    assert torch.equal(rows[0], expected.transpose(1, 2).flatten(0, 1))


def test_a_sketch_of_many_rows_is_as_strong_as_all_of_them():
    torch.manual_seed(0)
    x, grad = torch.randn(5000, 6) @ torch.randn(6, 40), torch.randn(5000, 3)
    sketch = sketch_of(x, grad, sketch_shape("rows", 40, 3), x.dtype, "rows", ())
    assert sketch.shape == (1, SLOTS + 1, 40)
    assert sketch[0, -1, 0] == 5000
    gram = x.T @ x
    assert (gram_of(sketch)[0] - gram).norm() < 0.3 * gram.norm()
    assert gram_of(sketch)[0].trace() == pytest.approx(float(gram.trace()), rel=0.15)


def energy_found(sketch, rows):
    """What the 32 leading directions of a sketch hold of the rows, over the best possible."""
    directions = torch.linalg.svd(sketch[0, :-1], full_matrices=False)[2][:32]
    best = torch.linalg.svdvals(rows)[:32].square().sum()
    return float((rows @ directions.T).square().sum() / best)


@pytest.fixture(scope="module")
def second_layer(data_folder):
    """Inputs of the second layer of a network on MNIST."""
    x, _ = mnist("train")
    pixels = x[:4000].flatten(1).float() / 255
    torch.manual_seed(0)
    layer = BinaryLinear(784, 512)
    with torch.no_grad():
        return F.hardtanh(layer(pixels / pixels.square().mean().sqrt()))


@pytest.mark.parametrize(
    ("passes", "least"),
    [(1, 0.999), (4, 0.96), (16, 0.94), (64, 0.93)],  # slots by a counter: 1.000, .954, .935 of 4, 16, 64
)
def test_sketches_of_passes_add(second_layer, passes, least):
    """On average over the data, in passes of 25 rows."""
    shape, parts, shares = sketch_shape("rows", 512, 10), second_layer.split(25), []
    for start in range(0, len(parts) - passes + 1, max(passes, 16)):
        own = parts[start : start + passes]
        total = sum(sketch_of(x, torch.ones(25, 10), shape, x.dtype, "rows", ()) for x in own)
        shares.append(energy_found(total, torch.cat(own)))
        assert total[0, -1, 0] == 25 * passes
    assert sum(shares) / len(shares) > least


@pytest.mark.parametrize("width", [7, 8, 16, 32])
@pytest.mark.parametrize("live", ["all", "every other"])
def test_a_sample_meets_all_images_and_all_parts_of_them(width, live):
    batch = 40
    images = torch.arange(batch * width**2, dtype=torch.float32).add(1).view(batch, 1, width, width)
    grad = torch.ones_like(images)
    if live == "every other":
        grad.view(-1)[1::2] = 0
    many = torch.Size([1, 129, 1])  # a layer has fewer slots for a single input
    sketch = sketch_of(images, grad, many, images.dtype, "rows", (2, False, 1, 1, 1, 1, 0, 0, 1, 1))
    count = float(sketch[0, -1, 0])
    seen = (sketch[0, :-1, 0].abs() / (count / 128) ** 0.5).round().long() - 1
    image, row, column = seen // width**2, seen // width % width, seen % width
    assert len(seen.unique()) > 0.95 * 128
    assert len(image.unique()) == batch
    for place in (row, column):
        assert (torch.bincount(4 * place // width, minlength=4) > 12).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_do_not_get_in(value):
    layer, _optimizer = begun(BinaryLinear(6, 4))
    x, grad = torch.randn(9, 6), torch.randn(9, 4)
    x[2, 3] = value
    layer(x).backward(grad)
    sketch = layer.companion.sketch
    assert sketch.isfinite().all()
    kept = x[[i for i in range(9) if i != 2]]
    torch.testing.assert_close(gram_of(sketch)[0], kept.T @ kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: BinaryLinear(6, 4), (0, 6)), (lambda: BinaryConv2d(2, 4, 3, groups=2), (0, 2, 5, 5))],
)
def test_an_empty_batch_leaves_a_sketch_of_nothing(make, shape, kind):
    layer, _optimizer = begun(make(), kind)
    layer(torch.zeros(shape)).sum().backward()
    assert not layer.companion.sketch.any()


def test_a_pass_that_accumulates_nothing_into_the_weight_leaves_no_sketch():
    layer, _optimizer = begun(BinaryLinear(4, 2))
    x = torch.randn(3, 4, requires_grad=True)
    torch.autograd.grad(layer(x).sum(), x)
    torch.autograd.grad(layer(x).sum(), layer.weight)
    layer(x).sum().backward(inputs=[x])
    with torch.no_grad():
        layer(x)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.companion.sketch is None
    layer.weight.requires_grad_(True)
    layer.eval()(x).sum().backward()
    assert count_of(layer) == 3


def test_a_layer_that_is_used_at_every_step_of_time_counts_every_use():
    layer, _optimizer = begun(BinaryLinear(20, 20))
    hidden = torch.randn(25, 20)
    for _ in range(8):
        hidden = F.hardtanh(layer(hidden) + torch.randn(25, 20))
    hidden.square().sum().backward()
    assert count_of(layer) == 200


def test_passes_before_a_step_count_together_and_the_step_uses_them_up():
    layer, optimizer = begun(BinaryLinear(6, 4))
    for _ in range(3):
        layer(torch.randn(5, 6)).sum().backward()
    out = layer(torch.randn(5, 6)).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert count_of(layer) == 25
    optimizer.step()
    assert layer.companion.sketch is None
    layer(torch.randn(5, 6)).sum().backward()
    assert count_of(layer) == 5
    optimizer.zero_grad()
    assert layer.companion.sketch is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_layer_leaves_the_sketch_of_an_ordinary_one(use_reentrant):
    torch.manual_seed(0)
    layer, _optimizer = begun(BinaryLinear(4, 4), "gram")
    x = torch.randn(3, 4, requires_grad=True)
    sketches = []
    for run in (
        lambda own: layer(own),
        partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=use_reentrant),
    ):
        layer(run(x)).square().sum().backward()
        sketches.append(layer.companion.sketch)
        layer.companion.clear()
    assert sketches[0][0, -1, 0] == 6
    torch.testing.assert_close(*sketches)


def test_tied_weights_have_one_companion():
    first, second = BinaryLinear(4, 4), BinaryLinear(4, 4)
    second.weight = first.weight
    model, _optimizer = begun(nn.Sequential(first, nn.Hardtanh(), second))
    assert first.companion is second.companion
    model(torch.randn(7, 4)).square().sum().backward()
    assert count_of(first) == 14


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_a_layer_is_an_ordinary_layer(copied):
    layer, _optimizer = begun(BinaryLinear(4, 2))
    layer(torch.randn(3, 4)).sum().backward()
    twin = copied(layer)
    assert twin.companion.leaf is None
    assert twin.companion is not layer.companion
    twin(torch.randn(3, 4)).sum().backward()
    assert count_of(layer) == 3
    _other = QPSBGD(binary_parameters(twin))
    twin(torch.randn(3, 4)).sum().backward()
    assert count_of(twin) == 3


def test_the_leaf_is_no_part_of_the_model_and_takes_the_memory_of_one_number():
    plain, (layer, _optimizer) = BinaryLinear(400, 20), begun(BinaryLinear(400, 20))
    layer(torch.randn(3, 400)).sum().backward()
    assert list(layer.state_dict()) == list(plain.state_dict()) == ["weight"]
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert not list(layer.buffers())
    assert layer.companion.leaf.shape == (1, 129, 400)
    assert layer.companion.leaf.untyped_storage().nbytes() == 4
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    assert buffer.tell() < 40_000


@pytest.mark.parametrize("kind", KINDS)
def test_the_companion_follows_its_model_with_the_sketch(kind):
    layer, _optimizer = begun(BinaryLinear(4, 2), kind)
    layer(torch.randn(3, 4)).sum().backward()
    before = layer.companion.sketch
    layer.double()
    assert layer.companion.leaf.dtype == layer.companion.sketch.dtype == torch.float64
    torch.testing.assert_close(layer.companion.sketch, before.double())
    layer(torch.randn(3, 4).double()).sum().backward()
    assert count_of(layer) == 6
    layer.to("meta")
    assert layer.companion.leaf.is_meta
    assert layer.companion.sketch.is_meta


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


def has_sketches(model):
    return any(weight.companion.sketch is not None for _, weight in binary_parameters(model))


@pytest.mark.parametrize("trains", [False, True])
def test_functional_gradients_are_ordinary_and_leave_no_sketch(trains):
    model, x = network(), torch.randn(5, 16)
    model(x).square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    _optimizer = QPSBGD(binary_parameters(model)) if trains else None
    found = torch.func.grad(partial(loss_of, model))(copies(model), x)
    torch.testing.assert_close(found, expected)
    each = torch.func.vmap(torch.func.grad(partial(loss_of, model)), (None, 0))(copies(model), x[:, None])
    torch.testing.assert_close({name: grad.mean(0) for name, grad in each.items()}, expected)
    assert not has_sketches(model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, in the first use of a jvp
def test_derivatives_by_the_input_in_a_transform_are_ordinary_and_leave_no_sketch():
    model, x = network(), torch.randn(5, 16)
    own = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(own).sum(), own)
    _optimizer = QPSBGD(binary_parameters(model))
    found = torch.func.vmap(torch.func.grad(lambda one: model(one[None]).sum()))(x)
    torch.testing.assert_close(found, expected)
    jacobian = torch.func.jacrev(lambda one: model(one[None])[0])(x[0])
    torch.testing.assert_close(jacobian.sum(0), expected[0])
    _, along = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(along.sum(1), expected.sum(1))
    assert not has_sketches(model)


def test_a_second_derivative_is_that_of_an_untrained_model():
    def penalty():
        x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [weight.grad.clone() for weight in model.parameters()]

    torch.manual_seed(0)
    model = nn.Sequential(BinaryLinear(4, 6), nn.Tanh(), BinaryLinear(6, 2))
    expected = penalty()
    _optimizer = QPSBGD(binary_parameters(model))
    model.zero_grad()
    torch.testing.assert_close(penalty(), expected)


def test_a_model_that_is_mapped_over_a_batch_has_the_gradient_of_the_batch():
    model, x = network(), torch.randn(3, 5, 16)
    _optimizer = QPSBGD(binary_parameters(model))

    def gradients(out):
        model.zero_grad()
        out.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(model(x.flatten(0, 1)))
    torch.testing.assert_close(gradients(torch.func.vmap(model)(x)), expected)
    torch.testing.assert_close(gradients(torch.func.vmap(model, in_dims=1)(x.transpose(0, 1))), expected)


def test_an_input_may_change_in_place_after_the_backward_pass_and_not_before():
    layer, _optimizer = begun(BinaryLinear(4, 2), "gram")
    x = torch.randn(3, 4)
    before = x.clone()
    layer(x).sum().backward()
    x.add_(1)
    torch.testing.assert_close(layer.companion.sketch[0, :4].float(), before.T @ before)
    out = layer(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("make", [lambda: BinaryLinear(4, 2), lambda: BinaryConv2d(1, 2, 2)])
def test_layer_and_optimizer_are_freed_without_the_collector(make):
    layer, optimizer = begun(make())
    out = layer(torch.randn(3, 4) if isinstance(layer, BinaryLinear) else torch.randn(2, 1, 4, 4))
    out.sum().backward()
    gone = [weakref.ref(thing) for thing in (layer, layer.weight, layer.companion)]
    gc.disable()
    try:
        del layer, optimizer, out
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
def test_a_compiled_model_leaves_the_sketches_of_the_model_itself(name, backend):
    make, shape = COMPILED[name]
    torch.manual_seed(0)
    model, optimizer = begun(make(), "gram")
    x = torch.randn(shape)

    def sketches(net):
        optimizer.zero_grad()
        out = net(x)
        (out.square() * torch.linspace(0, 1, out.numel()).view_as(out)).sum().backward()
        return [(weight.grad, weight.companion.sketch) for _, weight in binary_parameters(model)]

    expected = sketches(model)
    torch.compiler.reset()
    found = sketches(torch.compile(model, backend=backend, fullgraph=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_companion_ends_with_its_optimizer():
    layer, optimizer = begun(BinaryLinear(4, 2))
    layer(torch.randn(3, 4)).sum().backward()
    del optimizer
    gc.collect()
    assert layer.companion.leaf is None
    layer(torch.randn(3, 4)).sum().backward()
    assert layer.companion.sketch is None


def test_a_second_optimizer_takes_over():
    layer, first = begun(BinaryLinear(4, 2))
    second = QPSBGD(binary_parameters(layer), rank=None)
    assert layer.companion.kind == "gram"
    del first
    gc.collect()
    layer(torch.randn(3, 4)).sum().backward()
    assert count_of(layer) == 3
    before = layer.weight.detach().clone()
    second.step()
    assert not torch.equal(layer.weight, before)


@pytest.mark.needs("numba")
@pytest.mark.parametrize("rows", [1, 20, 28, 29, 400])
def test_the_sketch_of_the_kernel_is_that_of_its_meaning(rows):
    from spingrad.kernels.sample import on_cpu
    from spingrad.sketch import sample

    generator = torch.Generator().manual_seed(rows)
    x, grad = torch.randn(rows, 7, generator=generator), torch.randn(rows, 3, generator=generator)
    grad[::3] = 0
    sketches = [one(x, grad, [1, 29, 7], torch.float32, []) for one in (on_cpu, sample)]
    torch.testing.assert_close(*sketches)
    count = int((grad != 0).any(1).sum())
    assert sketches[1][0, -1, 0] == count
    assert (sketches[1][0, :-1] != 0).any(1).sum() == min(count, 28)
