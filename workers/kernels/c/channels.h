/* Records of channels (shm/floe.py): multiples of down rows added to y. Part of body.h; a variant defines LOOKED_UP (16
 * float32 numbers of a register by index) where the processor has it.
 *
 * A row's numbers are added to y in an order that depends on the row alone. */
#pragma once

#include "gates.h"

enum { PARTS = GROUP / LANES }; /* vectors of a group */
enum { SPLIT = BLOCK / LANES }; /* vectors of 16 numbers, which lie next to each other in a line */
enum { IN_FLIGHT = 8 * LANES }; /* numbers of y whose sums are in registers: as many as hide an addition's latency */

/* --- down ----------------------------------------------------------------------------------------------------- */

/* A group's codes, as float32; of bf16 its numbers. `half`, a constant: of an int4 line, the group in the lower or upper
 * four bits. */
INLINE void row_codes(const uint8_t *line, const int bits, const int half, vector *to) {
    if (bits == BF16) {
        for (int p = 0; p < PARTS; p++) to[p] = WIDENED((const uint16_t *)line + p * LANES);
        return;
    }
#ifdef LOOKED_UP
    const vector counted = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif
    for (int h = 0; h < SPLIT; h++) {
        words all = loaded_words(line + h * VECTOR_BYTES);
        for (int b = 0; b < 4; b++) {
            vector *at = to + SPLIT * b + h;
            words code = all >> (8 * b + 4 * half);
            if (bits == INT8)
                *at = __builtin_convertvector((ints)((all ^ 0x80808080u) << (24 - 8 * b)) >> 24, vector);
            else
#ifdef LOOKED_UP
                *at = LOOKED_UP(counted, code); /* by the lowest four bits */
#else
                *at = __builtin_convertvector((ints)(code & 15), vector);
#endif
        }
    }
}

/* call(g, half) for groups [g, g + n) of a segment that begins at an even one; `half` is a constant. */
#define EACH_GROUP(start, end, bits, call)                                                                       \
    for (int64_t g = start; g < (end); g++) {                                                                    \
        call(g, 0);                                                                                              \
        if ((bits) == INT4) {                                                                                    \
            g++;                                                                                                 \
            call(g, 1);                                                                                          \
        }                                                                                                        \
    }

/* The line of group g. */
INLINE const uint8_t *line_of(const uint8_t *row, const struct row_shape *s, const int bits, int64_t g) {
    if (bits == BF16) return row + 2 * g * GROUP;
    return row + s->codes + (bits == INT4 ? g / 2 : g) * 64;
}

/* y of up to GATES rows. A row's numbers are (code - zero) * scale: multiples of codes are added to `numbers`, and of
 * zeros, by group, to `zeros`, which are subtracted at the end. Both have whole SEGMENTs. */
struct added {
    float *numbers, *zeros;
    int64_t stride, zeros_stride; /* numbers from one row to the next */
};

/* Of `outputs` (a constant) rows of y: y[o] += the sum of a[o][i] * row i, one row after the other, for `number` (a
 * constant) rows. Other records next[i] bytes further are prefetched. Of a bf16 row no more than `numbers` are read. */
