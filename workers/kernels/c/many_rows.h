/* The kept channels of a tile for many rows of x, or for threads that share them: all gates, then WIDTH numbers of y at a
 * time. Part of body.h. */
#pragma once

#include "down_bf16.h"
#include "kept.h"
#include "team.h"

enum { CHUNK = 64 };         /* bf16 channels whose down is decoded together, for a core's first cache */
enum { MASK_STRIP = STRIP }; /* rows whose x stays in a core's cache while gates are multiplied */

struct shared_channels {
    const struct weights *w;
    const struct row_shape *shape;
    const uint8_t *records;
    const struct masked_scratch *s;
    float *y; /* [count, outputs] */
    int add;  /* y += and not = */
};

/* Gates of channels [lo, hi) for the rows that keep them. */
static void shared_gates(void *context, int64_t lo, int64_t hi) {
    const struct shared_channels *p = context;
    const struct kept *k = &p->s->kept;
    int64_t record = 2 * p->shape->bytes;
    for (int64_t strip = 0; strip < k->count; strip += MASK_STRIP) {
        int64_t rows = least(MASK_STRIP, k->count - strip);
        int32_t at[MASK_STRIP]; /* of each row: its next kept channel */
        for (int64_t r = 0; r < rows; r++) {
            const int32_t *which = k->which + (strip + r) * k->channels;
            for (at[r] = 0; at[r] < k->number[strip + r] && which[at[r]] < lo; at[r]++) {}
        }
        for (int64_t c = lo; c < hi; c++) {
            if (!k->any[c]) continue;
            const uint8_t *x[GATES];
            int64_t row[GATES], n = 0;
            for (int64_t r = 0; r < rows; r++) {
                if (at[r] < k->number[strip + r] && k->which[(strip + r) * k->channels + at[r]] == c)
                    row[n] = strip + r, x[n++] = p->s->gate_x[strip + r], at[r]++;
                if (n == GATES || (n && r + 1 == rows)) {
                    float dots[GATES];
                    gate_products(p->w, p->shape, p->records + c * record, x, n, HERE, 0, dots);
                    for (int64_t i = 0; i < n; i++) k->gates[row[i] * k->channels + c] = dots[i];
                    n = 0;
                }
            }
        }
    }
}

/* silu(gate) * u of rows [lo, hi). */
static void shared_activations(void *context, int64_t lo, int64_t hi) {
    const struct shared_channels *p = context;
    const struct kept *k = &p->s->kept;
    for (int64_t r = lo; r < hi; r++) {
        const int32_t *which = k->which + r * k->channels;
        float *gates = k->gates + r * k->channels, *a = k->a + r * k->channels;
        int64_t number = k->number[r];
        for (int64_t i = 0; i < number; i++) gates[i] = gates[which[i]]; /* which[i] >= i */
        silu_times(gates, a, number);
        memcpy(a, gates, (size_t)number * sizeof *a);
        memset(gates, 0, (size_t)k->channels * sizeof *gates);
        for (int64_t i = 0; i < number; i++) gates[which[i]] = a[i];
    }
}

/* y [rows, WIDTH] of some rows, from number h on, to or added to the caller's. */
static void take_column(const struct shared_channels *p, int64_t first, int64_t rows, int64_t h,
                        const float (*y)[WIDTH]) {
    int64_t width = least(WIDTH, p->shape->numbers - h);
    for (int64_t r = 0; r < rows; r++) {
        float *to = p->y + (first + r) * p->shape->numbers + h;
        for (int64_t i = 0; i < width; i++) to[i] = p->add ? to[i] + y[r][i] : y[r][i];
    }
}

