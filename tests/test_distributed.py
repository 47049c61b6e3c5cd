import pytest
import torch
from torch import nn
from workers import run_workers

from spinstep import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters, real_parameters
from spinstep.distributed import DistributedQPSBGD, data_parallel
from spinstep.distributed.bits import majority, pack, packed_size, unpack
from spinstep.solvers import BlockDescentSolver


def digits(count):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 48, generator=generator)
    return x, (x @ torch.randn(48, 10, generator=generator)).argmax(1)


def mlp(seed=0, widths=(48, 100, 60, 10)):
    torch.manual_seed(seed)
    layers = []
    for fan_in, fan_out in zip(widths, widths[1:], strict=False):
        layers += [BinaryLinear(fan_in, fan_out), nn.Hardtanh()]
    return nn.Sequential(*layers[:-1])


def weights(model):
    return {name: weight.detach().clone() for name, weight in binary_parameters(model)}


def same(states):
    return all(torch.equal(state[name], states[0][name]) for state in states for name in states[0])


def test_bits_are_the_spins_that_were_packed():
    for count in (1, 7, 8, 9, 1000):
        spins = torch.randint(2, (count,), generator=torch.Generator().manual_seed(count)) * 2.0 - 1
        assert len(pack(spins)) == packed_size(count)
        assert torch.equal(unpack(pack(spins), count), spins)


def test_a_majority_is_that_of_every_combination_of_votes_and_ties_are_even():
    votes = torch.cartesian_prod(*[torch.tensor([-1, 0, 1])] * 5).T.to(torch.int8)
    total = votes.sum(0)
    outcome = majority(votes, seed=3)
    assert torch.equal(outcome[total != 0], total.sign()[total != 0].to(torch.int8))
    ties = majority(torch.tensor([[1], [-1]]).expand(2, 10_000), seed=5).float()
    assert ties.abs().min() == 1
    assert abs(ties.mean()) < 0.05


def train_gather(rank, size, steps, micro):
    """The batch in micro-batches of a fixed size, whoever computes them."""
    model = mlp(seed=rank)  # the first worker's weights count
    optimizer = DistributedQPSBGD(binary_parameters(model), lr=1e-2, momentum=0.5, reduction="gather")
    x, y = digits(480)
    for step in range(steps):
        batch = torch.arange(48) + 48 * (step % 10)
        own = batch.tensor_split(size)[rank]
        optimizer.zero_grad()
        for rows in own.split(micro):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            (loss * len(rows) / len(own)).backward()
        optimizer.step()
    return weights(model)


def test_gather_gives_bit_identical_weights_on_1_2_and_4_workers_after_100_steps(tmp_path):
    states = [s for size in (1, 2, 4) for s in run_workers(train_gather, size, tmp_path, 100, 12)]
    assert same(states)


def test_gather_is_one_machine_with_the_whole_batch(tmp_path):
    (shared, _, _) = run_workers(train_gather, 3, tmp_path, 5, 48)
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model), lr=1e-2, momentum=0.5)
    x, y = digits(480)
    for step in range(5):
        batch = torch.arange(48) + 48 * (step % 10)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    for name, weight in weights(model).items():
        assert (weight - shared[name]).abs().lt(1e-6).float().mean() > 0.999  # near-ties may round otherwise


def vote_once(rank, size, momentum):
    model = mlp()
    optimizer = DistributedQPSBGD(binary_parameters(model), lr=1e-2, reduction="vote", momentum=momentum)
    x, y = digits(50)
    own = torch.arange(50).tensor_split(size)[rank]
    nn.functional.cross_entropy(model(x[own]), y[own]).backward()
    optimizer.step()
    return weights(model)


def test_vote_moves_every_weight_the_way_of_the_majority(tmp_path):
    states = run_workers(vote_once, 3, tmp_path, 0.0)
    assert same(states)
    x, y = digits(50)
    ballots = []
    for own in torch.arange(50).tensor_split(3):  # each worker alone
        model = mlp()
        optimizer = QPSBGD(binary_parameters(model), lr=1e-2)
        before = weights(model)
        nn.functional.cross_entropy(model(x[own]), y[own]).backward()
        optimizer.step()
        ballots.append({name: (before[name] - w).sign() for name, w in weights(model).items()})
    for name, start in weights(mlp()).items():
        expected = start - 1e-2 * sum(b[name] for b in ballots).sign()
        torch.testing.assert_close(states[0][name], expected)
