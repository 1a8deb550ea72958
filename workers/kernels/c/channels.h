/* Records of channels (shm/floe.py): where their parts are, products of gate rows with rows of x, and multiples of down
 * rows added to y. Part of body.h; a variant defines BYTE_DOTS, and LOOKED_UP (16 float32 numbers of a register by index)
 * where the processor has it.
 *
 * A product's numbers are added in an order that depends on its row alone, and so are a row's to y. */
#pragma once

#include "rows.h"
#include "vectors.h"

enum { GROUP = 64 };            /* numbers that share a scale */
enum { WIDTH = 2 * GROUP };     /* numbers of a whole int4 line */
enum { SEGMENT = 16 };          /* groups whose scales are widened together */
enum { SUMMED = 4 };            /* channels that are taken together: gate rows side by side, down rows in one pass */

/* Where the parts of a row record are, in bytes. */
struct row_shape {
    int64_t bits, numbers; /* INT4, INT8 or BF16 */
    int64_t groups;        /* with those that only pad */
    int64_t zeros, codes, bytes;
    int64_t channel; /* of a channel: gate's row, down's row, perhaps gate's bias */
};

static int64_t channel_bytes(const struct weights *w, const struct row_shape *s) {
    return 2 * s->bytes + (w->math.biases ? 64 : 0);
}

