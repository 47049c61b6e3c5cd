#ifndef TYPES_H
#define TYPES_H

/* Constants stay in flash. On AVR, where flash has addresses of its own, GNU C reads it through __flash, and
   strict C and C++ read it through avr/pgmspace.h. On other chips define NETWORK_CONST_SECTION to place the
   constants, for example as __attribute__((section(".qspi"))). */
#if defined(__AVR__) && (defined(__cplusplus) || defined(__STRICT_ANSI__))
#include <avr/pgmspace.h>
#define FLASH
#define GET_(type, pointer) get_##type(pointer)
#define GET(type, pointer) GET_(type, pointer)
#define GETTER(type)                                                                                         \
    static inline type get_##type(const type *pointer)                                                       \
    {                                                                                                        \
        type value;                                                                                          \
        if (sizeof value == 1)                                                                               \
            *(uint8_t *)&value = pgm_read_byte(pointer);                                                     \
        else                                                                                                 \
            memcpy_P(&value, pointer, sizeof value);                                                         \
        return value;                                                                                        \
    }
#ifndef NETWORK_CONST_SECTION
#define NETWORK_CONST_SECTION PROGMEM
#endif
#else
#ifdef __AVR__
#define FLASH __flash
#else
#define FLASH
#endif
#define GET(type, pointer) (*(pointer))
#define GETTER(type)
#ifndef NETWORK_CONST_SECTION
#define NETWORK_CONST_SECTION
#endif
#endif

/* Buffers of several types share memory. */
#ifdef __GNUC__
#define INLINE static inline __attribute__((__always_inline__))
#define SHARED __attribute__((__may_alias__))
#else
#define INLINE static inline
#define SHARED
#endif
typedef uint8_t u8;
typedef int8_t i8;
typedef int16_t SHARED i16;
typedef int32_t SHARED i32;
typedef int64_t i64;

/* WORD_4(w) is a word of 32 bits as one or more words of this chip; WORD_3 to WORD_1 are the 24, 16 or 8
   bits at the end of a unit's weights. */
#define WORD_BITS NETWORK_WORD_BITS
#if WORD_BITS == 8
typedef uint8_t word;
#define WORD_1(w) (word)((w)&0xffu)
#define WORD_2(w) WORD_1(w), WORD_1((w) >> 8)
#define WORD_3(w) WORD_2(w), WORD_1((uint32_t)(w) >> 16)
#define WORD_4(w) WORD_3(w), WORD_1((uint32_t)(w) >> 24)
#elif WORD_BITS == 16
typedef uint16_t SHARED word;
#define WORD_1(w) (word)((w)&0xffffu)
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

/* The image and the windows of a convolution or pooling; value c of pixel p is at c * channel + p * pixel. */
typedef struct {
    int channels, height, width, channel, pixel;
    int kernel_height, kernel_width, stride_down, stride_right, top, left, dilation_down, dilation_right;
} geometry;

GETTER(word)
GETTER(u8)
GETTER(i8)
GETTER(i16)
GETTER(i32)
GETTER(i64)
GETTER(geometry)

#endif
