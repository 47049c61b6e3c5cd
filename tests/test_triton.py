"""The kernels for GPUs without a GPU: in Triton's interpreter, and compiled for chips that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import ahead_of_time
import pytest
import torch

from spingrad.kernels import gpu, plain

FOLDER = Path(__file__).parent


def run(script, *arguments):
    """In a process of its own, since Triton is for the interpreter from its import on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, FOLDER / script, *map(str, arguments)]
    output = subprocess.check_output(command, text=True, env=environment)
    return [line.split() for line in output.splitlines()]


@pytest.mark.needs("triton")
@pytest.mark.parametrize(
    ("spins", "units"),
    [pytest.param(24, 20, marks=pytest.mark.slow), pytest.param(64, 64, marks=pytest.mark.long)],
)
def test_the_kernels_set_the_spins_of_torch(spins, units):
    for name, different, total in run("interpreted.py", 200, spins, units):
        assert int(different) <= (int(total) / 10_000 if name == "rounded" else 0), name
        assert int(total) > 1_000


@pytest.mark.needs("triton")
def test_the_kernels_set_the_spins_of_torch_on_a_few_problems():
    assert [line[1] for line in run("interpreted.py", 10, 12, 10)] == ["0", "0", "0"]


@pytest.mark.slow
@pytest.mark.needs("triton")
def test_nothing_spills_out_of_the_registers_of_any_chip():
    lines = run("ahead_of_time.py")
    assert len(lines) == len(ahead_of_time.CHIPS) * len(ahead_of_time.POINTERS) * len(ahead_of_time.ROWS)
    for kernel, rows, chip, registers, spilled in lines:
        assert int(spilled) == 0, f"{kernel} with {rows} rows spills on {chip}"
        assert 16 <= int(registers) <= 255


@pytest.mark.needs("triton")
def test_a_kernel_with_the_default_directions_compiles_ahead_of_time():
    assert all(line[-1] == "0" for line in run("ahead_of_time.py", 16))


def test_without_triton_a_gpu_takes_torch_and_says_so(monkeypatch):
    monkeypatch.setattr(gpu, "HAS_TRITON", False)
    Z, H = torch.randn(3, 8), torch.randn(5, 8)
    found, expected = torch.empty(5, 8), torch.empty(5, 8)
    with pytest.warns(UserWarning, match="Triton is not installed"):
        gpu.descend_(Z, H, found, 2)
    plain.descend_(Z, H, expected, 2)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("rows", "dtype"), [(gpu.MOST_ROWS + 1, torch.float32), (3, torch.float64)])
def test_what_no_kernel_holds_is_computed_by_torch(rows, dtype):
    Z, H = torch.randn(rows, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    found, expected = torch.empty_like(H), torch.empty_like(H)
    for module, G in ((gpu, found), (plain, expected)):
        module.descend_(Z, H, G, 2)
    assert torch.equal(found, expected)
