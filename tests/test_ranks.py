"""What a training script on several ranks may do: it works, or the error says what to do."""

import itertools
import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from workers import run_workers

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters, real_parameters
from spingrad.distributed import DistributedQPSBGD, data_parallel
from spingrad.distributed.handshake import facts_of, fingerprints
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


def plain_qpsbgd(rank, size):
    model = mlp()
    made = told(QPSBGD, binary_parameters(model))
    own = QPSBGD(binary_parameters(model), per_rank=True)
    model(torch.ones(8, 40)).square().mean().backward()
    own.step()
    return {"made": made}


def test_plain_qpsbgd_on_several_ranks_names_what_to_use_instead(tmp_path):
    for seen in run_workers(plain_qpsbgd, 2, tmp_path):
        assert "RuntimeError: QPSBGD" in seen["made"]
        assert "spingrad.distributed.DistributedQPSBGD" in seen["made"]
        assert "per_rank=True" in seen["made"]


def test_a_process_group_that_appears_after_construction_is_noticed_at_the_first_step(monkeypatch):
    model = mlp()
    optimizer = QPSBGD(binary_parameters(model))
    model(torch.ones(8, 40)).square().mean().backward()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="has 2 ranks"):
        optimizer.step()


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
    "rank": ({"rank": 4}, "rank 1 has rank=4, {others} rank=32"),
    "rows": ({"rows": "normalized"}, "rank 1 has rows='normalized', {others} rows='uniform'"),
    "target_rms": ({"target_rms": None}, "rank 1 has target_rms=None, {others} target_rms='auto'"),
    "on_nonfinite": ({"on_nonfinite": "skip"}, "rank 1 has on_nonfinite=skip, {others} on_nonfinite=raise"),
    "check_every": ({"check_every": 7}, "rank 1 has check_every=7, {others} check_every=100"),
    "solver": ({"solver": SignSolver()}, "rank 1 has solver=SignSolver(), {others} solver=BlockDescent"),
    "invalid": ({"lr": -1.0}, "rank 1 raised ValueError: lr"),
    "reduction": ({"reduction": None}, "rank 1 has reduction="),  # the other one
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


def differ_from_the_start(reduction, odd, difference):
    """An optimizer for ``difference`` on the odd rank, and for the ordinary settings on the others."""
    model, settings = mlp(), {"reduction": reduction}
    if odd and isinstance(difference, tuple):
        model = mlp(*difference)
    elif odd and isinstance(difference, torch.dtype):
        model.to(difference)
    elif odd:
        other = "vote" if reduction == "gather" else "gather"
        settings |= difference | ({"reduction": other} if "reduction" in difference else {})
    DistributedQPSBGD(binary_parameters(model), **settings)


DIFFERENT_LATER = {
    "scheduler": "rank 1 has lr=0.5, {others} lr=0.003",
    "no number": "rank 1 raised ValueError: lr is a number of at least 0 and below 1e+30, got nan",
    "frozen": "float32 of shape (4, 32), requires_grad=False, {others} weight 1 '2.weight'=torch.float32",
    "dtype": "the same step with the same model and settings: rank 1 has weight 0 '0.weight'=torch.float64",
    "loaded": "rank 1 has step=1, {others} step=3",
    "group": "rank 1 has call=add_param_group(), {others} call=step()",
    "nan": "FloatingPointError: nothing has moved: rank 1 raised FloatingPointError: layer '0': the",
    "nan in a weight": "Error: layer '2': the latent weight has entries that are not finite",
    "weights": "step 4 the weights are not the same on all ranks; something changed them on some ranks only: "
    "rank 1 has digest of weight 1 '2.weight'=",
}
HARMLESS = ("nothing", "huge", "unused everywhere", "unused", "no backward", "no rows", "inputs")


def train(rank, reduction, mode, steps=6):
    """A few steps; before one of them, rank 1 does something else."""
    if mode == "inputs":
        return train_on_images(rank, reduction)
    model = mlp()
    optimizer = DistributedQPSBGD(binary_parameters(model), reduction=reduction, check_every=2)
    start = optimizer.state_dict()
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        odd = rank == 1 and step == 3
        x = torch.randn(0 if odd and mode == "no rows" else 8, 40, generator=generator)
        optimizer.zero_grad()
        if step == 1:
            start = optimizer.state_dict()
        if mode == "unused everywhere":
            model[0](x).square().mean().backward()
        else:
            disturb_forward(odd, mode, model, x)
        if odd:
            disturb_step(mode, model, optimizer, start)
        optimizer.step()
    return model


def train_on_images(rank, reduction):
    model = nn.Sequential(BinaryConv2d(1, 2, 3))
    optimizer = DistributedQPSBGD(binary_parameters(model), reduction=reduction)
    model(torch.ones(4, 1, 6 if rank == 1 else 8, 6)).square().mean().backward()
    optimizer.step()
    return model


def disturb_forward(odd, mode, model, x):
    if odd and mode == "nan":
        x[0, 0] = torch.nan
    if odd and mode == "nan in a weight":
        model[2].weight.data[1, 2] = torch.nan
    if mode == "huge":
        x *= 1e15
    output = model[0](x) if odd and mode == "unused" else model(x)
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
    for reduction in ("gather", "vote"):
        for name, (difference, _) in DIFFERENT_FROM_THE_START.items():
            seen[reduction, name] = told(differ_from_the_start, reduction, rank == 1, difference)
        for name in DIFFERENT_LATER:
            seen[reduction, name] = told(train, rank, reduction, name)
        for name in HARMLESS:
            seen[reduction, name] = weights(train(rank, reduction, name))
        seen[reduction, "added"] = weights(add_a_group(rank, reduction))
    return seen


