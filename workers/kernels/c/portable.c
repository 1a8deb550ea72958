/* C for every processor, with the vectors of 16 bytes that gcc and clang know on all of them. Bytes are taken in
 * pairs, as the 16-bit numbers that they are on a little-endian machine. */
#include "kernels.h"

#include <string.h>

int tandem_supported(void) { return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__; }

#define INLINE static inline __attribute__((always_inline))
#define VECTOR_BYTES 16

#define VECTOR __attribute__((vector_size(16)))
typedef int16_t shorts VECTOR;
typedef uint16_t pairs VECTOR;
typedef int32_t ints VECTOR;
typedef uint32_t quads VECTOR;

enum { FOUR = 4 };  /* outputs of a vector, each with four inputs */
enum { SPAN = 32 }; /* inputs: a 16-bit sum holds their products: 16 * 15 * 127 < 32768; groups are multiples */

/* The codes of four inputs beside each of four outputs: [0] the first and third, [1] the second and fourth. */
typedef shorts spread_t[SPAN / 4][2];

INLINE void spread(const int8_t *codes, spread_t to) {
    for (int j = 0; j < SPAN / 4; j++) {
        uint32_t four;
        memcpy(&four, codes + 4 * j, sizeof four);
        pairs all = (pairs)(quads){four, four, four, four};
        to[j][0] = (shorts)(all << 8) >> 8;
        to[j][1] = (shorts)all >> 8;
    }
}

/* Each output's two 16-bit sums as one number. */
INLINE ints gathered(shorts sums) { return ((ints)((quads)sums << 16) >> 16) + ((ints)sums >> 16); }

/* dot[r] += the products of SPAN inputs of four outputs. A weight of INT8 is 16 times its upper four bits and its lower
 * four, which have sums of their own. */
INLINE void span(const uint8_t *data, const spread_t *codes, const int bits, const int rows, ints *dot) {
    const int width = bits == INT2 ? 2 : 4;                          /* bits that are taken together */
    const uint16_t mask = (uint16_t)((1 << width) - 1);
    const int inputs = 8 / bits;                                     /* of a byte */
    shorts sums[2][ROWS];
    for (int r = 0; r < rows; r++) sums[0][r] = sums[1][r] = (shorts){0};
#pragma GCC unroll 1 /* several steps at once need more registers than there are */
    for (int j = 0; j < SPAN / 4; j += inputs) {
        pairs both;
        memcpy(&both, data + 64 / inputs * j, sizeof both);
        for (int f = 0; f < 8 / width; f++, both >>= width) {
            shorts a = (shorts)(both & mask), b = (shorts)(both >> 8 & mask);
            const int input = bits == INT8 ? 0 : f, part = bits == INT8 ? f : 0;
            for (int r = 0; r < rows; r++) sums[part][r] += a * codes[r][j + input][0] + b * codes[r][j + input][1];
        }
    }
    for (int r = 0; r < rows; r++) dot[r] += gathered(sums[0][r]) + gathered(sums[1][r]) * 16;
}

static float number(const uint8_t *bf16) {
    uint16_t narrow;
    memcpy(&narrow, bf16, sizeof narrow);
    uint32_t bits = (uint32_t)narrow << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* y [16] += what one group contributes. */
INLINE void grow(float *y, const ints *dot, const float *scale, const float *zero, const float *factors) {
    int32_t sums[BLOCK];
    for (int i = 0; i < BLOCK / FOUR; i++) memcpy(sums + FOUR * i, dot + i * ROWS, sizeof *dot);
    for (int i = 0; i < BLOCK; i++)
        y[i] += ((float)sums[i] - zero[i] * factors[1]) * (scale[i] * factors[0]);
}

INLINE void block_of(const uint8_t *block, int64_t groups, int64_t group, const int8_t *codes, const float *factors,
                     const int bits, const int rows, float *y) {
    for (int i = 0; i < rows * BLOCK; i++) y[i] = 0.0f;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *data = block + 64;
        ints dot[BLOCK / FOUR][ROWS];
        for (int i = 0; i < BLOCK / FOUR; i++)
            for (int r = 0; r < rows; r++) dot[i][r] = (ints){0};
        for (int64_t start = 0; start < group; start += SPAN, data += SPAN * 2 * bits) {
            spread_t wide[ROWS];
            for (int line = 0; line < SPAN * 2 * bits; line += 64) PREFETCH(data + line + AHEAD);
            for (int r = 0; r < rows; r++) spread(codes + r * group + start, wide[r]);
            for (int i = 0; i < BLOCK / FOUR; i++) span(data + 16 * i, (const spread_t *)wide, bits, rows, dot[i]);
        }
        float scale[BLOCK], zero[BLOCK];
        for (int i = 0; i < BLOCK; i++) zero[i] = bits != INT8 ? number(block + 32 + 2 * i) : 128.0f;
        if (bits != INT8)
            for (int i = 0; i < BLOCK; i++) scale[i] = number(block + 2 * i);
        else
            memcpy(scale, block, sizeof scale);
        for (int r = 0; r < rows; r++) grow(y + BLOCK * r, &dot[0][r], scale, zero, factors + 2 * r);
        block = data;
        codes += rows * group;
        factors += 2 * rows;
    }
}

/* sum + the products of bytes with codes, four neighbours each. */
INLINE ints byte_dots(ints sum, quads bytes, const int8_t *codes) {
    pairs of, with;
    of = (pairs)bytes;
    memcpy(&with, codes, sizeof with);
    sum += gathered((shorts)(of & 255) * ((shorts)(with << 8) >> 8));
    return sum + gathered((shorts)(of >> 8) * ((shorts)with >> 8));
}
#define BYTE_DOTS(sum, bytes, codes, bits) byte_dots(sum, (quads)(bytes), codes)

#include "body.h"
