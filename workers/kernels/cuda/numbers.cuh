/* Scalars: the host kernels' operations (workers/kernels/c/vectors.h), one by one, so that every bit is theirs. Nothing
 * is contracted by the compiler (--fmad=false). */
#pragma once

#include "device.cuh"

enum { WARP = 32 }; /* lanes */

struct factors {
    float step, sum; /* of a group of activations: what a code counts, and the sum of its codes */
};

DEVICE float widened(uint32_t bf16) { return __uint_as_float(bf16 << 16); }

/* exp(y) is (1 + near_1) * power, for y from -87 to 89. */
struct exponent {
    float near_1, power;

    METHOD void of(float y) {
        float n = __fadd_rn(__fmul_rn(y, 1.44269504f), 12582912.0f);
        n = __fsub_rn(n, 12582912.0f);
        float r = __fsub_rn(y, __fmul_rn(n, 0.693359375f));
        r = __fadd_rn(r, __fmul_rn(n, 2.12194440e-4f));
        float p = 1.9875691500e-4f;
        p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
        p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
        p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
        p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
        p = __fadd_rn(__fmul_rn(p, r), 5.0000001201e-1f);
        near_1 = __fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r);
        power = __uint_as_float((uint32_t)((int32_t)n + 127) << 23);
    }
};

/* exp within 2 units of the last place. */
DEVICE float exponential(float x) {
    float y = x > -87.0f ? x : -87.0f; /* NaN becomes -87 here ... */
    y = y < 89.0f ? y : 89.0f;
    exponent e;
    e.of(y);
    return x == x ? __fmul_rn(__fadd_rn(e.near_1, 1.0f), e.power) : x; /* ... and is NaN here */
}

/* What lanes of a warp, COUNT that follow one another, have together; each of them gets it. */
template <int COUNT> DEVICE float sum_of_lanes(float sum) {
#pragma unroll
    for (int far = COUNT / 2; far; far /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, far));
    return sum;
}
