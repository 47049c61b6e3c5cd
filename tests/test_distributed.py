import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from workers import run_workers

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters, real_parameters
from spingrad.distributed import data_parallel
from spingrad.distributed.agreement import Agreement
from spingrad.distributed.bits import majority, pack, packed_size, unpack
from spingrad.distributed.handshake import fingerprints
from spingrad.distributed.vote import Vote
from spingrad.distributed.wire import Wire, _in_time
from spingrad.nn.sign import spins_of
from spingrad.optim.checks import WITHOUT_SKETCH
from spingrad.optim.ranks import Alone, Together
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


def conv():
    """Units of more than 32 inputs: with fewer, the solver draws random starts, for each block its own."""
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (1, 6, 8)), BinaryConv2d(1, 8, 6, padding=3), nn.Hardtanh()]
    layers += [BinaryConv2d(8, 12, 3, stride=2, groups=2), nn.Hardtanh(), nn.Flatten()]
    return nn.Sequential(*layers, BinaryLinear(144, 10))


def vote_once(rank, size, momentum, known=None):
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model), lr=1e-2, ranks="vote", momentum=momentum)
    if known:
        trusted = optimizer._ranks.vote.agreement
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


def normed_conv():
    return conv().insert(2, nn.BatchNorm2d(8))


WRAP = {"together": DistributedDataParallel, "vote": data_parallel}


def train_uneven(rank, size, ranks):
    """Convolutions, groups, BatchNorm under DDP, accumulation, and a last batch with no row for a worker."""
    model = normed_conv()
    optimizer = QPSBGD(binary_parameters(model), lr=1e-2, ranks=ranks, momentum=0.5)
    replica = WRAP[ranks](model)
    adam = torch.optim.Adam(real_parameters(model), lr=1e-2)
    x, y = digits(11)
    for batches in ((torch.arange(7), torch.arange(7, 11)), (torch.arange(2), torch.arange(2, 4))):
        optimizer.zero_grad()
        adam.zero_grad()
        for batch in batches:  # accumulated
            own = batch.tensor_split(size)[rank]
            replica.train(len(own) > 0)  # BatchNorm has no statistics of nothing
            nn.functional.cross_entropy(replica(x[own]), y[own], reduction="sum").backward()
        optimizer.step()
        adam.step()
    return weights(model) | {"2.weight": model[2].weight.detach()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["together", "vote"])
def test_workers_stay_equal_with_ddp_uneven_batches_and_accumulation(tmp_path, ranks):
    states = run_workers(train_uneven, 3, tmp_path, ranks)
    assert same(states)
    start = normed_conv().state_dict()
    assert not any(torch.equal(start[name], weight) for name, weight in states[0].items())


class Liar(BlockDescentSolver):
    def __repr__(self):
        return repr(BlockDescentSolver())  # when ranks compare their solvers


class Broken(Liar):
    def solve(self, problem, *, initial=None, seed=0):
        raise ValueError("no licence")


def ask_for_trouble(rank, size, ranks, trouble):
    """What each worker is told when one of them has no sketch, not a number, or no spins."""
    model = mlp()
    solver = Broken() if trouble == "solver" and rank == 1 else BlockDescentSolver()
    optimizer = QPSBGD(binary_parameters(model), ranks=ranks, solver=solver)
    replica = model if ranks == "vote" else DistributedDataParallel(model)
    x, y = digits(12)
    if trouble == "nan" and rank == 1:
        x[4] = torch.nan
    loss = nn.functional.cross_entropy(replica(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4])
    if (trouble == "no sketch" and rank == 1) or trouble == "no sketch anywhere":
        loss.backward(inputs=[weight for _, weight in binary_parameters(model)])
    else:
        loss.backward()
    if trouble == "no companion" and rank == 1:
        for _, weight in binary_parameters(model):
            weight.companion.end()
    try:
        optimizer.step()
    except (RuntimeError, FloatingPointError) as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "moved": not same([weights(model), weights(mlp())]),
        }
    return {"error": "", "moved": True}


TROUBLES = {
    "nan": "rank 1 raised FloatingPointError: layer '0': the gradient is not finite",
    "no sketch anywhere": f"rank 0 raised RuntimeError: layer '0': {WITHOUT_SKETCH}",
    "no companion": f"rank 1 raised RuntimeError: layer '0': {WITHOUT_SKETCH}",
    "solver": "RuntimeError: nothing has moved: rank 1 raised ValueError: no licence",
}


