/* The functions of which a network gets those that it calls. Two blank lines never stand inside of one. */
#include "types.h"

static int get_bit(const word *bits, int place)
{
    return (int)(bits[(unsigned)place / WORD_BITS] >> ((unsigned)place % WORD_BITS) & (word)1);
}

static void copy_bits(const word *in, int from, int bits, word *out, int to)
{
    while (bits > 0) {
        const int right = (int)((unsigned)from % WORD_BITS), left = (int)((unsigned)to % WORD_BITS);
        const int room = WORD_BITS - (right > left ? right : left), step = bits < room ? bits : room;
        const word mask = (word)((word)((word) ~(word)0 >> (WORD_BITS - step)) << left);
        const word moved = (word)((word)(in[(unsigned)from / WORD_BITS] >> right) << left);
        word *const target = out + (unsigned)to / WORD_BITS;
        *target = (word)((*target & (word)~mask) | (moved & mask));
        from += step;
        to += step;
        bits -= step;
    }
}

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

/* The input as bits, the channels of each pixel together. */
static void spins_of_input(const i8 *input, int channels, int pixels, word *out)
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

/* Adds four words to two counters per bit, ones and twos; returns the bits that carry: four each. */
INLINE word carry_of_four(word a, word b, word c, word d, word *ones, word *twos)
{
    const word sum = (word)(*ones ^ a ^ b), two = (word)((*ones & a) | ((*ones ^ a) & b));
    const word more = (word)((sum & c) | ((sum ^ c) & d)),
               carry = (word)((*twos & two) | ((*twos ^ two) & more));
    *ones = (word)(sum ^ c ^ d);
    *twos = (word)(*twos ^ two ^ more);
    return carry;
}

/* The number of bits that differ. */
static int differences(const word *in, const FLASH word *weight, int words)
{
    word ones = 0, twos = 0;
    int fours = 0;
    for (; words >= 4; words -= 4) {
        const word a = (word)(*in++ ^ GET(word, weight++));
        const word b = (word)(*in++ ^ GET(word, weight++));
        const word c = (word)(*in++ ^ GET(word, weight++));
        const word d = (word)(*in++ ^ GET(word, weight++));
        fours += count(carry_of_four(a, b, c, d, &ones, &twos));
    }
    fours = 4 * fours + 2 * count(twos) + count(ones);
    for (; words > 0; words--)
        fours += count((word)(*in++ ^ GET(word, weight++)));
    return fours;
}

/* Sums of spins: the number of inputs minus twice the number that differ from the weight. */
static void sum_bits(const word *in, const FLASH word *weight, int inputs, int units, i32 *sums)
{
    const int words = WORDS(inputs);
    for (int unit = 0; unit < units; unit++, weight += words)
        sums[unit] = inputs - 2 * differences(in, weight, words);
}

/* The number of bits that differ, of those that are valid. */
static int valid_differences(const word *in, const word *valid, const FLASH word *weight, int words)
{
    word ones = 0, twos = 0;
    int fours = 0;
    for (; words >= 4; words -= 4) {
        const word a = (word)((*in++ ^ GET(word, weight++)) & *valid++);
        const word b = (word)((*in++ ^ GET(word, weight++)) & *valid++);
        const word c = (word)((*in++ ^ GET(word, weight++)) & *valid++);
        const word d = (word)((*in++ ^ GET(word, weight++)) & *valid++);
        fours += count(carry_of_four(a, b, c, d, &ones, &twos));
    }
    fours = 4 * fours + 2 * count(twos) + count(ones);
    for (; words > 0; words--)
        fours += count((word)((*in++ ^ GET(word, weight++)) & *valid++));
    return fours;
}

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

/* Sums of spins times whole numbers. */
static void sum_whole_bits(const word *in, const FLASH i8 *weight, int inputs, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++) {
        i32 sum = 0;
        for (int i = 0; i < inputs; i++, weight++)
            sum += get_bit(in, i) ? GET(i8, weight) : -GET(i8, weight);
        sums[unit] = sum;
    }
}

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

static void load_bits(const word *in, int place, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = 2 * get_bit(in, place + unit) - 1;
}

static void multiply(i32 multiplier, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] *= multiplier;
}

static void join_bits(const word *in, int place, i32 multiplier, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] += get_bit(in, place + unit) ? multiplier : -multiplier;
}

/* Values of an image in the order of its channels. */
static void turn_bits(const word *in, int channels, int pixels, int first, int units, i32 *sums)
{
    for (int i = first; i < first + units; i++)
        *sums++ = 2 * get_bit(in, i % pixels * channels + i / pixels) - 1;
}

static void clip(i32 low, i32 high, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = sums[unit] > high ? high : sums[unit] < low ? low : sums[unit];
}

/* (multiplier * sum + offset) / 2^shift, rounded down; adding 2^62 keeps the shifted value positive. */
static i32 line(i32 sum, i32 multiplier, i64 offset, int shift, i32 low, i32 high)
{
    const i64 raised = (i64)sum * multiplier + offset + ((i64)1 << 62);
    const i64 value = (i64)((uint64_t)raised >> shift) - ((i64)1 << (62 - shift));
    return value > high ? high : value < low ? low : (i32)value;
}

static void rescale(i32 multiplier, i64 offset, int shift, i32 low, i32 high, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = line(sums[unit], multiplier, offset, shift, low, high);
}

static void rescale_each(const FLASH i32 *multipliers, const FLASH i64 *offsets, int shift, i32 low, i32 high,
                         int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] =
            line(sums[unit], GET(i32, multipliers + unit), GET(i64, offsets + unit), shift, low, high);
}

static void compare(i32 threshold, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = sums[unit] >= threshold ? 1 : -1;
}

static void direct(const FLASH i8 *directions, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] *= GET(i8, directions + unit);
}

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

#define T u8
#include "typed.c"
#define T i8
#include "typed.c"
#define T i16
#include "typed.c"
#define T i32
#include "typed.c"

#define T u8
#define TABLE i16
#include "sum.c"
#define T i8
#define TABLE i16
#include "sum.c"
#define T i16
#define TABLE i16
#include "sum.c"
#define T i16
#define TABLE i32
#include "sum.c"
#define T i32
#define TABLE i32
#include "sum.c"
