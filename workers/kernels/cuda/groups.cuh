/* Activations as int8 codes by groups, and what one group of a block adds to its outputs: workers/kernels/c/kernels.h
 * has the formula. The format is a constant of the compilation: BITS (2, 4 or 8), GROUP (64 or 128), and FUSED (1: the bits
 * of the host's variants with fused additions; 0: those of `portable`). */
#pragma once

#include "numbers.cuh"

static_assert(BITS != 2 || GROUP == 64, "int2 has groups of 64");

enum { LANES = 16 };                        /* outputs of a block, interleaved */
enum { WORDS = GROUP * BITS / 32 };         /* of a record, for each of its outputs */
enum { RECORD = 64 + LANES * GROUP * BITS / 8 }; /* bytes */

struct factors {
    float step, sum; /* of a group: what a code counts, and the sum of its codes */
};

/* A group of numbers, `count` of them valid, as codes: by one warp. */
DEVICE void quantize_group(const float *x, int64_t count, int8_t *codes, factors *to) {
    const int lane = threadIdx.x % WARP;
    float numbers[GROUP / WARP];
    int32_t most = 0; /* largest bit pattern of a magnitude; they order like the magnitudes, NaN above all */
#pragma unroll
    for (int j = 0; j < GROUP / WARP; j++) {
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
    for (int j = 0; j < GROUP / WARP; j++) {
        float code = step > 0.0f ? __fdiv_rn(numbers[j], step) : 0.0f;
        code = __fsub_rn(__fadd_rn(code, 12582912.0f), 12582912.0f); /* rounded, half to even */
        code = code < 127.0f ? code : 127.0f;
        code = code > -127.0f ? code : -127.0f;
        int32_t whole = lane + j * WARP < count ? (int32_t)code : 0;
        codes[lane + j * WARP] = (int8_t)whole;
        sum += whole;
    }
#pragma unroll
    for (int far = WARP / 2; far; far /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, far);
    if (lane == 0) to->step = step, to->sum = (float)sum;
}

/* Scale and zero of output i of a block's record. */
struct scaling {
    float scale, zero;

    METHOD void load(const uint8_t *record, int i) {
        if (BITS < 8) {
            scale = widened(read_once((const uint16_t *)record + i));
            zero = widened(read_once((const uint16_t *)record + LANES + i));
        } else {
            scale = __uint_as_float(read_once((const uint32_t *)record + i));
            zero = 0.0f; /* codes are taken without their offset: the same number, all of it exact */
        }
    }

    /* y + what a group with this integer product adds. */
    METHOD float added(int32_t dot, factors of, float y) const {
        float factor = __fmul_rn(scale, of.step);
        if (FUSED) {
            float centred = BITS < 8 ? __fmaf_rn(-zero, of.sum, (float)dot) : (float)dot;
            return __fmaf_rn(centred, factor, y);
        }
        float centred = BITS < 8 ? __fsub_rn((float)dot, __fmul_rn(zero, of.sum)) : (float)dot;
        return __fadd_rn(y, __fmul_rn(centred, factor));
    }
};

/* Four codes of int8 weights as signed numbers. */
DEVICE uint32_t centred_bytes(uint32_t word) { return word ^ 0x80808080u; }
