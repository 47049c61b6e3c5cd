/* @title@ */

#include "network.h"

#include <limits.h>

#if INT_MAX < 8 /*@longest*/
#error "this network is too large for a chip whose int has 16 bits"
#endif

#if defined(__AVR__) && defined(__GNUC__)
#pragma GCC optimize("O2") /* also where the Arduino IDE compiles for size: a third faster */
#endif

/* Define this macro before including this file to see the sums of every layer: sums holds the given number
   of units; in the layer's output the first is at index place, the others follow at distance stride. */
#ifndef NETWORK_TRACE
#define NETWORK_TRACE(layer, sums, units, place, stride) ((void)0)
#endif

#include "types.h"

/* @constants: of a small network, so that this file compiles as it is */
static const FLASH i8 weight_0[8] NETWORK_CONST_SECTION = {1, -1, 1, 1, -1, 1, 1, -1};

/* @end */
/* @arena: */
static uint32_t arena[NETWORK_RAM_BYTES / 4];

/* @end */
#include "library.c"

void network_scores(const uint8_t /*@kind*/ *input, int32_t *scores /*@scores*/)
{
    /* @calls: */
    i32 *const sums = (i32 *)(void *)arena;
    i32 *const out = (i32 *)scores;
    sum_whole_u8(input, weight_0, 4, 2, sums);
    NETWORK_TRACE(0, (const int32_t *)sums, 2, 0, 1);
    put_i32(sums, 2, out, 0);
    /* @end */
}

int network_class(const uint8_t /*@kind*/ *input /*@input*/)
{
    int32_t scores[NETWORK_CLASSES];
    int best = 0;
    network_scores(input, scores /*@passed*/);
    for (int i = 1; i < NETWORK_CLASSES; i++)
        if (scores[i] > scores[best])
            best = i;
    return best;
}
