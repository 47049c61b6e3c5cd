"""The mathematics of a step without a model, and what it reads back to the host."""

import pytest
import torch
from helpers import computed_by, posed, sketch_shape
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spingrad import QPSBGD, BinaryConv2d, BinaryLayer, BinaryLinear, binary_parameters
from spingrad.kernels import passes, plain
from spingrad.kernels.passes import blended, lengths, move_
from spingrad.optim.functional import published, scale, weight_of
from spingrad.scaling import factor, overlap, size_of, whitened
from spingrad.sketch import sketch_of


def scaled(x, grad, kind="rows", rank=16, target_rms="auto"):
    shape = sketch_shape(kind, x.shape[1], grad.shape[1])
    return scale(sketch_of(x, grad, shape, x.dtype, kind, ()), kind, grad.shape[1], rank, target_rms)


@pytest.mark.parametrize(("kind", "rank"), [("rows", 32), ("rows", 500), ("gram", None)])
def test_spins_reach_at_most_one_at_a_row_of_mean_norm(kind, rank):
    torch.manual_seed(0)
    x, grad = 1e-3 * torch.randn(20, 6), torch.randn(20, 3)
    grad[4] = 0
    Z, reach, _ = scaled(x, grad, kind, rank, target_rms=0.5)
    own = x[grad.any(1)]
    expected = own.T @ own * (19 / 6) / own.square().sum()
    torch.testing.assert_close((Z[0].mT @ Z[0]).float(), expected)
    assert float(reach) == pytest.approx(0.5 * (19 / 6) ** 0.5)


def test_lengths_have_the_asked_root_mean_square_and_outliers_are_cut():
    torch.manual_seed(0)
    length = torch.rand(50).double() + 0.5
    found = size_of(length, torch.full((50,), 0.7).double()) * length
    assert float(found.square().mean().sqrt()) == pytest.approx(0.7)
    torch.testing.assert_close(found / found[0], length / length[0])
    length[7] = 1e4
    with_outlier = size_of(length, torch.full((50,), 0.7).double()) * length
    assert float(with_outlier[7] / with_outlier.median()) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("factor", [1e-100, 1e-30, 1e30, 1e100])
def test_sizes_undo_any_factor_of_the_gradient(factor):
    length = torch.tensor([1.0, 2.0, 0.5]).double()
    reach = torch.ones(3).double()
    torch.testing.assert_close(size_of(factor * length, reach) * factor, size_of(length, reach))


def test_the_average_has_no_bias_to_a_zero_at_the_start():
    torch.manual_seed(0)
    model, seen = BinaryLinear(6, 3), []
    optimizer = QPSBGD(binary_parameters(model), lr=0.0)
    x, grad = torch.randn(20, 6), torch.randn(20, 3)
    for _ in range(3):
        model(x).backward(grad)
        optimizer.step()
        seen.append(optimizer.state[model.weight]["exp_avg"].clone())
        optimizer.zero_grad()
    torch.testing.assert_close(seen[1:], seen[:1] * 2)


def test_weights_of_steps_make_an_average():
    momentum, shares = 0.75, []
    for step in range(6):
        new = weight_of(momentum, step)
        shares = [*[(1 - new) * share for share in shares], new]
    expected = torch.tensor([momentum**k for k in range(5, -1, -1)])
    torch.testing.assert_close(torch.tensor(shares), expected / expected.sum())


@pytest.fixture(params=["kernel", "torch"])
def either_way(request, monkeypatch):
    """A step's passes in numba and in torch."""
    if request.param == "torch":
        monkeypatch.setattr(passes, "_has_kernel", lambda *_: False)


@pytest.mark.usefixtures("either_way")
def test_the_average_may_take_the_memory_of_the_past():
    torch.manual_seed(0)
    grad, size, past = torch.randn(700, 300), torch.rand(700), torch.randn(700, 300)
    expected = 0.75 * past + size[:, None] * grad
    assert blended(past, grad, 0.75, size, past) is past
    torch.testing.assert_close(past, expected)


