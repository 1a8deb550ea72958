/* The last launch of a layer. */
#pragma once

#include "items.cuh"

enum { COMBINE_THREADS = 256 };

/* y [rows, hidden] = for each row the sum of its terms [offsets[row], offsets[row + 1]), in their order; `wide` blocks of
 * threads a row. */
KERNEL(COMBINE_THREADS, combine, const float *out, const term *terms, const int32_t *offsets, int64_t hidden,
       int64_t wide, float *y) {
    int64_t row = blockIdx.x / wide, h = blockIdx.x % wide * COMBINE_THREADS + threadIdx.x;
    if (h >= hidden) return;
    float sum = 0.0f;
    for (int at = offsets[row]; at < offsets[row + 1]; at++) {
        const term one = terms[at];
        float part = out[(int64_t)one.first * hidden + h];
        for (int n = 1; n < one.parts; n++)
            part = __fadd_rn(part, out[((int64_t)one.first + (int64_t)n * one.stride) * hidden + h]);
        sum = __fadd_rn(sum, __fmul_rn(part, one.weight));
    }
    y[row * hidden + h] = sum;
}
