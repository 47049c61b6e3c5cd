import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from workers import run_workers

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters, real_parameters
from spingrad.distributed import DistributedQPSBGD, data_parallel
from spingrad.distributed.agreement import Agreement
from spingrad.distributed.bits import majority, pack, packed_size, unpack
from spingrad.distributed.gather import Gather
from spingrad.distributed.vote import Vote
from spingrad.distributed.wire import Wire, _in_time
from spingrad.nn.sign import spins_of
from spingrad.solvers import BlockDescentSolver, SignSolver, Solution
from spingrad.testing import random_problem


def digits(count):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 48, generator=generator)
    return x, (x @ torch.randn(48, 10, generator=generator)).argmax(1)


def mlp(seed=0, widths=(48, 100, 60, 10)):
    torch.manual_seed(seed)
    layers = []
    for fan_in, fan_out in itertools.pairwise(widths):
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


def train_gather(rank, size, steps, micro, whitening):
    """The batch in micro-batches of a fixed size, whoever computes them."""
    model = mlp(seed=rank)  # the first worker's weights count
    settings = {"lr": 1e-2, "momentum": 0.5, "whitening": whitening, "reduction": "gather"}
    optimizer = DistributedQPSBGD(binary_parameters(model), **settings)
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


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("whitening", [0.0, 0.125])
def test_gather_gives_bit_identical_weights_on_1_2_and_4_workers(steps, whitening, tmp_path):
    settings = (steps, 12, whitening)
    states = [s for size in (1, 2, 4) for s in run_workers(train_gather, size, tmp_path, *settings)]
    assert same(states)


@pytest.mark.slow
@pytest.mark.parametrize("whitening", [0.0, 0.125])
def test_gather_is_one_machine_with_the_whole_batch(whitening, tmp_path):
    (shared, _, _) = run_workers(train_gather, 3, tmp_path, 5, 48, whitening)
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model), lr=1e-2, momentum=0.5, whitening=whitening)
    x, y = digits(480)
    for step in range(5):
        batch = torch.arange(48) + 48 * (step % 10)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    for name, weight in weights(model).items():
        assert (weight - shared[name]).abs().lt(1e-6).float().mean() > 0.999  # near-ties may round otherwise


def vote_once(rank, size, momentum, known=None):
    model = mlp()
    optimizer = DistributedQPSBGD(binary_parameters(model), lr=1e-2, reduction="vote", momentum=momentum)
    if known:
        trusted = optimizer.reduction.agreement
        trusted.agreement, trusted.looks = torch.tensor(known), [9] * size
    x, y = digits(50)
    own = torch.arange(50).tensor_split(size)[rank]
    nn.functional.cross_entropy(model(x[own]), y[own]).backward()
    optimizer.step()
    return weights(model)


@pytest.mark.parametrize("known", [None, [0.8, 0.3, 0.8, 0.8]])
def test_vote_moves_every_weight_the_way_of_the_majority_that_is_trusted(tmp_path, known):
    size = 4 if known else 3
    states = run_workers(vote_once, size, tmp_path, 0.0, known)
    assert same(states)
    x, y = digits(50)
    ballots = []
    for rank, own in enumerate(torch.arange(50).tensor_split(size)):  # each worker alone
        if known and known[rank] < 0.5:
            continue
        model = mlp()
        optimizer = QPSBGD(binary_parameters(model), lr=1e-2, momentum=0.0)
        before = weights(model)
        nn.functional.cross_entropy(model(x[own]), y[own]).backward()
        optimizer.step()
        ballots.append({name: (before[name] - w).sign() for name, w in weights(model).items()})
    for name, start in weights(mlp()).items():
        expected = start - 1e-2 * sum(b[name] for b in ballots).sign()
        torch.testing.assert_close(states[0][name], expected)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = BinaryConv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = BinaryConv2d(6, 8, 3, stride=2, groups=2)
        self.head = BinaryLinear(8 * 9, 10)

    def forward(self, x):
        x = nn.functional.hardtanh(self.norm(self.first(x)))
        return self.head(nn.functional.hardtanh(self.second(x)).flatten(1))


