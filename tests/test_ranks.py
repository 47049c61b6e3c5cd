"""What a training script on several ranks may do: it works, or the error says what to do."""

import itertools
import os
import re
import signal
import time
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from workers import run_workers

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters, real_parameters
from spingrad.distributed import data_parallel
from spingrad.distributed.handshake import facts_of, fingerprints
from spingrad.optim import ranks as ranks_module
from spingrad.solvers import SignSolver


def mlp(*widths):
    torch.manual_seed(0)
    widths = widths or (40, 32, 4)
    layers = [BinaryLinear(n, m) for n, m in itertools.pairwise(widths)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Hardtanh())][:-1])


def weights(model):
    return torch.cat([weight.detach().double().flatten() for _, weight in binary_parameters(model)])


def told(attempt, *args):
    """The error of an attempt, or an empty string."""
    try:
        attempt(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without_an_engine(rank, size):
    """Steps on gradients that nobody has averaged."""
    seen = {}
    for ranks in ("together", "apart"):
        model = mlp()
        optimizer = QPSBGD(binary_parameters(model), ranks=ranks)
        model(torch.full((8, 40), 1.0 + rank)).square().mean().backward()
        seen[ranks] = told(optimizer.step)
    return seen


def test_gradients_that_no_engine_has_averaged_are_an_error_that_names_ddp(tmp_path):
    for seen in run_workers(without_an_engine, 2, tmp_path):
        assert "RuntimeError: the gradients are not the same on all ranks: wrap" in seen["together"]
        assert 'ranks="apart"' in seen["together"]
        assert "rank 1 has digest of layer '0'=" in seen["together"]
        assert seen["apart"] == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_fingerprint_notices_one_bit_and_the_order(dtype, monkeypatch):
    monkeypatch.setattr("spingrad.distributed.handshake.CHUNK", 700)
    weight = torch.randn(300, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = weight.clone()
    changed[-1, -1] *= -1
    seen = fingerprints([weight, changed, weight.flip(0), weight.roll(1, 0), weight.clone()]).tolist()
    assert len(set(seen)) == 4
    assert seen[0] == seen[-1]


def test_facts_tell_groups_of_channels():
    layer = BinaryConv2d(4, 6, 3, groups=2)
    optimizer = QPSBGD(binary_parameters(layer))
    assert facts_of(optimizer.param_groups, []) == {
        "weight 0 'weight'": "torch.float32 of shape (6, 2, 3, 3) in 2 groups"
    }


DIFFERENT_FROM_THE_START = {  # what rank 1 does differently, and what every rank is told
    "lr": ({"lr": 1e-2}, "rank 1 has lr=0.01, {others} lr=0.003"),
    "clamp": ({"clamp": 0.02}, "rank 1 has clamp=0.02, {others} clamp=1"),
    "seed": ({"seed": 5}, "rank 1 has seed=5, {others} seed=0"),
    "momentum": ({"momentum": 0.0}, "rank 1 has momentum=0, {others} momentum=0.9"),
    "whitening": ({"whitening": 0.5}, "rank 1 has whitening=0.5, {others} whitening=0"),
    "rank": ({"rank": 4}, "rank 1 has rank=4, {others} rank=16"),
    "rows": ({"rows": "normalized"}, "rank 1 has rows='normalized', {others} rows='uniform'"),
    "target_rms": ({"target_rms": None}, "rank 1 has target_rms=None, {others} target_rms='auto'"),
    "on_nonfinite": ({"on_nonfinite": "skip"}, "rank 1 has on_nonfinite=skip, {others} on_nonfinite=raise"),
    "solver": ({"solver": SignSolver()}, "rank 1 has solver=SignSolver(), {others} solver=BlockDescent"),
    "invalid": ({"lr": -1.0}, "rank 1 raised ValueError: lr"),
    "ranks": ({"ranks": None}, "rank 1 has ranks="),  # the other one
    "width": (
        (40, 48, 4),
        "rank 1 has weight 0 '0.weight'=torch.float32 of shape (48, 40), {others} weight 0",
    ),
    "depth": (
        (40, 32, 32, 4),
        "has weight 2 '4.weight'=torch.float32 of shape (4, 32), {others} no weight 2",
    ),
    "double": (torch.float64, "rank 1 has weight 0 '0.weight'=torch.float64 of shape (32, 40)"),
}


def differ_from_the_start(ranks, odd, difference):
    """An optimizer for ``difference`` on the odd rank, and for the ordinary settings on the others."""
    model, settings = mlp(), {"ranks": ranks}
    if odd and isinstance(difference, tuple):
        model = mlp(*difference)
    elif odd and isinstance(difference, torch.dtype):
        model.to(difference)
    elif odd:
        other = "vote" if ranks == "together" else "together"
        settings |= difference | ({"ranks": other} if "ranks" in difference else {})
    optimizer = QPSBGD(binary_parameters(model), **settings)
    model(torch.ones(8, 40).to(model[0].weight)).square().mean().backward()
    optimizer.step()  # a vote compares when it begins


DIFFERENT_LATER = {
    "scheduler": "rank 1 has lr=0.5, {others} lr=0.003",
    "no number": "rank 1 raised ValueError: lr is a number of at least 0 and below 1e+30, got nan",
    "frozen": "shape (4, 32), requires_grad=False, {others} weight 1 'layers.2.weight'=torch.float32",
    "dtype": "the same model and settings: rank 1 has weight 0 'layers.0.weight'=torch.float64",
    "loaded": "rank 1 has step=1, {others} step=3",
    "group": "rank 1 has groups=2, {others} groups=1",
    "nan": "rank 1 raised FloatingPointError: layer 'layers.0': the gradient is not finite",
    "nan in a weight": "Error: layer 'layers.2': the latent weight has entries that are not finite",
    "weights": "step 4 the weights are not the same on all ranks; something changed them on some ranks only: "
    "rank 1 has digest of weight 1 'layers.2.weight'=",
}
HARMLESS = ("nothing", "huge", "unused everywhere", "unused", "no backward", "no rows", "inputs")
NEEDED_BY_DDP = ("no backward",)  # which waits for all ranks


def wrapped(ranks, model):
    return DistributedDataParallel(model, find_unused_parameters=True) if ranks == "together" else model


def train(rank, ranks, mode, steps=6):
    """A few steps; before one of them, rank 1 does something else."""
    if mode == "inputs":
        return train_on_images(rank, ranks)
    ranks_module.CHECK_EVERY = 2
    model = Chain(mlp())
    optimizer, replica = QPSBGD(binary_parameters(model), ranks=ranks), wrapped(ranks, model)
    start = optimizer.state_dict()
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        odd = rank == 1 and step == 3
        x = torch.randn(0 if odd and mode == "no rows" else 8, 40, generator=generator)
        optimizer.zero_grad()
        if step == 1:
            start = optimizer.state_dict()
        disturb_forward(odd, mode, model.layers, replica, x)
        if odd:
            disturb_step(mode, model.layers, optimizer, start)
        optimizer.step()
    return model


class Chain(nn.Module):
    """Layers, or the first of them alone."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, whole=True):
        return self.layers(x) if whole else self.layers[0](x)


def train_on_images(rank, ranks):
    model = nn.Sequential(BinaryConv2d(1, 2, 3))
    optimizer = QPSBGD(binary_parameters(model), ranks=ranks)
    replica = wrapped(ranks, model)
    replica(torch.ones(4, 1, 6 if rank == 1 else 8, 6)).square().mean().backward()
    optimizer.step()
    return model


def disturb_forward(odd, mode, model, replica, x):
    if odd and mode == "nan":
        x[0, 0] = torch.nan
    if odd and mode == "nan in a weight":
        model[2].weight.data[1, 2] = torch.nan
    if mode == "huge":
        x *= 1e15
    part = mode == "unused everywhere" or (odd and mode == "unused")
    output = replica(x, False) if part else replica(x)
    if not (odd and mode == "no backward"):
        output.square().mean().backward()


def disturb_step(mode, model, optimizer, start):
    if mode == "scheduler":
        optimizer.param_groups[0]["lr"] = 0.5
    if mode == "no number":
        optimizer.param_groups[0]["lr"] = torch.nan
    if mode == "frozen":
        model[2].weight.requires_grad_(False)
    if mode == "dtype":
        model.double()
    if mode == "loaded":
        optimizer.load_state_dict(start)
    if mode == "group":
        optimizer.add_param_group({"params": binary_parameters(BinaryLinear(3, 2))})
    if mode == "weights":
        model[2].weight.data[1, 2] += 1e-6


def all_differences(rank, size):
    """What this rank is told of each difference, and the weights of the runs that end well."""
    seen = {}
    for ranks in ("together", "vote"):
        for name, difference in from_the_start(ranks).items():
            seen[ranks, name] = told(differ_from_the_start, ranks, rank == 1, difference[0])
        for name in DIFFERENT_LATER:
            seen[ranks, name] = told(train, rank, ranks, name)
        for name in harmless(ranks):
            seen[ranks, name] = weights(train(rank, ranks, name))
        seen[ranks, "added"] = weights(add_a_group(rank, ranks))
    return seen


def from_the_start(ranks):
    """Without a vote an optimizer that is refused on one rank has told nobody."""
    return {
        name: own for name, own in DIFFERENT_FROM_THE_START.items() if ranks == "vote" or name != "invalid"
    }


def harmless(ranks):
    return [name for name in HARMLESS if ranks == "vote" or name not in NEEDED_BY_DDP]


def add_a_group(rank, ranks):
    torch.manual_seed(rank if ranks == "vote" else 0)
    model = nn.Sequential(BinaryLinear(40, 32), nn.Hardtanh(), BinaryLinear(32, 4))
    first, second = binary_parameters(model)
    optimizer, replica = QPSBGD([first], ranks=ranks), wrapped(ranks, model)
    optimizer.add_param_group({"params": [second], "lr": 1e-2})
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        replica(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_difference_on_one_rank_is_an_error_on_every_rank_that_names_rank_and_setting(tmp_path, size):
    ranks = run_workers(all_differences, size, tmp_path)
    others = "rank 0 has" if size == 2 else "ranks 0, 2, 3 have"
    for mode in ("together", "vote"):
        expected = {name: text for name, (_, text) in from_the_start(mode).items()} | DIFFERENT_LATER
        for name, text in expected.items():
            first, *rest = [seen[mode, name] for seen in ranks]
            assert text.format(others=others) in first, (mode, name, first)
            assert all(other == first for other in rest), (mode, name, rest)
        for name in (*harmless(mode), "added"):
            first, *rest = [seen[mode, name] for seen in ranks]
            assert all(torch.equal(other, first) for other in rest), (mode, name)


def lose_a_rank(rank, size, signal_number):
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model))
    for step in range(3):
        model(torch.ones(8, 40)).square().mean().backward()
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal_number)
        if error := told(optimizer.step):
            return {"error": error, "steps": step}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named_by_the_others(tmp_path, how):
    for seen in run_workers(lose_a_rank, 3, tmp_path, how, lost=[1], timeout=15):
        assert "RuntimeError: rank 1 did not answer" in seen["error"]
        assert seen["steps"] == 1


def come_late(rank, size):
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model))
    model(torch.ones(8, 40)).square().mean().backward()
    if rank == 1:
        time.sleep(6)
    return told(optimizer.step)


def test_a_rank_that_is_slower_than_the_timeout_is_named(tmp_path):
    for error in run_workers(come_late, 3, tmp_path, timeout=4):
        late = r"rank 1 came too late: it has waited 0\.\d s for the others, and they up to [3-9]\.\d s"
        assert re.search(f"{late}|rank 1 did not answer within", error)  # on a busy machine it tells too late


def change_late(rank, size):
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model), ranks="vote")
    for step in range(6):
        model(torch.ones(8, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.check()
            if rank == 1:
                with torch.no_grad():
                    model[0].weight[0, 0] += 1
    return told(optimizer.check)


def test_a_weight_that_was_changed_is_found_at_the_end_of_a_short_run(tmp_path):
    for error in run_workers(change_late, 2, tmp_path):
        assert "at step 6 the weights are not the same on all ranks" in error
        assert "rank 1 has digest of weight 0" in error


class Mixed(nn.Sequential):
    def __init__(self, seed):
        torch.manual_seed(seed)
        layers = BinaryLinear(40, 32), nn.BatchNorm1d(32), nn.Hardtanh(), BinaryLinear(32, 4)
        super().__init__(*layers)


def everything(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def take_steps(rank, replica, optimizers):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        replica(torch.randn(16, 40, generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def with_ddp(rank, wrap, optimizer_first, ranks):
    model = Mixed(seed=rank)
    replica = None if optimizer_first else wrap(model)
    optimizer = QPSBGD(binary_parameters(model), ranks=ranks)
    replica = replica or wrap(model)
    take_steps(rank, replica, [optimizer, torch.optim.Adam(real_parameters(model))])
    return everything(model)


def sharded(rank, **settings):
    model = Mixed(seed=0)
    fully_shard(model)
    optimizer = QPSBGD(binary_parameters(model), **settings)
    take_steps(rank, model, [optimizer, torch.optim.Adam(real_parameters(model))])
    return torch.cat([own.full_tensor().detach().flatten() for _, own in binary_parameters(model)])


def torch_habits(rank, size):
    return {
        "sharded": sharded(rank),
        "whitening": told(lambda: sharded(rank, whitening=0.5)),
        "vote": told(lambda: sharded(rank, ranks="vote")),
        "ddp": {
            (ranks, wrap.__name__): [with_ddp(rank, wrap, first, ranks) for first in (True, False)]
            for ranks, wrap in (
                ("vote", data_parallel),
                ("vote", DistributedDataParallel),
                ("together", DistributedDataParallel),
            )
        },
    }


def test_ddp_and_fully_shard_are_used_as_with_any_optimizer(tmp_path):
    first, second = run_workers(torch_habits, 2, tmp_path)
    for seen in (first, second):
        assert "layer '0': whitening needs all units of a weight on each rank" in seen["whitening"]
        assert "wrap the model in DistributedDataParallel" in seen["vote"]
    assert torch.equal(first["sharded"], second["sharded"])
    for case, own in first["ddp"].items():
        results = own + second["ddp"][case]
        assert all(torch.equal(one, results[0]) for one in results), case


def under_torchrun(rank, size):
    """Make this process look as if torchrun had started it."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "test"}


def batches(rank, count=3):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(16, 40, generator=generator) for _ in range(count)]


def lightning_ddp(rank, size):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Mixed(seed=rank)
            self.automatic_optimization = False

        def training_step(self, x, _):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.net(x).square().mean())
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            return [QPSBGD(binary_parameters(self)), torch.optim.Adam(real_parameters(self))]

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"enable_model_summary": False, "max_epochs": 1, "use_distributed_sampler": False}
    trainer = lightning.Trainer(strategy="ddp", devices=size, accelerator="cpu", **quiet)
    module = Module()
    trainer.fit(module, DataLoader(torch.cat(batches(rank)), batch_size=16))
    return everything(module.net)


def accelerate_ddp(rank):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = Mixed(seed=rank)
    replica, *optimizers = accelerator.prepare(
        model, QPSBGD(binary_parameters(model)), torch.optim.Adam(real_parameters(model))
    )
    for x in batches(rank):
        for optimizer in optimizers:
            optimizer.zero_grad()
        accelerator.backward(replica(x).square().mean())
        for optimizer in optimizers:
            optimizer.step()
    return everything(model)


def trainers(rank, size):
    under_torchrun(rank, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "expected": with_ddp(rank, DistributedDataParallel, True, "together"),
            "accelerate": accelerate_ddp(rank),
            "lightning": lightning_ddp(rank, size),
        }


@pytest.mark.slow
@pytest.mark.needs("lightning", "accelerate")
def test_lightning_and_accelerate_on_two_ranks_take_the_steps_of_a_plain_loop(tmp_path):
    ranks = run_workers(trainers, 2, tmp_path)
    for seen in ranks:
        for trainer in ("lightning", "accelerate"):
            assert torch.equal(seen[trainer], ranks[0]["expected"]), trainer
