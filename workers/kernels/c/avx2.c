/* AVX2: products of four bits and eight are added in 16 bits, which hold the sum of eight pairs
 * (8 * 2 * 15 * 127 < 32768), and then in 32 bits. Nothing saturates. */
#include "kernels.h"

#include "blocks256.h"

/* Forces the addition here: otherwise the compiler forms all products first and spills registers. */
#define NOW(sum) __asm__("" : "+x"(sum))

int tandem_supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

/* 16-bit sums as 32-bit ones, neighbours added. */
INLINE __m256i wide(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

INLINE void dots_int4(const uint8_t *data, int64_t group, const int8_t *codes, const int rows, const int halves,
                      __m256i (*dot)[ROWS]) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int h = 0; h < halves; h++)
        for (int r = 0; r < rows; r++) dot[h][r] = _mm256_setzero_si256();
    for (int64_t start = 0; start < group; start += 32) { /* 8 pairs */
        __m256i sum[2][ROWS];
        for (int h = 0; h < halves; h++)
            for (int r = 0; r < rows; r++) sum[h][r] = _mm256_setzero_si256();
        for (int64_t j = start; j < start + 32; j += 8) {
            __m256i even[2], odd[2];
            for (int h = 0; h < halves; h++) {
                __m256i both = _mm256_loadu_si256((const __m256i *)(data + 8 * j + 32 * h));
                even[h] = _mm256_and_si256(both, low), odd[h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            }
            for (int r = 0; r < rows; r++) {
                __m256i first = four(codes + r * group + j), second = four(codes + r * group + j + 4);
                for (int h = 0; h < halves; h++) {
                    sum[h][r] = _mm256_add_epi16(sum[h][r], _mm256_maddubs_epi16(even[h], first));
                    sum[h][r] = _mm256_add_epi16(sum[h][r], _mm256_maddubs_epi16(odd[h], second));
                    NOW(sum[h][r]);
                }
            }
        }
        for (int h = 0; h < halves; h++)
            for (int r = 0; r < rows; r++) dot[h][r] = _mm256_add_epi32(dot[h][r], wide(sum[h][r]));
    }
}

/* A weight is 16 times its upper four bits and its lower four. */
INLINE void dots_int8(const uint8_t *data, int64_t group, const int8_t *codes, const int rows, const int halves,
                      __m256i (*dot)[ROWS]) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int h = 0; h < halves; h++)
        for (int r = 0; r < rows; r++) dot[h][r] = _mm256_setzero_si256();
    for (int64_t start = 0; start < group; start += 32) { /* 8 pairs */
        __m256i lower[2][ROWS], upper[2][ROWS];
        for (int h = 0; h < halves; h++)
            for (int r = 0; r < rows; r++) lower[h][r] = upper[h][r] = _mm256_setzero_si256();
        for (int64_t j = start; j < start + 32; j += 4) {
            __m256i even[2], odd[2];
            for (int h = 0; h < halves; h++) {
                __m256i both = _mm256_loadu_si256((const __m256i *)(data + 16 * j + 32 * h));
                even[h] = _mm256_and_si256(both, low), odd[h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            }
            for (int r = 0; r < rows; r++) {
                __m256i first = four(codes + r * group + j);
                for (int h = 0; h < halves; h++) {
                    lower[h][r] = _mm256_add_epi16(lower[h][r], _mm256_maddubs_epi16(even[h], first));
                    upper[h][r] = _mm256_add_epi16(upper[h][r], _mm256_maddubs_epi16(odd[h], first));
                    NOW(lower[h][r]);
                    NOW(upper[h][r]);
                }
            }
        }
        for (int h = 0; h < halves; h++)
            for (int r = 0; r < rows; r++) {
                dot[h][r] = _mm256_add_epi32(dot[h][r], wide(lower[h][r]));
                dot[h][r] = _mm256_add_epi32(dot[h][r], _mm256_slli_epi32(wide(upper[h][r]), 4));
            }
    }
}

INLINE void dots_int2(const uint8_t *data, int64_t group, const int8_t *codes, const int rows, const int halves,
                      __m256i (*dot)[ROWS]) {
    const __m256i low = _mm256_set1_epi8(3);
    for (int h = 0; h < halves; h++)
        for (int r = 0; r < rows; r++) dot[h][r] = _mm256_setzero_si256();
    for (int64_t j = 0; j < group; j += 16) /* 4 pairs */
        for (int h = 0; h < halves; h++) {
            __m256i all = _mm256_loadu_si256((const __m256i *)(data + 4 * j + 32 * h));
            __m256i sum[ROWS];
            for (int f = 0; f < 4; f++, all = _mm256_srli_epi16(all, 2)) {
                __m256i part = _mm256_and_si256(all, low);
                for (int r = 0; r < rows; r++) {
                    __m256i product = _mm256_maddubs_epi16(part, four(codes + r * group + j + 4 * f));
                    sum[r] = f ? _mm256_add_epi16(sum[r], product) : product;
                }
            }
            for (int r = 0; r < rows; r++) dot[h][r] = _mm256_add_epi32(dot[h][r], wide(sum[r]));
        }
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