INLINE void add_rows(const uint8_t *const *rows, const float (*a)[SUMMED], const int outputs, const int number,
                     const struct row_shape *s, const int bits, const int64_t *next, const struct added *y) {
    int64_t groups = bits == BF16 ? s->numbers / GROUP : s->groups;
    if (bits != BF16)
        for (int i = 0; i < number; i++)
            for (int64_t at = 0; at < s->codes; at += 64) PREFETCH(rows[i] + at + next[i]);
    for (int64_t start = 0; start < groups; start += SEGMENT) {
        float scales[SEGMENT], zeros[SEGMENT], by[GATES][SUMMED][SEGMENT]; /* what codes are multiplied by */
        for (int i = 0; bits != BF16 && i < number; i++) {
            widen_scales(rows[i], s, bits, start, scales, zeros);
            for (int v = 0; v < SEGMENT; v += LANES)
                for (int o = 0; o < outputs; o++) {
                    vector factor = loaded(scales + v) * splat(a[o][i]);
                    memcpy(by[o][i] + v, &factor, sizeof factor);
                    if (bits == INT8) continue;
                    float *to = y->zeros + o * y->zeros_stride + start + v;
                    vector sum = VFMA(factor, loaded(zeros + v), loaded(to));
                    memcpy(to, &sum, sizeof sum);
                }
        }
        int64_t end = least(start + SEGMENT, groups);
#define ADD_GROUP(g, half)                                                                                       \
    do {                                                                                                         \
        vector sums[GATES][PARTS], numbers[PARTS];                                                               \
        for (int o = 0; o < outputs; o++)                                                                        \
            for (int p = 0; p < PARTS; p++) sums[o][p] = loaded(y->numbers + o * y->stride + (g) * GROUP + p * LANES); \
        for (int i = 0; i < number; i++) {                                                                       \
            const uint8_t *line = line_of(rows[i], s, bits, g);                                                  \
            if (!(half)) PREFETCH(line + next[i]);                                                               \
            if (bits == BF16) PREFETCH(line + 64 + next[i]);                                                     \
            row_codes(line, bits, half, numbers);                                                                \
            for (int o = 0; o < outputs; o++) {                                                                  \
                vector factor = splat(bits == BF16 ? a[o][i] : by[o][i][(g) - start]);                           \
                for (int p = 0; p < PARTS; p++) sums[o][p] = VFMA(numbers[p], factor, sums[o][p]);               \
            }                                                                                                    \
        }                                                                                                        \
        for (int o = 0; o < outputs; o++)                                                                        \
            for (int p = 0; p < PARTS; p++)                                                                      \
                memcpy(y->numbers + o * y->stride + (g) * GROUP + p * LANES, &sums[o][p], sizeof(vector));       \
    } while (0)
        EACH_GROUP(start, end, bits, ADD_GROUP)
    }
    if (groups * GROUP == s->numbers || bits != BF16) return;
    for (int i = 0; i < number; i++) {
        float rest[GROUP] = {0}; /* the last numbers */
        for (int64_t at = groups * GROUP; at < s->numbers; at++)
            rest[at - groups * GROUP] = widened(((const uint16_t *)rows[i])[at]);
        for (int o = 0; o < outputs; o++)
            for (int p = 0; p < PARTS; p++) {
                float *to = y->numbers + o * y->stride + groups * GROUP + p * LANES;
                vector sum = VFMA(loaded(rest + p * LANES), splat(a[o][i]), loaded(to));
                memcpy(to, &sum, sizeof sum);
            }
    }
}

#define ADD_TO_EACH(bits)                                                                                        \
    switch (outputs) {                                                                                           \
    case 1: add_rows(rows, a, 1, SUMMED, s, bits, next, y); break;                                               \
    case 2: add_rows(rows, a, 2, SUMMED, s, bits, next, y); break;                                               \
    case 3: add_rows(rows, a, 3, SUMMED, s, bits, next, y); break;                                               \
    default: add_rows(rows, a, 4, SUMMED, s, bits, next, y);                                                     \
    }

/* The same for any format and up to SUMMED rows, for up to GATES rows of y. */
static void add_down(const struct row_shape *s, const uint8_t *const *rows, const float (*a)[SUMMED], int64_t outputs,
                     int64_t number, const int64_t *next, const struct added *y) {
    if (number == SUMMED) {
        if (s->bits == INT4) {
            ADD_TO_EACH(INT4)
        } else if (s->bits == INT8) {
            ADD_TO_EACH(INT8)
        } else {
            ADD_TO_EACH(BF16)
        }
        return;
    }
    for (int64_t o = 0; o < outputs; o++) {
        struct added one = {y->numbers + o * y->stride, y->zeros + o * y->zeros_stride, 0, 0};
        for (int64_t i = 0; i < number; i++) {
            const float last[1][SUMMED] = {{a[o][i]}};
            if (s->bits == INT4)
                add_rows(rows + i, last, 1, 1, s, INT4, next + i, &one);
            else if (s->bits == INT8)
                add_rows(rows + i, last, 1, 1, s, INT8, next + i, &one);
            else
                add_rows(rows + i, last, 1, 1, s, BF16, next + i, &one);
        }
    }
}

