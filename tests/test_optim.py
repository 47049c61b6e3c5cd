import copy
import itertools
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from helpers import ONE_BATCH, posed
from torch import nn

from spingrad import QPSBGD, BinaryConv2d, BinaryConvTranspose2d, BinaryLinear, binary_parameters
from spingrad.nn.sign import spins_of
from spingrad.solvers import BlockDescentSolver, ExactSolver, SignSolver, Solution, Solver


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(BinaryLinear(6, 5), nn.Hardtanh(), BinaryLinear(5, 3))


def batch(rows=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator)


def backward(model, rows=8, seed=0):
    x, y = batch(rows, seed)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def weights_of(model):
    return [weight.detach().clone() for _, weight in binary_parameters(model)]


def noted(model):
    """Inputs and output gradients of the linear layers, of every backward pass from now on."""
    passes = {layer: [] for layer in model.modules() if isinstance(layer, BinaryLinear)}

    def note(layer, inputs, out):
        x = inputs[0].detach()
        out.register_hook(lambda grad: passes[layer].append((x, layer.scale * grad)))

    for layer in passes:
        layer.register_forward_hook(note)
    return list(passes.values())


def test_inputs_whose_squares_overflow_are_an_error_that_names_the_layer():
    model = small_model().double()
    optimizer = QPSBGD(binary_parameters(model), rank=None)
    before = weights_of(model)
    out = model[0](1e200 * batch()[0].double())
    (1e-200 * out).sum().backward()
    with pytest.raises(FloatingPointError, match="layer '0': squares of the layer's inputs overflow"):
        optimizer.step()
    assert all(torch.equal(own, old) for own, old in zip(weights_of(model), before, strict=True))


@pytest.mark.parametrize("size", [1e-20, 1e25])
def test_inputs_of_any_size_train_alike(size):
    for settings in ({}, {"rank": None}):
        moved = []
        for factor in (1.0, size):
            model = small_model()[0]
            optimizer = QPSBGD(binary_parameters(model), solver=SignSolver(), **settings)
            (model(factor * batch()[0]) / factor).tanh().sum().backward()
            optimizer.step()
            moved.append(model.weight.detach().clone())
        assert torch.equal(*moved)


def test_zero_grad_forgets_gradients_and_sketches_and_a_step_without_a_gradient_does_nothing():
    model = small_model()
    optimizer = QPSBGD(binary_parameters(model))
    before = weights_of(model)
    optimizer.step()
    backward(model)
    assert model[0].weight.grad.any()
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    assert model[0].companion.sketch is None
    optimizer.step()
    assert all(torch.equal(own, old) for own, old in zip(weights_of(model), before, strict=True))
    assert optimizer.run["step"] == 0


def test_a_step_uses_up_the_sketch_and_an_old_gradient_without_one_is_an_error():
    model = small_model()
    optimizer = QPSBGD(binary_parameters(model))
    backward(model)
    optimizer.step()
    assert model[0].companion.sketch is None
    before = weights_of(model)
    with pytest.raises(
        RuntimeError, match="layer '0': it has a gradient, but since the last step no backward pass"
    ):
        optimizer.step()
    assert all(torch.equal(own, old) for own, old in zip(weights_of(model), before, strict=True))


