"""A rank is a pass: under DDP and FSDP2 the step is that of one process that takes all passes."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers import run_workers

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters, real_parameters
from spingrad.nn import BinaryMultiheadAttention

ROWS, STEPS = 20, 20


class Recurrent(nn.Module):
    """One layer used five times."""

    def __init__(self):
        super().__init__()
        self.into, self.again, self.out = BinaryLinear(24, 40), BinaryLinear(40, 40), BinaryLinear(40, 10)

    def forward(self, x):
        state = x.new_zeros(len(x), 40)
        for part in x.flatten(1).view(len(x), 6, 24).unbind(1)[:5]:
            state = nn.functional.hardtanh(self.into(part) + self.again(state))
        return self.out(state)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = BinaryMultiheadAttention(48, 4, batch_first=True)
        self.norm, self.up, self.down = nn.LayerNorm(48), BinaryLinear(48, 96), BinaryLinear(96, 48)
        self.out = nn.Linear(48, 10)

    def forward(self, x):
        x = x.flatten(1).view(len(x), 3, 48)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.down(nn.functional.relu(self.up(self.norm(x))))
        return self.out(x.mean(1))


def mlp():
    layers = [
        BinaryLinear(144, 101),
        nn.Hardtanh(),
        BinaryLinear(101, 30),
        nn.Hardtanh(),
        BinaryLinear(30, 10),
    ]
    return nn.Sequential(nn.Flatten(), *layers)


def conv():
    layers = [BinaryConv2d(1, 12, 3), nn.Hardtanh(), BinaryConv2d(12, 18, 3, stride=2, groups=3)]
    layers += [nn.Hardtanh(), BinaryConv2d(18, 18, 3, groups=18), nn.Hardtanh(), nn.Flatten()]
    return nn.Sequential(*layers, BinaryLinear(72, 10))


MODELS = {"mlp": mlp, "conv": conv, "rnn": Recurrent, "transformer": Block}


def train(rank, size, name, engine, dtype, passes=1, settings=(), hook=None, **ddp):
    """The binary weights after some steps; without an engine one process takes all ranks' passes."""
    torch.manual_seed(0)
    net = MODELS[name]().to(dtype)
    model, mine = net, range(rank * passes, (rank + 1) * passes)
    if engine is None:
        mine = range(size * passes)
    if engine == "DDP":
        model = DistributedDataParallel(net, **ddp)
        if hook is not None:
            model.register_comm_hook(None, hook)
    if engine == "FSDP2":
        for layer in net.modules():
            if isinstance(layer, BinaryLinear | BinaryConv2d):
                fully_shard(layer)
        fully_shard(net)
    optimizer = QPSBGD(binary_parameters(net), lr=1e-2, **dict(settings))
    real = [parameter for _, parameter in real_parameters(net)]
    other = torch.optim.SGD(real, lr=1e-2) if real else None
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, size * passes, ROWS, 1, 12, 12, generator=generator).to(dtype)
    y = torch.randint(10, (STEPS, size * passes, ROWS), generator=generator)
    for step in range(STEPS):
        model.zero_grad()
        for part in mine:
            last = part == mine[-1]
            if engine == "FSDP2":
                model.set_requires_gradient_sync(last)
            waits = engine == "DDP" and not last
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(model(x[step, part]), y[step, part])
                (loss / len(mine)).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        if other is not None:
            other.step()
    whole = [getattr(weight, "full_tensor", lambda own=weight: own)() for _, weight in binary_parameters(net)]
    return torch.cat([weight.detach().flatten() for weight in whole])


class Experts(nn.Module):
    """Each rank's rows go to an expert of their own, so that other ranks have no rows for it."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(BinaryLinear(144, 40) for _ in range(2))
        self.out = BinaryLinear(40, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.out(nn.functional.hardtanh(self.experts[int(x[0, 0] > 0)](x)))


MODELS["experts"] = Experts
CASES = [(name, engine, passes) for name in MODELS for engine in ("DDP", "FSDP2") for passes in (1, 3)]
CASES = [case for case in CASES if case[:2] != ("experts", "FSDP2")]  # whose ranks use the same layers
SETTINGS = [{"whitening": 0.125}, {"rank": None}, {"momentum": 0.0, "target_rms": 0.5}]
SETTINGS.append({"rows": "normalized", "rank": None, "target_rms": None, "momentum": 0.0, "clamp": None})


def train_all(rank, size, dtype):
    ddp = {"gradient_as_bucket_view": True}
    return {
        str(case): train(
            rank, size, *case[:2], dtype, case[2], **ddp, find_unused_parameters=case[0] == "experts"
        )
        for case in CASES
    }


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (2, torch.float64), (4, torch.float64)])
def test_ranks_are_one_process_that_takes_their_passes(tmp_path, size, dtype):
    first, *others = run_workers(train_all, size, tmp_path, dtype)
    for case in CASES:
        assert all(torch.equal(first[str(case)], other[str(case)]) for other in others), case
        alone = train(0, size, case[0], None, dtype, case[2])
        off = float(((first[str(case)] - alone).abs() > 1e-6).double().mean())
        print(f"{size} ranks, {dtype}, {case}: {off:.4%} of weights differ")
        assert off == 0 or (dtype == torch.float32 and off <= 1e-3), (case, off)


def train_with_settings(rank, size):
    return {
        **{str(own): train(rank, size, "mlp", "DDP", torch.float64, settings=own) for own in SETTINGS},
        "exact, sharded": train(rank, size, "mlp", "FSDP2", torch.float64, settings={"rank": None}),
        "static": train(rank, size, "mlp", "DDP", torch.float64, static_graph=True),
        "half": train(rank, size, "mlp", "DDP", torch.float32, hook=default_hooks.fp16_compress_hook),
    }


def test_settings_and_habits_of_ddp(tmp_path):
    first, other = run_workers(train_with_settings, 2, tmp_path)
    assert all(torch.equal(first[name], other[name]) for name in first)
    alone = {str(own): train(0, 2, "mlp", None, torch.float64, settings=own) for own in SETTINGS}
    alone |= {"static": train(0, 2, "mlp", None, torch.float64), "exact, sharded": alone[str(SETTINGS[1])]}
    for name, weights in alone.items():
        assert ((first[name] - weights).abs() > 1e-6).sum() == 0, name


def save_by_torch(rank, size):
    """Steps, a state as torch.distributed.checkpoint takes and gives it, and more steps."""
    torch.manual_seed(0)
    net = mlp()
    fully_shard(net)
    optimizer = QPSBGD(binary_parameters(net), lr=1e-2)

    def step(own, seed):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        net.zero_grad()
        net(torch.randn(ROWS, 144, generator=generator)).square().mean().backward()
        own.step()
        return torch.cat([weight.full_tensor().flatten() for _, weight in binary_parameters(net)]).detach()

    step(optimizer, 0)
    step(optimizer, 1)
    weights, state = copy.deepcopy(net.state_dict()), get_optimizer_state_dict(net, optimizer)
    state = copy.deepcopy(state)
    wanted = step(optimizer, 2)
    net.load_state_dict(weights)
    other = QPSBGD(binary_parameters(net))
    set_optimizer_state_dict(net, other, state)
    return {"run": other.run["step"], "equal": torch.equal(step(other, 2), wanted)}


def test_torch_saves_and_loads_the_state_of_sharded_weights(tmp_path):
    assert run_workers(save_by_torch, 2, tmp_path) == [{"run": 2, "equal": True}] * 2