/* bf16: y of WIDTHs [lo, hi). */
static void shared_bf16_down(void *context, int64_t lo, int64_t hi) {
    const struct shared_channels *p = context;
    const struct kept *k = &p->s->kept;
    float numbers[CHUNK][WIDTH] __attribute__((aligned(64))), y[MASK_STRIP][WIDTH] __attribute__((aligned(64)));
    for (int64_t strip = 0; strip < k->count; strip += MASK_STRIP) {
        int64_t rows = least(MASK_STRIP, k->count - strip);
        for (int64_t h = lo * WIDTH; h < least(hi * WIDTH, p->shape->numbers); h += WIDTH) {
            int32_t at[MASK_STRIP] = {0};
            memset(y, 0, (size_t)rows * sizeof *y);
            for (int64_t start = 0; start < k->channels; start += CHUNK) {
                int64_t end = least(start + CHUNK, k->channels);
                for (int64_t c = start; c < end; c++)
                    if (k->any[c])
                        decode_bf16(p->shape, p->records + (2 * c + 1) * p->shape->bytes, h, numbers[c - start]);
                for (int64_t r = 0; r < rows; r++) {
                    const int32_t *which = k->which + (strip + r) * k->channels + at[r];
                    int32_t places[CHUNK];
                    int64_t n = 0, more = k->number[strip + r] - at[r];
                    for (; n < more && which[n] < end; n++) places[n] = which[n] - (int32_t)start;
                    const float *a = k->a + (strip + r) * k->channels + at[r];
                    add_decoded((const float (*)[WIDTH])numbers, places, a, n, y[r]);
                    at[r] += (int32_t)n;
                }
            }
            take_column(p, strip, rows, h, (const float (*)[WIDTH])y);
        }
    }
}

#define ADD_COLUMN_INT4(n) add_column(&column, INT4, a, n, y + r)
#define ADD_COLUMN_INT8(n) add_column(&column, INT8, a, n, y + r)
#define UP_TO_DOWN_ROWS(call)                                                                                    \
    switch (least(DOWN_ROWS, rows - r)) {                                                                        \
    case 1: call(1); break;                                                                                      \
    case 2: call(DOWN_ROWS < 2 ? 1 : 2); break;                                                                  \
    case 3: call(DOWN_ROWS < 3 ? 1 : 3); break;                                                                  \
    default: call(DOWN_ROWS);                                                                                    \
    }

/* int4 and int8: the same. */
static void shared_down(void *context, int64_t lo, int64_t hi) {
    const struct shared_channels *p = context;
    const struct kept *k = &p->s->kept;
    struct column column __attribute__((aligned(64)));
    float y[MASK_STRIP][WIDTH] __attribute__((aligned(64))), some[DOWN_ROWS][STEPPED];
    for (int64_t strip = 0; strip < k->count; strip += MASK_STRIP) {
        int64_t rows = least(MASK_STRIP, k->count - strip);
        for (int64_t h = lo * WIDTH; h < least(hi * WIDTH, p->shape->numbers); h += WIDTH) {
            memset(y, 0, (size_t)rows * sizeof *y);
            for (int64_t start = 0; start < k->channels; start += STEPPED) {
                const uint8_t *down[STEPPED];
                int64_t number = least(STEPPED, k->channels - start);
                if (!memchr(k->any + start, 1, (size_t)number)) continue;
                for (int64_t i = 0; i < number; i++)
                    down[i] = k->any[start + i] ? p->records + (2 * (start + i) + 1) * p->shape->bytes : NULL;
                read_column(p->shape, down, number, h / GROUP, &column);
                memset(some, 0, sizeof some);
                for (int64_t r = 0; r < rows; r += DOWN_ROWS) {
                    const float *a[DOWN_ROWS];
                    for (int64_t i = 0; i < least(DOWN_ROWS, rows - r); i++) {
                        a[i] = k->gates + (strip + r + i) * k->channels + start;
                        if (number < STEPPED) a[i] = memcpy(some[i], a[i], (size_t)number * sizeof(float));
                    }
                    if (p->shape->bits == INT4)
                        UP_TO_DOWN_ROWS(ADD_COLUMN_INT4)
                    else
                        UP_TO_DOWN_ROWS(ADD_COLUMN_INT8)
                }
            }
            for (int64_t r = 0; r < rows; r++) {
                float ordered[WIDTH];
                put_in_order(y[r], WIDTH / GROUP, ordered);
                memcpy(y[r], ordered, sizeof ordered);
            }
            take_column(p, strip, rows, h, (const float (*)[WIDTH])y);
        }
    }
}
