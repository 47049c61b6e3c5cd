import shutil
import subprocess
from functools import partial

import numpy as np
import pytest
from test_export import SIGN_NETWORKS, batch_norm, images, made
from torch import nn

from spinstep import BinaryConv2d, BinaryLinear, Sign
from spinstep.export import pack
from spinstep.export.c import to_c

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

STRICT = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Werror"]
SANITIZED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

# Writes the sums of all layers, the scores and the class of every sample.
HARNESS = """
#include <stdint.h>
#include <stdio.h>
static int32_t traced[{layers}][{most}];
static void keep(int layer, const int32_t *sums, int32_t units, int32_t place, int32_t stride)
{{
    for (int32_t unit = 0; unit < units; unit++)
        traced[layer][place + unit * stride] = sums[unit];
}}
#define NET_TRACE(layer, sums, units, place, stride) keep(layer, sums, units, place, stride)
#include "net.c"
static const size_t counts[{layers}] = {{{counts}}};
int main(void)
{{
    {kind} input[NET_INPUTS];
    while (fread(input, 1, NET_INPUTS, stdin) == NET_INPUTS) {{
        int32_t scores[NET_CLASSES];
        const int32_t found = net_class(input);
        net_scores(input, scores);
        for (int layer = 0; layer < {layers}; layer++)
            fwrite(traced[layer], sizeof(int32_t), counts[layer], stdout);
        fwrite(scores, sizeof(int32_t), NET_CLASSES, stdout);
        fwrite(&found, sizeof(int32_t), 1, stdout);
    }}
    return 0;
}}
"""


def run_c(packed, x, folder, flags=("-O2",)):
    """Sums of every layer, scores and classes, as the compiled C finds them."""
    to_c(packed, "net").save(folder)
    flows = [
        flow for stage, flow in zip(packed.stages, packed.flows[1:], strict=True) if hasattr(stage, "bits")
    ]
    counts = [int(np.prod(flow.shape)) for flow in flows]
    kind = "uint8_t" if packed.kind == "pixels" else "int8_t"
    text = HARNESS.format(layers=len(counts), most=max(counts), counts=", ".join(map(str, counts)), kind=kind)
    (folder / "main.c").write_text(text)
    subprocess.run([*STRICT, *flags, "main.c", "-o", "main"], cwd=folder, check=True)
    subprocess.run([*STRICT, "-O2", "-c", "net.c"], cwd=folder, check=True)  # alone: nothing unused
    raw = x.astype(np.uint8 if packed.kind == "pixels" else np.int8).tobytes()
    out = subprocess.run([folder / "main"], input=raw, capture_output=True, check=True).stdout
    numbers = np.frombuffer(out, np.int32).reshape(len(x), -1)
    parts = np.split(numbers, np.cumsum([*counts, packed.flows[-1].shape[0]]), axis=1)
    sums = [part.reshape(len(x), *flow.shape) for part, flow in zip(parts, flows, strict=False)]
    return sums, parts[-2], parts[-1][:, 0]


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
def test_compiled_network_computes_the_same_whole_numbers(network, flags, tmp_path):
    packed, x = pack(made(network)), images(20)
    sums, scores, classes = run_c(packed, x, tmp_path, flags)
    for ours, theirs in zip(sums, packed.sums(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(scores, packed.scores(x))
    np.testing.assert_array_equal(classes, packed.classes(x))


def test_extreme_inputs_do_not_overflow(tmp_path):
    packed = pack(made(hardtanh_with_norm))
    x = np.stack([np.zeros(784), np.full(784, 255)]).astype(np.uint8)
    _, scores, _ = run_c(packed, x, tmp_path, SANITIZED)
    np.testing.assert_array_equal(scores, packed.scores(x, backend="numpy"))


def test_spins_go_in_as_they_are(tmp_path):
    model = made(partial(nn.Sequential, BinaryLinear(16, 4), nn.Hardtanh(), BinaryLinear(4, 2)))
    packed = pack(model, kind="spins")
    rows = ((np.arange(2**16)[:, None] >> np.arange(16)) & 1) * 2 - 1
    _, scores, _ = run_c(packed, rows, tmp_path)
    np.testing.assert_array_equal(scores, packed.scores(rows))


def test_footprint_is_what_the_compiler_makes_of_it(tmp_path):
    source = to_c(pack(made(SIGN_NETWORKS[1])), "net")
    source.save(tmp_path)
    subprocess.run([*STRICT, "-Os", "-c", "net.c"], cwd=tmp_path, check=True)
    listed = subprocess.run(["size", "-A", "net.o"], cwd=tmp_path, capture_output=True, text=True, check=True)
    sizes = {
        line.split()[0]: int(line.split()[1]) for line in listed.stdout.splitlines() if line.startswith(".")
    }
    assert source.constants <= sizes[".rodata"] <= source.constants + 200  # rounded up for alignment
    assert source.ram <= sizes[".bss"] <= source.ram + 64
    assert sizes[".data"] == 0


def test_names_that_are_no_identifiers_are_refused():
    with pytest.raises(ValueError, match="C identifier"):
        to_c(pack(made(SIGN_NETWORKS[0])), "3d-net")
