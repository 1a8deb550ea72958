/* Scalars and vectors of float32 and bf16, for everything that body.h puts together. Written with the vector types
 * of gcc and clang, which become whatever the variant's processor has. A variant defines INLINE and VECTOR_BYTES (the
 * width of a register) first, and where it has a better instruction also VFMA(a, b, c) = a * b + c, SUM (of a
 * vector's lanes), SUM_FOUR (of four vectors, the same bits), BITS_OF (a comparison's lanes), PACKED (the lanes that
 * are chosen by bits, first), WIDENED (as many bf16 numbers as float32), WIDENED_E4M3 and WITH_PAIRS (below). */
#pragma once

#include "kernels.h"

#include <string.h>

enum { LANES = VECTOR_BYTES / 4 }; /* numbers of a vector */
enum { PAIR = 2 * LANES };         /* numbers are taken two vectors at a time */
enum { ACROSS = VECTOR_BYTES == 64 ? 4 : 2 }; /* vectors multiplied together, as many as registers hold */

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef int8_t quarters __attribute__((vector_size(LANES)));
typedef uint64_t longs __attribute__((vector_size(LANES * 4)));

/* call(n) with n = `count`, 1 to `most` (at most 8, a constant), as a constant. */
#define IF_COUNT(n, most, call)                                                                                  \
    case n:                                                                                                      \
        if (n <= (most)) { call(n); }                                                                            \
        break;
#define BY_COUNT(count, most, call)                                                                              \
    switch (count) {                                                                                             \
        IF_COUNT(1, most, call)                                                                                  \
        IF_COUNT(2, most, call)                                                                                  \
        IF_COUNT(3, most, call)                                                                                  \
        IF_COUNT(4, most, call)                                                                                  \
        IF_COUNT(5, most, call)                                                                                  \
        IF_COUNT(6, most, call)                                                                                  \
        IF_COUNT(7, most, call)                                                                                  \
        IF_COUNT(8, most, call)                                                                                  \
    }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

#ifndef VFMA
#define VFMA(a, b, c) ((a) * (b) + (c))
#endif

#ifndef SUM
INLINE float sum_of_lanes(vector v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}
#define SUM sum_of_lanes
#endif

#ifndef SUM_FOUR
#define SUM_FOUR(a, b, c, d, y) ((y)[0] = SUM(a), (y)[1] = SUM(b), (y)[2] = SUM(c), (y)[3] = SUM(d))
#endif

#ifndef BITS_OF
INLINE uint32_t bits_of(ints truth) {
    uint32_t bits = 0;
    for (int l = 0; l < LANES; l++) bits |= ((uint32_t)truth[l] & 1) << l;
    return bits;
}
#define BITS_OF bits_of
#endif

INLINE vector loaded(const float *from) {
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE words loaded_words(const void *from) {
    words w;
    memcpy(&w, from, sizeof w);
    return w;
}

INLINE vector every(float number) { return number - (vector){0}; }

/* Lanes of a where `truth` has all bits, and of b elsewhere. */
INLINE vector chosen(ints truth, vector a, vector b) { return (vector)((truth & (ints)a) | (~truth & (ints)b)); }

/* The larger numbers; b where one is NaN. */
#ifndef LARGER
#define LARGER(a, b) chosen((a) > (b), a, b)
#endif

/* The largest lane, if none is NaN. */
INLINE float most_of_lanes(vector v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] = lanes[l] > lanes[l + half] ? lanes[l] : lanes[l + half];
    return lanes[0];
}
#ifndef MOST
#define MOST most_of_lanes
#endif

/* Lanes of the lower or upper halves of a and b, in turns. */
#if VECTOR_BYTES == 64
#define LOWER_LANES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define UPPER_LANES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif VECTOR_BYTES == 32
#define LOWER_LANES 0, 8, 1, 9, 2, 10, 3, 11
#define UPPER_LANES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOWER_LANES 0, 4, 1, 5
#define UPPER_LANES 2, 6, 3, 7
#endif
#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

/* PAIR words whose lower halves are a's 16-bit numbers and whose upper halves are b's. */
#ifndef INTERLEAVED
INLINE void interleave(const void *a, const void *b, void *to) {
    for (int part = 0; part < 2; part++) {
        halves lower, upper;
        memcpy(&lower, (const halves *)a + part, sizeof lower);
        memcpy(&upper, (const halves *)b + part, sizeof upper);
        words both = __builtin_convertvector(lower, words) | __builtin_convertvector(upper, words) << 16;
        memcpy((words *)to + part, &both, sizeof both);
    }
}
#define INTERLEAVED interleave
#endif

