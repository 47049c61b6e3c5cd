/* @title@ */

#ifndef NETWORK_H
#define NETWORK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NETWORK_VERSION "@version@" /* of spingrad, which wrote this file */
#define NETWORK_INPUTS 4 /*@inputs*/
#define NETWORK_CLASSES 2 /*@classes*/
#define NETWORK_RAM_BYTES 8 /*@ram*/ /* of buffers; the stack and the scores are not included */

/* Bits are stored in words of 8, 16 or 32 bits. Define this for the whole program to choose another size. */
#ifndef NETWORK_WORD_BITS
#if defined(__AVR__)
#define NETWORK_WORD_BITS 8
#elif defined(__MSP430__)
#define NETWORK_WORD_BITS 16
#else
#define NETWORK_WORD_BITS 32
#endif
#endif

/* Bytes of constants; the code is not included. */
#if NETWORK_WORD_BITS == 8
#define NETWORK_FLASH_BYTES 8 /*@flash_8*/
#elif NETWORK_WORD_BITS == 16
#define NETWORK_FLASH_BYTES 8 /*@flash_16*/
#elif NETWORK_WORD_BITS == 32
#define NETWORK_FLASH_BYTES 8 /*@flash_32*/
#else
#error "NETWORK_WORD_BITS must be 8, 16 or 32"
#endif

/* Computes one integer per class. input: @meaning@
   @note@ */
void network_scores(const uint8_t /*@kind*/ *input, int32_t *scores /*@scores*/);

/* The class with the highest score, the first if several are equal. */
int network_class(const uint8_t /*@kind*/ *input /*@input*/);

#ifdef __cplusplus
}
#endif

#endif
