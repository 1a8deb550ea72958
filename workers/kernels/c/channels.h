/* Records of channels (shm/floe.py), and a gate row's products with rows of x; down.h and down_bf16.h have the rest.
 * Part of body.h, which says what a variant defines.
 *
 * A row's numbers and products are added in an order that depends on the row alone. */
#pragma once

#include "prefetch.h"
#include "rows.h"
#include "vectors.h"

enum { GROUP = 64 };            /* numbers that share a scale */
enum { WIDTH = 2 * GROUP };     /* numbers of y that are taken together */
enum { PARTS = GROUP / LANES }; /* vectors of a group */
enum { SPLIT = BLOCK / LANES }; /* vectors of a line of 64 bytes */
enum { SEGMENT = 16 };          /* groups whose scales are widened together */
enum { GATES = 4 };             /* most rows of x that one read of a gate row is applied to */
enum { HERE = 0 };              /* prefetches what is read anyway: there is no later record */

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

/* Codes of the upper four bits of bytes. Where BYTE_DOTS takes all eight bits they stay in place, UPPER times as
 * large, and their product is divided at the end: by a power of two, which changes no bit. */
#ifdef WHOLE_BYTES
enum { UPPER = 16, UPPER_BITS = INT8 };
INLINE words upper_codes(words all) { return all & 0xF0F0F0F0u; }
#else
enum { UPPER = 1, UPPER_BITS = INT4 };
INLINE words upper_codes(words all) { return all >> 4 & 0x0F0F0F0Fu; }
#endif

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

/* y[r] = a gate row . x[r] for `rows` (a constant) rows; `bits`, a constant: INT4 or INT8. Another record `next` bytes
 * further is prefetched, and with `both` the scales of the one behind it. */
INLINE void gate_dots(const uint8_t *row, const struct row_shape *s, const int bits, const uint8_t *const *x,
                      const int rows, const int hint, int64_t next, int both, float *y) {
    const int taken = bits == INT4 ? 2 : 1; /* groups of a line */
    int64_t slots = rounded_up(s->groups, SEGMENT);
    vector sums[GATES], upper[GATES], rests[GATES];
    for (int r = 0; r < rows; r++) sums[r] = upper[r] = rests[r] = (vector){0};
    for (int64_t at = 0; at < s->codes; at += 64) PREFETCH(row + at + next, hint);
    for (int64_t at = 0; both && at < s->codes; at += 64) PREFETCH(row + s->bytes + at + next, hint);
    for (int64_t start = 0; start < s->groups; start += SEGMENT) {
        float scales[SEGMENT], zeros[SEGMENT], factors[GATES][SEGMENT];
        widen_scales(row, s, bits, start, scales, zeros);
        for (int v = 0; v < SEGMENT; v += LANES)
            for (int r = 0; r < rows; r++) {
                const float *steps = steps_of(s, x[r]) + start + v;
                vector factor = loaded(scales + v) * loaded(steps);
                rests[r] = VFMA(factor * loaded(zeros + v), loaded(steps + slots), rests[r]);
                memcpy(factors[r] + v, &factor, sizeof factor);
            }
        int64_t end = least(start + SEGMENT, s->groups);
        for (int64_t g = start; g < end; g += taken) {
            const uint8_t *line = row + s->codes + g / taken * 64;
            ints dots[GATES], more[GATES];
            for (int r = 0; r < rows; r++) dots[r] = more[r] = (ints){0};
            PREFETCH(line + next, hint);
            for (int at = 0; at < 64; at += VECTOR_BYTES) {
                words all = loaded_words(line + at), low = bits == INT4 ? all & 0x0F0F0F0Fu : all;
                for (int r = 0; r < rows; r++) {
                    const uint8_t *codes = x[r] + g * GROUP + at;
                    dots[r] = BYTE_DOTS(dots[r], low, loaded_words(codes), bits);
                    if (bits == INT4)
                        more[r] = BYTE_DOTS(more[r], upper_codes(all), loaded_words(codes + GROUP), UPPER_BITS);
                }
            }
            for (int r = 0; r < rows; r++) {
                const float *factor = factors[r] + g - start;
                sums[r] = VFMA(__builtin_convertvector(dots[r], vector), splat(factor[0]), sums[r]);
                if (bits == INT4)
                    upper[r] = VFMA(__builtin_convertvector(more[r], vector), splat(factor[1]), upper[r]);
            }
        }
    }
    for (int r = 0; r < rows; r++) y[r] = SUM(sums[r] + upper[r] * splat(1.0f / UPPER)) - SUM(rests[r]);
}

#define GATE_DOTS_INT4(n, hint) gate_dots(row, s, INT4, x, n, hint, next, both, y)
#define GATE_DOTS_INT8(n, hint) gate_dots(row, s, INT8, x, n, hint, next, both, y)
#define UP_TO_GATES(call, hint)                                                                                  \
    switch (rows) {                                                                                              \
    case 1: call(1, hint); break;                                                                                \
    case 2: call(2, hint); break;                                                                                \
    case 3: call(3, hint); break;                                                                                \
    default: call(4, hint);                                                                                      \
    }
#define GATES_INT4(hint) UP_TO_GATES(GATE_DOTS_INT4, hint)
#define GATES_INT8(hint) UP_TO_GATES(GATE_DOTS_INT8, hint)

/* The same for any format; at most GATES rows. */
static void gate_products(const struct weights *w, const struct row_shape *s, const uint8_t *row,
                          const uint8_t *const *x, int64_t rows, int64_t next, int both, float *y) {
    if (s->bits == INT4) {
        EACH_HINT(w->hint, GATES_INT4)
    } else if (s->bits == INT8) {
        EACH_HINT(w->hint, GATES_INT8)
    } else {
        int64_t ahead = next / 2; /* numbers */
#define BF16_GATE(hint) products(row, PAIRS, 1, s->numbers, (const char *)x[r], 0, 1, hint, ahead, y + r, 0)
#define WIDE_GATE(hint) products(row, BF16, 1, s->numbers, (const char *)x[r], 0, 1, hint, ahead, y + r, 0)
        for (int64_t r = 0; r < rows; r++) {
            if (HAS_PAIRS())
                EACH_HINT(w->hint, BF16_GATE)
            else
                EACH_HINT(w->hint, WIDE_GATE)
        }
    }
}