#ifndef WIDENED_INT8
INLINE ints widened_int8(const void *from) {
    quarters narrow;
    memcpy(&narrow, from, sizeof narrow);
    return __builtin_convertvector(narrow, ints);
}
#define WIDENED_INT8 widened_int8
#endif

#ifndef TRANSPOSED
#define TRANSPOSED transpose
#endif
/* LANES rows to columns: each step moves the highest bit of an element's place (row, lane) to its end. */
INLINE void transpose(words *rows) {
    for (int bit = 1; bit < LANES; bit *= 2) {
        words turned[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            turned[2 * i] = SHUFFLED(rows[i], rows[i + LANES / 2], LOWER_LANES);
            turned[2 * i + 1] = SHUFFLED(rows[i], rows[i + LANES / 2], UPPER_LANES);
        }
        for (int i = 0; i < LANES; i++) rows[i] = turned[i];
    }
}

#ifndef WIDENED
INLINE vector widened_vector(const uint16_t *from) {
    halves narrow;
    memcpy(&narrow, from, sizeof narrow);
    return (vector)(__builtin_convertvector(narrow, words) << 16);
}
#define WIDENED widened_vector
#endif

/* E4M3: 8 bits of a sign, an exponent and three of a mantissa. Divided by E4M3_UNIT, all of them are numbers of binary16
 * with nearly the same bits. Exact; what stands for NaN, which no weights have, is as if it were a number. */
enum { E4M3_UNIT = 256 };
static float e4m3_part(uint8_t number) {
    uint32_t bits = (uint32_t)(int8_t)number << 20 & 0x87F00000; /* of 2^-112 times as much */
    float value;
    memcpy(&value, &bits, 4);
    return value * 0x1p112f;
}

#ifndef WIDENED_E4M3
INLINE vector widened_e4m3(const uint8_t *from) {
    quarters narrow;
    memcpy(&narrow, from, sizeof narrow);
    return (vector)((words)__builtin_convertvector(narrow, ints) << 20 & 0x87F00000) * 0x1p112f;
}
#define WIDENED_E4M3 widened_e4m3
#endif

/* WITH_PAIRS(a, b, c) = c + the products of pairs of bf16 in a and b, the upper numbers first: where the processor
 * HAS_PAIRS. */
#ifndef WITH_PAIRS
#define WITH_PAIRS(a, b, c) ((void)(a), (void)(b), (c))
#define HAS_PAIRS() 0
#endif