def train_uneven(rank, size, reduction):
    """Convolutions, groups, BatchNorm under DDP, accumulation, and a last batch with no row for a worker."""
    torch.manual_seed(rank)
    model = Convolutional()
    optimizer = DistributedQPSBGD(binary_parameters(model), lr=1e-2, reduction=reduction, momentum=0.5)
    replica = data_parallel(model)
    adam = torch.optim.Adam(real_parameters(model), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(11, 1, 8, 8, generator=generator), torch.randint(10, (11,), generator=generator)
    for batches in ((torch.arange(7), torch.arange(7, 11)), (torch.arange(2), torch.arange(2, 4))):
        optimizer.zero_grad()
        adam.zero_grad()
        for batch in batches:  # accumulated
            own = batch.tensor_split(size)[rank]
            replica.train(len(own) > 0)  # BatchNorm has no statistics of nothing
            model.first.train(), model.second.train(), model.head.train()
            loss = nn.functional.cross_entropy(replica(x[own]), y[own], reduction="sum")
            (loss / max(1, len(own))).backward()
        optimizer.step()
        adam.step()
    own = weights(model) | {"norm": model.norm.weight.detach()}
    assert all(weight.grad is None for _, weight in binary_parameters(model))
    return own


def average_of_one_step(rank, size):
    """The average of gradients after one step, in which each worker has a share of another size."""
    torch.manual_seed(0)
    layer, x = BinaryLinear(6, 4), torch.randn(12, 6)
    one = QPSBGD if size == 1 else DistributedQPSBGD
    optimizer = one(binary_parameters(layer))
    own = x.split([12] if size == 1 else [3, 9])[rank]
    layer(own).square().mean().backward()
    optimizer.step()
    return optimizer.state[layer.weight]["exp_avg"]


def test_a_gradient_weighs_as_much_as_its_worker_has_rows(tmp_path):
    averages = run_workers(average_of_one_step, 2, tmp_path)
    for average in averages:
        torch.testing.assert_close(average, average_of_one_step(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["gather", "vote"])
def test_workers_stay_equal_with_ddp_uneven_batches_and_accumulation(tmp_path, reduction):
    states = run_workers(train_uneven, 3, tmp_path, reduction)
    assert same(states)
    torch.manual_seed(0)
    start = Convolutional()
    for name, weight in weights(start).items():
        assert not torch.equal(weight, states[0][name])
    assert not torch.equal(start.norm.weight, states[0]["norm"])


def ask_for_trouble(rank, size, reduction, trouble):
    """What each worker is told when one of them has no record, or not a number."""
    model = mlp()
    optimizer = DistributedQPSBGD(binary_parameters(model), reduction=reduction)
    x, y = digits(12)
    if trouble == "nan" and rank == 1:
        x[4] = torch.nan
    try:
        if not (trouble == "no backward pass" and rank == 1):
            own = slice(4 * rank, 4 * rank + 4)
            nn.functional.cross_entropy(model(x[own]), y[own]).backward()
        optimizer.step()
    except (RuntimeError, FloatingPointError) as error:
        return {"error": str(error), "moved": not same([weights(model), weights(mlp())])}
    return {"error": "", "moved": True}


@pytest.mark.parametrize("reduction", ["gather", "vote"])
@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        ("nan", "rank 1: layer '0': the layer's input or output gradient is not finite"),
        ("no backward pass", "a record on rank 1"),
    ],
)
def test_trouble_on_one_worker_is_an_error_on_all_and_moves_nothing(tmp_path, reduction, trouble, expected):
    for told in run_workers(ask_for_trouble, 2, tmp_path, reduction, trouble):
        assert expected in told["error"]
        assert not told["moved"]


def test_a_unit_without_gradient_anywhere_rests_and_one_with_gradient_somewhere_moves(tmp_path):
    start, state = weights(mlp())["4.weight"], run_workers(vote_on_some_units, 3, tmp_path)[0]["4.weight"]
    moved = (start != state).all(1)
    assert moved.tolist() == [True, False, True] + [False] * 7


def vote_on_some_units(rank, size):
    model = mlp()
    optimizer = DistributedQPSBGD(binary_parameters(model), reduction="vote")
    x, _ = digits(12)
    out = model(x[4 * rank : 4 * rank + 4])
    (out[:, 0] if rank else out[:, 0] + out[:, 2]).square().sum().backward()
    optimizer.step()
    return weights(model)


class Liar(BlockDescentSolver):
    def __repr__(self):
        return repr(BlockDescentSolver())  # when ranks compare their solvers


class Inverted(Liar):
    """An adversary: the opposite of what its rows ask for."""

    def solve(self, problem, *, seed=0):
        return Solution(problem, -super().solve(problem, seed=seed).spins)


class Random(Liar):
    """An adversary: noise."""

    def solve(self, problem, *, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return Solution(problem, torch.randint(2, problem.H.shape, generator=generator) * 2.0 - 1)


def train_among_liars(rank, size, liars):
    model = mlp()
    solver = liars.get(rank, BlockDescentSolver)()
    optimizer = DistributedQPSBGD(binary_parameters(model), lr=1e-2, reduction="vote", solver=solver)
    x, y = digits(500)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(40):
            own = torch.arange(500).roll(100 * step).tensor_split(size)[rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[own]), y[own]).backward()
            optimizer.step()
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    told = [str(w.message) for w in caught if w.category is RuntimeWarning]
    return {"suspects": optimizer.suspects, "accuracy": accuracy, "told": told, **weights(model)}


