import itertools
import json

import pytest
import torch

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad.baselines import SignSGD
from spingrad_lab.bench import runtime
from spingrad_lab.paper import direction, rosenbrock
from spingrad_lab.runs import Lab, Line, read_lines, to_frame

# torch_geometric compiles a few functions with the deprecated torch.jit when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def quick_section(name, experiment, folder):
    """Plan and compute in this process, then show from the file alone."""
    lab = Lab(name, experiment, folder, quick=True, workers=0)
    experiment.plan(lab)
    lines = read_lines(lab.path)
    assert lines
    assert max(len(json.dumps(vars(line))) for line in lines) < 30_000
    section = experiment.show(to_frame(lines))
    assert section.notes
    for table in section.tables:
        assert table.rows
        assert all(len(row) == len(table.header) for row in table.rows)
    assert all("<svg" in figure.svg for figure in section.figures)
    return lines, section


def network_and_batch(scale, seed=0, rows=30):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = torch.nn.Sequential(
            BinaryLinear(6, 4, scale=scale), torch.nn.Hardtanh(), BinaryLinear(4, 2, scale=scale)
        )
        x, y = torch.randn(rows, 6), torch.randint(2, (rows,))
    return network, lambda model: torch.nn.functional.cross_entropy(model(x), y)


def test_direction_test_runs(data_folder, tmp_path):
    lines, section = quick_section("direction-test", direction.DIRECTION_TEST, tmp_path)
    table = section.tables[0]
    assert len(table.rows) == len(direction.variants()) + 2  # a random direction for each kind of layer
    for line in lines:
        same, total = line.metrics["all"]
        assert 0 <= same <= total <= 72 * 6
        assert line.metrics["live"][1] <= total
        if line.job["method"] == direction.SIGN_SGD:
            assert line.metrics["batch"][0] == line.metrics["batch"][1] > 0


@pytest.mark.parametrize("scale", [True, False])
def test_a_step_of_sign_sgd_agrees_with_its_own_gradient_everywhere(scale):
    network, loss = network_and_batch(scale)
    optimizer = SignSGD(binary_parameters(network), lr=3e-3)
    for _ in range(5):
        own = direction.gradients(network, loss)
        for move, gradient in zip(direction.movement(network, optimizer, loss), own, strict=True):
            assert set(move.unique().tolist()) <= {-1.0, 1.0}
            assert torch.equal(move[gradient != 0], gradient.sign()[gradient != 0])


@pytest.mark.parametrize("scale", [True, False])
def test_a_movement_is_the_binary_map_that_the_optimizer_solved_for(scale):
    network, loss = network_and_batch(scale)
    optimizer = QPSBGD.as_published(binary_parameters(network), lr=3e-3)
    solved = []
    solve_all = optimizer.solver.solve_all
    optimizer.solver.solve_all = lambda *args, **kwargs: solved.extend(solve_all(*args, **kwargs)) or solved
    moves = direction.movement(network, optimizer, loss)
    for move, solution in zip(moves, solved, strict=True):
        assert torch.equal(move, solution.spins.T)


def test_a_look_at_the_gradient_is_no_step():
    (plain, loss), (trained, _) = network_and_batch(True), network_and_batch(True)
    _optimizer = QPSBGD(binary_parameters(trained))
    loss(plain).backward()
    for found, weight in zip(direction.gradients(trained, loss), plain.parameters(), strict=True):
        torch.testing.assert_close(found, weight.grad)
    for weight in trained.parameters():
        assert weight.grad is None
        assert weight.companion.sketch is None


def test_a_run_in_which_every_direction_agrees_has_the_largest_z():
    line = Line({}, {"all": [400, 400]}, 0.0, {})
    assert direction.z_values(to_frame([line])) == [20.0]  # √n


def test_rosenbrock_runs(tmp_path):
    lines, section = quick_section("rosenbrock", rosenbrock.ROSENBROCK, tmp_path)
    reals, spins = section.tables
    assert len(reals.rows) == 3 * len(rosenbrock.RATES)
    assert len(spins.rows) == 3 * len(rosenbrock.SPIN_METHODS)
    for line in lines:
        assert line.metrics["best"] <= line.metrics["value"] <= rosenbrock.RUNAWAY


@pytest.mark.parametrize("d", [2, 3, 10])
def test_rosenbrock_jacobian_is_that_of_autograd(d):
    x = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    expected = torch.autograd.functional.jacobian(rosenbrock.residuals, x)
    torch.testing.assert_close(rosenbrock.residual_jacobian(x), expected)


def test_squared_residuals_are_scipys_rosenbrock_function():
    from scipy.optimize import rosen, rosen_der

    x = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y, J = rosenbrock.residuals(x), rosenbrock.residual_jacobian(x)
    assert float(y.square().sum()) == pytest.approx(rosen(x.numpy()))
    gradient = rosenbrock.mover(rosenbrock.SGD, 7)(y, J)
    torch.testing.assert_close(gradient, torch.from_numpy(rosen_der(x.numpy())))
    assert torch.equal(rosenbrock.mover(rosenbrock.SIGN_SGD, 7)(y, J), gradient.sign())


def test_the_published_move_is_the_best_of_all_spins():
    x = torch.tensor([-1.2, 1.0, 0.4, -0.3], dtype=torch.float64)
    y, J = rosenbrock.residuals(x), rosenbrock.residual_jacobian(x)
    Z = J / J.square().sum(1, keepdim=True)
    every = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=4)), dtype=torch.float64)
    best = every[(2 * y - every @ Z.T).square().sum(1).argmin()]
    assert torch.equal(rosenbrock.mover(rosenbrock.PUBLISHED, 4)(y, J), best)


def test_gradient_descent_that_runs_away_ends_at_the_cap():
    values = rosenbrock.descend(rosenbrock.SGD, torch.full((4,), 2.0, dtype=torch.float64), 1.0, steps=30)
    assert len(values) == 31
    assert values[-1] == rosenbrock.RUNAWAY


@pytest.mark.parametrize("method", [rosenbrock.OURS, rosenbrock.SGD])
def test_a_descent_that_starts_at_the_optimum_stays(method):
    values = rosenbrock.descend(method, torch.ones(3, dtype=torch.float64), 0.1, steps=5)
    assert values == [0.0] * 6


def test_runtime_runs(data_folder, tmp_path):
    lines, section = quick_section("runtime", runtime.RUNTIME, tmp_path)
    assert [row[0] for row in section.tables[0].rows] == list(runtime.TASKS)
    for line in lines:
        assert line.metrics["seconds"] > 0
        if line.job["stage"] == "train":
            assert 0 < line.metrics["timed_steps"] <= line.metrics["steps"]


def test_time_of_training_grows_with_the_number_of_steps():
    class Tiny:
        encoder_lr = 0.01

        def network(self):
            return torch.nn.Sequential(BinaryLinear(4, 2))

        def batches(self):
            x, y = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
            yield lambda model: torch.nn.functional.cross_entropy(model(x), y)

    settings = {"lr": 1e-3, "momentum": 0}
    few, many = (
        runtime.train_seconds(Tiny(), "BinaryConnect signSGD", settings, steps, 0) for steps in (5, 100)
    )
    assert 0 < few < many