static struct row_shape row_shape_of(const struct weights *w) {
    struct row_shape s = {.bits = w->channel_bits, .numbers = w->outputs};
    if (s.bits == BF16) {
        s.bytes = rounded_up(2 * s.numbers, 64);
        s.channel = channel_bytes(w, &s);
        return s;
    }
    s.groups = rounded_up(s.numbers, s.bits == INT4 ? WIDTH : GROUP) / GROUP;
    s.zeros = rounded_up(s.groups * (s.bits == INT4 ? 2 : 4), 64);
    s.codes = s.bits == INT4 ? 2 * s.zeros : s.zeros;
    s.bytes = s.codes + s.groups * GROUP * s.bits / 8;
    s.channel = channel_bytes(w, &s);
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

/* y[i] = gate row i . x for `number` (a constant) gate rows; `bits`, a constant: INT4 or INT8. Several gate rows share the
 * loads of x, and their sums do not wait for each other. Other records next[i] bytes further are prefetched. */
INLINE void gate_dots(const uint8_t *const *row, const int number, const struct row_shape *s, const int bits,
                      const uint8_t *x, const int64_t *next, float *y) {
    const int taken = bits == INT4 ? 2 : 1; /* groups of a line */
    int64_t slots = rounded_up(s->groups, SEGMENT);
    vector sums[SUMMED], rests[SUMMED];
    for (int i = 0; i < number; i++) sums[i] = rests[i] = (vector){0};
    for (int i = 0; i < number; i++)
        for (int64_t at = 0; at < s->codes; at += 64) PREFETCH(row[i] + at + next[i]);
    for (int64_t start = 0; start < s->groups; start += SEGMENT) {
        float scales[SEGMENT], zeros[SEGMENT], factors[SUMMED][SEGMENT];
        for (int i = 0; i < number; i++) {
            widen_scales(row[i], s, bits, start, scales, zeros);
            for (int v = 0; v < SEGMENT; v += LANES) {
                const float *steps = steps_of(s, x) + start + v;
                vector factor = loaded(scales + v) * loaded(steps);
                rests[i] = VFMA(factor * loaded(zeros + v), loaded(steps + slots), rests[i]);
                memcpy(factors[i] + v, &factor, sizeof factor);
            }
        }
        int64_t end = least(start + SEGMENT, s->groups);
        for (int64_t g = start; g < end; g += taken)
            for (int i = 0; i < number; i++) {
                const uint8_t *line = row[i] + s->codes + g / taken * 64;
                const int8_t *codes = (const int8_t *)x + g * GROUP;
                const float *factor = factors[i] + g - start;
                ints dots = {0}, more = {0};
                PREFETCH(line + next[i]);
                for (int at = 0; at < 64; at += VECTOR_BYTES) {
                    words all = loaded_words(line + at);
                    words low = bits == INT4 ? all & 0x0F0F0F0Fu : all, high = all >> 4 & 0x0F0F0F0Fu;
                    dots = BYTE_DOTS(dots, low, codes + at, bits);
                    if (bits == INT4) more = BYTE_DOTS(more, high, codes + at + GROUP, bits);
                }
                sums[i] = VFMA(__builtin_convertvector(dots, vector), splat(factor[0]), sums[i]);
                if (bits == INT4) sums[i] = VFMA(__builtin_convertvector(more, vector), splat(factor[1]), sums[i]);
            }
    }
    if (number == SUMMED) {
        float rest[SUMMED];
        SUM_FOUR(sums[0], sums[1], sums[2], sums[3], y);
        SUM_FOUR(rests[0], rests[1], rests[2], rests[3], rest);
        for (int i = 0; i < SUMMED; i++) y[i] -= rest[i];
        return;
    }
    for (int i = 0; i < number; i++) y[i] = SUM(sums[i]) - SUM(rests[i]);
}

/* call(first row, rows): SUMMED rows together, fewer one after the other. */
#define BY_SUMMED(number, call)                                                                                  \
    if ((number) == SUMMED)                                                                                      \
        call(0, SUMMED);                                                                                         \
    else                                                                                                         \
        for (int64_t i = 0; i < (number); i++) call(i, 1);

/* y[i] = gate row i . x for `number` gate rows, up to SUMMED. */
static void gates_of_row(const struct row_shape *s, const uint8_t *const *rows, int64_t number, const uint8_t *x,
                         const int64_t *next, float *y) {
#define GATES_INT4(i, n) gate_dots(rows + i, n, s, INT4, x, next + i, y + i)
#define GATES_INT8(i, n) gate_dots(rows + i, n, s, INT8, x, next + i, y + i)
    if (s->bits == INT4) {
        BY_SUMMED(number, GATES_INT4)
        return;
    }
    if (s->bits == INT8) {
        BY_SUMMED(number, GATES_INT8)
        return;
    }
    for (int64_t i = 0; i < number; i++) {
        if (HAS_PAIRS())
            products(rows[i], PAIRS, 1, s->numbers, (const char *)x, 0, 1, next[i] / 2, y + i, 0);
        else
            products(rows[i], BF16, 1, s->numbers, (const char *)x, 0, 1, next[i] / 2, y + i, 0);
    }
}

enum { PARTS = GROUP / LANES }; /* vectors of a group */
enum { SPLIT = BLOCK / LANES }; /* vectors of 16 numbers, which lie next to each other in a line */

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

/* A row of y. A down row's numbers are (code - zero) * scale: multiples of codes are added to `numbers`, and of zeros, by
 * group, to `zeros`, which are subtracted at the end. Both have whole SEGMENTs. */
struct added {
    float *numbers, *zeros;
    int64_t stride, zeros_stride; /* numbers from one row to the next */
};

/* y += the sum of a[i] * row i, one row after the other, for `number` (a constant) rows. Other records next[i] bytes
 * further are prefetched. Of a bf16 row no more than `numbers` are read. */
INLINE void add_rows(const uint8_t *const *rows, const float *a, const int number, const struct row_shape *s,
                     const int bits, const int64_t *next, const struct added *y) {
    int64_t groups = bits == BF16 ? s->numbers / GROUP : s->groups;
    if (bits != BF16)
        for (int i = 0; i < number; i++)
            for (int64_t at = 0; at < s->codes; at += 64) PREFETCH(rows[i] + at + next[i]);
    for (int64_t start = 0; start < groups; start += SEGMENT) {
        float scales[SEGMENT], zeros[SEGMENT], by[SUMMED][SEGMENT]; /* what codes are multiplied by */
        for (int i = 0; bits != BF16 && i < number; i++) {
            widen_scales(rows[i], s, bits, start, scales, zeros);
            for (int v = 0; v < SEGMENT; v += LANES) {
                vector factor = loaded(scales + v) * splat(a[i]);
                memcpy(by[i] + v, &factor, sizeof factor);
                if (bits == INT8) continue;
                float *to = y->zeros + start + v;
                vector sum = VFMA(factor, loaded(zeros + v), loaded(to));
                memcpy(to, &sum, sizeof sum);
            }
        }
        int64_t end = least(start + SEGMENT, groups);
#define ADD_GROUP(g, half)                                                                                       \
    do {                                                                                                         \
        float *to = y->numbers + (g) * GROUP;                                                                    \
        vector sums[PARTS], numbers[PARTS];                                                                      \
        for (int p = 0; p < PARTS; p++) sums[p] = loaded(to + p * LANES);                                        \
        for (int i = 0; i < number; i++) {                                                                       \
            const uint8_t *line = line_of(rows[i], s, bits, g);                                                  \
            if (!(half)) PREFETCH(line + next[i]);                                                               \
            if (bits == BF16) PREFETCH(line + 64 + next[i]);                                                     \
            row_codes(line, bits, half, numbers);                                                                \
            vector factor = splat(bits == BF16 ? a[i] : by[i][(g) - start]);                                     \
            for (int p = 0; p < PARTS; p++) sums[p] = VFMA(numbers[p], factor, sums[p]);                         \
        }                                                                                                        \
        memcpy(to, sums, sizeof sums);                                                                           \
    } while (0)
        EACH_GROUP(start, end, bits, ADD_GROUP)
    }
    if (groups * GROUP == s->numbers || bits != BF16) return;
    for (int i = 0; i < number; i++) {
        float rest[GROUP] = {0}; /* the last numbers */
        for (int64_t at = groups * GROUP; at < s->numbers; at++)
            rest[at - groups * GROUP] = widened(((const uint16_t *)rows[i])[at]);
        for (int p = 0; p < PARTS; p++) {
            float *to = y->numbers + groups * GROUP + p * LANES;
            vector sum = VFMA(loaded(rest + p * LANES), splat(a[i]), loaded(to));
            memcpy(to, &sum, sizeof sum);
        }
    }
}

/* The same for any format and up to SUMMED rows. */
static void add_down(const struct row_shape *s, const uint8_t *const *rows, const float *a, int64_t number,
                     const int64_t *next, const struct added *y) {
#define ADD_INT4(i, n) add_rows(rows + i, a + i, n, s, INT4, next + i, y)
#define ADD_INT8(i, n) add_rows(rows + i, a + i, n, s, INT8, next + i, y)
#define ADD_BF16(i, n) add_rows(rows + i, a + i, n, s, BF16, next + i, y)
    if (s->bits == INT4) {
        BY_SUMMED(number, ADD_INT4)
    } else if (s->bits == INT8) {
        BY_SUMMED(number, ADD_INT8)
    } else {
        BY_SUMMED(number, ADD_BF16)
    }
}

/* to [numbers] = or += y, complete. */
static void take_added(const struct row_shape *s, const struct added *y, int add, float *to) {
    const float *from = y->numbers, *zeros = y->zeros;
    for (int64_t h = 0; h < s->numbers; h += GROUP) {
        float zero = s->bits == INT4 ? zeros[h / GROUP] : 0;
        for (int64_t i = h; i < least(h + GROUP, s->numbers); i++) {
            float number = from[i] - zero;
            to[i] = add ? to[i] + number : number;
        }
    }
}
