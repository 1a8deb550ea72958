/* AVX2. Products of four bits and eight are added in 16 bits, which hold the sum of eight pairs
 * (8 * 2 * 15 * 127 < 32768), of E2M1 of four (4 * 2 * 24 * 127), and then in 32 bits. Nothing saturates.
 *
 * A block of 16 outputs is two halves of 8. `dots` gives, for one group and one half or both, the exact integer products
 * of the outputs with each row's codes. data: the first 32 bytes of a half, the next
 * ones 64 bytes further; codes [rows, group]; dot [halves, ROWS]. */
#include "kernels.h"

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define VECTOR_BYTES 32
#include "records.h"
#define BITS_OF(truth) (uint32_t)_mm256_movemask_ps((__m256)(truth))
#define LARGER(a, b) (vector)_mm256_max_ps((__m256)(a), (__m256)(b))
#define VFMA(a, b, c) ((vector)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))

enum { TWICE = 4 }; /* from so many rows on a block is read once for each half, because there are few registers */

/* Forces the addition here: otherwise the compiler forms all products first and spills registers. */
#define NOW(sum) __asm__("" : "+x"(sum))

/* Not all compilers know F16C by name. */
int tandem_supported(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_F16C) != 0;
}

INLINE __m256i four(const int8_t *codes) {
    int32_t packed;
    memcpy(&packed, codes, 4);
    return _mm256_set1_epi32(packed);
}

INLINE __m256 eight_bf16(const void *numbers) {
    __m128i narrow = _mm_loadu_si128((const __m128i *)numbers);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}
#define WIDENED (vector)eight_bf16

INLINE __m256 eight_f16(const void *numbers) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)numbers)); }

/* E8M0: 2^(e - 127), of 0 a denormal number. */
INLINE __m256 eight_e8m0(const void *numbers) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)numbers));
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(wide, 23), _mm256_set1_epi32(1 << 22)));
}

/* E4M3 / 256, see unit_of. */
INLINE __m256 eight_e4m3(const void *numbers) {
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)numbers)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((int16_t)0xBFFF)));
}
#define WIDENED_E4M3 (vector)eight_e4m3

/* Scales of half the outputs, of group `part` of a record, and zeros. */
INLINE __m256 scales_of(const uint8_t *head, const int bits, const int scales, const int part, int half) {
    if (scales == SCALES_E8M0) return eight_e8m0(head + BLOCK * part + 8 * half);
    if (scales == SCALES_E4M3) return eight_e4m3(head + BLOCK * part + 8 * half);
    if (scales != SCALES_OWN) return eight_f16(head + 16 * half);
    return bits == INT8 ? _mm256_loadu_ps((const float *)head + 8 * half) : eight_bf16(head + 16 * half);
}
INLINE __m256 zeros_of(const uint8_t *head, const int bits, const int scales, int half) {
    const int given = scales == SCALES_F16_ZEROS || (scales == SCALES_OWN && bits != INT8);
    return given ? eight_bf16(head + 32 + 16 * half) : _mm256_set1_ps(constant_zero(bits, scales));
}

