/* The kept channels of a tile for up to GATES rows of x on one thread: all gates of a STEPPED, then all downs of it, row
 * of weights after row. Part of body.h. */
#pragma once

#include "down_bf16.h"
#include "kept.h"

/* The kept channels in the order in which their rows are read: all gates of a STEPPED, then all downs of it. */
struct reading_order {
    const uint8_t *records;
    int64_t row_bytes;
    const int32_t *all;   /* the channels that some row keeps, ascending */
    int64_t first, end;   /* of these, one STEPPED */
    int64_t number;       /* of all */
    int64_t ahead;        /* rows */
};

/* Bytes from the gate or down row of channel all[first + i] to the row that is read `ahead` rows later. `both`: whether
 * that is a gate. */
static int64_t later_row(const struct reading_order *o, int64_t i, int down, int *both) {
    int64_t n = o->end - o->first, at = i + down * n + o->ahead, to_down = at >= n && at < 2 * n;
    int64_t later = at < n ? o->first + at : at < 2 * n ? o->first + at - n : o->end + at - 2 * n;
    *both = !to_down;
    if (later >= o->number) return HERE;
    return (2 * (o->all[later] - o->all[o->first + i]) + to_down - down) * o->row_bytes;
}

/* a[r][i] = silu(gate . x) * u of the channels all[first + i]; 0 for what a row leaves out. at[r]: how many channels the
 * row has kept before. */
static void few_gates(const struct weights *w, const struct row_shape *shape, const struct masked_scratch *s,
                      const struct reading_order *o, int64_t *at, float (*a)[STEPPED]) {
    const struct kept *k = &s->kept;
    float gates[GATES][STEPPED], u[GATES][STEPPED]; /* of the channels that a row keeps */
    int32_t places[GATES][STEPPED];
    int64_t counts[GATES] = {0}, rows = k->count;
    for (int64_t i = 0; i < o->end - o->first; i++) {
        int32_t channel = o->all[o->first + i];
        const uint8_t *x[GATES];
        int64_t which[GATES], n = 0;
        for (int64_t r = 0; r < rows; r++) {
            int64_t place = r * k->channels + at[r];
            a[r][i] = 0.0f;
            if (at[r] == k->number[r] || k->which[place] != channel) continue;
            which[n] = r, x[n++] = s->gate_x[r];
            places[r][counts[r]] = (int32_t)i, u[r][counts[r]] = k->a[place], at[r]++;
        }
        float dots[GATES];
        int both;
        int64_t next = later_row(o, i, 0, &both);
        gate_products(w, shape, o->records + 2 * channel * o->row_bytes, x, n, next, both, dots);
        for (int64_t j = 0; j < n; j++) gates[which[j]][counts[which[j]]++] = dots[j];
    }
    for (int64_t r = 0; r < rows; r++) {
        silu_times(gates[r], u[r], counts[r]);
        for (int64_t i = 0; i < counts[r]; i++) a[r][places[r][i]] = gates[r][i];
    }
}

static void few_bf16_downs(const struct weights *w, const struct row_shape *shape, const struct reading_order *o,
                           const uint8_t *const *down, float (*a)[STEPPED], int64_t rows, float *y, int64_t stride) {
    for (int64_t i = 0; i < o->end - o->first; i += SUMMED) {
        int64_t taken = least(SUMMED, o->end - o->first - i), next[SUMMED];
        float of[GATES][SUMMED] = {{0}};
        int both;
        for (int64_t n = 0; n < taken; n++) {
            next[n] = later_row(o, i + n, 1, &both);
            for (int64_t r = 0; r < rows; r++) of[r][n] = a[r][i + n];
        }
        add_bf16_rows(w, shape, down + i, (const float (*)[SUMMED])of, rows, taken, next, y, stride);
    }
}