class Spy(Solver):
    """Hands on to the exact solver and remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def solve(self, problem, *, seed=0):
        self.calls.append((problem, seed))
        return ExactSolver().solve(problem, seed=seed)


def test_a_step_moves_every_weight_by_lr_against_the_projected_spins():
    model = small_model()
    before, passes = weights_of(model), noted(model)
    optimizer = QPSBGD(binary_parameters(model), lr=0.002, solver=ExactSolver(), **ONE_BATCH)
    backward(model)
    optimizer.step()
    for old, (_, new), [batch] in zip(before, binary_parameters(model), passes, strict=True):
        spins = ExactSolver().solve(posed(*batch)).spins.T
        torch.testing.assert_close(new.detach(), old - 0.002 * spins)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("factor", [1.0, 0.25, 3.0])
def test_as_published_solves_the_papers_problem(passes, factor):
    """By enumeration, over all rows of all passes; a factor of the gradient is one of the paper's target."""
    model = small_model()
    before, seen = weights_of(model), noted(model)
    optimizer = QPSBGD.as_published(binary_parameters(model), lr=3.0)
    for seed in range(passes):
        backward(model, seed=seed)
    for weight in model.parameters():
        weight.grad *= factor
    optimizer.step()
    for old, (_, new), batches in zip(before, binary_parameters(model), seen, strict=True):
        x, V = (torch.cat(own) for own in zip(*batches, strict=True))
        assert len(x) == 8 * passes
        Z = x / x.norm(dim=1, keepdim=True) ** 2
        every = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * x.shape[1])
        for unit, v in enumerate(V.T):
            best = every[(every @ Z.T - factor * v).square().sum(1).argmin()]
            torch.testing.assert_close(new.detach()[unit], old[unit] - 3.0 * best)  # and no clamp


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.grad.add_(w.detach(), alpha=0.1),
        lambda w: w.grad.clamp_(-1e-3, 1e-3),
        lambda w: w.grad[0].zero_(),
    ],
    ids=["penalty", "clipped by value", "masked"],
)
def test_as_published_a_gradient_may_only_be_multiplied(change):
    model = small_model()
    optimizer = QPSBGD.as_published(binary_parameters(model), lr=0.1)
    before = weights_of(model)
    backward(model)
    change(model[0].weight)
    with pytest.raises(RuntimeError, match="may only be multiplied by a number"):
        optimizer.step()
    assert all(torch.equal(own, old) for own, old in zip(weights_of(model), before, strict=True))


def test_without_a_rank_the_quadratic_term_is_that_of_all_rows_of_all_passes():
    model, solver = small_model(), Spy()
    seen = noted(model)
    optimizer = QPSBGD(binary_parameters(model), solver=solver, rank=None)
    for seed in range(3):
        backward(model, rows=100, seed=seed)
    optimizer.step()
    for (problem, _), batches in zip(solver.calls, seen, strict=True):
        x = torch.cat([x[grad.any(1)] for x, grad in batches])
        expected = x.T @ x * len(x) / x.shape[1] / x.square().sum()
        torch.testing.assert_close(problem.gram(), expected)


INVARIANT = {
    "mlp": (
        lambda: nn.Sequential(
            BinaryLinear(40, 30), nn.Hardtanh(), BinaryLinear(30, 20), nn.Hardtanh(), BinaryLinear(20, 5)
        ),
        (60, 40),
    ),
    "convolution": (
        lambda: nn.Sequential(
            BinaryConv2d(2, 8, 3), nn.Hardtanh(), BinaryConv2d(8, 6, 3, groups=2), nn.Flatten(),
            BinaryLinear(96, 5),
        ),
        (12, 2, 8, 8),
    ),
    "depthwise": (
        lambda: nn.Sequential(
            BinaryConv2d(8, 8, 3, groups=8), nn.Hardtanh(), nn.Flatten(), BinaryLinear(8 * 16, 5)
        ),
        (12, 8, 6, 6),
    ),
    "transposed": (
        lambda: nn.Sequential(
            BinaryConvTranspose2d(4, 6, 3, stride=2), nn.Hardtanh(), nn.Flatten(), BinaryLinear(6 * 81, 5)
        ),
        (12, 4, 4, 4),
    ),
    "small fan-in": (lambda: nn.Sequential(BinaryLinear(3, 40), nn.Hardtanh(), BinaryLinear(40, 5)), (60, 3)),
}  # fmt: skip
SETTINGS = {
    "default": {},
    "momentum 0": {"momentum": 0.0},
    "rank None": {"rank": None},
    "momentum 0, rank None": {"momentum": 0.0, "rank": None},
}


def moves(name, settings, factors):
    """The moves of three steps at fixed weights, each layer's gradient multiplied by a factor of its own."""
    make, shape = INVARIANT[name]
    torch.manual_seed(0)
    model = make()
    start = copy.deepcopy(model.state_dict())
    optimizer = QPSBGD(binary_parameters(model), **SETTINGS[settings])
    found = []
    for _ in range(3):
        nn.functional.cross_entropy(model(torch.randn(shape)), torch.arange(shape[0]) % 5).backward()
        for weight, factor in zip(model.parameters(), itertools.cycle(factors), strict=False):
            weight.grad *= factor
        optimizer.step()
        found += [(weight.detach() - start[key]).sign() for key, weight in model.named_parameters()]
        optimizer.zero_grad()
        model.load_state_dict(start)
    return found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", INVARIANT)