/* to [numbers] = or += y's row, complete. */
static void take_added(const struct row_shape *s, const struct added *y, int64_t row, int add, float *to) {
    const float *from = y->numbers + row * y->stride, *zeros = y->zeros + row * y->zeros_stride;
    for (int64_t h = 0; h < s->numbers; h += GROUP) {
        float zero = s->bits == INT4 ? zeros[h / GROUP] : 0;
        for (int64_t i = h; i < least(h + GROUP, s->numbers); i++) {
            float number = from[i] - zero;
            to[i] = add ? to[i] + number : number;
        }
    }
}

/* --- down for many rows of x: WIDTH numbers of some rows at a time, as float32 ------------------------------- */

/* WIDTH codes of a down row, and its groups' scales and zeros, in the first lanes. */
struct decoded {
    float codes[WIDTH], scales[LANES], zeros[LANES];
} __attribute__((aligned(64)));

INLINE void decode_as(const uint8_t *row, const struct row_shape *s, const int bits, int64_t first, struct decoded *to) {
    int64_t start = first / GROUP, whole = bits == BF16 ? s->numbers / GROUP : s->groups;
    int64_t end = least(start + WIDTH / GROUP, whole);
    *to = (struct decoded){0};
    for (int64_t g = 0; bits == BF16 && g < WIDTH / GROUP; g++) to->scales[g] = 1;
    for (int64_t g = start; g < end; g++) {
        vector codes[PARTS];
        if (bits == INT4) {
            to->scales[g - start] = widened(((const uint16_t *)row)[g]);
            to->zeros[g - start] = widened(((const uint16_t *)(row + s->zeros))[g]);
        }
        if (bits == INT8) memcpy(to->scales + (g - start), row + 4 * g, sizeof *to->scales);
        if (bits == INT4 && g % 2)
            row_codes(line_of(row, s, bits, g), bits, 1, codes);
        else
            row_codes(line_of(row, s, bits, g), bits, 0, codes);
        memcpy(to->codes + (g - start) * GROUP, codes, sizeof codes);
    }
    for (int64_t at = end * GROUP; bits == BF16 && at < least(first + WIDTH, s->numbers); at++)
        to->codes[at - first] = widened(((const uint16_t *)row)[at]);
}

/* WIDTH codes of a down row from `first` on, 0 beyond its end. */
static void decode_down(const struct row_shape *s, const uint8_t *row, int64_t first, struct decoded *to) {
    if (s->bits == INT4)
        decode_as(row, s, INT4, first, to);
    else if (s->bits == INT8)
        decode_as(row, s, INT8, first, to);
    else
        decode_as(row, s, BF16, first, to);
}

/* y += the sum of a[i] * rows[which[i]], one after the other; y's scales are not used. */
static void add_decoded(const struct decoded *rows, const int32_t *which, const float *a, int64_t number,
                        struct decoded *y) {
    enum { SUMS = (IN_FLIGHT < WIDTH ? IN_FLIGHT : WIDTH) / LANES };
    vector zeros = loaded(y->zeros);
    for (int64_t i = 0; i < number; i++)
        zeros = VFMA(loaded(rows[which[i]].scales) * splat(a[i]), loaded(rows[which[i]].zeros), zeros);
    memcpy(y->zeros, &zeros, sizeof zeros);
    for (int part = 0; part < WIDTH; part += SUMS * LANES) {
        vector sum[SUMS];
        for (int p = 0; p < SUMS; p++) sum[p] = loaded(y->codes + part + p * LANES);
        for (int64_t i = 0; i < number; i++) {
            const struct decoded *row = rows + which[i];
            for (int p = 0; p < SUMS; p++) {
                int at = part + p * LANES;
                sum[p] = VFMA(loaded(row->codes + at), splat(row->scales[at / GROUP] * a[i]), sum[p]);
            }
        }
        for (int p = 0; p < SUMS; p++) memcpy(y->codes + part + p * LANES, sum + p, sizeof *sum);
    }
}
