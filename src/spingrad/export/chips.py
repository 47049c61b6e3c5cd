"""Runs a network on simulated chips: an Arduino Uno in simavr, Cortex-M and RISC-V in qemu.

The chips are ``UNO``, ``CORTEX_M0``, ``CORTEX_M3`` and ``RISCV``; ``CHIPS`` has all of them.

The program holds the network, the inputs, and a ``main`` that prints the class of every input and what it
cost: cycles of timer 1 on AVR, instructions elsewhere. Under qemu one instruction takes a nanosecond of
simulated time (``-icount shift=0``): RISC-V counts them in ``instret``, Cortex-M in ticks of SysTick.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spingrad.export.c import INPUT_TYPES, CSource, to_c
from spingrad.export.library import filled
from spingrad.export.library import source as file
from spingrad.export.packed import PackedModel
from spingrad.export.stages import Array
from spingrad.export.text import listed, write_texts

STRICT = "-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Werror"


@dataclass(frozen=True)
class Chip:
    """A chip that can be simulated.

    Args:
        name: Of the chip, and of a board with it.
        compile: The compiler and its options for this chip.
        simulate: The simulator and its options; the program is the last argument.
        flash, ram: Bytes of memory for a program.
        unit: What a run costs: cycles, or instructions.
        tick: How many of them one tick of the timer is.
        start: File of C code that starts the chip, prints, and reads the timer.
        packages: What to install on Debian or Ubuntu.
        layout: Addresses of flash and RAM; none where the compiler knows them.

    Example:
        >>> UNO.name, UNO.flash, UNO.ram
        ('ATmega328P (Arduino Uno)', 32256, 2048)
    """

    name: str
    compile: tuple[str, ...]
    simulate: tuple[str, ...]
    flash: int
    ram: int
    unit: str
    tick: float
    start: str
    packages: str
    layout: tuple[str, str] | None = None

    @property
    def missing(self) -> list[str]:
        """Programs that must be installed before this chip can be simulated."""
        return [program for program in (self.compile[0], self.simulate[0]) if shutil.which(program) is None]


class Run(NamedTuple):
    """What a network did on a chip.

    Args:
        classes: The class of every input.
        cost: Cycles or instructions for each.
        flash: Bytes of the program, without the inputs that were stored with it.
        ram: Bytes of the buffers, of one input, and of the deepest stack.

    Example:
        >>> from torch import nn
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> packed = pack(nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3)))
        >>> x = np.zeros((2, 16), np.uint8)
        >>> found = run(UNO, packed, x)
        >>> found.flash < UNO.flash, found.ram < UNO.ram, found.cost.shape
        (True, True, (2,))
    """

    classes: Array
    cost: Array
    flash: int
    ram: int


_QEMU = "-nographic", "-monitor", "none", "-serial", "stdio", "-icount", "shift=0"
_CORTEX = "-mthumb", "-nostartfiles", "--specs=nano.specs"
_ARM = "gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm"
_RV32 = "-mcmodel=medany", "-nostartfiles", "--specs=picolibc.specs"
UNO = Chip(
    "ATmega328P (Arduino Uno)",
    ("avr-gcc", "-mmcu=atmega328p", "-std=gnu99"),
    ("simavr", "-m", "atmega328p", "-f", "16000000"),
    32_256,
    2_048,
    "cycles",
    1,
    "avr.c",
    "gcc-avr avr-libc simavr",
)
CORTEX_M0 = Chip(
    "Cortex-M0 (micro:bit)",
    ("arm-none-eabi-gcc", "-mcpu=cortex-m0", *_CORTEX, "-std=gnu99"),
    ("qemu-system-arm", "-machine", "microbit", *_QEMU, "-semihosting", "-kernel"),
    256 * 1024,
    16 * 1024,
    "instructions",
    62.5,  # ns, at 16 MHz
    "cortex_m.c",
    _ARM,
    ("0x00000000", "0x20000000"),
)
CORTEX_M3 = Chip(
    "Cortex-M3 (MPS2 AN385)",
    ("arm-none-eabi-gcc", "-mcpu=cortex-m3", *_CORTEX, "-std=gnu99"),
    ("qemu-system-arm", "-machine", "mps2-an385", *_QEMU, "-semihosting", "-kernel"),
    4 * 1024 * 1024,
    4 * 1024 * 1024,
    "instructions",
    40,  # ns, at 25 MHz
    "cortex_m.c",
    _ARM,
    ("0x00000000", "0x20000000"),
)
RISCV = Chip(
    "RISC-V RV32IMAC (qemu virt)",
    ("riscv64-unknown-elf-gcc", "-march=rv32imac", "-mabi=ilp32", *_RV32, "-std=gnu99"),
    ("qemu-system-riscv32", "-machine", "virt", "-bios", "none", *_QEMU, "-kernel"),
    4 * 1024 * 1024,
    4 * 1024 * 1024,
    "instructions",
    1,
    "riscv.c",
    "gcc-riscv64-unknown-elf picolibc-riscv64-unknown-elf qemu-system-misc",
    ("0x80000000", "0x80400000"),
)
CHIPS = UNO, CORTEX_M0, CORTEX_M3, RISCV


def run(chip: Chip, model: PackedModel, x: Array, *, flags: Sequence[str] = ("-O2",)) -> Run:
    """Runs a network on a simulated chip, as many inputs at a time as fit into its flash.

    Raises:
        MemoryError: The network does not fit.
        RuntimeError: A compiler or simulator is not installed.

    Example:
        >>> from torch import nn
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> packed = pack(nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3)))
        >>> x = np.zeros((2, 16), np.uint8)
        >>> found = run(UNO, packed, x)
        >>> np.array_equal(found.classes, packed.classes(x))
        True
    """
    if chip.missing:
        missing = " and ".join(chip.missing)
        raise RuntimeError(f"{chip.name} needs {missing}: apt-get install {chip.packages}")
    source = to_c(model)
    x = x.reshape(len(x), -1)
    with tempfile.TemporaryDirectory() as folder:
        source.save(folder)
        command = [*chip.compile, *flags, *STRICT, "-c", "network.c"]
        subprocess.run(command, cwd=folder, check=True)
        first = _run_some(chip, source, model.kind, x[:1], Path(folder), flags)
        parts, free = [first], chip.flash - first.flash
        at_once = min(free // x.shape[1], 200)
        if at_once < 1 or first.ram > chip.ram:
            raise MemoryError(
                f"{chip.name} has {chip.flash:,} bytes of flash and {chip.ram:,} of RAM; this program with "
                f"one input takes {first.flash + x.shape[1]:,} and {first.ram:,}"
            )
        for start in range(1, len(x), at_once):
            some = x[start : start + at_once]
            parts.append(_run_some(chip, source, model.kind, some, Path(folder), flags))
    classes, cost = (np.concatenate(each) for each in list(zip(*parts, strict=True))[:2])
    return Run(classes, cost, first.flash, max(part.ram for part in parts))


def _run_some(chip: Chip, source: CSource, kind: str, x: Array, folder: Path, flags: Sequence[str]) -> Run:
    fields = {"kind": INPUT_TYPES[kind], "count": len(x), "inputs": listed(x)}
    files = {"main.c": filled(file("chips/main.c"), fields), "chip.c": file(f"chips/{chip.start}")}
    command = [*chip.compile, *flags, "main.c", "network.o", "-o", "program"]
    if chip.layout:
        places = dict(zip(("flash_start", "ram_start"), chip.layout, strict=True))
        files["layout.ld"] = filled(file("chips/layout.ld"), {**places, "flash": chip.flash, "ram": chip.ram})
        command += ["-T", "layout.ld"]
    write_texts(folder, files)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise MemoryError(f"{chip.name}: {done.stderr.strip()[-500:]}")
    size = subprocess.run(
        [chip.compile[0].replace("gcc", "size"), "program"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    text, data, bss = (int(word) for word in size.stdout.splitlines()[1].split()[:3])
    out = subprocess.run(
        [*chip.simulate, "program"], cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, timeout=600
    )
    said = (out.stdout + out.stderr).decode(errors="replace")
    found = re.findall(r"(\d+) (\d+)[.\s]*\n", said)
    stack = re.search(r"s(\d+)[.\s]*\n", said)
    if len(found) != len(x) or stack is None:
        raise RuntimeError(f"{chip.name}: expected {len(x)} answers, got {said[-500:]!r}")
    classes, ticks = np.array(found, np.int64).T
    flash = text + data - x.nbytes
    return Run(classes, (ticks * chip.tick).astype(np.int64), flash, data + bss + int(stack[1]))