/* 16-bit sums as 32-bit ones, neighbours added. */
INLINE __m256i wide(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

/* A byte is taken in fields of 2 or 4 bits. Those of INT2 and INT4 are weights of different inputs; an INT8 weight is its
 * lower four bits and 16 times its upper four, which have sums of their own. */
INLINE void dots(const uint8_t *data, int64_t group, const int8_t *codes, const int bits, const int e2m1,
                 const int rows, const int halves, __m256i (*dot)[ROWS]) {
    const int width = bits == INT2 ? 2 : 4, fields = 8 / width, step = 32 / bits; /* inputs of a line */
    const int together = e2m1 ? 16 : 32; /* inputs whose products are added in 16 bits */
    const __m256i low = _mm256_set1_epi8((char)((1 << width) - 1));
    const __m256i numbers = _mm256_broadcastsi128_si256(_mm_setr_epi8(E2M1_NUMBERS));
    for (int h = 0; h < halves; h++)
        for (int r = 0; r < rows; r++) dot[h][r] = _mm256_setzero_si256();
    for (int64_t start = 0; start < group; start += together) {
        __m256i sums[2][2][ROWS]; /* [1]: of INT8's upper four bits */
        for (int h = 0; h < halves; h++)
            for (int r = 0; r < rows; r++) sums[0][h][r] = sums[1][h][r] = _mm256_setzero_si256();
        for (int64_t j = start; j < start + together; j += step) {
            __m256i part[4][2];
            for (int h = 0; h < halves; h++) {
                __m256i all = _mm256_loadu_si256((const __m256i *)(data + 64 / step * j + 32 * h));
                for (int f = 0; f < fields; f++, all = _mm256_srli_epi16(all, width)) {
                    part[f][h] = _mm256_and_si256(all, low);
                    if (e2m1) part[f][h] = _mm256_shuffle_epi8(numbers, part[f][h]);
                }
            }
            for (int r = 0; r < rows; r++) {
                __m256i with[4];
                for (int f = 0; f < fields; f++) with[f] = four(codes + r * group + j + (bits == INT8 ? 0 : 4 * f));
                for (int h = 0; h < halves; h++)
                    for (int f = 0; f < fields; f++) {
                        const int upper = bits == INT8 ? f : 0;
                        __m256i product = _mm256_maddubs_epi16(part[f][h], with[f]);
                        sums[upper][h][r] = _mm256_add_epi16(sums[upper][h][r], product);
                        NOW(sums[upper][h][r]);
                    }
            }
        }
        for (int h = 0; h < halves; h++)
            for (int r = 0; r < rows; r++) {
                dot[h][r] = _mm256_add_epi32(dot[h][r], wide(sums[0][h][r]));
                if (bits == INT8)
                    dot[h][r] = _mm256_add_epi32(dot[h][r], _mm256_slli_epi32(wide(sums[1][h][r]), 4));
            }
    }
}

INLINE void block_of(const uint8_t *block, int64_t groups, int64_t group, const int8_t *codes, const float *factors,
                     const int bits, const int scales, const int rows, float *y) {
    const int together = groups_together(scales), halves = rows < TWICE ? 2 : 1;
    const int64_t lines = BLOCK * bits / 8 * group; /* bytes of a group's */
    __m256 sum[ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g += together) {
        const uint8_t *data = block + record_head(scales);
        for (int64_t at = 0; at < record_head(scales) + together * lines; at += 64)
            PREFETCH(block + at + AHEAD);
        for (int part = 0; part < together; part++) {
            __m256i dot[2][ROWS];
            for (int half = 0; half < 2; half += halves)
                dots(data + 32 * half, group, codes, bits, is_e2m1(scales), rows, halves, dot + half);
            for (int half = 0; half < 2; half++) {
                __m256 scale = scales_of(block, bits, scales, part, half), zero = zeros_of(block, bits, scales, half);
                for (int r = 0; r < rows; r++) {
                    __m256 centred = _mm256_cvtepi32_ps(dot[half][r]);
                    centred = _mm256_fnmadd_ps(zero, _mm256_set1_ps(factors[2 * r + 1]), centred);
                    __m256 unit = _mm256_mul_ps(scale, _mm256_set1_ps(factors[2 * r]));
                    sum[r][half] = _mm256_fmadd_ps(centred, unit, sum[r][half]);
                }
            }
            data += lines;
            codes += rows * group;
            factors += 2 * rows;
        }
        block = data;
    }
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) _mm256_storeu_ps(y + BLOCK * r + 8 * half, sum[r][half]);
}

/* sum + the products of bytes with codes, four neighbours each. A byte of 8 bits is 16 times its upper four and its
 * lower four. */
INLINE __m256i byte_dots(__m256i sum, __m256i bytes, const int8_t *codes, const int bits) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i with = _mm256_loadu_si256((const __m256i *)codes);
    if (bits == INT4) return _mm256_add_epi32(sum, wide(_mm256_maddubs_epi16(bytes, with)));
    __m256i upper = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
    sum = _mm256_add_epi32(sum, wide(_mm256_maddubs_epi16(_mm256_and_si256(bytes, low), with)));
    return _mm256_add_epi32(sum, _mm256_slli_epi32(wide(_mm256_maddubs_epi16(upper, with)), 4));
}
#define BYTE_DOTS(sum, bytes, codes, bits) (ints)byte_dots((__m256i)(sum), (__m256i)(bytes), codes, bits)

#include "body.h"
