import re
import shutil
import subprocess
from functools import partial

import numpy as np
import pytest
from graph_helpers import RandomGraph
from test_export import SIGN_NETWORKS, batch_norm, images, made
from test_export_graph import EXACT, Normed, real_ends
from torch import nn

from spingrad import BinaryConv2d, BinaryLinear, Sign
from spingrad.export import pack, verify
from spingrad.export.c import to_c
from spingrad.export.plan import Buffer, plan
from spingrad.export.vectors import examples, to_test

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def assert_same(answers, packed, x):
    for ours, theirs in zip(answers.sums, packed.sums(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(answers.classes, packed.classes(x))


def hardtanh_with_norm():
    return nn.Sequential(
        BinaryLinear(784, 40), batch_norm(40), nn.Hardtanh(), BinaryLinear(40, 33), nn.Hardtanh(),
        BinaryLinear(33, 10), batch_norm(10),
    )  # fmt: skip


def averages():
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), nn.AvgPool2d(2), BinaryConv2d(1, 8, 3), nn.AvgPool2d(2), Sign(),
        nn.AvgPool2d((1, 2)), BinaryConv2d(8, 6, 3, padding=1, groups=2), nn.Hardtanh(), nn.MaxPool2d(2),
        nn.Flatten(), BinaryLinear(6 * 3 * 1, 10),
    )  # fmt: skip


def sign_of_pixels():
    return nn.Sequential(Sign(), BinaryLinear(784, 70), Sign(), BinaryLinear(70, 10))


CHAINS = [*SIGN_NETWORKS, hardtanh_with_norm, averages, sign_of_pixels]
NETWORKS = {network.__name__: (network, None) for network in CHAINS}
NETWORKS |= EXACT | {"normed": (Normed, (1, 28, 28)), "real_ends": (real_ends, (1, 28, 28))}


def packed_network(name):
    network, shape = NETWORKS[name]
    shift = -0.5 if network is sign_of_pixels else 0.0
    calibration = images(100).reshape(-1, *shape) if shape else None
    return pack(made(network), shape, scale=1 / 256, shift=shift, calibration=calibration)


@pytest.mark.parametrize("name", NETWORKS)
def test_compiled_network_computes_the_same_integers(name):
    packed, word = packed_network(name), (8, 16, 32)[list(NETWORKS).index(name) % 3]
    x = np.concatenate([images(20), np.zeros((1, 784), np.uint8), np.full((1, 784), 255, np.uint8)])
    flags = *SANITIZED, f"-DNETWORK_WORD_BITS={word}"
    assert_same(verify.from_c(packed, x, flags), packed, x)


@pytest.mark.parametrize("seed", range(9))
def test_random_graphs_compute_the_same_integers(seed):
    packed = RandomGraph(seed).model()
    x = examples(packed, 5, seed)
    assert_same(verify.from_c(packed, x, (*SANITIZED, f"-DNETWORK_WORD_BITS={8 << seed % 3}")), packed, x)


def test_spins_are_accepted_as_inputs():
    model = made(partial(nn.Sequential, BinaryLinear(16, 4), nn.Hardtanh(), BinaryLinear(4, 2)))
    packed = pack(model, kind="spins")
    rows = ((np.arange(2**16)[:, None] >> np.arange(16)) & 1) * 2 - 1
    assert_same(verify.from_c(packed, rows), packed, rows)


STRICT = "-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Werror", "-O2", "-c", "net.c", "-o", "net.o"
COMPILERS = {
    "avr": ("avr-gcc", "avr-g++", ("-mmcu=atmega328p",)),
    "arm": ("arm-none-eabi-gcc", "arm-none-eabi-g++", ("-mcpu=cortex-m0", "-mthumb")),
    "riscv": ("riscv64-unknown-elf-gcc", "riscv64-unknown-elf-g++", ("-march=rv32imac", "-mabi=ilp32")),
    "here": ("gcc", "g++", ()),
}


@pytest.mark.parametrize("target", COMPILERS)
def test_every_compiler_takes_it_without_a_warning_as_c99_gnu99_and_cpp11(target, tmp_path):
    c, cpp, flags = COMPILERS[target]
    if shutil.which(c) is None:
        pytest.skip(f"needs {c}")
    standards = [(c, "-std=c99"), (c, "-std=gnu99")]
    if target != "riscv":  # its C++ has no headers of a C library
        standards.append((cpp, "-std=c++11", "-x", "c++"))
    if target == "riscv":
        flags = *flags, "--specs=picolibc.specs"
    for seed, reentrant in ((2, False), (4, True)):
        to_c(RandomGraph(seed).model(), "net", reentrant=reentrant).save(tmp_path)
        for compiler in standards:
            subprocess.run([*compiler, *flags, *STRICT], cwd=tmp_path, check=True)


