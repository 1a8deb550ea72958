/* AVX-512 with VNNI: a block's 16 outputs are the 16 lanes of a register. */
#include "kernels.h"

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

int tandem_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

#define INLINE static inline __attribute__((always_inline))
#define VECTOR_BYTES 64
#include "records.h"
#define SUM(v) _mm512_reduce_add_ps((__m512)(v))
#define MOST(v) _mm512_reduce_max_ps((__m512)(v))
#define LARGER(a, b) (vector)_mm512_max_ps((__m512)(a), (__m512)(b))

/* y [4] = the sums of four vectors, in the order of additions of SUM. */
INLINE void sum_four(__m512 a, __m512 b, __m512 c, __m512 d, float *y) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    __m512 sum = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4E));
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xB1));
    _mm_storeu_ps(y, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sum)));
}
#define SUM_FOUR(a, b, c, d, y) sum_four((__m512)(a), (__m512)(b), (__m512)(c), (__m512)(d), y)
#define TIMES_POWER(x, n) (vector)_mm512_scalef_ps((__m512)(x), (__m512)(n))
#define VFMA(a, b, c) ((vector)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))

#define BITS_OF(truth) (uint32_t)_mm512_movepi32_mask((__m512i)(truth))
#define PACKED(lanes, bits) (ints)_mm512_maskz_compress_epi32((__mmask16)(bits), (__m512i)(lanes))

/* Two vectors of 32-bit words whose lower halves are a's 16-bit numbers and whose upper halves are b's. */
INLINE void interleave(const void *a, const void *b, void *to) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                           36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    __m512i of_a = _mm512_loadu_si512(a), of_b = _mm512_loadu_si512(b);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(of_a, first, of_b));
    _mm512_storeu_si512((char *)to + 64, _mm512_permutex2var_epi16(of_a, second, of_b));
}
#define INTERLEAVED interleave

INLINE void transpose_words(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) { /* in quarters: rows (i3 i2 i1 e1), lanes (e0 i0) */
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int e = 0; e < 2; e++) {
            r[i + 2 * e] = _mm512_unpacklo_epi64(t[i + e], t[i + 2 + e]);
            r[i + 2 * e + 1] = _mm512_unpackhi_epi64(t[i + e], t[i + 2 + e]);
        }
    for (int e = 0; e < 4; e++)
        for (int i = 0; i < 8; i += 4) { /* rows (i3 i2 e) to (i3 l0 e) */
            t[2 * i + e] = _mm512_shuffle_i32x4(r[2 * i + e], r[2 * i + 4 + e], 0x88);
            t[2 * i + 4 + e] = _mm512_shuffle_i32x4(r[2 * i + e], r[2 * i + 4 + e], 0xDD);
        }
    for (int e = 0; e < 8; e++) {
        r[e] = _mm512_shuffle_i32x4(t[e], t[8 + e], 0x88);
        r[8 + e] = _mm512_shuffle_i32x4(t[e], t[8 + e], 0xDD);
    }
}
#define TRANSPOSED(rows) transpose_words((__m512i *)(rows))

INLINE __m512i sixteen_int8(const void *numbers) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)numbers)); }
#define WIDENED_INT8 (ints)sixteen_int8

INLINE __m512i four(const int8_t *codes) {
    int32_t packed;
    memcpy(&packed, codes, 4);
    return _mm512_set1_epi32(packed);
}

INLINE __m512 sixteen_bf16(const void *numbers) {
    __m256i narrow = _mm256_loadu_si256((const __m256i *)numbers);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}
#define WIDENED (vector)sixteen_bf16

INLINE __m512 sixteen_f16(const void *numbers) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)numbers));
}

/* E8M0: 2^(e - 127), of 0 a denormal number. */
INLINE __m512 sixteen_e8m0(const void *numbers) {
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)numbers));
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(wide, 23), _mm512_set1_epi32(1 << 22)));
}

/* E4M3 / 256, see unit_of. */
INLINE __m512 sixteen_e4m3(const void *numbers) {
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)numbers)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((int16_t)0xBFFF)));
}
#define WIDENED_E4M3 (vector)sixteen_e4m3