def test_a_factor_above_zero_changes_no_move(name, settings):
    expected = moves(name, settings, [1.0])
    assert all(own.any() for own in expected)
    for factors in ([1e-10], [1e-3], [1e10], [1e-10, 1e10, 0.3]):
        found = moves(name, settings, factors)
        assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True)), factors


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", INVARIANT)
def test_minus_one_turns_every_move(name, settings):
    for own, turned in zip(moves(name, settings, [1.0]), moves(name, settings, [-1.0]), strict=True):
        assert torch.equal(own == 0, turned == 0)  # idle units
        assert (own == -turned).float().mean() > 0.999  # where two spins are as good, zero counts as +1


def test_a_very_large_target_gives_the_sign_of_the_gradient_bit_for_bit():
    model = small_model()
    twin = copy.deepcopy(model)
    QP = QPSBGD(binary_parameters(model), **{**ONE_BATCH, "target_rms": 1e9})
    sign = QPSBGD(binary_parameters(twin), solver=SignSolver(), **ONE_BATCH)
    for step in range(5):
        for net, optimizer in ((model, QP), (twin, sign)):
            backward(net, seed=step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model), weights_of(twin), strict=True))


@pytest.mark.parametrize("lr", [1e-3, 0.3, 7.0])
def test_the_fixed_point_theorem(lr):
    """A point with -Π = s keeps its signs under any positive lr; a point without leaves."""
    torch.manual_seed(1)
    x = torch.randn(40, 4)
    teacher = torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    target = 10 * x @ teacher.T  # every spin should grow without end

    def run(start, steps):
        layer = BinaryLinear(4, 1, scale=False)
        layer.weight.data.copy_(start)
        optimizer = QPSBGD.as_published(binary_parameters(layer), lr=lr)
        [passes] = noted(layer)
        signs = []
        for _ in range(steps):
            (0.5 * (layer(x) - target).square().sum()).backward()
            problem = posed(*passes[-1], rows="normalized", target_rms=None)
            projected = ExactSolver().solve(problem).spins.T
            optimizer.step()
            optimizer.zero_grad()
            signs.append((projected, spins_of(layer.weight.detach())))
        return signs

    for projected, signs in run(teacher * 0.5, 20):
        assert torch.equal(-projected, teacher)
        assert torch.equal(signs, teacher)
    stranger = teacher * torch.tensor([[1.0, 1.0, -1.0, 1.0]])
    path = run(stranger * 0.5 * lr, 20)
    assert not torch.equal(-path[0][0], stranger)
    assert torch.equal(path[-1][1], teacher)


def test_all_layers_reach_the_solver_together_with_seeds_of_their_own():
    class Together(Spy):
        def solve_all(self, problems, *, seed=0):
            self.batches = [*getattr(self, "batches", []), len(problems)]
            return super().solve_all(problems, seed=seed)

    solver = Together()
    model = nn.Sequential(BinaryConv2d(2, 4, 2, groups=2), nn.Hardtanh(), nn.Flatten(), BinaryLinear(16, 3))
    optimizer = QPSBGD(binary_parameters(model), solver=solver, seed=5)
    for _ in range(2):
        model(torch.randn(4, 2, 3, 3)).square().sum().backward()
        optimizer.step()
    assert solver.batches == [3, 3]  # two groups of the convolution, one linear layer
    assert len({seed for _, seed in solver.calls}) == 6


