"""The text of a network in C: header, source, and small functions of which a network gets those it calls.

``@NAME@`` stands for the network's name in capitals. Functions whose name ends in ``_@T@`` are written once
for each type of integer that they read.
"""

HEADER = """\
/* @title@ */

#ifndef @NAME@_H
#define @NAME@_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define @NAME@_VERSION "@version@" /* of spingrad, which wrote this file */
#define @NAME@_INPUTS @inputs@
#define @NAME@_CLASSES @classes@
#define @NAME@_RAM_BYTES @ram@ /* of buffers; the stack and the scores are not included */

/* Bits are stored in words of 8, 16 or 32 bits. Define this for the whole program to choose another size. */
#ifndef @NAME@_WORD_BITS
#if defined(__AVR__)
#define @NAME@_WORD_BITS 8
#elif defined(__MSP430__)
#define @NAME@_WORD_BITS 16
#else
#define @NAME@_WORD_BITS 32
#endif
#endif

/* Bytes of constants; the code is not included. */
#if @NAME@_WORD_BITS == 8
#define @NAME@_FLASH_BYTES @flash_8@
#elif @NAME@_WORD_BITS == 16
#define @NAME@_FLASH_BYTES @flash_16@
#elif @NAME@_WORD_BITS == 32
#define @NAME@_FLASH_BYTES @flash_32@
#else
#error "@NAME@_WORD_BITS must be 8, 16 or 32"
#endif

/* Computes one integer per class. input: @meaning@
   @note@ */
void @name@_scores(@arguments@);

/* The class with the highest score, the first if several are equal. */
int @name@_class(@class_arguments@);

#ifdef __cplusplus
}
#endif

#endif
"""

SOURCE = """\
/* @title@ */

#include "@name@.h"

#include <limits.h>

#if INT_MAX < @longest@
#error "this network is too large for a chip whose int has 16 bits"
#endif

#if defined(__AVR__) && defined(__GNUC__)
#pragma GCC optimize("O2") /* also where the Arduino IDE compiles for size: a third faster */
#endif

/* Define this macro before including this file to see the sums of every layer: sums holds the given number
   of units; in the layer's output the first is at index place, the others follow at distance stride. */
#ifndef @NAME@_TRACE
#define @NAME@_TRACE(layer, sums, units, place, stride) ((void)0)
#endif

/* Constants stay in flash. On AVR, where flash has addresses of its own, GNU C reads it through __flash, and
   strict C and C++ read it through avr/pgmspace.h. On other chips define @NAME@_CONST_SECTION to place the
   constants, for example as __attribute__((section(".qspi"))). */
#if defined(__AVR__) && (defined(__cplusplus) || defined(__STRICT_ANSI__))
#include <avr/pgmspace.h>
#define FLASH
#define GET(type, pointer) get_##type(pointer)
#ifndef @NAME@_CONST_SECTION
#define @NAME@_CONST_SECTION PROGMEM
#endif
#else
#ifdef __AVR__
#define FLASH __flash
#else
#define FLASH
#endif
#define GET(type, pointer) (*(pointer))
#ifndef @NAME@_CONST_SECTION
#define @NAME@_CONST_SECTION
#endif
#endif

/* Buffers of several types share memory. */
#ifdef __GNUC__
#define SHARED __attribute__((__may_alias__))
#else
#define SHARED
#endif
typedef uint8_t u8;
typedef int8_t i8;
typedef int16_t SHARED i16;
typedef int32_t SHARED i32;

/* WORD_4(w) is a word of 32 bits as one or more words of this chip; WORD_3 to WORD_1 are the 24, 16 or 8
   bits at the end of a unit's weights. */
#define WORD_BITS @NAME@_WORD_BITS
#if WORD_BITS == 8
typedef uint8_t word;
#define WORD_1(w) (word)((w) & 0xffu)
#define WORD_2(w) WORD_1(w), WORD_1((w) >> 8)
#define WORD_3(w) WORD_2(w), WORD_1((uint32_t)(w) >> 16)
#define WORD_4(w) WORD_3(w), WORD_1((uint32_t)(w) >> 24)
#elif WORD_BITS == 16
typedef uint16_t SHARED word;
#define WORD_1(w) (word)((w) & 0xffffu)
#define WORD_2(w) WORD_1(w)
#define WORD_3(w) WORD_1(w), WORD_1((uint32_t)(w) >> 16)
#define WORD_4(w) WORD_3(w)
#else
typedef uint32_t SHARED word;
#define WORD_1(w) (w)
#define WORD_2(w) (w)
#define WORD_3(w) (w)
#define WORD_4(w) (w)
#endif
#define WORDS(bits) (((bits) + WORD_BITS - 1) / WORD_BITS)

@geometry@#if defined(__AVR__) && (defined(__cplusplus) || defined(__STRICT_ANSI__))
#define GETTER(type) \\
    static inline type get_##type(const type *pointer) \\
    { \\
        type value; \\
        memcpy_P(&value, pointer, sizeof value); \\
        return value; \\
    }
#if WORD_BITS == 8
static inline word get_word(const word *pointer) { return pgm_read_byte(pointer); }
#else
GETTER(word)
#endif
static inline uint8_t get_uint8_t(const uint8_t *pointer) { return pgm_read_byte(pointer); }
static inline int8_t get_int8_t(const int8_t *pointer) { return (int8_t)pgm_read_byte(pointer); }
GETTER(i16)
GETTER(i32)
GETTER(int64_t)
@get_geometry@#endif

@constants@@arena@@functions@void @name@_scores(@arguments@)
{
@body@}

int @name@_class(@class_arguments@)
{
    int32_t scores[@NAME@_CLASSES];
    int best = 0;
    @name@_scores(@passed@);
    for (int i = 1; i < @NAME@_CLASSES; i++)
        if (scores[i] > scores[best])
            best = i;
    return best;
}
"""