/* Scales of group `part` of a record, and its zeros. */
INLINE __m512 scales_of(const uint8_t *head, const int bits, const int scales, const int part) {
    if (scales == SCALES_E8M0) return sixteen_e8m0(head + BLOCK * part);
    if (scales == SCALES_E4M3) return sixteen_e4m3(head + BLOCK * part);
    if (scales != SCALES_OWN) return sixteen_f16(head);
    return bits == INT8 ? _mm512_loadu_ps((const float *)head) : sixteen_bf16(head);
}
INLINE __m512 zeros_of(const uint8_t *head, const int bits, const int scales) {
    const int given = scales == SCALES_F16_ZEROS || (scales == SCALES_OWN && bits != INT8);
    return given ? sixteen_bf16(head + 32) : _mm512_set1_ps(constant_zero(bits, scales));
}

/* What the codes in the lowest four bits of bytes stand for. */
INLINE __m512i numbers_of(__m512i codes, const int scales) {
    const __m512i numbers = _mm512_broadcast_i32x4(_mm_setr_epi8(E2M1_NUMBERS));
    return is_e2m1(scales) ? _mm512_shuffle_epi8(numbers, codes) : codes;
}

#ifndef TANDEM_WITHOUT_PAIRS
/* VDPBF16PS, which not all of these processors have, nor all compilers: sum += the products of the pairs' upper
 * numbers, then those of the lower ones, each rounded as a fused addition is. Denormal numbers count as 0. Not on
 * Intel's processors: on a Xeon of model 207 two fused additions are 1.5 times as fast with 128 rows, and as fast
 * with one; a process that measured this itself could have other bits of denormal numbers than the next one. */