def test_grouped_convolutions_update_the_weights_of_their_group():
    torch.manual_seed(0)
    layer, solver = BinaryConv2d(4, 6, 2, groups=2), Spy()
    before = layer.weight.detach().clone()
    optimizer = QPSBGD(binary_parameters(layer), lr=0.01, solver=solver)
    layer(torch.randn(3, 4, 4, 4)).square().sum().backward()
    grad = layer.weight.grad.flatten(1)
    optimizer.step()
    for group, (problem, _) in enumerate(solver.calls):
        part = slice(3 * group, 3 * group + 3)
        angle = torch.nn.functional.cosine_similarity(problem.H.T, grad[part])
        torch.testing.assert_close(angle, torch.ones(3))
        spins = ExactSolver().solve(problem).spins
        expected = before[part] - 0.01 * spins.T.view(3, 2, 2, 2)
        torch.testing.assert_close(layer.weight.detach()[part], expected)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_step_moves_every_weight_of_a_convolution_whatever_its_memory_format(groups, memory_format):
    moved = []
    for layout in (torch.contiguous_format, memory_format):
        torch.manual_seed(0)
        layer = BinaryConv2d(6, 8, 3, padding=1, groups=groups)
        layer.weight.data = layer.weight.data.to(memory_format=layout)
        optimizer = QPSBGD(binary_parameters(layer), lr=0.01, rank=None)
        before = layer.weight.detach().clone()
        layer(torch.randn(4, 6, 9, 9)).square().sum().backward()
        optimizer.step()
        moved.append((layer.weight.detach() - before) / 0.01)
        torch.testing.assert_close(moved[-1].abs(), torch.ones_like(before), rtol=1e-3, atol=1e-3)
    assert (moved[0].sign() == moved[1].sign()).float().mean() > 0.99  # orders of sums differ


def test_accumulated_batches_equal_one_large_batch():
    """With the exact Gram matrix: rows of passes have signs of their own, and other orders of sums."""
    x, y = batch(12)
    results = []
    for chunks in (1, 3):
        model = small_model()
        optimizer = QPSBGD(binary_parameters(model), rank=None, solver=ExactSolver())
        for part, labels in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
            (nn.functional.cross_entropy(model(part), labels) / chunks).backward()
        optimizer.step()
        results.append(weights_of(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_units_without_a_gradient_rest_and_as_published_moves_them():
    for published in (False, True):
        layer = BinaryLinear(4, 2)
        before = layer.weight.detach().clone()
        params = binary_parameters(layer)
        optimizer = QPSBGD.as_published(params, lr=0.1) if published else QPSBGD(params, lr=0.1)
        layer(torch.randn(5, 4))[:, 0].sum().backward()
        optimizer.step()
        moved = (layer.weight.detach() - before).abs() > 0.05
        assert moved[0].all()
        assert moved[1].all() == published


def test_parameter_groups_have_settings_of_their_own():
    model = small_model()
    first, second = binary_parameters(model)
    before = weights_of(model)
    optimizer = QPSBGD(
        [{"params": [first], "lr": 0.5, "clamp": 0.25}, {"params": [second], "target_rms": 3.0}], lr=0.001
    )
    backward(model)
    optimizer.step()
    assert first[1].abs().max() == 0.25
    torch.testing.assert_close((second[1] - before[1]).abs(), torch.full((3, 5), 0.001))


def test_momentum_averages_only_the_linear_term_and_looks_ahead():
    model = small_model()
    solver, passes = Spy(), noted(model)
    optimizer = QPSBGD(binary_parameters(model), solver=solver, **{**ONE_BATCH, "momentum": 0.75})
    expected = [0, 0]
    for step in range(4):
        backward(model, seed=step)
        optimizer.step()
        optimizer.zero_grad()
        for i, batches in enumerate(passes):
            own = posed(*batches[-1])
            expected[i] = 0.75 * expected[i] + 0.25 * own.H
            sent = solver.calls[2 * step + i][0]
            torch.testing.assert_close(sent.gram(), own.gram())
            average = expected[i] / (1 - 0.75 ** (step + 1))
            torch.testing.assert_close(sent.H, 0.75 * average + 0.25 * own.H)


def test_a_solver_may_keep_the_problems_it_was_given():
    """The optimizer reuses the memory of old averages, but not if somebody still looks at them."""
    torch.manual_seed(0)
    model, solver, copies = BinaryLinear(40, 36), Spy(), []

    def solve(problem, *, seed=0):
        solver.calls.append(problem.H[:, 3])
        copies.append(problem.H[:, 3].clone())
        return BlockDescentSolver().solve(problem)

    solver.solve = solve
    optimizer = QPSBGD(binary_parameters(model), solver=solver)
    for _ in range(6):
        model(torch.randn(20, 40)).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(kept, copy) for kept, copy in zip(solver.calls, copies, strict=True))


def test_old_averages_are_the_memory_of_new_ones():
    model = BinaryLinear(40, 36)
    optimizer = QPSBGD(binary_parameters(model))
    places = []
    for _ in range(6):
        model(torch.randn(20, 40)).square().mean().backward()
        optimizer.step()
        places.append(optimizer.state[model.weight]["exp_avg"].data_ptr())
    assert places[2:] == places[:2] * 2


@pytest.mark.slow
def test_by_default_the_quadratic_term_keeps_the_directions_that_lead():
    torch.manual_seed(0)
    model, solver = BinaryLinear(40, 3), Spy()
    solver.solve = lambda problem, *, seed=0: (
        solver.calls.append(problem) or BlockDescentSolver().solve(problem)
    )
    optimizer = QPSBGD(binary_parameters(model), solver=solver)
    x = torch.randn(64, 3) @ torch.randn(3, 40) + 0.1 * torch.randn(64, 40)  # three directions and noise
    [passes] = noted(model)
    model(x).square().mean().backward()
    whole = posed(*passes[0], target_rms="auto")
    optimizer.step()
    (sent,) = solver.calls
    assert sent.Z.shape == (16, 40)
    torch.testing.assert_close(sent.H, whole.H)
    lost = (sent.gram() - whole.gram()).norm() / whole.gram().norm()
    assert 0 < lost < 0.05


def test_a_step_that_fails_can_be_taken_again():
    class Flaky(Spy):
        fails = True

        def solve_all(self, problems, *, seed=0):
            if self.fails:
                raise ConnectionError("the annealer is away")
            return super().solve_all(problems, seed=seed)

    results = []
    for disturbed in (False, True):
        model, solver = small_model(), Flaky()
        optimizer = QPSBGD(binary_parameters(model), solver=solver, momentum=0.9)
        for step in range(3):
            backward(model, seed=step)
            solver.fails = disturbed
            if disturbed:
                with pytest.raises(ConnectionError):
                    optimizer.step()
            solver.fails = False
            optimizer.step()
        results.append(weights_of(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_schedulers_and_closures_work_as_with_any_optimizer():
    model = small_model()
    optimizer = QPSBGD(binary_parameters(model), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    def closure():
        optimizer.zero_grad()
        return backward(model)

    losses = []
    for _ in range(10):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0)
    assert losses[-1] < losses[0]


def test_a_model_and_its_optimizer_can_be_copied_together():
    model = small_model()
    optimizer = QPSBGD(binary_parameters(model), solver=ExactSolver(), seed=3)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for net, opt in ((model, optimizer), (twin, twin_optimizer)):
        backward(net, seed=9)
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model), weights_of(twin), strict=True))
    assert twin_optimizer.param_groups[0]["params"][0] is twin[0].weight