static float widened(uint16_t number) {
    uint32_t bits = (uint32_t)number << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Numbers of an array of BF16 or float32: `bits` is a constant. */
INLINE vector vector_at(const void *from, int64_t at, const int bits) {
    return bits == BF16 ? WIDENED((const uint16_t *)from + at) : loaded((const float *)from + at);
}

INLINE float number_at(const void *from, int64_t at, const int bits) {
    return bits == BF16 ? widened(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

/* To nearest even; NaN stays NaN. The rounded numbers stay in float32. */
static void round_to_bf16(const float *x, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
        bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : rounded;
        memcpy(out + i, &bits, 4);
    }
}

/* The same, each in the upper half of a word. */
INLINE words rounded_words(vector x) {
    words bits = (words)x, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    return (words)chosen(x == x, (vector)rounded, (vector)((words){0} + 0x7FC00000));
}

/* exp(y) is (1 + *near_1) * *power, for y from -87 to 89: written so that compilers turn a loop of it into vectors. */
INLINE void exponent_of(float y, float *near_1, float *power) {
    float n = y * 1.44269504f + 12582912.0f;
    n -= 12582912.0f; /* rounded to an integer by the addition above */
    float r = y - n * 0.693359375f;
    r += n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    *near_1 = p * r * r + r;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    memcpy(power, &bits, 4);
}

/* exp within 2 units of the last place. */
INLINE float exponential(float x) {
    float y = x > -87.0f ? x : -87.0f; /* NaN becomes -87 here ... */
    y = y < 89.0f ? y : 89.0f;         /* beyond 88.7 the result is infinite */
    float near_1, power;
    exponent_of(y, &near_1, &power);
    return x == x ? (near_1 + 1.0f) * power : x; /* ... and is NaN here */
}

/* x 2^n for n integers from -126 to 127. */
#ifndef TIMES_POWER
INLINE vector times_power(vector x, vector n) {
    return x * (vector)((words)(__builtin_convertvector(n, ints) + 127) << 23);
}
#define TIMES_POWER times_power
#endif

/* exp of a vector of numbers that are at most 0, or NaN, within 2^-22 of itself for numbers from -10 on. */
INLINE vector exponentials(vector x) {
    const vector to_2 = every(1.44269504f); /* exp(x) = 2^(to_2 x) */
    vector y = LARGER(every(-87.0f), x);
    vector n = VFMA(y, to_2, every(12582912.0f)) - 12582912.0f; /* rounded to integers by the addition */
    vector r = VFMA(y, to_2, -n);
    vector p = VFMA(every(1.5403530e-4f), r, every(1.3333558e-3f));
    p = VFMA(p, r, every(9.6181291e-3f));
    p = VFMA(p, r, every(5.5504109e-2f));
    p = VFMA(p, r, every(2.4022651e-1f));
    p = VFMA(p, r, every(6.9314718e-1f));
    return TIMES_POWER(VFMA(p, r, every(1.0f)), n);
}

/* tanh within a few units of the last place, of small numbers too: e / (e + 2) with e = exp(2 x) - 1. */
INLINE float hyperbolic_tangent(float x) {
    float y = x > -20.0f ? x : -20.0f;
    y = y < 20.0f ? y : 20.0f; /* it is 1 from 10 on */
    float near_1, power;
    exponent_of(2.0f * y, &near_1, &power);
    float e = near_1 * power + (power - 1.0f);
    return x == x ? e / (e + 2.0f) : x;
}

/* gate[i] = silu(gate[i]) * up[i] */
static void silu_times(float *restrict gate, const float *restrict up, int64_t n) {
    for (int64_t i = 0; i < n; i++) gate[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

/* gate[i] = f(gate[i], up[i]) of any GLU; `capped`, a constant: with softcaps. */
INLINE void glu(const struct expert_math *m, const int capped, float *restrict gate, const float *restrict up, int64_t n) {
    const float alpha = m->alpha, cubic = m->cubic, most = m->gate_max, limit = m->up_limit, offset = m->offset;
    const float gate_cap = m->gate_softcap, up_cap = m->up_softcap;
    for (int64_t i = 0; i < n; i++) {
        float g = gate[i] > most ? most : gate[i], u = up[i] > limit ? limit : up[i], s = g;
        u = u < -limit ? -limit : u;
        float z = alpha * g * (1.0f + cubic * g * g);
        if (capped) {
            s = gate_cap > 0 ? gate_cap * hyperbolic_tangent(g / gate_cap) : g;
            u = up_cap > 0 ? up_cap * hyperbolic_tangent(u / up_cap) : u;
        }
        gate[i] = s / (1.0f + exponential(-z)) * (u + offset);
    }
}

/* gate [n] = what an expert computes of gate, unless ungated, and up, which have their biases. */
static void activated(const struct expert_math *m, float *restrict gate, const float *restrict up, int64_t n) {
    if (m->kind == SWIGLU)
        silu_times(gate, up, n);
    else if (m->kind == RELU2)
        for (int64_t i = 0; i < n; i++) gate[i] = up[i] > 0 || up[i] != up[i] ? up[i] * up[i] : 0.0f;
    else if (m->gate_softcap > 0 || m->up_softcap > 0)
        glu(m, 1, gate, up, n);
    else
        glu(m, 0, gate, up, n);
}

/* The same of `n` channels of a tile from channel `first` on, which adds the tile's biases to gate and up. */
static void activate_channels(const struct weights *w, const uint8_t *tile, int64_t first, float *restrict gate,
                              float *restrict up, int64_t n) {
    const struct expert_math *m = &w->math;
    if (m->biases) {
        const float *of_gate = (const float *)(tile + m->biases) + first, *of_up = of_gate;
        if (m->kind != RELU2) {
            of_up += w->channels;
            for (int64_t i = 0; i < n; i++) gate[i] += of_gate[i];
        }
        for (int64_t i = 0; i < n; i++) up[i] += of_up[i];
    }
    activated(m, gate, up, n);
}

/* The matrices of a tile before down. */
static int64_t wide_matrices(const struct weights *w) { return w->math.kind == RELU2 ? 1 : 2; }
