/* What experts compute between their matrices (shm/expert_math.py), with the host's bits (workers/kernels/c/vectors.h).
 * The kind is in constants of the compilation: BIASED 1 where tiles have biases; UNGATED 1 for max(up, 0)^2, or with LINEAR 1
 * for up itself; the numbers of the formula, each as the bits of a float32. */
#pragma once

#include "numbers.cuh"

enum { WIDE_MATRICES = UNGATED ? 1 : 2 }; /* of a tile, before down */
enum {
    SWIGLU = ALPHA == 0x3F800000 && !CUBIC && GATE_MAX == 0x7F800000 && UP_LIMIT == 0x7F800000 && !OFFSET &&
             !GATE_SOFTCAP && !UP_SOFTCAP
};

/* cap * tanh(x / cap), or x where there is no cap. */
template <uint32_t CAP> DEVICE float capped(float x) {
    if (CAP == 0) return x;
    float cap = __uint_as_float(CAP), part = __fdiv_rn(x, cap);
    float y = part > -20.0f ? part : -20.0f;
    y = y < 20.0f ? y : 20.0f;
    exponent two;
    two.of(__fmul_rn(2.0f, y));
    float e = __fadd_rn(__fmul_rn(two.near_1, two.power), __fsub_rn(two.power, 1.0f));
    return __fmul_rn(cap, part == part ? __fdiv_rn(e, __fadd_rn(e, 2.0f)) : part);
}

/* Of a channel's gate, unless ungated, and up, which have their biases. */
DEVICE float activated(float gate, float up) {
    if (LINEAR) return up;
    if (UNGATED) return up > 0.0f || up != up ? __fmul_rn(up, up) : 0.0f;
    if (SWIGLU) return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, exponential(-gate))), up);
    const float most = __uint_as_float(GATE_MAX), limit = __uint_as_float(UP_LIMIT);
    gate = gate > most ? most : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    float wider = __fadd_rn(1.0f, __fmul_rn(__fmul_rn(__uint_as_float(CUBIC), gate), gate));
    float z = __fmul_rn(__fmul_rn(__uint_as_float(ALPHA), gate), wider);
    float s = __fdiv_rn(capped<GATE_SOFTCAP>(gate), __fadd_rn(1.0f, exponential(-z)));
    return __fmul_rn(s, __fadd_rn(capped<UP_SOFTCAP>(up), __uint_as_float(OFFSET)));
}

/* The same of channel `channel` of a tile of `channels`, which adds its biases: they begin `biases` bytes behind the tile. */
DEVICE float activated_channel(const void *tile, int64_t biases, int64_t channels, int64_t channel, float gate,
                               float up) {
    if (BIASED) {
        const float *from = (const float *)((const uint8_t *)tile + biases) + channel;
        if (!UNGATED) gate = __fadd_rn(gate, __ldg(from));
        up = __fadd_rn(up, __ldg(from + (UNGATED ? 0 : channels)));
    }
    return activated(gate, up);
}
