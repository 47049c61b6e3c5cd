"""A C program that checks a network on the chip: inputs, and what every layer must compute for them."""

import numpy as np

from spingrad.export.c import INPUT_TYPES, CSource
from spingrad.export.packed import PackedModel
from spingrad.export.stages import PRODUCTS, Array
from spingrad.export.text import filled, listed

FACTOR = 2654435761  # multiplies the place of a sum, so that sums that changed places are noticed
_TEST = """\
/* Checks @name@.c: returns 0 if every layer of every input is right, else 1. Written by spingrad.

   Compile only this file; it includes @name@.c. With -D@NAME@_QUIET it prints nothing and needs no stdio.h.
   With -Dmain=@name@_test it is a function, int @name@_test(void), for a program that has its own main.
*/

#include <stdint.h>

static uint32_t checksums[@layers@];

static void add_to_checksum(int layer, const int32_t *sums, int units, int place, int stride)
{
    for (int unit = 0; unit < units; unit++, place += stride)
        checksums[layer] += (uint32_t)sums[unit] * ((uint32_t)place * @factor@u + 1u);
}

#define @NAME@_TRACE(layer, sums, units, place, stride) add_to_checksum(layer, sums, units, place, stride)
#include "@name@.c"

#ifdef @NAME@_QUIET
#define WRONG(vector, what, number) ((void)0)
#define RIGHT(vectors) ((void)0)
#else
#include <stdio.h>
#define WRONG(vector, what, number) printf("input %d: wrong %s %d\\n", vector, what, number)
#define RIGHT(vectors) printf("%d inputs: all sums and scores are right\\n", vectors)
#endif

#define VECTORS @vectors@

static const FLASH @kind@ inputs[VECTORS * @NAME@_INPUTS] @NAME@_CONST_SECTION = {
    @inputs@
};

/* The sum over places p of a layer of sum[p] * (p * @factor@ + 1), modulo 2^32. */
static const FLASH i32 expected_checksums[VECTORS * @layers@] @NAME@_CONST_SECTION = {
    @checksums@
};

static const FLASH i32 expected_scores[VECTORS * @NAME@_CLASSES] @NAME@_CONST_SECTION = {
    @scores@
};

int main(void)
{
    static @kind@ input[@NAME@_INPUTS];
    static int32_t scores[@NAME@_CLASSES];
@memory@    int wrong = 0;
    for (int vector = 0; vector < VECTORS; vector++) {
        for (int i = 0; i < @NAME@_INPUTS; i++)
            input[i] = GET(@kind@, inputs + vector * @NAME@_INPUTS + i);
        for (int layer = 0; layer < @layers@; layer++)
            checksums[layer] = 0;
        @name@_scores(@passed@);
        for (int layer = 0; layer < @layers@; layer++)
            if (checksums[layer] != (uint32_t)GET(i32, expected_checksums + vector * @layers@ + layer)) {
                WRONG(vector, "sums in layer", layer);
                wrong = 1;
            }
        for (int i = 0; i < @NAME@_CLASSES; i++)
            if (scores[i] != GET(i32, expected_scores + vector * @NAME@_CLASSES + i)) {
                WRONG(vector, "score", i);
                wrong = 1;
            }
    }
    if (!wrong)
        RIGHT(VECTORS);
    return wrong;
}
"""


def to_test(model: PackedModel, source: CSource, x: Array) -> str:
    """A C program that runs the inputs ``x`` and returns 0 if all sums of layers and all scores are right.

    The scores are stored as they are; of each layer's sums a checksum is stored, so that the program fits
    where the network fits.
    """
    sums = model.sums(x)
    checksums = np.stack([_checksums(layer.reshape(len(x), -1)) for layer in sums], 1)
    kind = INPUT_TYPES[model.kind]
    reentrant = "void *buffer" in source.header
    fields = {
        "name": source.name,
        "NAME": source.name.upper(),
        "kind": kind,
        "layers": sum(isinstance(stage, PRODUCTS) for stage in model.stages),
        "factor": FACTOR,
        "vectors": len(x),
        "inputs": listed(x),
        "checksums": listed(checksums),
        "scores": listed(model.scores(x)),
        "memory": f"    static int32_t buffer[{source.name.upper()}_RAM_BYTES / 4];\n" if reentrant else "",
        "passed": "input, scores, buffer" if reentrant else "input, scores",
    }
    return filled(_TEST, fields)


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