@pytest.mark.parametrize("ranks", ["together", "vote"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_on_one_worker_is_an_error_on_all_and_moves_nothing(tmp_path, ranks, trouble):
    for told in run_workers(ask_for_trouble, 2, tmp_path, ranks, trouble):
        assert TROUBLES[trouble] in told["error"]
        assert not told["moved"]


def test_a_gradient_without_a_sketch_of_its_own_counts_under_ddp_and_has_no_vote(tmp_path):
    together = run_workers(ask_for_trouble, 2, tmp_path, "together", "no sketch")
    assert [told["error"] for told in together] == ["", ""]
    for told in run_workers(ask_for_trouble, 2, tmp_path, "vote", "no sketch"):
        assert "rank 1 raised RuntimeError: layer '0': it has a gradient, but" in told["error"]


def test_a_unit_without_gradient_anywhere_rests_and_one_with_gradient_somewhere_moves(tmp_path):
    start, state = weights(mlp())["4.weight"], run_workers(vote_on_some_units, 3, tmp_path)[0]["4.weight"]
    moved = (start != state).all(1)
    assert moved.tolist() == [True, False, True] + [False] * 7


def vote_on_some_units(rank, size):
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model), ranks="vote")
    x, _ = digits(12)
    out = model(x[4 * rank : 4 * rank + 4])
    (out[:, 0] if rank else out[:, 0] + out[:, 2]).square().sum().backward()
    optimizer.step()
    return weights(model)


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
    optimizer = QPSBGD(binary_parameters(model), lr=1e-2, ranks="vote", solver=solver)
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

    def all_reduce_(self, tensor):
        tensor.copy_(sum(self.together(tensor)))

    def all_to_all(self, parts):
        return torch.stack([part[self.rank] for part in self.together(parts)])

    def broadcast_(self, tensor):
        tensor.copy_(self.together(tensor)[0])


def in_threads(size, work):
    """What ``work(wire)`` returns in each of several threads."""
    shared, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Thread(rank, size, shared, barrier)), range(size)))


@pytest.mark.parametrize("size", [1, 3, 17])
def test_each_rank_solves_a_share_and_all_have_the_spins_of_one(size):
    models = [conv() for _ in range(size + 1)]
    optimizers = [QPSBGD(binary_parameters(model), solver=SignSolver()) for model in models]
    for model in models:
        nn.functional.cross_entropy(model(digits(8)[0]), digits(8)[1]).backward()

    def solve(rank, ranks):
        return ranks.solve(optimizers[rank], optimizers[rank].gradients(), 0)[1]

    expected = solve(size, Alone())
    for answers in in_threads(size, lambda wire: solve(wire.rank, Together(wire))):
        for (spins, idle), (own, rests) in zip(answers, expected, strict=True):
            assert torch.equal(spins, own)
            assert torch.equal(idle, rests)


def test_a_vote_is_the_majority_of_the_workers_that_do_not_abstain():
    torch.manual_seed(0)
    own = [[random_problem(5, 9, 7, seed=3 * i + rank) for i in range(2)] for rank in range(3)]
    own = [[replace(problem, idle=torch.rand(7) < 0.4) for problem in problems] for problems in own]

    def vote(wire):
        return Vote(wire).decide([SignSolver().solve(problem) for problem in own[wire.rank]], seed=0)

    found = in_threads(3, vote)
    for i in range(2):
        ballots = torch.stack([spins_of(problems[i].H) * ~problems[i].idle for problems in own])
        total = ballots.sum(0)
        for solution in (solutions[i] for solutions in found):
            assert torch.equal(solution.spins[total != 0], total.sign()[total != 0])
            assert torch.equal(solution.spins, found[0][i].spins)
            assert torch.equal(solution.problem.idle, torch.stack([p[i].idle for p in own]).all(0))


def test_one_worker_warns_of_suspects_for_all():
    assert in_threads(3, lambda wire: Vote(wire).agreement.report) == [True, False, False]


@pytest.mark.parametrize("ranks", ["together", "vote"])
def test_a_group_that_is_added_later_takes_part(ranks):
    first, second = BinaryLinear(6, 5), BinaryLinear(5, 3)
    optimizer = QPSBGD(binary_parameters(first), group=Thread(), ranks=ranks, solver=SignSolver())
    optimizer.add_param_group({"params": binary_parameters(second)})
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
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(3))
    wire = Wire()
    assert wire.all_gather(torch.arange(4)).tolist() == 3 * [[0, 1, 2, 3]]
    assert wire.sent == 2 * 4 * 8
    assert wire.all_to_all(torch.ones(3, 5)).tolist() == 3 * [5 * [1.0]]
    assert wire.sent == 2 * 4 * 8 + 2 * 5 * 4
    wire.sent = 0
    one, two = wire.sums([torch.ones(2, 5), torch.ones(3).double()])
    assert (one.tolist(), two.tolist()) == (2 * [5 * [3.0]], 3 * [3.0])
    assert wire.sent == 2 * 2 * (10 * 4 + 3 * 8) // 3


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
    monkeypatch.setattr(
        "spingrad.optim.ranks.fingerprints", lambda of: compared.append(step) or fingerprints(of)
    )
    for check_every, expected in ((2, {0, 2, 4}), (3, {0, 3, 4})):
        monkeypatch.setattr("spingrad.optim.ranks.CHECK_EVERY", check_every)
        model = mlp()
        optimizer = QPSBGD(binary_parameters(model), group=Thread(), ranks="vote", solver=SignSolver())
        compared.clear()
        for step in range(5):
            if step == 4:
                optimizer.load_state_dict(optimizer.state_dict())
            model(digits(8)[0]).square().mean().backward()
            optimizer.step()
        assert set(compared) == expected


