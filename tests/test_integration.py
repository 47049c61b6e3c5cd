"""The library as people use it: in a trainer, on real data, from the command line of a fresh process."""

import itertools
import json
import math
import re
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from dwave.samplers import SimulatedAnnealingSampler
from helpers import ONE_BATCH, mnist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spingrad import (
    QPSBGD,
    BinaryConv2d,
    BinaryLinear,
    BinaryQuadratic,
    binary_parameters,
    real_parameters,
)
from spingrad.optim import capture
from spingrad.solvers import BlockDescentSolver, DimodSolver

ROOT = Path(__file__).parent.parent


def unit_rms(data):
    pixels = data[0].flatten(1).float() / 255
    return pixels / (mnist("train")[0].float() / 255).square().mean().sqrt()


def network(*sizes):
    layers = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [BinaryLinear(fan_in, fan_out), nn.Hardtanh()]
    return nn.Sequential(*layers[:-1])


@pytest.fixture(scope="module")
def layer_problems(data_folder):
    """The two wide layers of 784-512-512-10 after 40 steps of training with batches of 100."""
    torch.manual_seed(0)
    data = mnist("train")
    x, y = unit_rms(data), data[1]
    model = network(784, 512, 512, 10)
    optimizer = QPSBGD(binary_parameters(model), **ONE_BATCH)
    for step, rows in enumerate(torch.randperm(len(x)).split(100)):
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        with capture(optimizer, [40]) as problems:
            optimizer.step()
        optimizer.zero_grad()
        if step == 40:
            break
    return [BinaryQuadratic.of(p.Z, p.H[:, ~p.idle], p.offset[~p.idle]) for p in problems[:2]]


@pytest.mark.parametrize("layer", [0, 1], ids=["784x512", "512x512"])
def test_wide_mnist_layers_are_solved_within_their_certificate(layer_problems, layer):
    problem = layer_problems[layer]
    assert problem.num_spins == (784, 512)[layer]
    bound = problem.lower_bound(tolerance=1e-4)
    for num_sweeps, allowed in ((None, 0.01), (2, 0.002)):
        spins = BlockDescentSolver(num_sweeps=num_sweeps).solve(problem).spins
        gap = (problem.double().energy(spins.double()) - bound) / bound
        assert gap.mean() < allowed


@pytest.mark.usefixtures("one_thread")
def test_a_layer_takes_a_ten_thousandth_of_the_time_of_annealing(layer_problems):
    problem = layer_problems[1]
    unit = problem.units(0, 1)
    annealer = DimodSolver(SimulatedAnnealingSampler(), num_reads=1, num_sweeps=100)

    def seconds(solver, problem):
        begin = time.perf_counter()
        solver.solve(problem)
        return time.perf_counter() - begin

    own = sorted(seconds(BlockDescentSolver(), problem) for _ in range(9))[4]
    assert seconds(annealer, unit) * problem.num_units > 10_000 * own


