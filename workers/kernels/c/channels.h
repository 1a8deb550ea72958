/* Records of channels (shm/floe.py): where their parts are, products of gate rows with rows of x, and multiples of down
 * rows added to y. Part of body.h; a variant defines BYTE_DOTS, and LOOKED_UP (16 float32 numbers of a register by index)
 * where the processor has it.
 *
 * A product's numbers are added in an order that depends on its row alone, and so are a row's to y. */
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
