"""The text of a network in C: header, source, and small functions of which a network gets those it calls."""

HEADER = """\
/* {title} */

#ifndef {upper}_H
#define {upper}_H

#include <stdint.h>

#define {upper}_INPUTS {inputs}
#define {upper}_CLASSES {classes}

/* Computes one integer per class. input: {meaning}
   The buffers are static, so calls must not overlap. */
void {name}_scores(const {kind} *input, int32_t *scores);

/* The class with the highest score, the first if several are equal. */
int {name}_class(const {kind} *input);

#endif
"""

SOURCE = """\
/* {title} */

#include "{name}.h"

/* Define this macro before including this file to see the sums of every layer: sums holds the given number
   of units; in the layer's output the first is at index place, the others follow at distance stride. */
#ifndef {upper}_TRACE
#define {upper}_TRACE(layer, sums, units, place, stride) ((void)0)
#endif

{constants}{buffers}
{functions}void {name}_scores(const {kind} *input, int32_t *scores)
{{
{body}}}

int {name}_class(const {kind} *input)
{{
    int32_t scores[{upper}_CLASSES];
    int best = 0;
    {name}_scores(input, scores);
    for (int i = 1; i < {upper}_CLASSES; i++)
        if (scores[i] > scores[best])
            best = i;
    return best;
}}
"""

GEOMETRY = """\
typedef struct {
    int32_t channels, height, width, kernel_height, kernel_width, stride_down, stride_right, top, left,
        dilation_down, dilation_right;
} geometry;

"""

# Name: the text of a function, and the functions that it calls. They are written in this order.
FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "get_bit": (
        """\
static int32_t get_bit(const uint32_t *bits, int32_t place)
{
    return (int32_t)(bits[place / 32] >> (place % 32) & 1u);
}

""",
        (),
    ),
    "put_bit": (
        """\
static void put_bit(uint32_t *bits, int32_t place, int value)
{
    const uint32_t bit = (uint32_t)1 << (place % 32);
    if (value)
        bits[place / 32] |= bit;
    else
        bits[place / 32] &= ~bit;
}

""",
        (),
    ),
    "count": (
        """\
static int32_t count(uint32_t bits)
{
    bits -= bits >> 1 & 0x55555555u;
    bits = (bits & 0x33333333u) + (bits >> 2 & 0x33333333u);
    bits = (bits + (bits >> 4)) & 0x0f0f0f0fu;
    return (int32_t)(bits * 0x01010101u >> 24);
}

""",
        (),
    ),
    "bits_of_input": (
        """\
static void bits_of_input(const int8_t *input, int32_t inputs, uint32_t *bits)
{
    for (int32_t i = 0; i < inputs; i++)
        put_bit(bits, i, input[i] > 0);
}

""",
        ("put_bit",),
    ),
    "add_bits": (
        """\
/* Sums of spins: the number of inputs minus twice the number that differ from the weight. */
static void add_bits(const uint32_t *in, const uint32_t *weight, int32_t inputs, int32_t units, int32_t *sums)
{
    const int32_t words = (inputs + 31) / 32;
    for (int32_t unit = 0; unit < units; unit++, weight += words) {
        int32_t differ = 0;
        for (int32_t i = 0; i < words; i++)
            differ += count(in[i] ^ weight[i]);
        sums[unit] = inputs - 2 * differ;
    }
}

""",
        ("count",),
    ),
    "add_patch_of_bits": (
        """\
/* The same for a patch of which only the valid bits lie inside the image. */
static void add_patch_of_bits(const uint32_t *in, const uint32_t *valid, const uint32_t *weight,
                              int32_t inputs, int32_t units, int32_t *sums)
{
    const int32_t words = (inputs + 31) / 32;
    int32_t inside = 0;
    for (int32_t i = 0; i < words; i++)
        inside += count(valid[i]);
    for (int32_t unit = 0; unit < units; unit++, weight += words) {
        int32_t differ = 0;
        for (int32_t i = 0; i < words; i++)
            differ += count((in[i] ^ weight[i]) & valid[i]);
        sums[unit] = inside - 2 * differ;
    }
}

""",
        ("count",),
    ),
    "patch_of_bits": (
        """\
static void patch_of_bits(const uint32_t *in, const geometry *g, int32_t first, int32_t y, int32_t x,
                          uint32_t *patch, uint32_t *valid)
{
    int32_t place = 0;
    for (int32_t c = first; c < first + g->channels; c++)
        for (int32_t i = 0; i < g->kernel_height; i++)
            for (int32_t j = 0; j < g->kernel_width; j++, place++) {
                const int32_t row = y * g->stride_down - g->top + i * g->dilation_down;
                const int32_t column = x * g->stride_right - g->left + j * g->dilation_right;
                const int inside = row >= 0 && row < g->height && column >= 0 && column < g->width;
                put_bit(valid, place, inside);
                put_bit(patch, place, inside && get_bit(in, (c * g->height + row) * g->width + column));
            }
    for (; place % 32; place++) {
        put_bit(valid, place, 0);
        put_bit(patch, place, 0);
    }
}

""",
        ("get_bit", "put_bit"),
    ),
    "put_signs": (
        """\
static void put_signs(const int32_t *sums, int32_t units, uint32_t *out, int32_t place, int32_t stride)
{
    for (int32_t unit = 0; unit < units; unit++, place += stride)
        put_bit(out, place, sums[unit] >= 0);
}

""",
        ("put_bit",),
    ),
    "put_thresholds": (
        """\
static void put_thresholds(const int32_t *sums, const int32_t *thresholds, const int8_t *directions,
                           int32_t units, uint32_t *out, int32_t place, int32_t stride)
{
    for (int32_t unit = 0; unit < units; unit++, place += stride)
        put_bit(out, place, sums[unit] * directions[unit] >= thresholds[unit]);
}

""",
        ("put_bit",),
    ),
    "put_lines": (
        """\
/* (multiplier * sum + offset) / 2^shift, rounded down; adding 2^62 keeps the shifted value positive. */
static void put_lines(const int32_t *sums, const int32_t *multipliers, const int64_t *offsets, int32_t shift,
                      int32_t limit, int32_t units, int32_t *out, int32_t place, int32_t stride)
{
    for (int32_t unit = 0; unit < units; unit++, place += stride) {
        const int64_t line = (int64_t)sums[unit] * multipliers[unit] + offsets[unit];
        const uint64_t up = (uint64_t)(line + ((int64_t)1 << 62)) >> shift;
        const int64_t value = (int64_t)up - ((int64_t)1 << (62 - shift));
        out[place] = value > limit ? limit : value < -limit ? -limit : (int32_t)value;
    }
}

""",
        (),
    ),
    "put_clipped": (
        """\
static void put_clipped(const int32_t *sums, int32_t limit, int32_t units, int32_t *out, int32_t place,
                        int32_t stride)
{
    for (int32_t unit = 0; unit < units; unit++, place += stride)
        out[place] = sums[unit] > limit ? limit : sums[unit] < -limit ? -limit : sums[unit];
}

""",
        (),
    ),
    "put_sums": (
        """\
static void put_sums(const int32_t *sums, int32_t units, int32_t *out, int32_t place, int32_t stride)
{
    for (int32_t unit = 0; unit < units; unit++, place += stride)
        out[place] = sums[unit];
}

""",
        (),
    ),
    "pool_bits": (
        """\
static void pool_bits(const uint32_t *in, const geometry *g, int32_t y, int32_t x, int32_t add, int32_t *sums)
{
    for (int32_t c = 0; c < g->channels; c++) {
        int32_t ones = 0;
        for (int32_t i = 0; i < g->kernel_height; i++)
            for (int32_t j = 0; j < g->kernel_width; j++)
                ones += get_bit(in, (c * g->height + y * g->stride_down + i) * g->width
                                    + x * g->stride_right + j);
        sums[c] = add ? 2 * ones - g->kernel_height * g->kernel_width : ones > 0 ? 1 : -1;
    }
}

""",
        ("get_bit",),
    ),
    "pool_numbers": (
        """\
static void pool_numbers(const int32_t *in, const geometry *g, int32_t y, int32_t x, int32_t add,
                         int32_t *sums)
{
    for (int32_t c = 0; c < g->channels; c++) {
        const int32_t *window = in + (c * g->height + y * g->stride_down) * g->width + x * g->stride_right;
        int32_t result = add ? 0 : window[0];
        for (int32_t i = 0; i < g->kernel_height; i++)
            for (int32_t j = 0; j < g->kernel_width; j++) {
                const int32_t value = window[i * g->width + j];
                result = add ? result + value : value > result ? value : result;
            }
        sums[c] = result;
    }
}

""",
        (),
    ),
}

