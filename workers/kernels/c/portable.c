/* C for every processor, with the vectors of 16 bytes that gcc and clang know on all of them. Bytes are taken in
 * pairs, as the 16-bit numbers that they are on a little-endian machine. */
#include "kernels.h"

#include <string.h>

int tandem_supported(void) { return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__; }

#define INLINE static inline __attribute__((always_inline))
#define VECTOR_BYTES 16
#include "records.h"

#define VECTOR __attribute__((vector_size(16)))
typedef int8_t bytes VECTOR;
typedef int16_t shorts VECTOR;
typedef uint16_t pairs VECTOR;
typedef int32_t ints VECTOR;
typedef uint32_t quads VECTOR;

enum { FOUR = 4 };  /* outputs of a vector, each with four inputs */
enum { SPAN = 32 }; /* inputs: a 16-bit sum holds their products: 16 * 15 * 127 < 32768; groups are multiples, or half */

/* The codes of four inputs beside each of four outputs: [0] the first and third, [1] the second and fourth. */
typedef shorts spread_t[SPAN / 4][2];

INLINE void spread(const int8_t *codes, const int inputs, spread_t to) {
    for (int j = 0; j < inputs / 4; j++) {
        uint32_t four;
        memcpy(&four, codes + 4 * j, sizeof four);
        pairs all = (pairs)(quads){four, four, four, four};
        to[j][0] = (shorts)(all << 8) >> 8;
        to[j][1] = (shorts)all >> 8;
    }
}

/* Each output's two 16-bit sums as one number. */
INLINE ints gathered(shorts sums) { return ((ints)((quads)sums << 16) >> 16) + ((ints)sums >> 16); }

/* Twice the values of E2M1 codes. */
INLINE bytes doubled_e2m1(bytes codes) {
    bytes size = codes & 7, most = size > 6; /* comparisons give -1 */
    size -= (size > 4) + (size > 5) + most + most + most;
    bytes negative = codes > 7;
    return (size ^ negative) - negative;
}

/* dot[r] += the products of `inputs`, at most SPAN, of four outputs. A weight of INT8 is 16 times its upper four bits and
 * its lower four, which have sums of their own. */
INLINE void span(const uint8_t *data, const spread_t *codes, const int bits, const int e2m1, const int inputs,
                 const int rows, ints *dot) {
    const int width = bits == INT2 ? 2 : 4;                          /* bits that are taken together */
    const uint16_t mask = (uint16_t)((1 << width) - 1);
    const int of_byte = 8 / bits;                                    /* inputs */
    shorts sums[2][ROWS];
    for (int r = 0; r < rows; r++) sums[0][r] = sums[1][r] = (shorts){0};
#pragma GCC unroll 1 /* several steps at once need more registers than there are */
    for (int j = 0; j < inputs / 4; j += of_byte) {
        pairs both;
        memcpy(&both, data + 64 / of_byte * j, sizeof both);
        for (int f = 0; f < 8 / width; f++, both >>= width) {
            shorts a = (shorts)(both & mask), b = (shorts)(both >> 8 & mask);
            if (e2m1) {
                bytes doubled = doubled_e2m1((bytes)(both & 0x0F0F));
                a = (shorts)((pairs)doubled << 8) >> 8, b = (shorts)doubled >> 8;
            }
            const int input = bits == INT8 ? 0 : f, part = bits == INT8 ? f : 0;
            for (int r = 0; r < rows; r++) sums[part][r] += a * codes[r][j + input][0] + b * codes[r][j + input][1];
        }
    }
    for (int r = 0; r < rows; r++) dot[r] += gathered(sums[0][r]) + gathered(sums[1][r]) * 16;
}

static float number(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The number of a float16's bits. */
static float half_number(uint32_t half) {
    uint32_t size = half & 0x7FFF, exponent = size < 0x7C00 ? 112u << 23 : 224u << 23;
    float value = size < 0x400 ? (float)size * 0x1p-24f : number((size << 13) + exponent);
    return half & 0x8000 ? -value : value;
}

/* The scale of output i of group `part` of a record. */
INLINE float scale_of(const uint8_t *head, const int bits, const int scales, const int part, int i) {
    uint32_t byte = head[BLOCK * part + i], whole;
    uint16_t pair;
    memcpy(&pair, head + 2 * i, sizeof pair);
    if (scales == SCALES_E8M0) return number(byte ? byte << 23 : 1u << 22);
    if (scales == SCALES_E4M3) return half_number((byte & 128) << 8 | (byte & 127) << 7); /* / 256, see unit_of */
    if (scales != SCALES_OWN) return half_number(pair);
    if (bits != INT8) return number((uint32_t)pair << 16);
    memcpy(&whole, head + 4 * i, sizeof whole);
    return number(whole);
}
INLINE float zero_of(const uint8_t *head, const int bits, const int scales, int i) {
    if (is_e2m1(scales)) return 0.0f; /* its codes are taken as signed numbers, with the same results */
    if (scales == SCALES_F16 || (scales == SCALES_OWN && bits == INT8)) return constant_zero(bits, scales);
    uint16_t pair;
    memcpy(&pair, head + 32 + 2 * i, sizeof pair);
    return number((uint32_t)pair << 16);
}

/* y [16] += what one group contributes. */
INLINE void grow(float *y, const ints *dot, const float *scale, const float *zero, const float *factors) {
    int32_t sums[BLOCK];
    for (int i = 0; i < BLOCK / FOUR; i++) memcpy(sums + FOUR * i, dot + i * ROWS, sizeof *dot);
    for (int i = 0; i < BLOCK; i++)
        y[i] += ((float)sums[i] - zero[i] * factors[1]) * (scale[i] * factors[0]);
}

INLINE void block_of(const uint8_t *block, int64_t groups, int64_t group, const int8_t *codes, const float *factors,
                     const int bits, const int scales, const int rows, float *y) {
    const int together = groups_together(scales), e2m1 = is_e2m1(scales);
    const int inputs = scales == SCALES_E4M3 ? SPAN / 2 : SPAN;
    for (int i = 0; i < rows * BLOCK; i++) y[i] = 0.0f;
    for (int64_t g = 0; g < groups; g += together) {
        const uint8_t *data = block + record_head(scales);
        for (int part = 0; part < together; part++) {
            ints dot[BLOCK / FOUR][ROWS];
            for (int i = 0; i < BLOCK / FOUR; i++)
                for (int r = 0; r < rows; r++) dot[i][r] = (ints){0};
            for (int64_t start = 0; start < group; start += inputs, data += inputs * 2 * bits) {
                spread_t wide[ROWS];
                for (int line = 0; line < inputs * 2 * bits; line += 64) PREFETCH(data + line + AHEAD);
                for (int r = 0; r < rows; r++) spread(codes + r * group + start, inputs, wide[r]);
                for (int i = 0; i < BLOCK / FOUR; i++)
                    span(data + 16 * i, (const spread_t *)wide, bits, e2m1, inputs, rows, dot[i]);
            }
            float scale[BLOCK], zero[BLOCK];
            for (int i = 0; i < BLOCK; i++) {
                scale[i] = scale_of(block, bits, scales, part, i);
                zero[i] = zero_of(block, bits, scales, i);
            }
            for (int r = 0; r < rows; r++) grow(y + BLOCK * r, &dot[0][r], scale, zero, factors + 2 * r);
            codes += rows * group;
            factors += 2 * rows;
        }
        block = data;
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
