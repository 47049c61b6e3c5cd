"""Networks that people build, and the rivals of QP-SBGD on them."""

import numpy as np
import pytest
import torch
from torch import nn

import spingrad.sketch
from spingrad import BinaryLinear, BinaryQuadratic, binary_parameters
from spingrad.baselines import BinaryConnect
from spingrad.testing import check_solver
from spingrad_lab.beyond import held_out, networks
from spingrad_lab.data import spoken_digits
from spingrad_lab.rivals import FOOF, Muon, SignOfMuon, Windowed
from spingrad_lab.runs import Line, seeded, to_frame
from spingrad_lab.tasks.networks import ResNet, with_long_trials


@pytest.mark.parametrize("norm", ["none", "Gain", "BatchNorm"])
def test_a_residual_network_has_the_normalisation_asked_for(norm):
    task = ResNet.__new__(ResNet)  # without its data
    task.channels, task.normalisation = 4, norm
    model = task.network()
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    kinds = {type(module).__name__ for module in model.modules()}
    assert ("Gain" in kinds, "BatchNorm2d" in kinds) == (norm == "Gain", norm == "BatchNorm")


def tables_of(means):
    """What a contest shows of trials and six final runs of each method, whose mean accuracies are given."""

    def line(stage, method, seed, accuracy):
        job = {"stage": stage, "task": networks.FULLY.tasks[0], "method": method, "settings": {"lr": 1e-3}}
        return Line({**job, "seed": seed, "quick": False}, {"test_accuracy": accuracy}, 1.0, {})

    lines = [line("trial", method, 1000, mean) for method, mean in means.items()]
    for method, mean in means.items():
        lines += [line("final", method, seed, mean + 1e-4 * (seed % 3)) for seed in range(5)]
        lines += [line("final", method, 5, mean - 1e-4 * len(method))]
    return networks.FULLY.show(to_frame(lines)).tables


def test_the_table_says_who_is_ahead_after_correction():
    (table,) = tables_of({"QP-SBGD": 0.95, "Adam": 0.93, "signSGD": 0.9501, "Muon": 0.97})
    says = {row[0]: row[3] for row in table.rows}
    assert says == {"QP-SBGD": "–", "Adam": "**ahead**", "signSGD": "level", "Muon": "**behind**"}


def test_longer_trials_choose_among_the_best_rates():
    def line(stage, lr, seed, accuracy):
        job = {"stage": stage, "task": contest.tasks[0], "method": "QP-SBGD", "settings": {"lr": lr}}
        return Line({**job, "seed": seed, "quick": False}, {"test_accuracy": accuracy}, 1.0, {})

    contest = networks.FULLY
    short = {0.1: 0.50, 0.01: 0.51, 0.001: 0.52, 0.0001: 0.40}
    lines = [line("trial", lr, 1000, accuracy) for lr, accuracy in short.items()]
    lines += [line("final", lr, seed, 0.6 + lr) for lr in short for seed in range(2)]
    (row,) = contest.show(to_frame(lines)).tables[0].rows
    assert (row[1][:6], row[-2]) == ("0.6010", "lr 0.001")
    long = {0.1: 0.63, 0.01: 0.62, 0.001: 0.61, 0.0001: 0.99}  # the last was not among the best
    lines += [line("longer trial", lr, 1000, accuracy) for lr, accuracy in long.items()]
    (row,) = contest.show(to_frame(lines)).tables[0].rows
    assert (row[1][:6], row[-2]) == ("0.7000", "lr 0.1†")


def test_runs_can_be_shown_while_those_with_the_chosen_settings_are_not_finished():
    def line(stage, method, lr, seed, accuracy):
        job = {"stage": stage, "task": networks.FULLY.tasks[0], "method": method, "settings": {"lr": lr}}
        return Line({**job, "seed": seed, "quick": False}, {"test_accuracy": accuracy}, 1.0, {})

    names = ("QP-SBGD", networks.STRONGER, "Adam")
    lines = [line("trial", name, lr, 1000, 0.8 + lr) for name in names for lr in (0.01, 0.1)]
    lines += [line("final", name, 0.1, seed, 0.8) for name in names[1:] for seed in range(3)]
    lines += [line("final", "QP-SBGD", 0.01, seed, 0.8) for seed in range(3)]  # chosen by earlier trials
    (whitening,) = networks.FULLY.show(to_frame(lines)).tables
    assert whitening.rows[0][3:5] == ["no common seed, undecided", "+0.0000 ± 0.0000, Holm p = 1, level"]
    assert networks.FULLY.summary(to_frame(lines)) == []


