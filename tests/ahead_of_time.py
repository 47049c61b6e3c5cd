"""Registers and spills of the GPU kernels on chips that need not be here: ``python tests/ahead_of_time.py``.

Triton brings the assemblers. Each line names a kernel, the rows that it holds, a chip, and what the assembler
or the object file says: registers of a lane, and bytes or registers that did not fit.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CHIPS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
ROWS = (16, 32, 64, 128, 256, 512, 1024)
POINTERS = {
    "descend": {"Z": "*fp32", "H": "*fp32", "G": "*fp32"},
    "anneal": {
        **{name: "*fp32" for name in ("Z", "H", "G", "work", "temperatures", "noise")},
        "places": "*i64",
    },
}
NUMBERS = {
    "descend": ("n", "m", "sweeps", "started"),
    "anneal": ("n", "m", "reads", "sweeps", "descents", "started"),
}


class Use(NamedTuple):
    """What a compiled kernel takes of a lane."""

    kernel: str
    rows: int
    chip: str
    registers: int
    spilled: int


def compiled(kernel: str, rows: int, chip: str) -> Use:
    """One kernel with so many rows; all other sizes share it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from spingrad.kernels import descent_triton, gpu

    signature = POINTERS[kernel] | dict.fromkeys(NUMBERS[kernel], "i32")
    constants = {"R": rows, "UNITS": gpu.units_of(rows)}
    source = ASTSource(
        fn=getattr(descent_triton, kernel),
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={
            (place,): [["tt.divisibility", 16]] for place in range(len(POINTERS[kernel]))
        },  # torch's memory
    )
    built = triton.compile(source, target=GPUTarget(*CHIPS[chip]), options=gpu.OPTIONS)
    if chip.startswith("gfx"):
        text = built.asm["amdgcn"]
        count = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", text)}
        return Use(
            kernel, rows, chip, count["vgpr_count"], count["vgpr_spill_count"] + count["sgpr_spill_count"]
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Use(kernel, rows, chip, found["REG"], found["STACK"] + found["LOCAL"])


def table(kernels: tuple[str, ...], rows: tuple[int, ...], chips: tuple[str, ...]) -> Iterator[Use]:
    for chip in chips:
        for kernel in kernels:
            for count in rows:
                yield compiled(kernel, count, chip)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    rows = tuple(map(int, sys.argv[1:])) or ROWS
    for use in table(tuple(POINTERS), rows, tuple(CHIPS)):
        print(*use, flush=True)