ARENA = "static uint32_t arena[@NAME@_RAM_BYTES / 4];\n\n"

GEOMETRY = """\
typedef struct {
    int channels, height, width, channel, pixel; /* value c of pixel p is at c * channel + p * pixel */
    int kernel_height, kernel_width, stride_down, stride_right, top, left, dilation_down, dilation_right;
} geometry;

"""

_DIFFERENCES = """\
/* The number of bits that differ. Four words are added bit by bit, so that only one of four is counted. */
static int differences(const word *in, @argument@const FLASH word *weight, int words)
{
    word ones = 0, twos = 0;
    int fours = 0;
    for (; words >= 4; words -= 4) {
        const word a = DIFFER;
        const word b = DIFFER;
        const word c = DIFFER;
        const word d = DIFFER;
        const word sum = (word)(ones ^ a ^ b), two = (word)((ones & a) | ((ones ^ a) & b));
        const word more = (word)((sum & c) | ((sum ^ c) & d));
        ones = (word)(sum ^ c ^ d);
        fours += count((word)((twos & two) | ((twos ^ two) & more)));
        twos = (word)(twos ^ two ^ more);
    }
    fours = 4 * fours + 2 * count(twos) + count(ones);
    for (; words > 0; words--)
        fours += count(DIFFER);
    return fours;
}

"""
_TABLES = """\
/* Sums of integers times spins, 32 inputs at a time: a table holds the 16 sums of four inputs, so that four
   weights are a place in it. */
static void @name@(const @T@ *in, const FLASH word *weight, int inputs, int units, i32 *sums)
{
    const int words = WORDS(inputs);
    @table@ tables[8][16];
    for (int unit = 0; unit < units; unit++)
        sums[unit] = 0;
    for (int start = 0; start < inputs; start += 32, weight += 32 / WORD_BITS) {
        const FLASH word *row = weight;
        const int left = WORDS(inputs - start), now = left < 32 / WORD_BITS ? left : 32 / WORD_BITS;
        for (int part = 0; part < now * (WORD_BITS / 4); part++) {
            @table@ *const table = tables[part];
            @table@ twice[4], least = 0;
            for (int k = 0; k < 4; k++) {
                const int place = start + part * 4 + k;
                const @table@ value = place < inputs ? (@table@)in[place] : 0;
                least = (@table@)(least - value);
                twice[k] = (@table@)(2 * value);
            }
            table[0] = least;
            for (int k = 0, filled = 1; k < 4; k++, filled += filled)
                for (int i = 0; i < filled; i++)
                    table[filled + i] = (@table@)(table[i] + twice[k]);
        }
        for (int unit = 0; unit < units; unit++, row += words) {
            const @table@ *table = tables[0];
            @table_sum@ sum = 0;
            for (int i = 0; i < now; i++) {
                word bits = GET(word, row + i);
                for (int part = 0; part < WORD_BITS / 4; part++, table += 16, bits = (word)(bits >> 4))
                    sum = (@table_sum@)(sum + table[bits & (word)15]);
            }
            sums[unit] += sum;
        }
    }
}

"""


