/* Checks network.c: returns 0 if every layer of every input is right, else 1. Written by spingrad.

   Compile only this file; it includes network.c. With -DNETWORK_QUIET it prints nothing and needs no stdio.h.
   With -Dmain=network_test it is a function, int network_test(void), for a program that has its own main.
*/

#include <stdint.h>

#define LAYERS 1 /*@layers*/
#define VECTORS 1 /*@vectors*/
#define FACTOR 2654435761u /*@factor*/

static uint32_t checksums[LAYERS];

static void add_to_checksum(int layer, const int32_t *sums, int units, int place, int stride)
{
    for (int unit = 0; unit < units; unit++, place += stride)
        checksums[layer] += (uint32_t)sums[unit] * ((uint32_t)place * FACTOR + 1u);
}

#define NETWORK_TRACE(layer, sums, units, place, stride) add_to_checksum(layer, sums, units, place, stride)
#include "network.c"

#ifdef NETWORK_QUIET
#define WRONG(vector, what, number) ((void)0)
#define RIGHT(vectors) ((void)0)
#else
#include <stdio.h>
#define WRONG(vector, what, number) printf("input %d: wrong %s %d\n", vector, what, number)
#define RIGHT(vectors) printf("%d inputs: all sums and scores are right\n", vectors)
#endif

static const FLASH u8 /*@kind*/ inputs[VECTORS * NETWORK_INPUTS] NETWORK_CONST_SECTION = {0 /*@inputs*/};

/* The sum over places p of a layer of sum[p] * (p * FACTOR + 1), modulo 2^32. */
static const FLASH i32 expected_checksums[VECTORS * LAYERS] NETWORK_CONST_SECTION = {0 /*@checksums*/};

static const FLASH i32 expected_scores[VECTORS * NETWORK_CLASSES] NETWORK_CONST_SECTION = {0 /*@scores*/};

int main(void)
{
    static u8 /*@kind*/ input[NETWORK_INPUTS];
    static int32_t scores[NETWORK_CLASSES];
    /* @memory: */
    /* @end */
    int wrong = 0;
    for (int vector = 0; vector < VECTORS; vector++) {
        for (int i = 0; i < NETWORK_INPUTS; i++)
            input[i] = GET(u8 /*@kind*/, inputs + vector * NETWORK_INPUTS + i);
        for (int layer = 0; layer < LAYERS; layer++)
            checksums[layer] = 0;
        network_scores(input, scores /*@passed*/);
        for (int layer = 0; layer < LAYERS; layer++)
            if (checksums[layer] != (uint32_t)GET(i32, expected_checksums + vector * LAYERS + layer)) {
                WRONG(vector, "sums in layer", layer);
                wrong = 1;
            }
        for (int i = 0; i < NETWORK_CLASSES; i++)
            if (scores[i] != GET(i32, expected_scores + vector * NETWORK_CLASSES + i)) {
                WRONG(vector, "score", i);
                wrong = 1;
            }
    }
    if (!wrong)
        RIGHT(VECTORS);
    return wrong;
}
