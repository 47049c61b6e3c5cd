"""One optimizer for a whole model: binary weights by QP-SBGD, real parameters by AdamW."""

import copy

import pytest
import torch
from torch import nn

from spingrad import QPSBGD, BinaryLinear, binary_parameters, real_parameters

ADAMW = {"lr": 2e-3, "betas": (0.8, 0.99), "weight_decay": 0.1}


def model():
    torch.manual_seed(0)
    layers = BinaryLinear(12, 20), nn.BatchNorm1d(20), nn.Hardtanh(), BinaryLinear(20, 8), nn.Linear(8, 4)
    return nn.Sequential(*layers)


def one(net, **settings):
    groups = [{"params": binary_parameters(net)}, {"params": real_parameters(net), "real": True, **ADAMW}]
    return QPSBGD(groups, lr=1e-2, **settings)


def train(net, *optimizers, steps=range(5), schedules=()):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = net(torch.randn(16, 12, generator=generator)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def test_it_takes_the_steps_of_two_optimizers():
    together, apart = model(), model()
    own = one(together)
    real = torch.optim.AdamW([p for _, p in real_parameters(apart)], **ADAMW)
    binary = QPSBGD(binary_parameters(apart), lr=1e-2)
    halve = torch.optim.lr_scheduler.ExponentialLR
    first = train(together, own, schedules=[halve(own, 0.5)])
    second = train(apart, binary, real, schedules=[halve(binary, 0.5), halve(real, 0.5)])
    assert torch.equal(first, second)


def test_its_state_goes_on_where_it_was():
    net = model()
    optimizer = one(net)
    train(net, optimizer)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    wanted = train(net, optimizer, steps=range(5, 8))
    other = model()
    resumed = one(other)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert torch.equal(train(other, resumed, steps=range(5, 8)), wanted)


def test_a_step_that_is_skipped_moves_no_real_parameter():
    net = model()
    optimizer = one(net, on_nonfinite="skip")
    before = train(net, optimizer, steps=[])
    net(torch.full((16, 12), torch.nan)).sum().backward()
    optimizer.step()
    assert optimizer.run["skipped"] == 1
    assert torch.equal(train(net, optimizer, steps=[]), before)


def test_real_parameters_move_where_no_binary_weight_has_a_gradient():
    net = model()
    optimizer = one(net)
    before = net[4].weight.detach().clone()
    net[4](torch.ones(3, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(net[4].weight, before)
    assert optimizer.run["step"] == 0


def test_a_copy_of_model_and_optimizer_trains_alike():
    net = model()
    optimizer = one(net)
    train(net, optimizer, steps=range(2))
    other, copied = copy.deepcopy((net, optimizer))
    assert torch.equal(train(net, optimizer), train(other, copied))


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"momentum": 0.9}, "'momentum' is no setting of AdamW"), ({"lr": -1.0}, "Invalid learning rate")],
)
def test_a_wrong_setting_is_refused(settings, told):
    net = model()
    with pytest.raises(ValueError, match=told):
        QPSBGD(
            [{"params": binary_parameters(net)}, {"params": real_parameters(net), "real": True} | settings]
        )


def test_a_binary_weight_in_a_real_group_is_refused():
    net = model()
    with pytest.raises(ValueError, match="a binary weight is in a group of real parameters"):
        QPSBGD([{"params": binary_parameters(net)[:1]}, {"params": binary_parameters(net)[1:], "real": True}])


def test_a_state_with_other_groups_is_refused():
    net = model()
    optimizer, state = one(net), one(net).state_dict()
    state["param_groups"].reverse()
    with pytest.raises(ValueError, match=r"as many weights|binary weights where"):
        optimizer.load_state_dict(state)


@pytest.mark.needs("lightning")
@pytest.mark.filterwarnings("ignore")
def test_lightning_optimizes_by_itself():
    import lightning
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()

        def training_step(self, x, _):
            return self.net(x).square().mean()

        def configure_optimizers(self):
            return one(self.net)

    batches = [torch.randn(16, 12, generator=torch.Generator().manual_seed(step)) for step in range(5)]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    module, net = Module(), model()
    trainer.fit(module, DataLoader(torch.cat(batches), batch_size=16))
    wanted = train(net, one(net))
    assert torch.equal(train(module.net, steps=[]), wanted)