def test_long_trials_hold_data_out_and_train_as_long_as_final_runs(data_folder):
    def made(kind, tuning):
        with seeded(0):
            return kind(0, tuning, quick=False)

    kind = networks.TASKS["CIFAR-10, residual"]
    final, trial, long = made(kind, False), made(kind, True), made(with_long_trials(kind), True)
    assert [(len(own.train[0]), own.epochs) for own in (final, trial, long)] == [
        (10_000, 6),
        (5_000, 2),
        (10_000, 6),
    ]
    assert torch.equal(long.train[0], final.train[0])
    assert torch.equal(long.test[0], trial.test[0])
    trained = {image.numpy().tobytes() for image in long.train[0]}
    assert not trained & {image.numpy().tobytes() for image in long.test[0]}


def test_whitening_is_judged_in_a_table_of_its_own():
    means = {"QP-SBGD": 0.95, "Adam": 0.93, "Muon": 0.97}
    table, whitening = tables_of({**means, networks.WHITENED: 0.96, networks.STRONGER: 0.94})
    (alone,) = tables_of(means)
    others = [row for row in table.rows if "whitening" not in row[0]]
    assert others == alone.rows  # the same family of tests
    weak, strong = whitening.rows
    assert "**ahead**" in weak[3]
    assert "**behind**" in weak[4]
    assert "**behind**" in strong[3]
    assert [row[1] for row in (weak, strong)] == ["whitening 0.125", "whitening 1"]
    assert weak[5] == strong[5] == "Muon"


@pytest.mark.parametrize("rows", [100, 300])
def test_a_larger_sample_has_all_rows_of_a_batch(rows):
    for make, most in ((networks.ENTRANTS["QP-SBGD"].make, 128), (held_out.AVERAGES.steps["512 rows"], 512)):
        layer = BinaryLinear(200, 40)
        step = make(binary_parameters(layer), seed=0, lr=0.01)
        layer(torch.randn(rows, 200)).square().mean().backward()
        assert layer.companion.sketch[0, :-1].any(1).sum() == min(rows, most)
        step.step()
    assert spingrad.sketch.SLOTS == 128


def test_foof_is_a_solver_that_rounds_the_minimum():
    check_solver(FOOF())
    Z, V = torch.randn(40, 6), torch.randn(40, 3)
    problem = BinaryQuadratic.least_squares(Z, V)
    spins = FOOF(damping=1e-6).solve(problem).spins
    assert torch.equal(spins, torch.linalg.lstsq(Z, V).solution.sign())


def gradients(model, optimizer, steps=3):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("shape", [(6, 4), (6, 9)])
def test_muon_is_torchs_up_to_the_rounding_of_bfloat16(shape):
    torch.manual_seed(0)
    ours = BinaryLinear(*shape)
    theirs = BinaryLinear(*shape)
    theirs.load_state_dict(ours.state_dict())
    own = gradients(ours, BinaryConnect(binary_parameters(ours), Muon, lr=1e-4))  # no spin flips
    torchs = BinaryConnect(binary_parameters(theirs), torch.optim.Muon, lr=1e-4, weight_decay=0)
    torch.testing.assert_close(own, gradients(theirs, torchs), rtol=0, atol=5e-6)


def test_muon_takes_the_kernels_of_a_convolution_as_rows():
    weight, flat = nn.Parameter(torch.zeros(4, 3, 2, 2)), nn.Parameter(torch.zeros(4, 12))
    weight.grad = torch.randn(4, 3, 2, 2)
    flat.grad = weight.grad.flatten(1)
    for parameter in (weight, flat):
        Muon([parameter], lr=0.1).step()
    assert torch.equal(weight.flatten(1), flat)


def test_the_sign_of_muon_moves_every_weight_by_the_learning_rate():
    layer = BinaryLinear(6, 4)
    before = layer.weight.detach().clone()
    after = gradients(layer, SignOfMuon(binary_parameters(layer), lr=0.01), steps=1)
    torch.testing.assert_close((after - before).abs(), torch.full((4, 6), 0.01))


def test_the_window_stops_the_gradient_of_weights_beyond_one():
    layer = BinaryLinear(6, 4)
    nn.init.constant_(layer.weight[:2].data, 1.5)
    before = layer.weight.detach().clone()
    after = gradients(layer, Windowed(binary_parameters(layer), lr=0.01), steps=1)
    assert torch.equal(after[:2], before[:2])
    assert not torch.equal(after[2:], before[2:])


def test_spoken_digits_have_the_published_counts(data_folder):
    recordings = spoken_digits()
    assert len(recordings) == 3_000
    assert np.bincount([recording.digit for recording in recordings]).tolist() == [300] * 10
    assert len({recording.speaker for recording in recordings}) == 6
    assert {recording.take for recording in recordings} == set(range(50))
    assert all(np.abs(recording.sound).max() <= 1 for recording in recordings)
