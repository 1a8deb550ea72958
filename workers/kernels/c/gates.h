/* Records of channels (shm/floe.py): where their parts are, and products of gate rows with rows of x. Part of body.h; a
 * variant defines BYTE_DOTS.
 *
 * A product's numbers are added in an order that depends on its row alone. */
#pragma once

#include "rows.h"
#include "vectors.h"

enum { GROUP = 64 };            /* numbers that share a scale */
enum { WIDTH = 2 * GROUP };     /* numbers of y that are taken together */
enum { SEGMENT = 16 };          /* groups whose scales are widened together */
enum { GATES = 4 };             /* most rows of x that one read of a gate row is applied to */
enum { SUMMED = 4 };            /* channels that are taken together: gate rows side by side, down rows in one pass */

/* Where the parts of a row record are, in bytes. */
struct row_shape {
    int64_t bits, numbers; /* INT4, INT8 or BF16 */
    int64_t groups;        /* with those that only pad */
    int64_t zeros, codes, bytes;
};

static struct row_shape row_shape_of(const struct weights *w) {
    struct row_shape s = {.bits = w->channel_bits, .numbers = w->outputs};
    if (s.bits == BF16) {
        s.bytes = rounded_up(2 * s.numbers, 64);
        return s;
    }
    s.groups = rounded_up(s.numbers, s.bits == INT4 ? WIDTH : GROUP) / GROUP;
    s.zeros = rounded_up(s.groups * (s.bits == INT4 ? 2 : 4), 64);
    s.codes = s.bits == INT4 ? 2 * s.zeros : s.zeros;
    s.bytes = s.codes + s.groups * GROUP * s.bits / 8;
    return s;
}

/* --- x as gate rows take it ----------------------------------------------------------------------------------- */

/* Bytes of a row: bf16 as `arrange` makes it; else its codes in the order of a row record, and of each group the step
 * and the sum of the codes, in two arrays of whole SEGMENTs. */
static int64_t gate_x_bytes(const struct row_shape *s) {
    if (s->bits == BF16) return rounded_up(arranged_bytes(s->numbers), 64);
    return s->groups * GROUP + 8 * rounded_up(s->groups, SEGMENT);
}

static const float *steps_of(const struct row_shape *s, const uint8_t *x) {
    return (const float *)(x + s->groups * GROUP);
}

/* One row of x: float32 numbers, and the same as activations in groups of GROUP. */
static void arrange_gate_x(const struct row_shape *s, const float *x, const int8_t *codes, const float *factors,
                           uint8_t *to) {
    if (s->bits == BF16) {
        arrange(x, s->numbers, (char *)to);
        return;
    }
    int64_t given = (s->numbers + GROUP - 1) / GROUP, slots = rounded_up(s->groups, SEGMENT);
    float *steps = (float *)(to + s->groups * GROUP), *sums = steps + slots;
    memset(to, 0, (size_t)gate_x_bytes(s));
    for (int64_t g = 0; g < given; g++) {
        for (int i = 0; i < BLOCK; i++)
            for (int b = 0; b < 4; b++) to[g * GROUP + 4 * i + b] = (uint8_t)codes[g * GROUP + BLOCK * b + i];
        steps[g] = factors[2 * g], sums[g] = factors[2 * g + 1];
    }
}

/* --- gate ----------------------------------------------------------------------------------------------------- */

INLINE vector splat(float number) { return number - (vector){0}; }

/* SEGMENT scales and zeros of a row record from group g on. */
INLINE void widen_scales(const uint8_t *row, const struct row_shape *s, const int bits, int64_t g, float *scales,
                         float *zeros) {
    for (int v = 0; v < SEGMENT; v += LANES) {
        vector scale = bits == INT4 ? WIDENED((const uint16_t *)row + g + v) : loaded((const float *)row + g + v);
        vector zero = bits == INT4 ? WIDENED((const uint16_t *)(row + s->zeros) + g + v) : splat(128.0f);
        memcpy(scales + v, &scale, sizeof scale);
        memcpy(zeros + v, &zero, sizeof zero);
    }
}

/* y = gate rows . x for `number` gate rows and `rows` rows of x (constants; one of them is 1), by gate row; `bits`, a
 * constant: INT4 or INT8. Several gate rows share the loads of x, and their sums do not wait for each other. Other
 * records next[i] bytes further are prefetched. */