static void few_downs(const struct weights *w, const struct row_shape *shape, const struct stepped *stepped,
                      const struct reading_order *o, const uint8_t **down, float (*a)[STEPPED], int64_t rows,
                      float *y, int64_t stride) {
    int64_t number = o->end - o->first, taken = PASSED * QUAD, slots = rounded_up(shape->groups, SEGMENT);
    int32_t numbers[STEPPED];
    for (int64_t i = 0; i < number; i++) numbers[i] = o->all[o->first + i] % STEPPED;
    for (int64_t r = 0; r < rows; r++) {
        const struct stepped *of = stepped + r;
        if (shape->bits == INT4)
            quantize_channels(shape, INT4, down, numbers, a[r], number, of->codes, of->step, of->rest);
        else
            quantize_channels(shape, INT8, down, numbers, a[r], number, of->codes, of->step, of->rest);
        for (int64_t q = (number + QUAD - 1) / QUAD; q % PASSED; q++) /* of a last pass */
            memset(of->codes + q * slots, 0, (size_t)slots * sizeof *of->codes);
    }
    for (int64_t i = 0; i < number; i += taken) {
        const uint8_t *some[PASSED * QUAD];
        int64_t next[PASSED * QUAD];
        int both;
        for (int64_t n = 0; n < taken; n++) {
            int64_t which = least(i + n, number - 1); /* beyond the end, codes are 0 */
            some[n] = down[which], next[n] = i + n < number ? later_row(o, which, 1, &both) : HERE;
        }
        add_some_quads(w, shape, some, i / QUAD, stepped, rows, next);
    }
    for (int64_t r = 0; r < rows; r++) finish_stepped(shape, stepped + r, y + r * stride);
}

static void few_rows(const struct weights *w, const struct row_shape *shape, const uint8_t *records,
                     const struct masked_scratch *s, float *y, int64_t stride) {
    const struct kept *k = &s->kept;
    int64_t rows = k->count, at[GATES] = {0}, unit = shape->bits == BF16 ? SUMMED : PASSED * QUAD;
    struct reading_order o = {.records = records, .row_bytes = shape->bytes, .all = s->sizes};
    int32_t *all = s->sizes;
    for (int64_t c = 0; c < k->channels; c++) all[o.number] = (int32_t)c, o.number += k->any[c];
    o.ahead = rounded_up((w->ahead + shape->bytes - 1) / shape->bytes + 1, unit);
    int64_t slots = rounded_up(rounded_up(w->outputs, WIDTH) / GROUP, SEGMENT);
    for (int64_t r = 0; r < rows && shape->bits != BF16; r++) {
        const struct stepped *first = &s->first;
        s->stepped[r] = (struct stepped){first->codes + r * QUADS * slots, first->step + r * slots,
                                         first->rest + r * slots, first->sums + r * stride};
        memset(s->stepped[r].sums, 0, (size_t)stride * sizeof *first->sums);
    }
    for (int64_t i = 0; i < least(o.ahead, o.number); i++) { /* nothing comes before that would prefetch them */
        const uint8_t *row = records + 2 * all[i] * shape->bytes;
#define WHOLE_RECORD(hint)                                                                                       \
    for (int64_t line = 0; line < shape->bytes + shape->codes; line += 64) PREFETCH(row + line, hint)
        EACH_HINT(w->hint, WHOLE_RECORD)
    }
    for (; o.first < o.number; o.first = o.end) {
        float a[GATES][STEPPED];
        const uint8_t *down[STEPPED];
        for (o.end = o.first; o.end < o.number && all[o.end] / STEPPED == all[o.first] / STEPPED; o.end++)
            down[o.end - o.first] = records + (2 * all[o.end] + 1) * shape->bytes;
        few_gates(w, shape, s, &o, at, a);
        if (shape->bits == BF16)
            few_bf16_downs(w, shape, &o, down, a, rows, y, stride);
        else
            few_downs(w, shape, s->stepped, &o, down, a, rows, y, stride);
    }
}
