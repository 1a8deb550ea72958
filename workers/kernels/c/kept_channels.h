/* The channels that rows of x keep of a tile whose gate and down lie by channel (shm/floe.py), and what they add to y.
 * Part of body.h.
 *
 * One row goes through its channels SUMMED at a time, a few rows channel by channel. Many rows, and threads that share a
 * tile, do all gates first, and then WIDTH numbers of y at a time. A row gives the same bits in each way: its y is the
 * sum over its own kept channels, in their order. */
#pragma once

#include "blocks.h"
#include "channels.h"
#include "team.h"

enum { HERE = 0 };      /* prefetches what is read anyway: there is no later record */
enum { CHUNK = 64 };    /* channels whose down is decoded together: with their WIDTH numbers in a core's first cache */
enum { MASK_STRIP = STRIP }; /* rows whose x stays in a core's cache while gates are multiplied */

struct kept { /* of rows: the channels that each keeps */
    int64_t channels, count;
    int32_t *number, *which; /* [count]; [count, channels], ascending */
    float *a;                /* [count, channels]: of each kept channel u, later silu(gate . x) * u */
    float *gates;            /* [count, channels], by channel; before that each of several rows' u */
    uint8_t *any;            /* [channels]: some row keeps it; not for one row alone */
};

/* The parts of the caller's scratch. */
struct masked_scratch {
    struct packed x;
    float *u;              /* [channels, count], in blocks as a product gives them */
    int32_t *sizes;        /* [count, channels] */
    struct tally *tallies; /* [count] */
    struct added y; /* of few rows */
    const uint8_t **gate_x; /* [count] */
    struct kept kept;
    int64_t bytes;
};

static struct masked_scratch lay_out_masked(const struct weights *w, int64_t channels, int64_t rows, void *from) {
    struct masked_scratch s = {.kept = {.channels = channels, .count = rows}};
    uint8_t *at = from;
    int64_t inputs = rounded_up(w->inputs, w->group);
    TAKE(x.codes, rows * inputs);
    TAKE(x.factors, rows * inputs / w->group * 8);
    TAKE(u, rows * channels * 4);
    TAKE(sizes, rows * channels * 4);
    TAKE(tallies, rows * (int64_t)sizeof *s.tallies);
    s.y.stride = rounded_up(w->outputs, WIDTH), s.y.zeros_stride = rounded_up(s.y.stride / GROUP, SEGMENT);
    TAKE(y.numbers, least(rows, GATES) * s.y.stride * 4);
    TAKE(y.zeros, least(rows, GATES) * s.y.zeros_stride * 4);
    TAKE(gate_x, rows * (int64_t)sizeof *s.gate_x);
    TAKE(kept.number, rows * 4);
    TAKE(kept.which, rows * channels * 4);
    TAKE(kept.a, rows * channels * 4);
    TAKE(kept.gates, rows * channels * 4);
    TAKE(kept.any, channels);
    s.bytes = at - (uint8_t *)from;
    return s;
}

/* --- few rows, one thread --------------------------------------------------------------------------------------- */

/* Where the records are that come SUMMED channels after channels [first, first + taken), in bytes from each of these. */
static void records_ahead(const int32_t *channels, int64_t number, int64_t first, int64_t taken, int64_t record,
                          int64_t *next) {
    for (int64_t i = first; i < first + taken; i++)
        next[i - first] = i + SUMMED < number ? (channels[i + SUMMED] - channels[i]) * record : HERE;
}

static void one_row(const struct row_shape *shape, const uint8_t *records, const struct masked_scratch *s) {
    const struct kept *k = &s->kept;
    int64_t number = k->number[0], record = 2 * shape->bytes;
    for (int64_t first = 0; first < number; first += SUMMED) {
        int64_t taken = least(SUMMED, number - first), next[SUMMED];
        const uint8_t *gate[SUMMED], *down[SUMMED];
        float a[1][SUMMED];
        records_ahead(k->which, number, first, taken, record, next);
        for (int64_t i = 0; i < taken; i++)
            gate[i] = records + k->which[first + i] * record, down[i] = gate[i] + shape->bytes;
        gates_of_row(shape, gate, taken, s->gate_x[0], next, a[0]);
        silu_times(a[0], k->a + first, taken);
        add_down(shape, down, (const float (*)[SUMMED])a, 1, taken, next, &s->y);
    }
}