@pytest.mark.slow
@pytest.mark.parametrize("liar", [Inverted, Random])
def test_a_liar_is_outvoted_and_reported_once_and_nobody_else_is(tmp_path, liar):
    states = run_workers(train_among_liars, 5, tmp_path, {3: liar})
    told = [state.pop("told") for state in states]
    assert [len(messages) for messages in told] == [1, 0, 0, 0, 0], told
    assert "worker 3" in told[0][0]
    for state in states:
        assert state.pop("suspects") == [3]
        assert state.pop("accuracy") > 0.6
    assert same(states)


def test_a_resumed_vote_knows_whose_votes_do_not_count():
    def examine(ranks, count):
        for _ in range(count):
            ranks.update(torch.full((3,), 0.5 if ranks.next == 1 else 0.9))
        return ranks.state_dict()

    ranks, resumed = Agreement(3, report=False), Agreement(3, report=False)
    resumed.load_state_dict(examine(ranks, 17))
    assert (resumed.suspects(), resumed.next) == ([1], 2)
    assert str(examine(ranks, 5)) == str(examine(resumed, 5))
    other = Agreement(4, report=False)
    other.load_state_dict(ranks.state_dict())
    assert other.suspects() == []


class Thread(Wire):
    """A worker that is a thread of this process."""

    def __init__(self, rank=0, size=1, shared=None, barrier=None):
        self.rank, self.size, self.sent = rank, size, 0
        self.shared, self.barrier = shared or [None], barrier or threading.Barrier(1)

    def together(self, own):
        self.shared[self.rank] = own
        self.barrier.wait(60)
        parts = [part.clone() for part in self.shared]
        self.barrier.wait(60)
        return parts

    def all_gather(self, part):
        return torch.stack(self.together(part))

    def all_to_all(self, parts):
        return torch.stack([part[self.rank] for part in self.together(parts)])

    def broadcast_(self, tensor):
        tensor.copy_(self.together(tensor)[0])


def in_threads(size, work):
    """What ``work(wire)`` returns in each of several threads."""
    shared, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Thread(rank, size, shared, barrier)), range(size)))


@pytest.mark.parametrize("size", [1, 3])
def test_workers_that_gather_get_the_spins_of_one_machine(size):
    problems = [random_problem(5, 9, 130, seed=0), random_problem(4, 7, 3, seed=1)]
    for solutions in in_threads(size, lambda wire: Gather(SignSolver(), wire).solve_all(problems)):
        for problem, solution in zip(problems, solutions, strict=True):
            assert torch.equal(solution.spins, SignSolver().solve(problem).spins)


def test_a_vote_is_the_majority_of_the_workers_that_do_not_abstain():
    torch.manual_seed(0)
    own = [[random_problem(5, 9, 7, seed=3 * i + rank) for i in range(2)] for rank in range(3)]
    own = [[replace(problem, idle=torch.rand(7) < 0.4) for problem in problems] for problems in own]
    found = in_threads(3, lambda wire: Vote(SignSolver(), wire).solve_all(own[wire.rank]))
    for i in range(2):
        ballots = torch.stack([spins_of(problems[i].H) * ~problems[i].idle for problems in own])
        total = ballots.sum(0)
        for solution in (solutions[i] for solutions in found):
            assert torch.equal(solution.spins[total != 0], total.sign()[total != 0])
            assert torch.equal(solution.spins, found[0][i].spins)
            assert torch.equal(solution.problem.idle, torch.stack([p[i].idle for p in own]).all(0))


def test_one_worker_warns_of_suspects_for_all():
    assert in_threads(3, lambda wire: Vote(SignSolver(), wire).agreement.report) == [True, False, False]


def test_a_group_that_is_added_later_takes_part():
    first, second = BinaryLinear(6, 5), BinaryLinear(5, 3)
    optimizer = DistributedQPSBGD([first.weight], group=Thread(), solver=SignSolver())
    optimizer.add_param_group({"params": [second.weight]})
    before = second.weight.detach().clone()
    second(first(torch.randn(8, 6))).square().mean().backward()
    optimizer.step()
    assert not torch.equal(second.weight, before)


def test_the_first_examination_of_a_worker_counts_in_full_and_the_next_half():
    ranks = Agreement(1, report=False)
    for seen, expected in ((0.9, 0.9), (0.5, 0.7), (0.4, 0.6)):
        ranks.update(torch.tensor([seen]))
        assert float(ranks.agreement[0]) == pytest.approx(expected)