def test_a_process_group_that_is_younger_than_the_optimizer_is_noticed(monkeypatch):
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model))
    monkeypatch.setattr("spingrad.optim.qpsbgd.ranks_of", lambda ranks, group: Together(Thread()))
    model(digits(8)[0]).square().mean().backward()
    optimizer.step()
    assert type(optimizer._ranks) is Together


@pytest.mark.parametrize("ranks", ["together", "vote"])
@pytest.mark.parametrize("passes", [0, 1])
def test_an_empty_batch_on_all_workers_or_zeros_without_a_pass_move_nothing(ranks, passes):
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model), group=Thread(), ranks=ranks)
    for _, weight in binary_parameters(model):
        weight.grad = torch.zeros_like(weight)
    if passes:
        model(torch.ones(0, 48)).sum().backward()
    optimizer.step()
    assert optimizer.run["step"] == passes
    assert same([weights(model), weights(mlp())])


def test_a_rank_without_rows_abstains_whatever_gradient_it_is_given():
    models = [mlp() for _ in range(3)]  # before the threads, which share torch's random numbers

    def vote(wire):
        model = models[wire.rank]
        optimizer = QPSBGD(binary_parameters(model), group=wire, ranks="vote", lr=1e-2)
        x, _ = digits(8 if wire.rank == 0 else 0)
        model(x).square().sum().backward()
        if wire.rank:
            for _, weight in binary_parameters(model):
                weight.grad = torch.ones_like(weight)  # as DDP around the whole model averages it
        optimizer.step()
        return weights(model)

    alone = mlp()
    optimizer = QPSBGD(binary_parameters(alone), lr=1e-2)
    alone(digits(8)[0]).square().sum().backward()
    optimizer.step()
    assert same([*in_threads(3, vote), weights(alone)])


@pytest.mark.parametrize("ranks", ["together", "vote"])
@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_solver_that_does_not_return_spins_is_refused_before_its_answer_is_sent(ranks, value):
    class Constant(SignSolver):
        def solve(self, problem, *, seed=0):
            return Solution(problem, torch.full_like(problem.H, value))

    model = mlp()
    optimizer = QPSBGD(binary_parameters(model), group=Thread(), ranks=ranks, solver=Constant())
    model(digits(8)[0]).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"Constant returned spins .* every entry -1 or \+1"):
        optimizer.step()


def test_the_state_of_a_vote_is_in_that_of_the_optimizer():
    before, after = (QPSBGD(binary_parameters(mlp()), group=Thread(), ranks="vote") for _ in range(2))
    before._ranks.vote.agreement.update(torch.tensor([0.7]))
    after.load_state_dict(before.state_dict())
    assert after._ranks.vote.agreement.looks == [1]
    alone = QPSBGD(binary_parameters(mlp()))
    alone.load_state_dict(before.state_dict())
    after.load_state_dict(alone.state_dict())


def test_units_that_lie_in_another_way_than_fully_shard_lays_them_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, model = dist.init_device_mesh("cpu", (1,)), nn.Sequential(BinaryLinear(6, 4))
        split = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(1)]))
        model[0].register_parameter("weight", split)
        with pytest.raises(TypeError, match=r"laid out as .* as fully_shard\(module\) lays them out"):
            QPSBGD(binary_parameters(model))
    finally:
        dist.destroy_process_group()


def test_without_a_process_group_the_error_says_how_to_start_one():
    with pytest.raises(RuntimeError, match="torchrun"):
        QPSBGD(binary_parameters(mlp()), ranks="vote")


def count_bytes(rank, size, ranks):
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model), ranks=ranks)
    replica = WRAP[ranks](model) if ranks == "together" else model
    x, y = digits(60)
    own = torch.arange(60).tensor_split(size)[rank]
    optimizer._ranks.wire.sent = 0
    for _ in range(3):
        nn.functional.cross_entropy(replica(x[own]), y[own]).backward()
        optimizer.step()
    return {"bytes": optimizer._ranks.wire.sent / 3}


@pytest.mark.slow
def test_a_vote_sends_two_bits_for_a_weight_and_ddp_its_gradients_sketches_and_spins(tmp_path):
    bits = -(-(4800 + 6000 + 600) // 8 // 4)  # of the spins that one of four workers counts
    rest = 24 + 1  # what is compared, and whether all have solved
    for told in run_workers(count_bytes, 4, tmp_path, "vote"):
        assert told["bytes"] == 3 * (2 * bits + packed_size(170) + 4 + rest + 3 + 1)
    sketches, share = 129 * (48 + 100 + 60), packed_size(25 * 48 + 15 * 100 + 3 * 60)
    for told in run_workers(count_bytes, 4, tmp_path, "together"):
        assert told["bytes"] == 2 * 3 / 4 * 4 * sketches + 3 * (share + rest)