CONTINUE = """
    import sys
    import torch
    from torch import nn
    from spingrad import QPSBGD, BinaryLinear, binary_parameters
    from spingrad.solvers import BlockDescentSolver

    def run(model, optimizer, scheduler, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    def setup():
        torch.manual_seed(0)
        model = nn.Sequential(BinaryLinear(6, 80), nn.Hardtanh(), BinaryLinear(80, 3))
        solver = BlockDescentSolver(num_reads=4)  # random starts: the seeds matter
        optimizer = QPSBGD(binary_parameters(model), lr=0.01, solver=solver, momentum=0.9, seed=11)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        return model, optimizer, scheduler

    if __name__ == "__main__":
        parts = setup()
        for part, state in zip(parts, torch.load(sys.argv[1], weights_only=True)):
            part.load_state_dict(state)
        run(*parts, range(20, 40))
        torch.save(parts[0].state_dict(), sys.argv[2])
"""


@pytest.mark.slow
def test_twenty_steps_after_a_checkpoint_in_a_new_process_are_the_same_bit_for_bit(tmp_path):
    script = tmp_path / "resume.py"
    script.write_text(textwrap.dedent(CONTINUE))
    scope = {"__name__": "resume"}
    exec(textwrap.dedent(CONTINUE), scope)
    parts = scope["setup"]()
    scope["run"](*parts, range(20))
    torch.save([copy.deepcopy(part.state_dict()) for part in parts], tmp_path / "checkpoint.pt")
    scope["run"](*parts, range(20, 40))
    subprocess.run([sys.executable, script, tmp_path / "checkpoint.pt", tmp_path / "resumed.pt"], check=True)
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    for name, weight in parts[0].state_dict().items():
        assert torch.equal(weight, resumed[name]), name


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda m: m[0].weight.grad.fill_(1.0), RuntimeError, "layer '0': it has a gradient, but"),
        (lambda m: (m(batch()[0]).sum() * torch.nan).backward(), FloatingPointError, "layer '0'.*not finite"),
    ],
)
def test_a_bad_gradient_names_the_layer_and_moves_nothing(spoil, error, message):
    model = small_model()
    optimizer = QPSBGD(binary_parameters(model))
    before = weights_of(model)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    spoil(model)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model), before, strict=True))


