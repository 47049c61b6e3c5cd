import shutil
import subprocess

import numpy as np
import pytest
import torch
from test_export import SIGN_NETWORKS, convolutional, images, made, mlp

from spingrad.cli import main
from spingrad.export import PackedModel, pack
from spingrad.export.report import LayerReport, _evaluated, _in_floats, _in_int8, example

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def packed_file(tmp_path):
    pack(made(SIGN_NETWORKS[0])).save(tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@pytest.mark.parametrize(
    ("to", "files"),
    [
        ("packed", ["net-packed.safetensors"]),
        ("c", ["net_c.c", "net_c.h"]),
        ("arduino", ["net_arduino/library.properties", "net_arduino/src/net_arduino.c"]),
        ("onnx", ["net-onnx.onnx"]),
        ("qonnx", ["net-qonnx.onnx"]),
    ],
)
def test_a_packed_file_goes_to_every_format(packed_file, to, files, capsys):
    if to.endswith("onnx"):
        pytest.importorskip("onnx")
    main(["export", str(packed_file), "--to", to])
    said = capsys.readouterr().out
    assert all((packed_file.parent / name).exists() and name in said for name in files)
    assert "86,100 weights" in said


def test_test_vectors_come_with_a_program_that_checks_them(packed_file):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    main(["export", str(packed_file), "--to", "c", "--test-vectors", "3"])
    command = ["gcc", "-std=c99", "net_c_test.c", "-o", "program"]
    subprocess.run(command, cwd=packed_file.parent, check=True)
    ran = subprocess.run([packed_file.parent / "program"], check=True, capture_output=True, text=True)
    assert ran.stdout == "3 inputs: all sums and scores are right\n"


def test_test_vectors_are_refused_where_nothing_would_use_them(packed_file, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(packed_file), "--to", "onnx", "--test-vectors", "3"])
    assert "use it with --to c, got --to onnx" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--scale=0.5", "--shift=1", "--spins", "--shape=1,28,28"])
def test_options_of_a_torch_network_are_refused_for_a_packed_one(packed_file, option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(packed_file), "--to", "c", option])
    assert f"{option.partition('=')[0]} needs --model" in capsys.readouterr().err


def test_a_torch_checkpoint_needs_its_network(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\nfrom spingrad import BinaryLinear, Sign\n"
        "def digits():\n    return nn.Sequential(BinaryLinear(784, 8), Sign(), BinaryLinear(8, 10))\n"
    )
    import importlib

    importlib.invalidate_caches()
    monkeypatch.syspath_prepend(tmp_path)
    import my_nets

    model = my_nets.digits()
    safetensors.save_file(model.state_dict(), tmp_path / "weights.safetensors")
    arguments = ["export", "weights.safetensors", "--to", "packed", "--out", "out.safetensors"]
    with pytest.raises(SystemExit, match="must be packed first"):
        main(arguments)
    main([*arguments, "--model", "my_nets:digits"])
    assert PackedModel.load("out.safetensors").to_bytes() == pack(model).to_bytes()
    with pytest.raises(SystemExit, match="no_such"):
        main([*arguments, "--model", "my_nets:no_such"])


def test_a_report_says_what_every_layer_gains(packed_file, capsys, one_thread):
    main(["export", str(packed_file), "--report", "--batch", "4"])
    said = capsys.readouterr().out
    assert "whole network" in said
    assert "784 → 100" in said
    assert "int8" in said


@pytest.mark.parametrize("network", [mlp, convolutional])
def test_the_report_times_the_same_network_in_torch(network):
    packed, x = pack(made(network)), images(20)
    pairs = zip(packed.stages, packed.flows[:-1], strict=True)
    functions = [_in_floats(stage, flow) for stage, flow in pairs]
    found = _evaluated(functions, packed.reads, torch.from_numpy(x).float().view(-1, *packed.shape))
    np.testing.assert_array_equal(found[-1], packed.scores(x))


def test_the_report_times_the_same_network_in_int8():
    packed = pack(made(mlp), kind="spins")
    x = np.random.default_rng(0).choice(np.array([-1, 1], np.int8), (20, 784))
    found = _evaluated([_in_int8(stage) for stage in packed.stages], packed.reads, torch.from_numpy(x))
    np.testing.assert_array_equal(found[-1], packed.scores(x))


@pytest.mark.parametrize(
    ("float_ms", "int8_ms", "gain"),
    [(6.0, 4.0, "2.00 times"), (6.0, None, "3.00 times"), (2.1, 9.0, "size only")],
)
def test_the_gain_of_a_layer_is_over_the_faster_of_float32_and_int8(float_ms, int8_ms, gain):
    assert LayerReport("layer", 1, 1, 1, 1, 2.0, float_ms, int8_ms).gain == gain


def test_the_example_of_a_report_is_a_network_of_random_weights():
    packed = example((20, 30, 3))
    assert packed.num_weights == 20 * 30 + 30 * 3
    assert len(np.unique(packed.scores(np.full((1, 20), 9, np.uint8)))) > 1


def test_a_command_without_a_checkpoint_is_an_error_that_says_what_to_give(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["export"])
    assert "--to packed, c, arduino, onnx or qonnx" in capsys.readouterr().err
