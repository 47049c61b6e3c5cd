import shutil
import subprocess
from functools import partial

import numpy as np
import pytest
from test_export import SIGN_NETWORKS, batch_norm, images, made
from torch import nn

from spingrad import BinaryConv2d, BinaryLinear, Sign
from spingrad.export import pack, verify
from spingrad.export.c import to_c

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


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
        nn.Unflatten(1, (1, 28, 28)), BinaryConv2d(1, 8, 3), nn.AvgPool2d(2), Sign(), nn.AvgPool2d((1, 2)),
        BinaryConv2d(8, 6, 3, padding=1, groups=2), nn.Hardtanh(), nn.MaxPool2d(2), nn.Flatten(),
        BinaryLinear(6 * 6 * 3, 10),
    )  # fmt: skip


@pytest.mark.parametrize("flags", [("-O2",), SANITIZED], ids=["strict", "sanitized"])
@pytest.mark.parametrize("network", [*SIGN_NETWORKS, hardtanh_with_norm, averages], ids=lambda n: n.__name__)
def test_compiled_network_computes_the_same_integers(network, flags):
    packed = pack(made(network))
    x = np.concatenate([images(20), np.zeros((1, 784), np.uint8), np.full((1, 784), 255, np.uint8)])
    assert_same(verify.from_c(packed, x, flags), packed, x)


def test_spins_are_accepted_as_inputs():
    model = made(partial(nn.Sequential, BinaryLinear(16, 4), nn.Hardtanh(), BinaryLinear(4, 2)))
    packed = pack(model, kind="spins")
    rows = ((np.arange(2**16)[:, None] >> np.arange(16)) & 1) * 2 - 1
    assert_same(verify.from_c(packed, rows), packed, rows)


@pytest.mark.parametrize("network", [*SIGN_NETWORKS, hardtanh_with_norm], ids=lambda n: n.__name__)
def test_scores_alone_compile_without_a_warning_and_are_those_of_the_runtime(network, tmp_path):
    packed, x = pack(made(network)), images(3)
    main = """
#include <stdio.h>
#include "net.h"
int main(void)
{
    uint8_t input[NET_INPUTS];
    int32_t scores[NET_CLASSES];
    while (fread(input, 1, NET_INPUTS, stdin) == NET_INPUTS) {
        net_scores(input, scores);
        for (int i = 0; i < NET_CLASSES; i++)
            printf("%ld ", (long)scores[i]);
    }
    return 0;
}
"""
    program = verify.compiled(to_c(packed, "net"), main, tmp_path, ("-O2", "net.c"))
    out = subprocess.run([program], input=x.tobytes(), capture_output=True, check=True).stdout
    assert [int(word) for word in out.split()] == packed.scores(x).ravel().tolist()


def test_footprint_is_what_the_compiler_makes_of_it(tmp_path):
    source = to_c(pack(made(SIGN_NETWORKS[1])), "net")
    source.save(tmp_path)
    subprocess.run([*verify.STRICT, "-Os", "-c", "net.c"], cwd=tmp_path, check=True)
    listed = subprocess.run(["size", "-A", "net.o"], cwd=tmp_path, capture_output=True, text=True, check=True)
    sizes = {
        line.split()[0]: int(line.split()[1]) for line in listed.stdout.splitlines() if line.startswith(".")
    }
    assert source.constants <= sizes[".rodata"] <= source.constants + 200  # rounded up for alignment
    assert source.ram <= sizes[".bss"] <= source.ram + 64
    assert sizes[".data"] == 0


def test_names_that_are_not_identifiers_are_refused():
    with pytest.raises(ValueError, match="C identifier"):
        to_c(pack(made(SIGN_NETWORKS[0])), "3d-net")