def test_a_layer_in_evaluation_trains_as_it_does_in_training():
    results = []
    for mode in (True, False):
        model = small_model().train(mode)
        optimizer = QPSBGD(binary_parameters(model))
        backward(model)
        optimizer.step()
        results.append(weights_of(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_empty_batch_moves_nothing():
    model = small_model()
    optimizer = QPSBGD(binary_parameters(model))
    before = weights_of(model)
    model(torch.zeros(0, 6)).sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model), before, strict=True))


def test_skipping_leaves_the_weights_and_counts():
    model = small_model()
    optimizer = QPSBGD(binary_parameters(model), on_nonfinite="skip")
    before = weights_of(model)
    (model(batch()[0]).sum() * torch.inf).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model), before, strict=True))
    assert optimizer.run["skipped"] == 1
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert optimizer.run["skipped"] == 1
    assert not torch.equal(weights_of(model)[0], before[0])


def test_without_names_the_error_gives_index_and_shape():
    model = small_model()
    optimizer = QPSBGD([weight for _, weight in binary_parameters(model)])
    backward(model)
    model[0].companion.clear()
    with pytest.raises(RuntimeError, match=r"layer 0 \(weight of shape \(5, 6\)\)"):
        optimizer.step()


def test_frozen_weights_rest():
    model = small_model()
    optimizer = QPSBGD(binary_parameters(model))
    model[0].weight.requires_grad_(False)
    before = weights_of(model)
    backward(model)
    optimizer.step()
    after = weights_of(model)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_latent_weights_in_half_precision_are_refused_whenever_they_appear():
    model = small_model()
    optimizer = QPSBGD(binary_parameters(model))
    model[0].weight.data = model[0].weight.data.bfloat16()
    with pytest.raises(TypeError, match=r"layer '0': the latent weight is torch.bfloat16"):
        optimizer.step()
    with pytest.raises(TypeError, match=r"layer '0': the latent weight is torch.bfloat16"):
        QPSBGD(binary_parameters(model))


def test_double_precision_trains_in_double_precision():
    model = small_model().double()
    optimizer = QPSBGD(binary_parameters(model), solver=BlockDescentSolver(num_sweeps=2))
    x, y = batch()
    nn.functional.cross_entropy(model(x.double()), y).backward()
    optimizer.step()
    assert model[0].weight.dtype == torch.float64


def test_wrong_arguments_are_explained():
    params = binary_parameters(small_model())
    with pytest.raises(ValueError, match=r"lr is a number of at least 0 and below .*, got -1"):
        QPSBGD(params, lr=-1)
    with pytest.raises(ValueError, match="seed belongs to the run"):
        QPSBGD([{"params": params, "seed": 1}])
    with pytest.raises(ValueError, match=r"momentum is in \[0, 1\), got 1"):
        QPSBGD(params, momentum=1)
    with pytest.raises(ValueError, match='target_rms is a positive finite number, "auto" or None, got 0'):
        QPSBGD(params, target_rms=0)
    with pytest.raises(ValueError, match="rank is a whole number of at least 1 or None, got 0"):
        QPSBGD(params, rank=0)
    with pytest.raises(ValueError, match='"uniform" or "normalized", got \'equal\''):
        QPSBGD(params, rows="equal")
    with pytest.raises(ValueError, match='"raise" or "skip", got \'ignore\''):
        QPSBGD(params, on_nonfinite="ignore")
    with pytest.raises(ValueError, match="'momentun' is no setting of a group of parameters"):
        QPSBGD([{"params": params, "momentun": 0.5}])
    with pytest.raises(
        ValueError, match=r"this weight is not tied to a binary layer\. Pass binary_parameters"
    ):
        QPSBGD([BinaryLinear(4, 2).weight])