INLINE __m512 with_pairs(__m512 sum, __m512i a, __m512i b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#define WITH_PAIRS(a, b, c) ((vector)with_pairs((__m512)(c), (__m512i)(a), (__m512i)(b)))
#define HAS_PAIRS() (__builtin_cpu_supports("avx512bf16") > 0 && !__builtin_cpu_is("intel"))
#endif

INLINE __m512 grown(__m512 y, __m512i dot, __m512 scale, __m512 zero, const float *factors) {
    __m512 centred = _mm512_fnmadd_ps(zero, _mm512_set1_ps(factors[1]), _mm512_cvtepi32_ps(dot));
    return _mm512_fmadd_ps(centred, _mm512_mul_ps(scale, _mm512_set1_ps(factors[0])), y);
}

/* Of sums of INT2 codes times 4^f, exact. */
INLINE __m512i in_place_sum(const __m512i *dots) {
    __m512i even = _mm512_add_epi32(dots[0], _mm512_srai_epi32(dots[2], 4));
    __m512i odd = _mm512_add_epi32(_mm512_srai_epi32(dots[1], 2), _mm512_srai_epi32(dots[3], 6));
    return _mm512_add_epi32(even, odd);
}

enum { IN_PLACE = 4 }; /* rows with four sums each: as many as registers hold */

/* Whether this processor reads lines that are prefetched as used once (NTA) as fast as others. They then leave its second
 * and third cache to what runs between two products. Of AMD's family 25 (Zen 4) that was measured; on Intel's it is half
 * as fast (docs/kernels.md). */
static int reads_past_caches;

__attribute__((constructor)) static void find_processor(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd") && __get_cpuid(1, &a, &b, &c, &d))
        reads_past_caches = (a >> 8 & 15) + (a >> 20 & 255) == 25;
}

/* PREFETCH for so many rows; constants. One row's arithmetic is short, and its lines are best in the first cache; more
 * rows' are not (docs/kernels.md has both measured). `past`: as above, of one row. */
INLINE void prefetch_line(const uint8_t *at, const int rows, const int past) {
    if (rows > 1)
        PREFETCH(at + AHEAD);
    else if (past)
        __builtin_prefetch((const char *)at + AHEAD / 2, 0, 0);
    else
        __builtin_prefetch((const char *)at + AHEAD, 0, 3);
}

/* dot [rows] = the products of one group's codes, at `data`, with those of each row. */
INLINE void group_dots(const uint8_t *data, int64_t group, const int8_t *codes, const int bits, const int scales,
                       const int rows, const int past, __m512i *dot) {
    const __m512i low = _mm512_set1_epi8(15);
    const int step = 32 / bits; /* inputs of a line */
    const int in_place = rows <= IN_PLACE; /* INT2: codes are not shifted to the lowest bits of their byte */
    __m512i more[ROWS], dots[IN_PLACE][4];
    for (int r = 0; r < rows; r++) dot[r] = more[r] = _mm512_setzero_si512();
    for (int r = 0; r < IN_PLACE; r++)
        for (int f = 0; f < 4; f++) dots[r][f] = _mm512_setzero_si512();
    for (int64_t j = 0; j < group; j += step) {
        __m512i line = _mm512_loadu_si512(data + 64 / step * j);
        prefetch_line(data + 64 / step * j, rows, past);
        if (bits == INT2 && in_place) {
            for (int f = 0; f < 4; f++) {
                __m512i part = _mm512_and_si512(line, _mm512_set1_epi8((char)(3 << 2 * f)));
                for (int r = 0; r < rows; r++)
                    dots[r][f] = _mm512_dpbusd_epi32(dots[r][f], part, four(codes + r * group + j + 4 * f));
            }
            continue;
        }
        if (bits == INT2) {
            for (int f = 0; f < 4; f++) {
                __m512i part = _mm512_and_si512(_mm512_srli_epi16(line, 2 * f), _mm512_set1_epi8(3));
                for (int r = 0; r < rows; r++)
                    dot[r] = _mm512_dpbusd_epi32(dot[r], part, four(codes + r * group + j + 4 * f));
            }
            continue;
        }
        __m512i first = bits == INT4 ? numbers_of(_mm512_and_si512(line, low), scales) : line;
        __m512i second = numbers_of(_mm512_and_si512(_mm512_srli_epi16(line, 4), low), scales);
        for (int r = 0; r < rows; r++) {
            dot[r] = _mm512_dpbusd_epi32(dot[r], first, four(codes + r * group + j));
            if (bits == INT8) continue;
            if (rows <= 4)
                more[r] = _mm512_dpbusd_epi32(more[r], second, four(codes + r * group + j + 4));
            else
                dot[r] = _mm512_dpbusd_epi32(dot[r], second, four(codes + r * group + j + 4));
        }
    }
    for (int r = 0; r < rows; r++) {
        if (bits == INT2 && in_place) {
            dot[r] = in_place_sum(dots[r]);
        } else if (bits == INT4 && rows <= 4) {
            dot[r] = _mm512_add_epi32(dot[r], more[r]);
        }
    }
}

INLINE void prefetched_block(const uint8_t *block, int64_t groups, int64_t group, const int8_t *codes,
                             const float *factors, const int bits, const int scales, const int rows, const int past,
                             float *y) {
    const int together = groups_together(scales);
    __m512 sum[ROWS];
    for (int r = 0; r < rows; r++) sum[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g += together) {
        const uint8_t *data = block + record_head(scales);
        prefetch_line(block, rows, past);
        for (int part = 0; part < together; part++) {
            __m512i dot[ROWS];
            group_dots(data, group, codes, bits, scales, rows, past, dot);
            __m512 scale = scales_of(block, bits, scales, part), zero = zeros_of(block, bits, scales);
            for (int r = 0; r < rows; r++) sum[r] = grown(sum[r], dot[r], scale, zero, factors + 2 * r);
            data += BLOCK * bits / 8 * group;
            codes += rows * group;
            factors += 2 * rows;
        }
        block = data;
    }
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(y + BLOCK * r, sum[r]);
}

INLINE void block_of(const uint8_t *block, int64_t groups, int64_t group, const int8_t *codes, const float *factors,
                     const int bits, const int scales, const int rows, float *y) {
    if (rows == 1 && reads_past_caches)
        prefetched_block(block, groups, group, codes, factors, bits, scales, rows, 1, y);
    else
        prefetched_block(block, groups, group, codes, factors, bits, scales, rows, 0, y);
}

/* sum + the products of bytes with codes, four neighbours each. */
INLINE __m512i byte_dots(__m512i sum, __m512i bytes, const int8_t *codes) {
    return _mm512_dpbusd_epi32(sum, bytes, _mm512_loadu_si512(codes));
}
#define BYTE_DOTS(sum, bytes, codes, bits) (ints)byte_dots((__m512i)(sum), (__m512i)(bytes), codes)
#define LOOKED_UP(table, index) (vector)_mm512_permutexvar_ps((__m512i)(index), (__m512)(table))

#include "body.h"