def test_mnist_trains_in_one_epoch_without_batchnorm(data_folder):
    torch.manual_seed(0)
    train, test = mnist("train"), mnist("test")
    x, y = unit_rms(train)[:10_000], train[1][:10_000]
    model = network(784, 128, 128, 10)
    optimizer = QPSBGD(binary_parameters(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    for rows in torch.randperm(len(x)).split(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        assert (model.eval()(unit_rms(test)).argmax(1) == test[1]).float().mean() > 0.88


@pytest.mark.needs("lightning")
def test_a_lightning_trainer_takes_the_same_steps_as_a_plain_loop():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(
                BinaryConv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Hardtanh(), nn.Flatten(), BinaryLinear(144, 3)
            )
            self.automatic_optimization = True

        def training_step(self, batch, _):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            optimizer = QPSBGD(binary_parameters(self), lr=0.01)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 1, 8, 8, generator=generator), torch.randint(3, (64,), generator=generator)
    )
    loader = DataLoader(data, batch_size=8)

    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hints about workers and devices
        trainer = lightning.Trainer(
            max_epochs=2,
            accumulate_grad_batches=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)

    plain = Module()
    (optimizer,), (schedule,) = plain.configure_optimizers()
    for _ in range(2):
        for step, batch in enumerate(loader):
            (plain.training_step(batch, step) / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
                schedule["scheduler"].step()
    for (name, a), (_, b) in zip(binary_parameters(module), binary_parameters(plain), strict=True):
        assert torch.equal(a, b), name


def test_binary_and_real_weights_train_side_by_side():
    torch.manual_seed(0)
    model = nn.Sequential(BinaryLinear(6, 8), nn.BatchNorm1d(8), nn.Hardtanh(), nn.Linear(8, 2))
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = [QPSBGD(binary_parameters(model)), torch.optim.Adam(real_parameters(model))]
    x, y = torch.randn(16, 6), torch.randint(2, (16,))
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    assert losses[-1] < losses[0]
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
def test_importing_spingrad_costs_little_beside_torch():
    def seconds(statement):
        """Of the processor, which a busy machine lengthens less than the time on the clock."""
        code = f"{statement}; import time; print(time.process_time())"
        command = [sys.executable, "-c", code]
        return min(float(subprocess.check_output(command, text=True)) for _ in range(3))

    assert seconds("import spingrad") < 1.5 * seconds("import torch")
    code = "import spingrad, sys; assert not {'dimod', 'numba', 'dwave'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.needs("sklearn")
@pytest.mark.slow
def test_the_quickstart_runs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    rows = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if "BinaryConnect" in line or "QP" in line
    ]
    assert len(rows) >= 4
    assert all(0.9 < float(row[-3]) <= 1 and math.isfinite(float(row[-4])) for row in rows)


def run_script(name, *arguments):
    allowed = ["-W", "error", "-W", "ignore:numba is not installed"]
    command = [sys.executable, *allowed, ROOT / name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.needs("spingrad_lab")
@pytest.mark.slow
def test_the_mnist_example_reports_what_it_reached(data_folder, tmp_path):
    out = tmp_path / "result.json"
    arguments = ["--images", "2000", "--epochs", "2", "--sizes", "784", "64", "10", "--threads", "1", "--out"]
    printed = run_script("examples/mnist_without_batchnorm.py", *arguments, out)
    result = json.loads(out.read_text())
    assert result["bits"] == 784 * 64 + 640
    assert len(result["history"]) == 2
    assert result["test_accuracy"] > 0.7
    assert f"test {result['test_accuracy']:.4f}" in printed


@pytest.mark.needs("spingrad_lab", "lightning")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "printed"),
    [
        (
            "resnet_cifar10",
            "--images 200 --epochs 1 --test-images 100 --width 4",
            "epoch 1: test accuracy 0.",
        ),
        (
            "shakespeare_transformer",
            "--steps 4 --every 2 --width 32 --test-batches 1",
            "step 4: validation loss",
        ),
        ("lightning_two_optimizers", "--images 300 --epochs 1", "test accuracy 0."),
        (
            "spoken_digits",
            "--recordings 300 --epochs 1 --channels 16",
            "the C program: 0 classes that differ",
        ),
    ],
)
def test_scripts_from_outside_run_at_a_small_size(data_folder, script, arguments, printed, tmp_path):
    command = [sys.executable, ROOT / f"examples/{script}.py", *arguments.split()]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert printed in run.stdout


def test_the_page_shows_the_training_script_as_it_is():
    script = (ROOT / "examples/training_script.py").read_text()
    page = (ROOT / "docs/training.md").read_text()
    assert script[script.index("import argparse") :].rstrip() in page


@pytest.mark.needs("sklearn")
@pytest.mark.slow
def test_the_training_script_resumes_and_takes_two_workers(tmp_path):
    script = ROOT / "examples/training_script.py"
    alone = [sys.executable, "-W", "error"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for command, folder, epochs in ((alone, "one", 1), (alone, "one", 2), (launch, "two", 1)):
        ran = subprocess.run(
            [*command, script, "--epochs", str(epochs), "--folder", folder],
            check=True, capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip
        assert re.findall(r"epoch (\d): held-out accuracy 0\.", ran.stdout) == [str(epochs)]
