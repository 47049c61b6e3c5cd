"""What a training script on several ranks may do: it works, or the error says what to do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from workers import run_workers

from spingrad import QPSBGD, BinaryLinear, binary_parameters


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(BinaryLinear(40, 32), nn.Hardtanh(), BinaryLinear(32, 4))


def told(attempt):
    """The error of an attempt, or an empty string."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def plain_qpsbgd(rank, size):
    model = mlp()
    made = told(lambda: QPSBGD(binary_parameters(model)))
    own = QPSBGD(binary_parameters(model), per_rank=True)
    model(torch.ones(8, 40)).square().mean().backward()
    own.step()
    dist.destroy_process_group()
    early = QPSBGD(binary_parameters(model))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model(torch.ones(8, 40)).square().mean().backward()
    early.step()  # one rank is no reason for an error
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