def _differences(name: str, argument: str, differ: str) -> str:
    text = _DIFFERENCES.replace("int differences", f"int {name}").replace("@argument@", argument)
    return text.replace("DIFFER", f"(word)({differ})")


# Name: the text of a function, and the functions that it calls. They are written in this order.
FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sum_@T@": (
        _TABLES.replace("@name@", "sum_@T@").replace("@table_sum@", "i32").replace("@table@", "i32"),
        (),
    ),
    "sum_small_@T@": (
        _TABLES.replace("@name@", "sum_small_@T@")
        .replace("@table_sum@", "int")
        .replace("@table@", "int16_t"),
        (),
    ),
    "get_bit": (
        """\
static int get_bit(const word *bits, int place)
{
    return (int)(bits[(unsigned)place / WORD_BITS] >> ((unsigned)place % WORD_BITS) & (word)1);
}

""",
        (),
    ),
    "copy_bits": (
        """\
static void copy_bits(const word *in, int from, int bits, word *out, int to)
{
    while (bits > 0) {
        const int right = (int)((unsigned)from % WORD_BITS), left = (int)((unsigned)to % WORD_BITS);
        const int room = WORD_BITS - (right > left ? right : left), step = bits < room ? bits : room;
        const word mask = (word)((word)((word)~(word)0 >> (WORD_BITS - step)) << left);
        const word moved = (word)((word)(in[(unsigned)from / WORD_BITS] >> right) << left);
        word *const target = out + (unsigned)to / WORD_BITS;
        *target = (word)((*target & (word)~mask) | (moved & mask));
        from += step;
        to += step;
        bits -= step;
    }
}

""",
        (),
    ),
    "fill_bits": (
        """\
static void fill_bits(int value, int bits, word *out, int to)
{
    for (; bits > 0; bits--, to++) {
        const word bit = (word)((word)1 << ((unsigned)to % WORD_BITS));
        if (value)
            out[(unsigned)to / WORD_BITS] |= bit;
        else
            out[(unsigned)to / WORD_BITS] &= (word)~bit;
    }
}

""",
        (),
    ),
    "count": (
        """\
static int count(word bits)
{
#if WORD_BITS == 8
    bits = (word)(bits - (bits >> 1 & 0x55));
    bits = (word)((bits & 0x33) + (bits >> 2 & 0x33));
    return (bits + (bits >> 4)) & 0x0f;
#elif WORD_BITS == 16
    bits = (word)(bits - (bits >> 1 & 0x5555));
    bits = (word)((bits & 0x3333) + (bits >> 2 & 0x3333));
    bits = (word)((bits + (bits >> 4)) & 0x0f0f);
    return (bits + (bits >> 8)) & 0x1f;
#else
    bits -= bits >> 1 & 0x55555555u;
    bits = (bits & 0x33333333u) + (bits >> 2 & 0x33333333u);
    bits = (bits + (bits >> 4)) & 0x0f0f0f0fu;
    return (int)(bits * 0x01010101u >> 24);
#endif
}

""",
        (),
    ),
    "spins_of_input": (
        """\
/* The input as bits, the channels of each pixel together. */
static void spins_of_input(const int8_t *input, int channels, int pixels, word *out)
{
    int place = 0;
    word bits = 0, bit = 1;
    for (int pixel = 0; pixel < pixels; pixel++)
        for (int channel = 0; channel < channels; channel++) {
            if (input[channel * pixels + pixel] > 0)
                bits |= bit;
            bit = (word)(bit << 1);
            if (!bit) {
                out[place++] = bits;
                bits = 0;
                bit = 1;
            }
        }
    if (bit != 1)
        out[place] = bits;
}

""",
        (),
    ),
    "sum_bits": (
        _differences("differences", "", "*in++ ^ GET(word, weight++)")
        + """\
/* Sums of spins: the number of inputs minus twice the number that differ from the weight. */
static void sum_bits(const word *in, const FLASH word *weight, int inputs, int units, i32 *sums)
{
    const int words = WORDS(inputs);
    for (int unit = 0; unit < units; unit++, weight += words)
        sums[unit] = inputs - 2 * differences(in, weight, words);
}

""",
        ("count",),
    ),
    "sum_valid_bits": (
        _differences("valid_differences", "const word *valid, ", "(*in++ ^ GET(word, weight++)) & *valid++")
        + """\
/* Sums of spins in a patch of which only the valid bits lie inside the image. */
static void sum_valid_bits(const word *in, const word *valid, const FLASH word *weight, int inputs, int units,
                           i32 *sums)
{
    const int words = WORDS(inputs);
    int inside = 0;
    for (int i = 0; i < words; i++)
        inside += count(valid[i]);
    for (int unit = 0; unit < units; unit++, weight += words)
        sums[unit] = inside - 2 * valid_differences(in, valid, weight, words);
}

""",
        ("count",),
    ),
    "sum_whole_bits": (
        """\
/* Sums of spins times whole numbers. */
static void sum_whole_bits(const word *in, const FLASH int8_t *weight, int inputs, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++) {
        i32 sum = 0;
        for (int i = 0; i < inputs; i++, weight++)
            sum += get_bit(in, i) ? GET(int8_t, weight) : -GET(int8_t, weight);
        sums[unit] = sum;
    }
}

""",
        ("get_bit",),
    ),
    "sum_whole_@T@": (
        """\
/* Sums of integers times whole numbers. */
static void sum_whole_@T@(const @T@ *in, const FLASH int8_t *weight, int inputs, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++) {
        i32 sum = 0;
        for (int i = 0; i < inputs; i++, weight++)
            sum += (i32)in[i] * GET(int8_t, weight);
        sums[unit] = sum;
    }
}

""",
        (),
    ),
    "patch_of_bits": (
        """\
static void patch_of_bits(const word *in, const FLASH geometry *where, int first, int y, int x, word *patch)
{
    const geometry g = GET(geometry, where);
    int place = 0;
    for (int i = 0; i < g.kernel_height; i++)
        for (int j = 0; j < g.kernel_width; j++, place += g.channels) {
            const int row = y * g.stride_down + i * g.dilation_down;
            const int column = x * g.stride_right + j * g.dilation_right;
            copy_bits(in, (row * g.width + column) * g.pixel + first, g.channels, patch, place);
        }
}

""",
        ("copy_bits",),
    ),
    "patch_of_valid_bits": (
        """\
static void patch_of_valid_bits(const word *in, const FLASH geometry *where, int first, int y, int x,
                                word *patch, word *valid)
{
    const geometry g = GET(geometry, where);
    int place = 0;
    for (int i = 0; i < g.kernel_height; i++)
        for (int j = 0; j < g.kernel_width; j++, place += g.channels) {
            const int row = y * g.stride_down - g.top + i * g.dilation_down;
            const int column = x * g.stride_right - g.left + j * g.dilation_right;
            const int inside = row >= 0 && row < g.height && column >= 0 && column < g.width;
            fill_bits(inside, g.channels, valid, place);
            if (inside)
                copy_bits(in, (row * g.width + column) * g.pixel + first, g.channels, patch, place);
        }
}

""",
        ("copy_bits", "fill_bits"),
    ),
    "patch_of_spins": (
        """\
static void patch_of_spins(const word *in, const FLASH geometry *where, int first, int y, int x, i8 *patch)
{
    const geometry g = GET(geometry, where);
    for (int i = 0; i < g.kernel_height; i++)
        for (int j = 0; j < g.kernel_width; j++)
            for (int c = first; c < first + g.channels; c++) {
                const int row = y * g.stride_down - g.top + i * g.dilation_down;
                const int column = x * g.stride_right - g.left + j * g.dilation_right;
                const int inside = row >= 0 && row < g.height && column >= 0 && column < g.width;
                const int place = (row * g.width + column) * g.pixel + c;
                *patch++ = (i8)(!inside ? 0 : get_bit(in, place) ? 1 : -1);
            }
}

""",
        ("get_bit",),
    ),
    "patch_of_@T@": (
        """\
static void patch_of_@T@(const @T@ *in, const FLASH geometry *where, int first, int y, int x, @T@ *patch)
{
    const geometry g = GET(geometry, where);
    for (int i = 0; i < g.kernel_height; i++)
        for (int j = 0; j < g.kernel_width; j++) {
            const int row = y * g.stride_down - g.top + i * g.dilation_down;
            const int column = x * g.stride_right - g.left + j * g.dilation_right;
            const int inside = row >= 0 && row < g.height && column >= 0 && column < g.width;
            int place = (row * g.width + column) * g.pixel + first * g.channel;
            for (int c = 0; c < g.channels; c++, place += g.channel)
                *patch++ = (@T@)(inside ? in[place] : 0);
        }
}

""",
        (),
    ),
    "pool_bits": (
        """\
static void pool_bits(const word *in, const FLASH geometry *where, int first, int y, int x, int add,
                      int units, i32 *sums)
{
    const geometry g = GET(geometry, where);
    for (int c = 0; c < units; c++) {
        int ones = 0;
        for (int i = 0; i < g.kernel_height; i++)
            for (int j = 0; j < g.kernel_width; j++) {
                const int pixel = (y * g.stride_down + i) * g.width + x * g.stride_right + j;
                ones += get_bit(in, pixel * g.pixel + first + c);
            }
        sums[c] = add ? 2 * ones - g.kernel_height * g.kernel_width : ones > 0 ? 1 : -1;
    }
}

""",
        ("get_bit",),
    ),
    "pool_@T@": (
        """\
static void pool_@T@(const @T@ *in, const FLASH geometry *where, int first, int y, int x, int add,
                     int units, i32 *sums)
{
    const geometry g = GET(geometry, where);
    for (int c = 0; c < units; c++) {
        i32 result = 0;
        for (int i = 0; i < g.kernel_height; i++)
            for (int j = 0; j < g.kernel_width; j++) {
                const int pixel = (y * g.stride_down + i) * g.width + x * g.stride_right + j;
                const i32 value = in[pixel * g.pixel + (first + c) * g.channel];
                if (add)
                    result += value;
                else if ((!i && !j) || value > result)
                    result = value;
            }
        sums[c] = result;
    }
}

""",
        (),
    ),
    "load_bits": (
        """\
static void load_bits(const word *in, int place, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = 2 * get_bit(in, place + unit) - 1;
}

""",
        ("get_bit",),
    ),
    "load_@T@": (
        """\
static void load_@T@(const @T@ *in, int place, int stride, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++, place += stride)
        sums[unit] = in[place];
}

""",
        (),
    ),
    "multiply": (
        """\
static void multiply(i32 multiplier, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] *= multiplier;
}

""",
        (),
    ),
    "join_bits": (
        """\
static void join_bits(const word *in, int place, i32 multiplier, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] += get_bit(in, place + unit) ? multiplier : -multiplier;
}

""",
        ("get_bit",),
    ),
    "join_@T@": (
        """\
static void join_@T@(const @T@ *in, int place, int stride, i32 multiplier, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++, place += stride)
        sums[unit] += in[place] * multiplier;
}

""",
        (),
    ),
    "pad_@T@": (
        """\
/* Zeros outside of the image: top, left and first may be negative or beyond its end. */
static void pad_@T@(const @T@ *in, const FLASH geometry *where, int first, int row, int column, int units,
                    i32 *sums)
{
    const geometry g = GET(geometry, where);
    for (int c = first; c < first + units; c++) {
        const int inside = row >= 0 && row < g.height && column >= 0 && column < g.width && c >= 0
                           && c < g.channels;
        *sums++ = inside ? in[(row * g.width + column) * g.pixel + c * g.channel] : 0;
    }
}

""",
        (),
    ),
    "turn_bits": (
        """\
/* Values of an image in the order of its channels. */
static void turn_bits(const word *in, int channels, int pixels, int first, int units, i32 *sums)
{
    for (int i = first; i < first + units; i++)
        *sums++ = 2 * get_bit(in, i % pixels * channels + i / pixels) - 1;
}

""",
        ("get_bit",),
    ),
    "turn_@T@": (
        """\
/* Values of an image in the order of its channels. */
static void turn_@T@(const @T@ *in, int channels, int pixels, int first, int units, i32 *sums)
{
    for (int i = first; i < first + units; i++)
        *sums++ = in[i % pixels * channels + i / pixels];
}

""",
        (),
    ),
    "clip": (
        """\
static void clip(i32 low, i32 high, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = sums[unit] > high ? high : sums[unit] < low ? low : sums[unit];
}

""",
        (),
    ),
    "line": (
        """\
/* (multiplier * sum + offset) / 2^shift, rounded down; adding 2^62 keeps the shifted value positive. */
static i32 line(i32 sum, i32 multiplier, int64_t offset, int shift, i32 low, i32 high)
{
    const int64_t raised = (int64_t)sum * multiplier + offset + ((int64_t)1 << 62);
    const int64_t value = (int64_t)((uint64_t)raised >> shift) - ((int64_t)1 << (62 - shift));
    return value > high ? high : value < low ? low : (i32)value;
}

""",
        (),
    ),
    "rescale": (
        """\
static void rescale(i32 multiplier, int64_t offset, int shift, i32 low, i32 high, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = line(sums[unit], multiplier, offset, shift, low, high);
}

""",
        ("line",),
    ),
    "rescale_each": (
        """\
static void rescale_each(const FLASH i32 *multipliers, const FLASH int64_t *offsets, int shift, i32 low,
                         i32 high, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = line(sums[unit], GET(i32, multipliers + unit), GET(int64_t, offsets + unit), shift, low,
                          high);
}

""",
        ("line",),
    ),
    "compare": (
        """\
static void compare(i32 threshold, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = sums[unit] >= threshold ? 1 : -1;
}

""",
        (),
    ),
    "compare_@T@": (
        """\
static void compare_@T@(const FLASH @T@ *thresholds, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = sums[unit] >= GET(@T@, thresholds + unit) ? 1 : -1;
}

""",
        (),
    ),
    "direct": (
        """\
static void direct(const FLASH int8_t *directions, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] *= GET(int8_t, directions + unit);
}

""",
        (),
    ),
    "put_bits": (
        """\
/* A one where the value is at least zero. */
static void put_bits(const i32 *sums, int units, word *out, int place)
{
    word bit = (word)((word)1 << ((unsigned)place % WORD_BITS));
    out += (unsigned)place / WORD_BITS;
    for (int unit = 0; unit < units; unit++) {
        if (sums[unit] >= 0)
            *out |= bit;
        else
            *out &= (word)~bit;
        bit = (word)(bit << 1);
        if (!bit) {
            bit = 1;
            out++;
        }
    }
}

""",
        (),
    ),
    "put_@T@": (
        """\
static void put_@T@(const i32 *sums, int units, @T@ *out, int place)
{
    for (int unit = 0; unit < units; unit++)
        out[place + unit] = (@T@)sums[unit];
}

""",
        (),
    ),
}


def function(name: str) -> tuple[str, str, tuple[str, ...]]:
    """A function by its name: the key of its text, the text for its type, and the functions that it calls."""
    if name in FUNCTIONS:
        return name, *FUNCTIONS[name]
    stem, _, kind = name.rpartition("_")
    key = f"{stem}_@T@"
    text, calls = FUNCTIONS[key]
    return key, text.replace("@T@", kind), calls
