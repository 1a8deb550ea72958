/* Down of channels in bf16 (shm/floe.py): multiples of rows added to y, one row after the other. Part of body.h. */
#pragma once

#include "channels.h"

enum { SUMMED = 4 };            /* rows that are added to y in one pass */
enum { IN_FLIGHT = 8 * LANES }; /* numbers of y whose sums are in registers: as many as hide an addition's latency */

/* Of `outputs` (a constant) rows of y: y[o] += the sum of a[o][i] * row i, for `number` (a constant) rows. Other records
 * next[i] bytes further are prefetched. y has whole groups, and `stride` numbers from one row to the next. */
INLINE void add_rows(const uint8_t *const *rows, const float (*a)[SUMMED], const int outputs, const int number,
                     const struct row_shape *s, const int hint, const int64_t *next, float *y, int64_t stride) {
    int64_t whole = s->numbers / GROUP * GROUP;
    for (int64_t at = 0; at < whole; at += GROUP) {
        vector sums[GATES][PARTS];
        for (int o = 0; o < outputs; o++)
            for (int p = 0; p < PARTS; p++) sums[o][p] = loaded(y + o * stride + at + p * LANES);
        for (int i = 0; i < number; i++) {
            const uint8_t *line = rows[i] + 2 * at;
            PREFETCH(line + next[i], hint);
            PREFETCH(line + 64 + next[i], hint);
            for (int p = 0; p < PARTS; p++) {
                vector numbers = WIDENED((const uint16_t *)line + p * LANES);
                for (int o = 0; o < outputs; o++) sums[o][p] = VFMA(numbers, splat(a[o][i]), sums[o][p]);
            }
        }
        for (int o = 0; o < outputs; o++)
            for (int p = 0; p < PARTS; p++) memcpy(y + o * stride + at + p * LANES, &sums[o][p], sizeof(vector));
    }
    if (whole == s->numbers) return;
    for (int i = 0; i < number; i++) {
        float rest[GROUP] = {0}; /* the last numbers */
        for (int64_t at = whole; at < s->numbers; at++) rest[at - whole] = widened(((const uint16_t *)rows[i])[at]);
        for (int o = 0; o < outputs; o++)
            for (int p = 0; p < PARTS; p++) {
                float *to = y + o * stride + whole + p * LANES;
                vector sum = VFMA(loaded(rest + p * LANES), splat(a[o][i]), loaded(to));
                memcpy(to, &sum, sizeof sum);
            }
    }
}

/* The same for up to SUMMED rows and up to GATES rows of y. */
static void add_bf16_rows(const struct weights *w, const struct row_shape *s, const uint8_t *const *rows,
                          const float (*a)[SUMMED], int64_t outputs, int64_t number, const int64_t *next, float *y,
                          int64_t stride) {
#define ADD_TO_ONE(hint) add_rows(rows, a, 1, SUMMED, s, hint, next, y, stride)
    if (number == SUMMED) {
        switch (outputs) { /* several rows of y take longer than a look at the hint */
        case 1: EACH_HINT(w->hint, ADD_TO_ONE) break;
        case 2: add_rows(rows, a, 2, SUMMED, s, (int)w->hint, next, y, stride); break;
        case 3: add_rows(rows, a, 3, SUMMED, s, (int)w->hint, next, y, stride); break;
        default: add_rows(rows, a, 4, SUMMED, s, (int)w->hint, next, y, stride);
        }
        return;
    }
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t i = 0; i < number; i++) {
            const float last[1][SUMMED] = {{a[o][i]}};
            add_rows(rows + i, last, 1, 1, s, NO_HINT, next + i, y + o * stride, stride);
        }
}

/* --- for many rows of x: WIDTH numbers of some rows at a time ----------------------------------------------------- */

/* to [WIDTH] = numbers [first, first + WIDTH) of a row as float32, 0 beyond its end. */
static void decode_bf16(const struct row_shape *s, const uint8_t *row, int64_t first, float *to) {
    const uint16_t *from = (const uint16_t *)row + first;
    int64_t whole = least(s->numbers - first, WIDTH), at = 0;
    for (; at + LANES <= whole; at += LANES) {
        vector numbers = WIDENED(from + at);
        memcpy(to + at, &numbers, sizeof numbers);
    }
    for (; at < WIDTH; at++) to[at] = at < whole ? widened(from[at]) : 0.0f;
}

/* y [WIDTH] += the sum of a[i] * rows[which[i]], one after the other. */
static void add_decoded(const float (*rows)[WIDTH], const int32_t *which, const float *a, int64_t number, float *y) {
    enum { SUMS = (IN_FLIGHT < WIDTH ? IN_FLIGHT : WIDTH) / LANES };
    for (int part = 0; part < WIDTH; part += SUMS * LANES) {
        vector sum[SUMS];
        for (int p = 0; p < SUMS; p++) sum[p] = loaded(y + part + p * LANES);
        for (int64_t i = 0; i < number; i++) {
            const float *row = rows[which[i]] + part;
            for (int p = 0; p < SUMS; p++) sum[p] = VFMA(loaded(row + p * LANES), splat(a[i]), sum[p]);
        }
        for (int p = 0; p < SUMS; p++) memcpy(y + part + p * LANES, sum + p, sizeof *sum);
    }
}
