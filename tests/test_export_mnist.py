"""All 10,000 test images of MNIST through every export of one trained network."""

import contextlib
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import mnist
from torch import nn

from spingrad import QPSBGD, BinaryLinear, Sign, binary_parameters
from spingrad.export import chips, pack, verify
from spingrad.export.c import to_c

SCALE = 1 / 128


@pytest.fixture(scope="module")
def trained(data_folder):
    """784-128-10 after 100 steps, its packed form, the test images and torch's answers."""
    (images, labels), test = mnist("train"), mnist("test")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(BinaryLinear(784, 128), Sign(), BinaryLinear(128, 10))
        optimizer = QPSBGD(binary_parameters(model), lr=1e-3)
        for rows in torch.randperm(20_000).split(200):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows].flatten(1) * SCALE), labels[rows]).backward()
            optimizer.step()
    model.eval()
    x = test[0].flatten(1)
    theirs = verify.from_torch(model, x * SCALE, SCALE)
    assert (theirs.classes == test[1].numpy()).mean() > 0.8
    return pack(model, scale=SCALE), x.numpy(), theirs


def needs(name, found):
    return pytest.mark.skipif(not found, reason=f"needs {name}")


@pytest.mark.parametrize(
    ("run", "count"),
    [
        pytest.param(verify.from_packed, 10_000, id="packed"),
        pytest.param(verify.from_c, 10_000, id="c", marks=needs("gcc", shutil.which("gcc"))),
        pytest.param(
            verify.from_onnx, 10_000, id="onnx", marks=needs("onnxruntime", find_spec("onnxruntime"))
        ),
        pytest.param(verify.from_qonnx, 100, id="qonnx", marks=needs("qonnx", find_spec("qonnx"))),
    ],
)
def test_every_class_and_every_sum_is_torchs(trained, run, count):
    packed, x, theirs = trained
    ours = run(packed, x[:count])
    np.testing.assert_array_equal(ours.classes, theirs.classes[:count])
    for mine, other in zip(ours.sums, theirs.sums, strict=True):
        np.testing.assert_array_equal(mine, other[:count])


def test_it_fits_a_microcontroller(trained):
    source = to_c(trained[0])
    assert source.constants < 14_000
    assert source.ram < 1_024


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.needs("spingrad_lab")
def test_the_example_runs_from_training_to_a_compiled_program(data_folder, tmp_path, monkeypatch, capsys):
    example = Path(__file__).parents[1] / "examples" / "arduino.py"
    arguments = ["--epochs", "1", "--images", "3000", "--on-chip", "2", "--out", str(tmp_path / "digits")]
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    with torch.random.fork_rng(), contextlib.suppress(SystemExit):  # it stops early without simavr
        runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("different classes: 0") == (1 if chips.UNO.missing else 2)