static void few_rows(const struct row_shape *shape, const uint8_t *records, const struct masked_scratch *s) {
    const struct kept *k = &s->kept;
    int64_t rows = k->count, number = 0, record = 2 * shape->bytes, at[GATES] = {0};
    int32_t *all = s->sizes; /* the channels that some row keeps */
    for (int64_t c = 0; c < k->channels; c++) all[number] = (int32_t)c, number += k->any[c];
    for (int64_t first = 0; first < number; first += SUMMED) {
        int64_t taken = least(SUMMED, number - first), next[SUMMED], counts[GATES] = {0};
        const uint8_t *down[SUMMED];
        float a[GATES][SUMMED] = {{0}}, gates[GATES][SUMMED], u[GATES][SUMMED]; /* of a row's own, the latter two */
        int32_t places[GATES][SUMMED];
        records_ahead(all, number, first, taken, record, next);
        for (int64_t i = 0; i < taken; i++) {
            int32_t channel = all[first + i];
            const uint8_t *gate = records + channel * record, *x[GATES];
            int64_t which[GATES], n = 0;
            for (int64_t r = 0; r < rows; r++) {
                int64_t place = r * k->channels + at[r];
                if (at[r] == k->number[r] || k->which[place] != channel) continue;
                which[n] = r, x[n++] = s->gate_x[r];
                places[r][counts[r]] = (int32_t)i, u[r][counts[r]] = k->a[place], at[r]++;
            }
            float dots[GATES];
            gate_products(shape, gate, x, n, next[i], dots);
            for (int64_t j = 0; j < n; j++) gates[which[j]][counts[which[j]]++] = dots[j];
            down[i] = gate + shape->bytes;
        }
        for (int64_t r = 0; r < rows; r++) {
            silu_times(gates[r], u[r], counts[r]);
            for (int64_t i = 0; i < counts[r]; i++) a[r][places[r][i]] = gates[r][i];
        }
        add_down(shape, down, (const float (*)[SUMMED])a, rows, taken, next, &s->y);
    }
}

/* --- many rows, or threads that share them ------------------------------------------------------------------------ */

struct shared_channels {
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
                    gate_products(p->shape, p->records + c * record, x, n, HERE, dots);
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
    }
}

/* y of WIDTHs [lo, hi). */
static void shared_down(void *context, int64_t lo, int64_t hi) {
    const struct shared_channels *p = context;
    const struct kept *k = &p->s->kept;
    struct decoded numbers[CHUNK], y[MASK_STRIP];
    for (int64_t strip = 0; strip < k->count; strip += MASK_STRIP) {
        int64_t rows = least(MASK_STRIP, k->count - strip);
        for (int64_t h = lo * WIDTH; h < least(hi * WIDTH, p->shape->numbers); h += WIDTH) {
            int32_t at[MASK_STRIP] = {0};
            memset(y, 0, (size_t)rows * sizeof *y);
            for (int64_t start = 0; start < k->channels; start += CHUNK) {
                int64_t end = least(start + CHUNK, k->channels);
                for (int64_t c = start; c < end; c++)
                    if (k->any[c])
                        decode_down(p->shape, p->records + (2 * c + 1) * p->shape->bytes, h, numbers + c - start);
                for (int64_t r = 0; r < rows; r++) {
                    const int32_t *which = k->which + (strip + r) * k->channels + at[r];
                    int32_t places[CHUNK];
                    int64_t n = 0, more = k->number[strip + r] - at[r];
                    for (; n < more && which[n] < end; n++) places[n] = which[n] - (int32_t)start;
                    const float *a = k->a + (strip + r) * k->channels + at[r];
                    add_decoded(numbers, places, a, n, y + r);
                    at[r] += (int32_t)n;
                }
            }
            struct row_shape part = {.bits = p->shape->bits, .numbers = least(WIDTH, p->shape->numbers - h)};
            for (int64_t r = 0; r < rows; r++) {
                const struct added sum = {y[r].codes, y[r].zeros, 0, 0};
                take_added(&part, &sum, 0, p->add, p->y + (strip + r) * p->shape->numbers + h);
            }
        }
    }
}

/* --- either ----------------------------------------------------------------------------------------------------- */

/* y [count, outputs] = or += what the kept channels of `records` give. */
static void kept_channels(struct team *team, const struct weights *w, const uint8_t *records,
                          const struct masked_scratch *s, float *y, int add) {
    struct row_shape shape = row_shape_of(w);
    int64_t rows = s->kept.count;
    if (!team && rows <= GATES) {
        memset(s->y.numbers, 0, (size_t)(rows * s->y.stride) * sizeof *s->y.numbers);
        memset(s->y.zeros, 0, (size_t)(rows * s->y.zeros_stride) * sizeof *s->y.zeros);
        if (rows == 1)
            one_row(&shape, records, s);
        else
            few_rows(&shape, records, s);
        for (int64_t r = 0; r < rows; r++) take_added(&shape, &s->y, r, add, y + r * w->outputs);
        return;
    }
    struct shared_channels shared = {&shape, records, s, y, add};
    parallel_for(team, shared_gates, &shared, s->kept.channels, WAKE_NS);
    parallel_for(team, shared_activations, &shared, rows, WAKE_NS);
    parallel_for(team, shared_down, &shared, s->y.stride / WIDTH, 0);
}