def test_the_published_problem_is_the_least_squares_problem():
    torch.manual_seed(0)
    x, V = torch.randn(20, 6).double(), torch.randn(20, 3).double()
    problem = posed(x, V, rows="normalized", target_rms=None)
    G = torch.randint(2, (6, 3)).double() * 2 - 1
    Z = x / x.square().sum(1, keepdim=True)
    torch.testing.assert_close(problem.energy(G), (V - Z @ G).square().sum(0))


@pytest.mark.parametrize("factor", [-3.0, 1e-20, 0.5, 1e15, 1e20])
def test_a_multiple_of_the_published_gradient_multiplies_the_linear_term(factor):
    torch.manual_seed(0)
    x, V = torch.randn(20, 6), torch.randn(20, 3)
    sketch = sketch_of(x, V, sketch_shape("published", 6, 3), x.dtype, "published", ())
    Z = x / x.square().sum(1, keepdim=True)
    linear, factors = published(sketch, factor * (V.T @ x))
    torch.testing.assert_close(linear.float(), factor * (V.T @ Z))
    torch.testing.assert_close(factors.float(), torch.tensor([factor]))
    with pytest.raises(RuntimeError, match="may only be multiplied by a number"):
        published(sketch, factor * (V.T @ x) + 0.1 * factor)


def test_a_published_gradient_that_cancels_to_rounding_keeps_its_linear_term():
    torch.manual_seed(0)
    x, V = torch.randn(20, 6), torch.randn(20, 3)
    x, V = torch.cat([x, 3 * x]), torch.cat([3 * V, -V])  # XᵀV is zero, ZᵀV is not
    sketch = sketch_of(x, V, sketch_shape("published", 6, 3), x.dtype, "published", ())
    linear, factors = published(sketch, V.T @ x)
    assert factors.tolist() == [1.0]
    torch.testing.assert_close(linear.float(), V.T @ (x / x.square().sum(1, keepdim=True)))
    with pytest.raises(RuntimeError, match="may only be multiplied by a number"):
        published(sketch, V.T @ x + 0.1)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("factor", [1.0, 1e30, 1e-30])
def test_lengths_neither_overflow_nor_underflow(factor):
    found = lengths(factor * torch.tensor([[3.0, 4.0], [-5.0, 12.0], [0.0, 0.0]]))
    torch.testing.assert_close(found / factor, torch.tensor([5.0, 13.0, 0.0]).double(), rtol=1e-6, atol=0)
    assert not lengths(factor * torch.tensor([[1.0, torch.nan]])).isfinite().any()


def exactly_whitened(H, strength):
    """The formula, by eigenvalues."""
    H = H.double()
    values, vectors = torch.linalg.eigh(H.T @ H)
    weaker = H @ (vectors * (1 + strength * values.clamp(min=0) / values.mean()).rsqrt()) @ vectors.T
    return weaker * (H.norm(dim=0) / weaker.norm(dim=0).clamp(min=1e-300))


@pytest.mark.parametrize("strength", [0.0, 0.125, 1.0, 50.0])
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
def test_whitening_weakens_what_units_share_and_keeps_their_lengths(strength, size):
    torch.manual_seed(0)
    H = torch.randn(40, 1) + 0.3 * torch.randn(40, 12)  # almost parallel
    H[:, 5] = 0
    found = whitened(H * size, strength) / size
    torch.testing.assert_close(found, exactly_whitened(H, strength).float(), rtol=1e-3, atol=1e-3)
    assert not whitened(torch.zeros(4, 3), strength).any()


def test_whitening_of_many_units_changes_their_leading_directions():
    torch.manual_seed(0)
    common = torch.randn(300, 4) @ torch.randn(4, 200)
    H = 3 * common + torch.randn(300, 200)
    found, expected = whitened(H, 0.125), exactly_whitened(H, 0.125)
    assert (found - expected).norm() < 0.02 * (H - expected).norm()


