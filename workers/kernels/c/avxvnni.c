/* AVX-VNNI: the dot-product instruction of AVX-512 on registers of 256 bits. */
#include "kernels.h"

#include "blocks256.h"

#include <cpuid.h>

int tandem_supported(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid_count(7, 1, &a, &b, &c, &d) &&
           a >> 4 & 1;
}

#ifndef DPBUSD
#define DPBUSD _mm256_dpbusd_avx_epi32
#endif

INLINE void dots_int4(const uint8_t *data, int64_t group, const int8_t *codes, const int rows, const int halves,
                      __m256i (*dot)[ROWS]) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int h = 0; h < halves; h++)
        for (int r = 0; r < rows; r++) dot[h][r] = _mm256_setzero_si256();
    for (int64_t j = 0; j < group; j += 8) {
        __m256i even[2], odd[2];
        for (int h = 0; h < halves; h++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(data + 8 * j + 32 * h));
            even[h] = _mm256_and_si256(both, low), odd[h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
        for (int r = 0; r < rows; r++) {
            __m256i first = four(codes + r * group + j), second = four(codes + r * group + j + 4);
            for (int h = 0; h < halves; h++) {
                dot[h][r] = DPBUSD(dot[h][r], even[h], first);
                dot[h][r] = DPBUSD(dot[h][r], odd[h], second);
            }
        }
    }
}

INLINE void dots_int8(const uint8_t *data, int64_t group, const int8_t *codes, const int rows, const int halves,
                      __m256i (*dot)[ROWS]) {
    for (int h = 0; h < halves; h++)
        for (int r = 0; r < rows; r++) dot[h][r] = _mm256_setzero_si256();
    for (int64_t j = 0; j < group; j += 4) {
        __m256i weights[2];
        for (int h = 0; h < halves; h++)
            weights[h] = _mm256_loadu_si256((const __m256i *)(data + 16 * j + 32 * h));
        for (int r = 0; r < rows; r++) {
            __m256i first = four(codes + r * group + j);
            for (int h = 0; h < halves; h++) dot[h][r] = DPBUSD(dot[h][r], weights[h], first);
        }
    }
}

INLINE void dots_int2(const uint8_t *data, int64_t group, const int8_t *codes, const int rows, const int halves,
                      __m256i (*dot)[ROWS]) {
    const __m256i low = _mm256_set1_epi8(3);
    for (int h = 0; h < halves; h++)
        for (int r = 0; r < rows; r++) dot[h][r] = _mm256_setzero_si256();
    for (int64_t j = 0; j < group; j += 16)
        for (int h = 0; h < halves; h++) {
            __m256i all = _mm256_loadu_si256((const __m256i *)(data + 4 * j + 32 * h));
            for (int f = 0; f < 4; f++, all = _mm256_srli_epi16(all, 2)) {
                __m256i part = _mm256_and_si256(all, low);
                for (int r = 0; r < rows; r++)
                    dot[h][r] = DPBUSD(dot[h][r], part, four(codes + r * group + j + 4 * f));
            }
        }
}

INLINE __m256i byte_dots(__m256i sum, __m256i bytes, const int8_t *codes) {
    return DPBUSD(sum, bytes, _mm256_loadu_si256((const __m256i *)codes));
}
#define BYTE_DOTS(sum, bytes, codes, bits) (ints)byte_dots((__m256i)(sum), (__m256i)(bytes), codes)

#include "body.h"
