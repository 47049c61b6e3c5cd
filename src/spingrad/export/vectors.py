"""A C program that checks a network on the chip: inputs, and what every layer must compute for them."""

import numpy as np

from spingrad.export.c import CSource
from spingrad.export.library import filled, named
from spingrad.export.library import source as file
from spingrad.export.packed import PackedModel
from spingrad.export.stages import PRODUCTS, Array
from spingrad.export.text import listed

FACTOR = 2654435761  # multiplies the place of a sum, so that sums that changed places are noticed


def to_test(model: PackedModel, source: CSource, x: Array) -> str:
    """A C program that runs the inputs ``x`` and returns 0 if all sums of layers and all scores are right.

    The scores are stored as they are; of each layer's sums a checksum is stored, so that the program fits
    where the network fits.
    """
    sums = model.sums(x)
    checksums = np.stack([_checksums(layer.reshape(len(x), -1)) for layer in sums], 1)
    kind = "u8" if model.kind == "pixels" else "i8"
    reentrant = "void *buffer" in source.header
    fields = {
        "kind": kind,
        "layers": sum(isinstance(stage, PRODUCTS) for stage in model.stages),
        "factor": f"{FACTOR}u",
        "vectors": len(x),
        "inputs": listed(x),
        "checksums": listed(checksums),
        "scores": listed(model.scores(x)),
        "memory": "    static int32_t buffer[NETWORK_RAM_BYTES / 4];\n" if reentrant else "",
        "passed": "scores, buffer" if reentrant else "scores",
    }
    return named(filled(file("test.c"), fields), source.name)


def examples(model: PackedModel, count: int, seed: int = 0) -> Array:  # (count, inputs)
    """Random inputs that a network accepts."""
    random = np.random.default_rng(seed)
    size = count, int(np.prod(model.shape))
    if model.kind == "pixels":
        return random.integers(0, 256, size).astype(np.uint8)
    if model.kind == "int8":
        return random.integers(-128, 128, size).astype(np.int8)
    return random.choice(np.array([-1, 1], np.int8), size)


def _checksums(sums: Array) -> Array:  # (inputs, places) -> (inputs,), int32
    factors = np.arange(sums.shape[1], dtype=np.uint64) * np.uint64(FACTOR) + np.uint64(1)
    total = (sums.astype(np.int64).astype(np.uint64) * factors).sum(1, dtype=np.uint64)
    return np.asarray(total.astype(np.uint32).view(np.int32))
