"""Compiled models leave the gradients and the sketches of eager ones, in as many graphs as ``nn.Linear``."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, Sign, binary_parameters

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # torch's own


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.up, self.down = linear(8, 16), linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.relu(self.up(x)))


def deep(blocks=3, linear=BinaryLinear):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(linear) for _ in range(blocks)))


def inputs(rows=20, seed=0):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def left_by(model, run, batches=1):
    """Gradients and sketches after some backward passes."""
    optimizer = QPSBGD(binary_parameters(model))
    for seed in range(batches):
        run(inputs(seed=seed)).square().mean().backward()
    left = [(weight.grad, weight.companion.sketch) for _, weight in binary_parameters(model)]
    optimizer.step()
    return left, [weight.detach().clone() for _, weight in binary_parameters(model)]


def assert_same(found, expected):
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


def test_equal_blocks_compiled_one_by_one_give_as_many_graphs_as_linear_layers():
    graphs = {}
    for linear in (nn.Linear, BinaryLinear):
        torch._dynamo.reset()
        counter = CompileCounter()
        model = deep(12, linear)
        optimizer = QPSBGD(binary_parameters(model)) if linear is BinaryLinear else None
        blocks = [torch.compile(block, backend=counter) for block in model]
        x = inputs().requires_grad_()
        for block in blocks:
            x = block(x)
        x.square().mean().backward()
        graphs[linear] = counter.frame_count
        del optimizer
    assert graphs[BinaryLinear] == graphs[nn.Linear] <= 2


def test_a_whole_model_with_dynamic_shapes_is_one_graph():
    counter, model = CompileCounterWithBackend("aot_eager"), deep()
    optimizer = QPSBGD(binary_parameters(model))
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for rows in (20, 33, 7):
        optimizer.zero_grad()
        compiled(inputs(rows)).square().mean().backward()
        optimizer.step()
    assert counter.frame_count == 1


def test_new_optimizers_need_no_new_graphs():
    counter, model = CompileCounterWithBackend("aot_eager"), deep()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(10):  # more than dynamo would compile
        optimizer = QPSBGD(binary_parameters(model))
        compiled(inputs()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_sketches_are_those_of_eager_mode(backend):
    expected = left_by(model := deep(), model, batches=3)
    found = left_by(model := deep(), torch.compile(model, backend=backend, fullgraph=True), batches=3)
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])


def test_compiled_convolutions_leave_the_sketches_of_eager_mode():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)),
            BinaryConv2d(2, 8, 3, padding=1, bias=True),
            Sign(),
            BinaryConv2d(8, 8, 2, groups=4, padding_mode="circular", padding=1),
        )

    for dynamic in (False, True):
        expected = left_by(model := network(), model)
        compiled = torch.compile(model := network(), backend="aot_eager", fullgraph=True, dynamic=dynamic)
        assert_same(left_by(model, compiled)[0], expected[0])


def test_a_layer_in_evaluation_trains_in_a_compiled_model_as_in_eager_mode():
    def network():
        model = deep()
        model[1].up.eval()
        return model

    expected = left_by(model := network(), model)
    found = left_by(model := network(), torch.compile(model, backend="aot_eager", fullgraph=True))
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])


def test_two_calls_with_the_same_input_count_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = BinaryLinear(8, 4)

        def forward(self, x):
            return self.layer(x) + self.layer(x)

    model = Twice()
    for run in (model, torch.compile(model, backend="aot_eager_decomp_partition"), torch.compile(model)):
        ((_, sketch),), _ = left_by(model, run)
        assert sketch[0, -1, 0] == 40
        model.zero_grad()


def test_one_frozen_layer_leaves_no_sketch_when_compiled():
    model = deep()
    model[0].up.weight.requires_grad_(False)
    left, _ = left_by(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    assert left[0] == (None, None)
    assert all(sketch is not None for _, sketch in left[1:])


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_backward_pass_through_compiled_autograd_leaves_the_sketches_of_eager_mode():
    expected, _ = left_by(model := deep(1), model)
    optimizer = QPSBGD(binary_parameters(model := deep(1)))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        model(inputs()).square().mean().backward()
    assert_same([(weight.grad, weight.companion.sketch) for _, weight in binary_parameters(model)], expected)
    optimizer.step()
