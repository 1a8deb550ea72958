/* Activations as int8 codes by groups, and what one group of a block adds to its outputs: workers/kernels/c/kernels.h
 * has the formula. The format is a constant of the compilation: BITS (2, 4 or 8), GROUP (inputs that share a scale: 16 to
 * 128) and SCALES (below). Additions are fused, as in the host's variants but `portable`. */
#pragma once

#include "numbers.cuh"

static_assert(BITS != 2 || GROUP == 64, "int2 has groups of 64");

enum { SCALES_OWN, SCALES_F16, SCALES_F16_ZEROS, SCALES_E8M0, SCALES_E4M3 }; /* as in workers/kernels/c/kernels.h */

enum { LANES = 16 };                          /* outputs of a block, interleaved */
enum { E2M1 = SCALES >= SCALES_E8M0 };        /* codes are floating point numbers of 4 bits */
enum { TOGETHER = E2M1 ? 2 : 1 };             /* groups of a record */
enum { INPUTS = TOGETHER * GROUP };           /* of a record */
enum { WORDS = INPUTS * BITS / 32 };          /* of a record, for each of its outputs */
enum { HEAD = SCALES == SCALES_OWN || SCALES == SCALES_F16_ZEROS ? 64 : 32 }; /* bytes of a record's scales and zeros */
enum { RECORD = HEAD + LANES * INPUTS * BITS / 8 }; /* bytes */
enum { NUMBERS = GROUP < WARP ? 1 : GROUP / WARP }; /* of a group, for each thread of a warp */

/* Where the code of a group's number is kept. Of E2M1 the codes of inputs 0, 4, 1, 5, 2, 6, 3 and 7 follow one another, as
 * the nibbles of a word of weights do: both are multiplied as they lie. */
DEVICE int place_of(int i) { return E2M1 ? (i & ~7) + i % 4 * 2 + i / 4 % 2 : i; }

/* A group of numbers, `count` of them valid, as codes: by one warp. */
DEVICE void quantize_group(const float *x, int64_t count, int8_t *codes, factors *to) {
    const int lane = threadIdx.x % WARP;
    float numbers[NUMBERS];
    int32_t most = 0; /* largest bit pattern of a magnitude; they order like the magnitudes, NaN above all */
#pragma unroll
    for (int j = 0; j < NUMBERS; j++) {
        int i = lane + j * WARP;
        numbers[j] = i < count ? x[i] : 0.0f;
        int32_t magnitude = __float_as_int(numbers[j]) & 0x7FFFFFFF;
        most = magnitude > most ? magnitude : most;
    }
#pragma unroll
    for (int far = WARP / 2; far; far /= 2) {
        int32_t other = __shfl_xor_sync(ALL_LANES, most, far);
        most = other > most ? other : most;
    }
    float step = __fdiv_rn(__int_as_float(most), 127.0f);
    int32_t sum = 0;
#pragma unroll
    for (int j = 0; j < NUMBERS; j++) {
        float code = step > 0.0f ? __fdiv_rn(numbers[j], step) : 0.0f;
        code = __fsub_rn(__fadd_rn(code, 12582912.0f), 12582912.0f); /* rounded, half to even */
        code = code < 127.0f ? code : 127.0f;
        code = code > -127.0f ? code : -127.0f;
        int32_t whole = lane + j * WARP < count ? (int32_t)code : 0;
        if (GROUP >= WARP || lane < GROUP) codes[place_of(lane + j * WARP)] = (int8_t)whole;
        sum += whole;
    }
#pragma unroll
    for (int far = WARP / 2; far; far /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, far);
    if (lane == 0) to->step = step, to->sum = (float)sum;
}

/* What a group adds to an output: the product of both. */
struct term {
    float centred, factor;
};
DEVICE float added(term one, float y) { return __fmaf_rn(one.centred, one.factor, y); }

/* Scale and zero of output i of a block's record, for one of its groups. They are widened where they are used, so
 * that nothing has to wait for a load before. */
struct scaling {
    uint32_t scale_bits, zero_bits;

    METHOD void load(const uint8_t *record, int i, int group) {
        if (E2M1)
            scale_bits = read_once(record + LANES * group + i);
        else if (SCALES != SCALES_OWN)
            scale_bits = read_once((const uint16_t *)record + i);
        else
            scale_bits = BITS < 8 ? read_once((const uint16_t *)record + i) : read_once((const uint32_t *)record + i);
        if (BITS < 8 && HEAD == 64) zero_bits = read_once((const uint16_t *)record + LANES + i);
    }

    METHOD float scale() const {
        if (SCALES == SCALES_OWN) return BITS < 8 ? widened(scale_bits) : __uint_as_float(scale_bits);
        if (SCALES == SCALES_E8M0) return __uint_as_float(scale_bits ? scale_bits << 23 : 1u << 22);
        /* As binary16 an E4M3 number has the same bits but for 256 in the exponent, which is left out: see unit_of. */
        return half_number(SCALES == SCALES_E4M3 ? (scale_bits & 128) << 8 | (scale_bits & 127) << 7 : scale_bits);
    }

    /* The code that means 0, where codes are not taken without their offset. */
    METHOD float zero() const { return E2M1 ? 12.0f : HEAD == 64 ? widened(zero_bits) : 8.0f; }

    /* Of a group with this integer product. */
    METHOD term term_of(int32_t dot, factors of) const {
        float factor = __fmul_rn(scale(), of.step);
        return {BITS < 8 ? __fmaf_rn(-zero(), of.sum, (float)dot) : (float)dot, factor};
    }
};

/* Four codes of 8 bits as signed numbers: without their offset, so the zero is 0, with the same sums, all of them exact. */
DEVICE uint32_t centred_bytes(uint32_t word) { return word ^ 0x80808080u; }

/* Four E2M1 codes, the lowest nibbles, as twice their values and 12: 0 to 24, so that products of bytes are those of int4.
 * The instruction that chooses bytes of a table by nibbles gives 0 for those with a sign, as no byte here has its upper bit
 * set. So positive codes are looked up in one table, negative ones, with their sign inverted, in another; the third
 * instruction joins them. */
DEVICE uint32_t e2m1_bytes(uint32_t codes) {
    return chosen_bytes(0x0F0E0D0Cu, 0x18141210u, codes) | chosen_bytes(0x090A0B0Cu, 0x00040608u, codes ^ 0x88888888u);
}

/* What an output of a matrix, the sum of all `added`, is to be multiplied by: what E2M1 and E4M3 leave out, and with E4M3
 * the matrix's factor, which is so many bytes behind the beginning of its tile. */
DEVICE float unit_of(const uint8_t *tile, int64_t factor) {
    if (SCALES == SCALES_E4M3) return __fmul_rn(128.0f, __ldg((const float *)(tile + factor)));
    return E2M1 ? 0.5f : 1.0f;
}
DEVICE float in_units(float y, float unit) { return E2M1 ? __fmul_rn(y, unit) : y; }
