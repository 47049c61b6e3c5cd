"""C on simulated chips; tests are skipped where a compiler or a simulator is not installed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from graph_helpers import RandomGraph
from test_export import images
from test_export_c import packed_network
from torch import nn

from spingrad import BinaryLinear, Sign
from spingrad.export import chips, pack
from spingrad.export.arduino import to_arduino
from spingrad.export.vectors import examples

ROOT = Path(__file__).parents[1]
CORE = Path("/usr/share/arduino/hardware/arduino/avr")


def need(*programs):
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def packed_spins():
    """A small network of random spins."""
    return pack(nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3)), kind="spins")


@pytest.mark.parametrize("chip", chips.CHIPS, ids=lambda chip: chip.name)
def test_classes_on_a_chip_are_those_of_the_packed_network(chip):
    need(*chip.missing)
    for seed in (0, 3):
        packed = RandomGraph(seed).model()
        x = examples(packed, 4)
        ran = chips.run(chip, packed, x)
        np.testing.assert_array_equal(ran.classes, packed.classes(x))
        assert (ran.cost > 1000).all()


def test_the_instructions_of_a_small_network_are_counted_from_the_first_input_on():
    need(*chips.CORTEX_M3.missing)
    packed = packed_spins()
    assert (chips.run(chips.CORTEX_M3, packed, examples(packed, 2)).cost < 100_000).all()


def test_a_missing_compiler_or_simulator_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        RuntimeError, match="needs avr-gcc and simavr: apt-get install gcc-avr avr-libc simavr"
    ):
        chips.run(chips.UNO, packed_spins(), np.ones((1, 16), np.int8))


@pytest.mark.needs("safetensors")
def test_the_programs_and_commands_of_the_page_check_a_network_on_two_chips(tmp_path):
    need(*chips.UNO.missing, *chips.CORTEX_M3.missing)
    _, after = (ROOT / "docs/devices.md").read_text(encoding="utf-8").split("\n## On a chip, by hand\n")
    page = after.partition("\n## ")[0]
    packed_spins().save(tmp_path / "net.safetensors")
    for name, code in re.findall(r"(?ms)^```c\n(?=/\* (\S+):)(.*?)^```", page):
        (tmp_path / name).write_text(code)
    commands = "".join(re.findall(r"(?ms)^```bash\n(.*?)^```", page)).replace("spingrad ", "$SPINGRAD ")
    spingrad = f"{sys.executable} -m spingrad"
    ran = subprocess.run(
        ["bash", "-ec", commands], cwd=tmp_path, env=os.environ | {"SPINGRAD": spingrad}, capture_output=True,
        timeout=100,
    )  # fmt: skip
    said = (ran.stdout + ran.stderr).decode()
    assert ran.returncode == 0, said
    assert said.count("10 inputs: all sums and scores are right") == 2
    assert "all right" in said


def test_a_network_of_pixels_fits_an_arduino_uno():
    need(*chips.UNO.missing)
    packed, x = packed_network("sign_of_pixels"), images(3)
    ran = chips.run(chips.UNO, packed, x)
    np.testing.assert_array_equal(ran.classes, packed.classes(x))
    assert ran.flash < chips.UNO.flash
    assert ran.ram < chips.UNO.ram


def test_a_network_that_is_too_large_is_refused_with_numbers():
    need(*chips.UNO.missing)
    with pytest.raises(MemoryError, match="ATmega328P"):
        chips.run(chips.UNO, packed_network("signal"), images(1))


def test_an_arduino_library_runs_its_sketch(tmp_path):
    need("avr-gcc", "avr-g++", "simavr")
    if not CORE.is_dir():
        pytest.skip("needs arduino-core-avr")
    packed, x = packed_network("sign_of_pixels"), images(1)
    to_arduino(packed, "digits", x[0]).save(tmp_path)
    assert "name=digits\n" in (tmp_path / "library.properties").read_text()
    flags = ["-mmcu=atmega328p", "-DF_CPU=16000000UL", "-DARDUINO=10819", "-Os", "-w", "-ffunction-sections"]
    folders = [
        f"-I{folder}" for folder in (CORE / "cores/arduino", CORE / "variants/standard", tmp_path / "src")
    ]
    core = CORE / "cores/arduino"
    c_files = [*core.glob("*.c"), tmp_path / "src/digits.c"]
    sketch = tmp_path / "sketch.cpp"
    sketch.write_text("#include <Arduino.h>\n" + (tmp_path / "examples/digits/digits.ino").read_text())
    cpp_files = [
        core / name for name in ("HardwareSerial.cpp", "HardwareSerial0.cpp", "Print.cpp", "main.cpp")
    ]
    subprocess.run(["avr-gcc", *flags, *folders, "-c", *c_files], cwd=tmp_path, check=True)
    subprocess.run(
        ["avr-g++", *flags, "-std=gnu++11", "-fno-threadsafe-statics", *folders, "-c", *cpp_files, sketch],
        cwd=tmp_path,
        check=True,
    )
    objects = [str(path) for path in tmp_path.glob("*.o")]
    link = ["avr-gcc", "-mmcu=atmega328p", "-Wl,--gc-sections", *objects, "-o", "sketch.elf"]
    subprocess.run(link, cwd=tmp_path, check=True)
    command = ["timeout", "3", "simavr", "-m", "atmega328p", "-f", "16000000", "sketch.elf"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True)
    expected = int(packed.classes(x)[0])
    assert f"class {expected}, expected {expected}" in (said.stdout + said.stderr).decode()