def test_any_solver_of_an_outside_author_will_do():
    class AlwaysUp(Solver):
        def solve(self, problem, *, seed=0):
            return Solution(problem, torch.ones(problem.num_spins, problem.num_units))

    model = small_model()
    before = weights_of(model)
    optimizer = QPSBGD(binary_parameters(model), lr=0.002, solver=AlwaysUp())
    backward(model)
    optimizer.step()
    for old, new in zip(before, weights_of(model), strict=True):
        torch.testing.assert_close(new, old - 0.002)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_spins_of_an_outside_solver_may_have_another_dtype(dtype):
    class Signs(Solver):
        def solve(self, problem, *, seed=0):
            return Solution(problem, SignSolver().solve(problem).spins.to(dtype))

    moved = []
    for solver in (Signs(), SignSolver()):
        model = small_model()
        optimizer = QPSBGD(binary_parameters(model), lr=0.01, solver=solver)
        backward(model)
        optimizer.step()
        moved.append(weights_of(model))
    assert all(torch.equal(own, other) for own, other in zip(*moved, strict=True))


def test_numbers_of_numpy_as_settings_are_saved_as_pythons(tmp_path):
    model = small_model()
    numbers = {"lr": np.logspace(-3, -1, 3)[1], "rank": np.int64(4), "momentum": np.float32(0.5)}
    optimizer = QPSBGD(binary_parameters(model), seed=np.int64(3), **numbers)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["param_groups"][0]["run"]["seed"] == 3
    group = state["param_groups"][0]
    assert {name: group[name] for name in numbers} == pytest.approx({"lr": 0.01, "rank": 4, "momentum": 0.5})


def test_a_state_that_the_solver_refuses_changes_nothing():
    class Refuses(BlockDescentSolver):
        def state_dict(self):
            return {"spent": 1}

        def load_state_dict(self, state):
            raise LookupError("not mine")

    model = small_model()
    optimizer = QPSBGD(binary_parameters(model), lr=0.1, solver=Refuses())
    saved = copy.deepcopy(optimizer.state_dict())
    backward(model)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(LookupError, match="not mine"):
        optimizer.load_state_dict(saved)
    assert optimizer.run["step"] == 1
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.state[model[0].weight]["step"] == 1


def test_a_state_of_other_groups_is_an_error_that_names_both():
    model = small_model()
    optimizer = QPSBGD(binary_parameters(model), lr=0.1)
    other = QPSBGD([model[0].weight], lr=0.1)
    with pytest.raises(ValueError, match=r"as many weights as in this optimizer, \[2\], got \[1\]"):
        optimizer.load_state_dict(other.state_dict())


def test_two_matrices_are_all_the_method_needs():
    """The binary map without a model: the heart of the step as a pure function."""
    problem = posed(torch.eye(3), torch.tensor([[0.2], [-0.1], [0.4]]))
    assert ExactSolver().solve(problem).spins.T.tolist() == [[1.0, -1.0, 1.0]]


@pytest.mark.parametrize("size", [1e-10, 1.0, 1e10])
def test_gradients_may_be_clipped_and_scaled(size):
    expected, clipped = (BinaryLinear(12, 5) for _ in range(2))
    clipped.load_state_dict(expected.state_dict())
    optimizers = [QPSBGD(binary_parameters(model)) for model in (expected, clipped)]
    for seed in range(3):
        x = torch.randn(20, 12, generator=torch.Generator().manual_seed(seed))
        for model, optimizer in zip((expected, clipped), optimizers, strict=True):
            optimizer.zero_grad()
            (size * model(x).square().mean()).backward()
            if model is clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 * size)
            optimizer.step()
        assert torch.equal(clipped.weight, expected.weight)
