/* Blocks of 16 outputs with registers of 256 bits: two halves of 8 outputs, for avx2.c and avxvnni.c. Each defines,
 * for one group and one half or both,
 *
 *     dots_int4(data, group, codes, rows, halves, dot)      dots_int8 and dots_int2 the same
 *
 * the exact integer products of the outputs with each row's codes. data: the first 32 bytes of a half, the next ones
 * 64 bytes further; codes [rows, group]; dot [halves, ROWS].
 */
#include "prefetch.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define VECTOR_BYTES 32
#define BITS_OF(truth) (uint32_t)_mm256_movemask_ps((__m256)(truth))
#define VFMA(a, b, c) ((vector)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))

enum { TWICE = 4 }; /* from so many rows on a block is read once for each half, because there are few registers */

INLINE void dots_int4(const uint8_t *data, int64_t group, const int8_t *codes, const int rows, const int halves,
                      __m256i (*dot)[ROWS]);
INLINE void dots_int8(const uint8_t *data, int64_t group, const int8_t *codes, const int rows, const int halves,
                      __m256i (*dot)[ROWS]);

INLINE void dots_int2(const uint8_t *data, int64_t group, const int8_t *codes, const int rows, const int halves,
                      __m256i (*dot)[ROWS]);

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

INLINE void block_of(const uint8_t *block, int64_t groups, int64_t group, const int8_t *codes, const float *factors,
                     const int bits, const int rows, const int hint, int64_t ahead, float *y) {
    __m256 sum[ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *data = block + 64;
        for (int64_t line = 0; line < 64 + 2 * bits * group; line += 64)
            PREFETCH(block + line + ahead, hint);
        __m256i dot[2][ROWS];
        const int halves = rows < TWICE ? 2 : 1;
        for (int half = 0; half < 2; half += halves) {
            if (bits == INT2)
                dots_int2(data + 32 * half, group, codes, rows, halves, dot + half);
            else if (bits == INT4)
                dots_int4(data + 32 * half, group, codes, rows, halves, dot + half);
            else
                dots_int8(data + 32 * half, group, codes, rows, halves, dot + half);
        }
        for (int half = 0; half < 2; half++) {
            __m256 scale, zero;
            if (bits != INT8)
                scale = eight_bf16(block + 16 * half), zero = eight_bf16(block + 32 + 16 * half);
            else
                scale = _mm256_loadu_ps((const float *)block + 8 * half), zero = _mm256_set1_ps(128.0f);
            for (int r = 0; r < rows; r++) {
                __m256 centred = _mm256_cvtepi32_ps(dot[half][r]);
                centred = _mm256_fnmadd_ps(zero, _mm256_set1_ps(factors[2 * r + 1]), centred);
                __m256 unit = _mm256_mul_ps(scale, _mm256_set1_ps(factors[2 * r]));
                sum[r][half] = _mm256_fmadd_ps(centred, unit, sum[r][half]);
            }
        }
        block = data + 2 * bits * group;
        codes += rows * group;
        factors += 2 * rows;
    }
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) _mm256_storeu_ps(y + BLOCK * r + 8 * half, sum[r][half]);
}
