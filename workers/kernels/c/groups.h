/* int8 codes of a group of activations. Used by the kernels, and where activations travel (pipeline/cluster/rows.c). */
#pragma once

#include <stdint.h>
#include <string.h>

/* Of n numbers; NaN is above all. */
static float largest_magnitude(const float *x, int64_t n) {
    int32_t most = 0; /* bit patterns of magnitudes order like these */
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, 4);
    return largest;
}

/* `group` codes for n numbers of this largest magnitude, and their factors: the step, and the codes' sum. */
static void quantize_group(const float *x, int64_t n, int64_t group, float largest, int8_t *codes, float *factors) {
    float step = largest / 127.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        float code = step > 0.0f ? x[i] / step : 0.0f;
        code = code + 12582912.0f - 12582912.0f; /* rounded, half to even */
        code = code < 127.0f ? code : 127.0f;
        code = code > -127.0f ? code : -127.0f;
        codes[i] = (int8_t)code;
        sum += codes[i];
    }
    memset(codes + n, 0, (size_t)(group - n));
    factors[0] = step;
    factors[1] = (float)sum;
}
