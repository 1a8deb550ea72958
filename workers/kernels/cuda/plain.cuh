/* Weights that are row-major, in bf16 or with FP8 1 in fp8 (shm/formats.py, shm/fp8.py), and their dot products with rows
 * of x, which bf16 rounds to it and fp8 does not; added in float32. */
#pragma once

#include "numbers.cuh"

#ifndef FP8
#define FP8 0
#endif
#if FP8
typedef uint8_t stored; /* a weight: E4M3, with a scale for each block of SCALED x SCALED */
typedef float number;   /* of x and of inner activations */
#else
typedef uint16_t stored, number;
#endif

enum { BITS = 8 * sizeof(stored), EACH = 4 / sizeof(stored), SCALED = 128 }; /* EACH: in 32 bits */
enum { VECTOR = 4 * EACH }; /* weights that a lane reads together */
enum { UNIT = 256 };

/* To nearest even; NaN stays NaN. */
DEVICE uint16_t narrowed(float number) {
    uint32_t bits = __float_as_uint(number);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

#if FP8
DEVICE number rounded(float x) { return x; }
DEVICE float as_float(number x) { return x; }
#else
DEVICE number rounded(float x) { return narrowed(x); }
DEVICE float as_float(number x) { return widened(x); }
#endif

/* Weight `i` of a word; of fp8 divided by UNIT, as a binary16 number with nearly the same bits. */
DEVICE float weight_of(uint32_t word, int i) {
    uint32_t top = word << (32 - BITS - BITS * i); /* from the highest bit on */
    return FP8 ? half_number((uint32_t)((int32_t)top >> 17) & 0xBF80u) : __uint_as_float(top & 0xFFFF0000u);
}

/* EACH weights, 0 beyond `count`. */
DEVICE uint32_t word_of(const stored *from, int64_t count) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) word |= i < count ? read_once(from + i) << BITS * i : 0;
    return word;
}

/* VECTOR weights, and numbers of x, 0 beyond `count`. Where rows are no whole vectors, they are not aligned either. */
struct weights {
    uint32_t words[4];

    template <bool WHOLE> METHOD void load(const stored *from, int64_t count) {
        uint4 all = {0, 0, 0, 0};
        if (WHOLE) all = read_once((const uint4 *)from);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
#pragma unroll
        for (int i = 0; !WHOLE && i < 4; i++) words[i] = word_of(from + EACH * i, count - EACH * i);
    }
};

struct inputs {
    float x[VECTOR];

    template <bool WHOLE> METHOD void load(const number *from, int64_t count) {
        if (!WHOLE) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) x[i] = i < count ? as_float(__ldg(from + i)) : 0.0f;
            return;
        }
        const int PARTS = VECTOR * sizeof(number) / 16;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            uint4 all = __ldg((const uint4 *)from + part);
            const uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
            for (int i = 0; i < VECTOR / PARTS; i++)
                x[VECTOR / PARTS * part + i] = FP8 ? __uint_as_float(words[i]) : weight_of(words[i / EACH], i % EACH);
        }
    }

    /* sum + the dot product with weights that share a scale. */
    METHOD float dot(const weights &with, float scale, float sum) const {
        float part = FP8 ? 0.0f : sum;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) part = __fmaf_rn(weight_of(with.words[i / EACH], i % EACH), x[i], part);
        return FP8 ? __fmaf_rn(part, scale, sum) : part;
    }
};

/* The scales of rows from `row` on of a matrix [.., numbers], whose first ones these are. */
DEVICE const float *scales_of(const float *scales, int64_t row, int64_t numbers) {
    return scales + row / SCALED * ((numbers + SCALED - 1) / SCALED);
}
DEVICE float scale_at(const float *scales, int64_t at) {
    return FP8 ? __fmul_rn(__ldg(scales + at / SCALED), (float)UNIT) : 1.0f;
}

DEVICE float sum_of_lanes(float sum) {
#pragma unroll
    for (int far = WARP / 2; far; far /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, far));
    return sum;
}
