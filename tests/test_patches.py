"""Patches: the rows of a convolution, unfolded in parts."""

import pytest
import torch
import torch.nn.functional as F
from helpers import ONE_BATCH, posed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from spingrad import QPSBGD, BinaryConv2d, binary_parameters
from spingrad.recording import record_of
from spingrad.rows import Patches
from spingrad.solvers import BlockDescentSolver, ExactSolver

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
borders = st.tuples(st.integers(0, 2), st.integers(0, 2))


def rows_of(images, kernel_size, stride, padding, dilation):
    unfolded = F.unfold(images, kernel_size, dilation, padding, stride)
    return unfolded.transpose(1, 2).flatten(0, 1)


@given(pairs, pairs, borders, pairs, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_all_is_as_if_the_images_were_unfolded(kernel, stride, padding, dilation, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = [(2, 3, 8, 7), (3, 3, 8, 7) if seed % 2 else (1, 3, 9, 7)]
    images = [torch.randn(size, generator=generator) for size in sizes]
    geometry = kernel, stride, padding, dilation
    expected = torch.cat([rows_of(batch, *geometry) for batch in images])
    live = (torch.rand(len(expected), generator=generator) < 0.5).nonzero()[:, 0]
    rows = [Patches([batch], *geometry) for batch in images]
    sizes = [(own._sizes()[0], len(own)) for own in rows]
    V = torch.randn(len(expected), 4, generator=generator)
    grads = [
        v.unflatten(0, size).permute(0, 3, 1, 2)
        for v, (size, _) in zip(V.split([count for _, count in sizes]), sizes, strict=True)
    ]
    whole, grad = Patches.join(rows, grads)
    kept = torch.zeros_like(V).index_copy(0, live, V[live])
    kept_grads = [
        v.unflatten(0, size).permute(0, 3, 1, 2)
        for v, (size, _) in zip(kept.split([count for _, count in sizes]), sizes, strict=True)
    ]
    cases = [(whole, grad, expected, V)]
    if len(live):
        some, some_grad = whole.select(live, Patches.join(rows, kept_grads)[1])
        cases.append((some, some_grad, expected[live], V[live]))
    images_peak = max(batch.abs().max() for batch in images)
    for patches, grad, matrix, V in cases:
        assert patches.shape == matrix.shape
        assert torch.equal(patches.dense(), matrix)
        assert torch.equal(torch.cat(list(patches.blocks(1)), 1), matrix)
        assert torch.equal(torch.cat(list(patches.chunks(10))), matrix)
        torch.testing.assert_close(patches.norm(), matrix.norm())
        torch.testing.assert_close(patches.peak(), images_peak)
        torch.testing.assert_close(patches.pull_back(grad), V.T @ matrix, rtol=1e-4, atol=1e-4)
        factor, past = torch.rand(4), torch.randn(4, matrix.shape[1])
        torch.testing.assert_close(
            patches.pull_back(grad, factor, past, 0.25),
            0.75 * past + 0.25 * (V * factor).T @ matrix,
            rtol=1e-4,
            atol=1e-4,
        )
        assert len(patches.sample(4)) <= 4
        for row in patches.sample(4):
            assert (matrix == row).all(1).any()


@pytest.mark.parametrize("width", [7, 8, 16, 32])
@pytest.mark.parametrize("kind", ["all patches", "with a gradient", "of two sizes"])
def test_a_sample_meets_all_images_and_all_parts_of_them_equally_often(width, kind):
    count, batch = 128, 40
    numbers = torch.arange(batch * width**2, dtype=torch.float64).view(batch, 1, width, width)
    parts = [numbers] if kind != "of two sizes" else [numbers[:20], numbers[20:, :, 1:]]
    patches = Patches(parts, (1, 1), (1, 1), (0, 0), (1, 1))
    if kind == "with a gradient":
        patches, _ = patches.select(torch.arange(len(patches))[::2], torch.empty(0))
    seen = patches.sample(count)[:, 0].long()
    image, row, column = seen // width**2, seen // width % width, seen % width
    assert len(seen) == count
    assert len(seen.unique()) > 0.95 * count
    assert len(image.unique()) == batch
    for place in (row, column):
        parts_met = torch.bincount(4 * place // width, minlength=4) / count
        assert (parts_met > 0.1).all()


def convolution_record(groups=1):
    torch.manual_seed(0)
    layer = BinaryConv2d(6, 8, 3, padding=1, groups=groups)
    optimizer = QPSBGD(binary_parameters(layer), lr=0.01, **ONE_BATCH)
    layer(torch.randn(4, 6, 9, 9)).square().sum().backward()
    return layer, optimizer, record_of(layer.weight).layers()


def test_the_problem_of_a_convolution_is_that_of_its_unfolded_patches(monkeypatch):
    _, _, (record,) = convolution_record()
    record.grad[0, :, :4] = 0  # patches that are left out
    r, n = record.rows.shape
    monkeypatch.setattr(Patches, "dense", lambda self: pytest.fail("all patches were unfolded at once"))
    lazy = posed(record)
    assert len(lazy.rows) == r - 36
    spins = BlockDescentSolver(block_size=9).solve(lazy).spins
    compressed = lazy.compressed()
    monkeypatch.undo()
    reach = ((r - 36) / n) ** 0.5  # a linear layer with these rows has no such factor
    dense = posed(record.dense(), target_rms=reach)
    torch.testing.assert_close(lazy.rows.dense(), dense.rows.dense())
    torch.testing.assert_close(lazy.H, dense.H)
    assert (spins == BlockDescentSolver(block_size=9).solve(dense).spins).float().mean() > 0.999
    torch.testing.assert_close(compressed.energy(spins), dense.energy(spins), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lazy.energy(spins), dense.energy(spins))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_step_moves_every_weight_of_a_convolution_by_its_spin(groups, memory_format):
    layer, optimizer, records = convolution_record(groups)
    layer.weight.data = layer.weight.data.to(memory_format=memory_format)
    before = layer.weight.detach().clone()
    optimizer.step()
    problems = [posed(record) for record in records]
    spins = torch.cat([BlockDescentSolver().solve(problem).spins.T for problem in problems])
    torch.testing.assert_close(layer.weight.detach(), before - 0.01 * spins.view_as(before))


def test_convolutions_as_published_and_with_any_solver_unfold_their_patches():
    torch.manual_seed(0)
    layer = BinaryConv2d(1, 4, 3)
    x = torch.randn(6, 1, 5, 5)
    for optimizer in (
        QPSBGD.as_published(binary_parameters(layer), lr=0.01),
        QPSBGD(binary_parameters(layer), solver=ExactSolver(), momentum=0.5),
    ):
        before = layer.weight.detach().clone()
        layer(x).square().sum().backward()
        optimizer.step()
        assert not torch.equal(layer.weight, before)


def test_batches_of_images_of_different_sizes_accumulate():
    torch.manual_seed(0)
    layer = BinaryConv2d(4, 5, 3)
    model = nn.Sequential(layer, nn.Hardtanh(), nn.AdaptiveAvgPool2d(1))
    optimizer = QPSBGD(binary_parameters(model))
    for size in (6, 9):
        model(torch.randn(2, 4, size, size)).square().sum().backward()
    (record,) = record_of(layer.weight).layers()
    assert record.rows.shape == (2 * 16 + 2 * 49, 36)
    optimizer.step()
