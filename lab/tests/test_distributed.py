"""Benchmarks of training over several workers: the same bits in threads, in processes, and after a kill."""

import pytest
import torch
from workers import run_workers

from spingrad import binary_parameters
from spingrad._files import read_records
from spingrad.distributed import Wire
from spingrad_lab.bench import elastic, vote_accuracy


def digits(count):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 48, generator=generator)
    return x, (x @ torch.randn(48, 10, generator=generator)).argmax(1)


def weights(model):
    return {name: weight.detach().clone() for name, weight in binary_parameters(model)}


def same(states):
    return all(torch.equal(state[name], states[0][name]) for state in states for name in states[0])


SETTINGS = {"lr": 1e-2, "momentum": 0.9, "target_rms": 2}


def vote_in_processes(rank, size):
    model = vote_accuracy.network(3, (48, 100, 60, 10))
    vote_accuracy.train(model, Wire(), "vote", SETTINGS, digits(90), 30, 2, seed=3)
    return weights(model)


@pytest.mark.slow
def test_the_threads_of_the_benchmark_end_with_the_bits_of_real_processes(tmp_path):
    processes = run_workers(vote_in_processes, 3, tmp_path)
    models = [vote_accuracy.network(3, (48, 100, 60, 10)) for _ in range(3)]

    def work(wire):
        vote_accuracy.train(models[wire.rank], wire, "vote", SETTINGS, digits(90), 30, 2, seed=3)

    vote_accuracy.in_threads(3, work)
    assert same([weights(model) for model in models] + processes)


def test_threads_that_gather_take_the_same_steps():
    models = [vote_accuracy.network(3, (48, 100, 60, 10)) for _ in range(3)]

    def work(wire):
        vote_accuracy.train(models[wire.rank], wire, "gather", SETTINGS, digits(90), 30, 1, seed=3)

    vote_accuracy.in_threads(3, work)
    first = weights(vote_accuracy.network(3, (48, 100, 60, 10)))
    states = [weights(model) for model in models]
    assert same(states)
    assert not any(torch.equal(states[0][name], first[name]) for name in first)


def undisturbed(rank, size, folder):
    elastic.work(folder, -1, 0, 0.0)


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path, data_folder
):
    (tmp_path / "whole").mkdir()
    run_workers(undisturbed, 2, tmp_path, tmp_path / "whole")
    elastic.launch(tmp_path / "killed", 7, 1, 0.0, workers=2)
    assert (tmp_path / "killed" / "killed").exists()
    starts = read_records(tmp_path / "killed" / "starts")
    assert sorted(starts[2:]) == [[0, 5], [1, 5]]
    states = elastic.weights(tmp_path / "whole") + elastic.weights(tmp_path / "killed")
    assert len(states) == 4
    assert same(states)