def test_overlapping_calls_need_a_buffer_each(tmp_path):
    packed, x = packed_network("convolutional"), images(2)
    main = """
#include <stdio.h>
#include "net.h"
int main(void)
{
    static uint8_t input[NET_INPUTS];
    static int32_t one[NET_RAM_BYTES / 4], other[NET_RAM_BYTES / 4], scores[NET_CLASSES];
    while (fread(input, 1, NET_INPUTS, stdin) == NET_INPUTS) {
        net_scores(input, scores, one);
        for (int i = 0; i < NET_CLASSES; i++)
            printf("%ld ", (long)scores[i]);
        printf("%d ", net_class(input, other));
    }
    return 0;
}
"""
    program = verify.compiled(to_c(packed, "net", reentrant=True), main, tmp_path, ("-O2", "net.c"))
    out = subprocess.run([program], input=x.tobytes(), capture_output=True, check=True).stdout
    expected = np.concatenate([packed.scores(x), packed.classes(x)[:, None]], 1)
    assert [int(word) for word in out.split()] == expected.ravel().tolist()


def test_footprint_is_what_the_compiler_makes_of_it(tmp_path):
    source = to_c(packed_network("mlp_with_norm"), "net")
    source.save(tmp_path)
    subprocess.run([*verify.STRICT, "-Os", "-c", "net.c"], cwd=tmp_path, check=True)
    listed = subprocess.run(["size", "-A", "net.o"], cwd=tmp_path, capture_output=True, text=True, check=True)
    sizes = {
        line.split()[0]: int(line.split()[1]) for line in listed.stdout.splitlines() if line.startswith(".")
    }
    assert source.constants <= sizes[".rodata"] <= source.constants + 200  # rounded up for alignment
    assert source.ram <= sizes[".bss"] <= source.ram + 64
    assert sizes[".data"] == 0
    assert f"NET_FLASH_BYTES {source.constants}\n" in source.header
    assert f"NET_RAM_BYTES {source.ram} " in source.header


def test_test_vectors_notice_one_wrong_weight(tmp_path):
    packed = packed_network("separable")
    source = to_c(packed, "net", reentrant=True)
    source.save(tmp_path)
    (tmp_path / "net_test.c").write_text(to_test(packed, source, examples(packed, 3)))
    build = [*verify.STRICT, "-O1", "net_test.c", "-o", "net_test"]
    subprocess.run(build, cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "net_test"]).returncode == 0

    first = re.search(r"    WORD_\d\(0x[0-9a-f]+", source.source)
    assert first
    place = first.end() - 1  # the lowest bits are used by any fan-in
    digit = f"{int(source.source[place], 16) ^ 1:x}"
    (tmp_path / "net.c").write_text(source.source[:place] + digit + source.source[place + 1 :])
    subprocess.run(build, cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "net_test"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "wrong sums in layer" in done.stdout


@pytest.mark.parametrize("seed", range(20))
def test_buffers_needed_at_the_same_time_do_not_overlap(seed):
    random = np.random.default_rng(seed)
    starts, lengths, sizes = (random.integers(0, 9, 12) for _ in range(3))
    buffers = [
        Buffer(str(i), 1 + int(size), int(start), int(start + length))
        for i, (start, length, size) in enumerate(zip(starts, lengths, sizes, strict=True))
    ]
    offsets, total = plan(buffers)
    for i, one in enumerate(buffers):
        assert offsets[one.name] % 4 == 0
        assert offsets[one.name] + one.size <= total
        for other in buffers[:i]:
            apart = (
                offsets[one.name] + one.size <= offsets[other.name]
                or offsets[other.name] + other.size <= offsets[one.name]
            )
            assert apart or not one.meets(other)


def test_memory_is_reused_and_integers_take_as_few_bytes_as_they_need():
    deep = [layer for _ in range(6) for layer in (BinaryLinear(64, 64), Sign())]
    source = to_c(pack(made(partial(nn.Sequential, *deep, BinaryLinear(64, 10)))))
    assert source.ram == 2 * 8 + 4 * 32  # the input and the output of one layer, and 32 sums
    hidden = to_c(packed_network("hardtanh_with_norm")).memory
    assert {buffer.name: buffer.size for buffer, _ in hidden}["value_2"] == 2 * 40


def test_names_that_are_not_identifiers_are_refused():
    with pytest.raises(ValueError, match="C identifier"):
        to_c(packed_network("mlp"), "3d-net")
    for name in ("stdint", "String", "limits"):
        with pytest.raises(ValueError, match=f"not be that of a system header, such as <{name.lower()}.h>"):
            to_c(packed_network("mlp"), name)


def test_the_picture_of_the_memory_shows_every_buffer():
    source = to_c(packed_network("sign_of_pixels"))
    picture = source.picture()
    assert all(f"<title>{buffer.name}, {buffer.size:,} B</title>" in picture for buffer, _ in source.memory)
    assert f"{source.ram:,} B" in picture