INLINE void gate_dots(const uint8_t *const *row, const int number, const struct row_shape *s, const int bits,
                      const uint8_t *const *x, const int rows, const int64_t *next, float *y) {
    const int taken = bits == INT4 ? 2 : 1; /* groups of a line */
    int64_t slots = rounded_up(s->groups, SEGMENT);
    _Static_assert((int)SUMMED <= (int)GATES, "sums of several gate rows, or of several rows of x");
    vector sums[GATES], rests[GATES];
    for (int o = 0; o < number * rows; o++) sums[o] = rests[o] = (vector){0};
    for (int i = 0; i < number; i++)
        for (int64_t at = 0; at < s->codes; at += 64) PREFETCH(row[i] + at + next[i]);
    for (int64_t start = 0; start < s->groups; start += SEGMENT) {
        float scales[SEGMENT], zeros[SEGMENT], factors[GATES][SEGMENT];
        for (int i = 0; i < number; i++) {
            widen_scales(row[i], s, bits, start, scales, zeros);
            for (int v = 0; v < SEGMENT; v += LANES)
                for (int r = 0; r < rows; r++) {
                    const float *steps = steps_of(s, x[r]) + start + v;
                    vector factor = loaded(scales + v) * loaded(steps), *rest = rests + i * rows + r;
                    *rest = VFMA(factor * loaded(zeros + v), loaded(steps + slots), *rest);
                    memcpy(factors[i * rows + r] + v, &factor, sizeof factor);
                }
        }
        int64_t end = least(start + SEGMENT, s->groups);
        for (int64_t g = start; g < end; g += taken)
            for (int i = 0; i < number; i++) {
                const uint8_t *line = row[i] + s->codes + g / taken * 64;
                ints dots[GATES], more[GATES];
                for (int r = 0; r < rows; r++) dots[r] = more[r] = (ints){0};
                PREFETCH(line + next[i]);
                for (int at = 0; at < 64; at += VECTOR_BYTES) {
                    words all = loaded_words(line + at);
                    words low = bits == INT4 ? all & 0x0F0F0F0Fu : all, high = all >> 4 & 0x0F0F0F0Fu;
                    for (int r = 0; r < rows; r++) {
                        const int8_t *codes = (const int8_t *)x[r] + g * GROUP + at;
                        dots[r] = BYTE_DOTS(dots[r], low, codes, bits);
                        if (bits == INT4) more[r] = BYTE_DOTS(more[r], high, codes + GROUP, bits);
                    }
                }
                for (int r = 0; r < rows; r++) {
                    const float *factor = factors[i * rows + r] + g - start;
                    vector *sum = sums + i * rows + r;
                    *sum = VFMA(__builtin_convertvector(dots[r], vector), splat(factor[0]), *sum);
                    if (bits == INT4) *sum = VFMA(__builtin_convertvector(more[r], vector), splat(factor[1]), *sum);
                }
            }
    }
    if (number == SUMMED) {
        float rest[SUMMED];
        SUM_FOUR(sums[0], sums[1], sums[2], sums[3], y);
        SUM_FOUR(rests[0], rests[1], rests[2], rests[3], rest);
        for (int i = 0; i < SUMMED; i++) y[i] -= rest[i];
        return;
    }
    for (int o = 0; o < number * rows; o++) y[o] = SUM(sums[o]) - SUM(rests[o]);
}

#define GATE_DOTS_INT4(n) gate_dots(&row, 1, s, INT4, x, n, &next, y)
#define GATE_DOTS_INT8(n) gate_dots(&row, 1, s, INT8, x, n, &next, y)
#define UP_TO_GATES(call)                                                                                        \
    switch (rows) {                                                                                              \
    case 1: call(1); break;                                                                                      \
    case 2: call(2); break;                                                                                      \
    case 3: call(3); break;                                                                                      \
    default: call(4);                                                                                            \
    }

/* The same for any format; at most GATES rows. */
static void gate_products(const struct row_shape *s, const uint8_t *row, const uint8_t *const *x, int64_t rows,
                          int64_t next, float *y) {
    if (s->bits == INT4) {
        UP_TO_GATES(GATE_DOTS_INT4)
        return;
    }
    if (s->bits == INT8) {
        UP_TO_GATES(GATE_DOTS_INT8)
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        if (HAS_PAIRS())
            products(row, PAIRS, 1, s->numbers, (const char *)x[r], 0, 1, next / 2, y + r, 0);
        else
            products(row, BF16, 1, s->numbers, (const char *)x[r], 0, 1, next / 2, y + r, 0);
    }
}

/* y[i] = gate row i . x for `number` gate rows, up to SUMMED. */
static void gates_of_row(const struct row_shape *s, const uint8_t *const *rows, int64_t number, const uint8_t *x,
                         const int64_t *next, float *y) {
    if (number == SUMMED && s->bits == INT4)
        gate_dots(rows, SUMMED, s, INT4, &x, 1, next, y);
    else if (number == SUMMED && s->bits == INT8)
        gate_dots(rows, SUMMED, s, INT8, &x, 1, next, y);
    else
        for (int64_t i = 0; i < number; i++) gate_products(s, rows[i], &x, 1, next[i], y + i);
}