def add_a_group(rank, reduction):
    torch.manual_seed(rank)
    model = nn.Sequential(BinaryLinear(40, 32), nn.Hardtanh(), BinaryLinear(32, 4))
    first, second = binary_parameters(model)
    optimizer = DistributedQPSBGD([first], reduction=reduction)
    optimizer.add_param_group({"params": [second], "lr": 1e-2})
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_difference_on_one_rank_is_an_error_on_every_rank_that_names_rank_and_setting(tmp_path, size):
    ranks = run_workers(all_differences, size, tmp_path)
    others = "rank 0 has" if size == 2 else "ranks 0, 2, 3 have"
    expected = {name: text for name, (_, text) in DIFFERENT_FROM_THE_START.items()} | DIFFERENT_LATER
    for reduction in ("gather", "vote"):
        for name, text in expected.items():
            first, *rest = [seen[reduction, name] for seen in ranks]
            assert text.format(others=others) in first, (reduction, name)
            assert all(other == first for other in rest), (reduction, name, rest)
        for name in (*HARMLESS, "added"):
            first, *rest = [seen[reduction, name] for seen in ranks]
            assert all(torch.equal(other, first) for other in rest), (reduction, name)


def lose_a_rank(rank, size, signal_number):
    model = mlp()
    optimizer = DistributedQPSBGD(binary_parameters(model))
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


def with_ddp(rank, wrap, optimizer_first, reduction):
    model = Mixed(seed=rank)
    replica = None if optimizer_first else wrap(model)
    optimizer = DistributedQPSBGD(binary_parameters(model), reduction=reduction)
    replica = replica or wrap(model)
    take_steps(rank, replica, [optimizer, torch.optim.Adam(real_parameters(model))])
    return everything(model)


def with_ddp_and_plain_qpsbgd(rank):
    model = Mixed(seed=rank)
    DistributedDataParallel(model)
    _optimizer = QPSBGD(binary_parameters(model))


def sharded(rank):
    model = Mixed(seed=rank)
    fully_shard(model)
    DistributedQPSBGD(binary_parameters(model))


def sharded_without_binary_weights(rank):
    model = Mixed(seed=rank)
    fully_shard(model, ignored_params={weight for _, weight in binary_parameters(model)})
    optimizer = DistributedQPSBGD(binary_parameters(model))
    adam = torch.optim.Adam(real_parameters(model))
    take_steps(rank, model, [optimizer, adam])
    return weights(model)


def torch_habits(rank, size):
    return {
        "plain": told(with_ddp_and_plain_qpsbgd, rank),
        "sharded": told(sharded, rank),
        "ignored": sharded_without_binary_weights(rank),
        "ddp": {
            (reduction, wrap.__name__): [with_ddp(rank, wrap, first, reduction) for first in (True, False)]
            for wrap in (data_parallel, DistributedDataParallel)
            for reduction in ("gather", "vote")
        },
    }


def test_raw_ddp_works_and_plain_qpsbgd_or_sharded_weights_raise(tmp_path):
    first, second = run_workers(torch_habits, 2, tmp_path)
    for seen in (first, second):
        assert "DistributedQPSBGD" in seen["plain"]
        assert "weight 0 '0.weight' is sharded" in seen["sharded"]
        assert "ignored_params" in seen["sharded"]
    assert torch.equal(first["ignored"], second["ignored"])
    for case, own in first["ddp"].items():
        results = own + second["ddp"][case]
        if case == ("gather", "DistributedDataParallel"):  # an average of averages
            results += first["ddp"]["gather", "data_parallel"]
        assert all(torch.equal(one, results[0]) for one in results), case


def under_torchrun(rank, size):
    """Make this process look as if torchrun had started it."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "test"}


def batches(rank, count=3):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(16, 40, generator=generator) for _ in range(count)]


def lightning_ddp(rank, size, make):
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
            return [make(binary_parameters(self)), torch.optim.Adam(real_parameters(self))]

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"enable_model_summary": False, "max_epochs": 1, "use_distributed_sampler": False}
    trainer = lightning.Trainer(strategy="ddp", devices=size, accelerator="cpu", **quiet)
    module = Module()
    trainer.fit(module, DataLoader(torch.cat(batches(rank)), batch_size=16))
    return everything(module.net)


def accelerate_ddp(rank, make):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = Mixed(seed=rank)
    replica, *optimizers = accelerator.prepare(
        model, make(binary_parameters(model)), torch.optim.Adam(real_parameters(model))
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
            "expected": with_ddp(rank, data_parallel, True, "gather"),
            "accelerate": accelerate_ddp(rank, DistributedQPSBGD),
            "accelerate, plain": told(accelerate_ddp, rank, QPSBGD),
            "lightning": lightning_ddp(rank, size, DistributedQPSBGD),
            "lightning, plain": told(lightning_ddp, rank, size, QPSBGD),
        }


@pytest.mark.slow
@pytest.mark.needs("lightning", "accelerate")
def test_lightning_and_accelerate_on_two_ranks_take_the_steps_of_a_plain_loop(tmp_path):
    ranks = run_workers(trainers, 2, tmp_path)
    for seen in ranks:
        for trainer in ("lightning", "accelerate"):
            assert torch.equal(seen[trainer], ranks[0]["expected"]), trainer
            assert "DistributedQPSBGD" in seen[f"{trainer}, plain"]
