/* The channels that rows of x keep of a tile whose gate and down lie by channel (shm/floe.py), and what they add to y: a
 * row's y is the sum over its own kept channels, in their order, by one thread. What a row has read is in the core's cache
 * for the next one. Part of body.h. */
#pragma once

#include "blocks.h"
#include "channels.h"
#include "team.h"

enum { HERE = 0 }; /* prefetches what is read anyway: there is no later record */

struct kept { /* of rows: the channels that each keeps */
    int64_t channels, count;
    int32_t *number, *which; /* [count]; [count, channels], ascending */
    float *a;                /* [count, channels]: u of each kept channel, with its bias */
    uint8_t *any;            /* [channels]: some row keeps it; not for one row alone */
};

/* The parts of the caller's scratch. */
struct masked_scratch {
    struct packed x;
    float *u;               /* [channels, count], in blocks as a product gives them */
    float *rows;            /* [count, channels]: u by rows */
    int32_t *sizes;         /* [count, channels] */
    struct tally *tallies;  /* [count] */
    struct added y;         /* of each row */
    const uint8_t **gate_x; /* [count] */
    struct kept kept;
    int64_t bytes;
};

static struct masked_scratch lay_out_masked(const struct weights *w, int64_t channels, int64_t rows, void *from) {
    struct masked_scratch s = {.kept = {.channels = channels, .count = rows}};
    uint8_t *at = from;
    int64_t inputs = padded_inputs(w, w->inputs);
    TAKE(s.x.codes, rows * inputs);
    TAKE(s.x.factors, rows * inputs / w->group * 8);
    TAKE(s.u, rows * channels * 4);
    TAKE(s.rows, rows * channels * 4);
    TAKE(s.sizes, rows * channels * 4);
    TAKE(s.tallies, rows * (int64_t)sizeof *s.tallies);
    s.y.stride = rounded_up(w->outputs, WIDTH), s.y.zeros_stride = rounded_up(s.y.stride / GROUP, SEGMENT);
    TAKE(s.y.numbers, rows * s.y.stride * 4);
    TAKE(s.y.zeros, rows * s.y.zeros_stride * 4);
    TAKE(s.gate_x, rows * (int64_t)sizeof *s.gate_x);
    TAKE(s.kept.number, rows * 4);
    TAKE(s.kept.which, rows * channels * 4);
    TAKE(s.kept.a, rows * channels * 4);
    TAKE(s.kept.any, channels);
    s.bytes = at - (uint8_t *)from;
    return s;
}

/* Where the records are that come SUMMED channels after channels [first, first + taken), in bytes from each of these. */
static void records_ahead(const int32_t *channels, int64_t number, int64_t first, int64_t taken, int64_t record,
                          int64_t *next) {
    for (int64_t i = first; i < first + taken; i++)
        next[i - first] = i + SUMMED < number ? (channels[i + SUMMED] - channels[i]) * record : HERE;
}

struct channel_rows {
    const struct expert_math *math;
    const struct row_shape *shape;
    const uint8_t *records;
    const struct masked_scratch *s;
    float *y; /* [count, outputs] */
    int add;  /* y += and not = */
};

/* y of rows [lo, hi). */
static void add_kept(void *context, int64_t lo, int64_t hi) {
    const struct channel_rows *p = context;
    const struct row_shape *shape = p->shape;
    const struct kept *k = &p->s->kept;
    int64_t record = shape->channel, biases = p->math->biases;
    for (int64_t r = lo; r < hi; r++) {
        const int32_t *which = k->which + r * k->channels;
        int64_t number = k->number[r];
        struct added sum = p->s->y;
        sum.numbers += r * sum.stride, sum.zeros += r * sum.zeros_stride;
        memset(sum.numbers, 0, (size_t)sum.stride * sizeof *sum.numbers);
        memset(sum.zeros, 0, (size_t)sum.zeros_stride * sizeof *sum.zeros);
        for (int64_t first = 0; first < number; first += SUMMED) {
            int64_t taken = least(SUMMED, number - first), next[SUMMED];
            const uint8_t *gate[SUMMED], *down[SUMMED];
            float a[SUMMED];
            records_ahead(which, number, first, taken, record, next);
            for (int64_t i = 0; i < taken; i++)
                gate[i] = p->records + which[first + i] * record, down[i] = gate[i] + shape->bytes;
            gates_of_row(shape, gate, taken, p->s->gate_x[r], next, a);
            for (int64_t i = 0; biases && i < taken; i++) a[i] += *(const float *)(gate[i] + biases);
            activated(p->math, a, k->a + r * k->channels + first, taken);
            add_down(shape, down, a, taken, next, &sum);
        }
        take_added(shape, &sum, p->add, p->y + r * shape->numbers);
    }
}

/* y [count, outputs] = or += what the kept channels of `records` give. */
static void kept_channels(struct team *team, const struct weights *w, const uint8_t *records,
                          const struct masked_scratch *s, float *y, int add) {
    struct row_shape shape = row_shape_of(w);
    struct channel_rows rows = {&w->math, &shape, records, s, y, add};
    parallel_for(s->kept.count > 1 ? team : NULL, add_kept, &rows, s->kept.count, 0);
}