def test_a_whitened_step_averages_the_linear_term_as_it_was():
    x, y = torch.randn(30, 12, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 4
    averages, weights = [], []
    for whitening in (0.0, 1.0):
        torch.manual_seed(0)
        model = nn.Sequential(BinaryLinear(12, 24), nn.Hardtanh(), BinaryLinear(24, 4))
        optimizer = QPSBGD(binary_parameters(model), lr=1e-6, whitening=whitening)  # no sign changes
        for _ in range(3):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        averages.append([state["exp_avg"] for state in optimizer.state.values()])
        weights.append([weight.detach() for weight in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*averages, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_whitened_problem_of_one_batch_has_the_energy_of_its_fields():
    torch.manual_seed(0)
    batch = torch.randn(20, 6), torch.randn(20, 3)
    problem, other = posed(*batch), posed(*batch, whitening=0.5)
    G = torch.randint(2, (6, 3)) * 2.0 - 1
    expected = (problem.Z @ G).square().sum(0) - 2 * (whitened(problem.H, 0.5) * G).sum(0)
    torch.testing.assert_close(other.energy(G), expected)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_units_move_by_lr_within_the_clamp_and_idle_ones_stay(clamp):
    torch.manual_seed(0)
    weight = torch.rand(700, 300) - 0.5
    before, spins = weight.clone(), torch.randint(2, weight.shape) * 2.0 - 1
    idle = torch.rand(700) < 0.3
    move_(weight, spins, idle, 0.1, clamp)
    expected = before - 0.1 * spins
    expected = expected if clamp is None else expected.clamp(-clamp, clamp)
    assert torch.equal(weight, torch.where(idle[:, None], before, expected))


class Reads(TorchDispatchMode):
    """Counts what a device would have to wait for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = ("_local_scalar_dense", "nonzero", "masked_select", "item", "unique")
        if any(name in str(function) for name in names):
            self.count += 1
        return function(*args, **(kwargs or {}))


NETWORKS = {
    "mlp": (
        lambda: nn.Sequential(BinaryLinear(40, 50), nn.Hardtanh(), BinaryLinear(50, 4)),
        (30, 40),
    ),
    "convolutional": (
        lambda: nn.Sequential(
            BinaryConv2d(2, 6, 3, padding=1),
            nn.Hardtanh(),
            BinaryConv2d(6, 8, 3, groups=2),
            nn.Hardtanh(),
            nn.Flatten(),
            BinaryLinear(8 * 16, 4),
        ),
        (5, 2, 6, 6),
    ),
}


@pytest.mark.parametrize("whitening", [0.0, 0.125])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_reads_one_value_back_to_the_host(name, whitening, monkeypatch):
    """As on an accelerator: without numba, whose kernels run on the CPU."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    optimizer = QPSBGD(binary_parameters(model), whitening=whitening)
    read_backs = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: read_backs.append(self) or tolist(self))
    for _ in range(3):
        nn.functional.cross_entropy(model(torch.randn(shape)), torch.arange(shape[0]) % 4).backward()
        read_backs.clear()
        with Reads() as reads, computed_by(plain):
            optimizer.step()
        dropped = sum(layer.groups == 1 for layer in model if isinstance(layer, BinaryLayer))
        assert reads.count + len(read_backs) == 1 + dropped  # empty slots are dropped on a CPU alone


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_the_overlap_of_a_sample_that_is_everything_sums_all_products(rows):
    sample = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    padded = torch.cat([sample, torch.zeros(4, 5)])  # rows of zeros do not count
    products = padded @ padded.T
    expected = rows * products.square().sum() / products.trace() ** 2
    torch.testing.assert_close(overlap(products, torch.tensor(float(rows))), expected)
    torch.testing.assert_close(overlap(1e-9 * products, torch.tensor(float(rows))), expected)
    assert overlap(0 * products, torch.tensor(float(rows))) == 0


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_factor_has_as_many_rows_as_the_rank_whatever_the_scale(scale):
    rows = torch.randn(3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = scale * rows.T @ rows
    Z = factor(gram)
    assert len(Z) == 3
    torch.testing.assert_close(Z.T @ Z, gram, rtol=1e-9, atol=1e-9 * scale)
    assert factor(0 * gram).shape == (0, 9)