# Written once for bytes and once for int32.
NUMBERS = """\
/* Sums of integers: twice the sum of those with a weight of +1, minus the sum of all. */
static void add_{kind}(const {type} *in, const uint32_t *weight, int32_t inputs, int32_t units, int32_t *sums)
{{
    int32_t all = 0;
    for (int32_t i = 0; i < inputs; i++)
        all += in[i];
    for (int32_t unit = 0; unit < units; unit++) {{
        int32_t positive = 0;
        for (int32_t start = 0; start < inputs; start += 32) {{
            const int32_t stop = inputs - start < 32 ? inputs - start : 32;
            uint32_t bits = *weight++;
            for (int32_t i = 0; i < stop; i++, bits >>= 1)
                positive += in[start + i] & -(int32_t)(bits & 1u);
        }}
        sums[unit] = 2 * positive - all;
    }}
}}

"""
PATCH_OF_NUMBERS = """\
static void patch_of_{kind}(const {type} *in, const geometry *g, int32_t first, int32_t y, int32_t x,
                          {type} *patch)
{{
    for (int32_t c = first; c < first + g->channels; c++)
        for (int32_t i = 0; i < g->kernel_height; i++)
            for (int32_t j = 0; j < g->kernel_width; j++) {{
                const int32_t row = y * g->stride_down - g->top + i * g->dilation_down;
                const int32_t column = x * g->stride_right - g->left + j * g->dilation_right;
                const int inside = row >= 0 && row < g->height && column >= 0 && column < g->width;
                *patch++ = inside ? in[(c * g->height + row) * g->width + column] : 0;
            }}
}}

"""
for _kind, _type in (("bytes", "uint8_t"), ("numbers", "int32_t")):
    FUNCTIONS[f"add_{_kind}"] = NUMBERS.format(kind=_kind, type=_type), ()
    FUNCTIONS[f"patch_of_{_kind}"] = PATCH_OF_NUMBERS.format(kind=_kind, type=_type), ()
