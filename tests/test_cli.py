"""The command ``spingrad``: what it loads and what it needs."""

import subprocess
import sys

import pytest

import spingrad
from spingrad.cli import main

PLAN = ["qpu", "plan", "3-2", "--batch-size", "10", "--num-examples", "100", "--topology", "zephyr"]
NOT_NEEDED = ["matplotlib", "rich", "pandas", "torch_geometric", "pooch", "spingrad_lab"]
OPTIONAL = [
    *NOT_NEEDED,
    "numba",
    "llvmlite",
    "onnx",
    "onnxruntime",
    "qonnx",
    "safetensors",
    "dwave",
    "minorminer",
]


def python(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def without(*modules):
    """Code that makes imports of these modules fail, then runs the command."""
    return (
        f"import sys; sys.modules.update(dict.fromkeys({modules!r})); from spingrad.cli import main; main()"
    )


def test_the_edges_load_no_optional_package_when_they_are_imported():
    code = "import sys, spingrad.qpu, spingrad.export, spingrad.cli; print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in python(code).split()}
    assert not loaded & set(OPTIONAL)


def test_a_plan_needs_only_the_extra_qpu(tmp_path, monkeypatch):
    pytest.importorskip("dwave.cloud")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    missing = *NOT_NEEDED, "numba", "onnx", "safetensors"
    assert "QPU time per step" in python(without(*missing), *PLAN)


def test_an_export_needs_only_the_extra_export(tmp_path):
    pytest.importorskip("safetensors")
    from spingrad.export.report import example

    path = tmp_path / "net.safetensors"
    example((8, 4, 2)).save(path)
    missing = *NOT_NEEDED, "onnx", "dwave.cloud", "dwave.system", "minorminer"
    assert "40 weights" in python(without(*missing), "export", str(path), "--to", "c")
    assert "whole network" in python(without(*missing), "export", str(path), "--report", "--batch", "2")


@pytest.mark.parametrize("to", ["onnx", "qonnx"])
def test_onnx_is_written_without_the_packages_that_run_it(to, tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnx")
    from spingrad.export.report import example

    example((8, 4, 2)).save(tmp_path / "net.safetensors")
    for module in ("onnxruntime", "qonnx"):
        monkeypatch.setitem(sys.modules, module, None)
    main(["export", str(tmp_path / "net.safetensors"), "--to", to])
    assert "40 weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [
        ("dwave.cloud.testing.mocks", PLAN, "qpu"),
        ("onnx", ["export", "net.safetensors", "--to", "onnx"], "onnx"),
        ("onnx", ["export", "net.safetensors", "--to", "qonnx"], "onnx"),
    ],
)
def test_a_missing_package_is_an_error_that_names_its_extra(module, command, extra, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    from spingrad.export.report import example

    monkeypatch.chdir(tmp_path)
    example((8, 4, 2)).save("net.safetensors")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=rf'pip install "spingrad\[{extra}\]"'):
        main(command)


@pytest.mark.parametrize(
    "command",
    [
        ["qpu", "plan"],
        ["qpu", "inspect"],
        ["qpu", "emulate"],
        ["export"],
    ],
)
def test_the_help_of_a_command_names_its_extra(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert f'pip install "spingrad[{"qpu" if command[0] == "qpu" else "export"}]"' in words


def test_the_version_is_printed_by_the_command_and_by_the_module(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    expected = f"spingrad {spingrad.__version__}"
    assert capsys.readouterr().out.strip() == expected
    command = [sys.executable, "-m", "spingrad", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == expected