def test_a_wire_counts_the_bytes_that_go_to_the_others(monkeypatch):
    def all_gather(parts, part, group):
        for own in parts:
            own.copy_(part)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, parts, group: out.copy_(parts))
    wire = Wire()
    assert wire.all_gather(torch.arange(4)).tolist() == 3 * [[0, 1, 2, 3]]
    assert wire.sent == 2 * 4 * 8
    assert wire.all_to_all(torch.ones(3, 5)).tolist() == 3 * [5 * [1.0]]
    assert wire.sent == 2 * 4 * 8 + 2 * 5 * 4


def test_a_search_for_lost_ranks_ends_in_time():
    def fail():
        raise RuntimeError("the store is lost")

    never = threading.Event()
    assert _in_time(lambda: [2], 60) == [2]
    assert _in_time(fail, 60) is None
    assert _in_time(never.wait, 0.05) is None
    never.set()


def test_weights_are_compared_in_every_so_many_steps_and_after_loading(monkeypatch):
    compared = []
    fingerprints = "spingrad.distributed.optim.fingerprints"
    monkeypatch.setattr(
        fingerprints, lambda weights: compared.append(step) or torch.zeros(len([*weights])).long()
    )
    for check_every, expected in ((0, {4}), (2, {0, 2, 4}), (3, {0, 3, 4})):
        model = mlp()
        settings = {"solver": SignSolver(), "check_every": check_every}
        optimizer = DistributedQPSBGD(binary_parameters(model), group=Thread(), **settings)
        compared.clear()
        for step in range(5):
            if step == 4:
                optimizer.load_state_dict(optimizer.state_dict())
            model(digits(8)[0]).square().mean().backward()
            optimizer.step()
        assert set(compared) == expected


def test_a_batch_that_is_empty_on_all_workers_is_an_error():
    model = mlp()
    optimizer = DistributedQPSBGD(binary_parameters(model), group=Thread())
    model(torch.ones(0, 48)).sum().backward()
    with pytest.raises(RuntimeError, match="no rows on any rank; the batch was empty"):
        optimizer.step()


def test_gather_solves_64_units_at_a_time_each_block_with_a_seed_of_its_own():
    class Spy(SignSolver):
        def solve(self, problem, *, seed=0):
            seen.append((problem.num_units, seed))
            return super().solve(problem)

    seen = []
    problem = random_problem(5, 9, 130, seed=0)
    solution = Gather(Spy(), Thread()).solve(problem)
    assert torch.equal(solution.spins, SignSolver().solve(problem).spins)
    assert [units for units, _ in seen] == [64, 64, 2]
    assert len({seed for _, seed in seen}) == 3


@pytest.mark.parametrize("reduction", [Gather, Vote])
@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_solver_that_does_not_return_spins_is_refused_before_its_answer_is_sent(reduction, value):
    class Constant(SignSolver):
        def solve(self, problem, *, seed=0):
            return Solution(problem, torch.full_like(problem.H, value))

    with pytest.raises(ValueError, match=r"Constant returned spins .* every entry -1 or \+1"):
        reduction(Constant(), Thread()).solve(random_problem(5, 9, 3, seed=0))


def test_the_state_of_the_solver_goes_through_the_vote():
    class Stateful(SignSolver):
        spent = 0

        def state_dict(self):
            return {"spent": self.spent}

        def load_state_dict(self, state):
            self.spent = state["spent"]

    before, after = Vote(Stateful(), Thread()), Vote(Stateful(), Thread())
    before.inner.spent = 7
    after.load_state_dict(before.state_dict())
    assert after.inner.spent == 7


def test_without_a_process_group_the_error_says_how_to_start_one():
    with pytest.raises(RuntimeError, match="torchrun"):
        DistributedQPSBGD(binary_parameters(mlp()))


def count_bytes(rank, size, reduction):
    model = mlp()
    optimizer = DistributedQPSBGD(binary_parameters(model), reduction=reduction)
    x, y = digits(60)
    own = torch.arange(60).tensor_split(size)[rank]
    for _ in range(3):
        nn.functional.cross_entropy(model(x[own]), y[own]).backward()
        optimizer.step()
    return {"bytes": optimizer.wire.sent / 3}


@pytest.mark.slow
def test_a_vote_sends_two_bits_for_a_weight_and_gather_the_rows(tmp_path):
    count = sum(weight.numel() for _, weight in binary_parameters(mlp()))
    for told in run_workers(count_bytes, 4, tmp_path, "vote"):
        assert (
            3 / 4 * 2 * count / 8
            <= told["bytes"]
            <= 3 / 4 * 2 * count / 8 + 3 * (packed_size(170) + 8 * (3 + 2) + 8 + 1 + 4 + 4)
        )
    rows = 15 * 4 * (48 + 100 + 100 + 60 + 60 + 10)
    for told in run_workers(count_bytes, 4, tmp_path, "gather"):
        assert 3 * (rows + count / 8 / 4) <= told["bytes"] <= 3 * (rows + count / 8)
