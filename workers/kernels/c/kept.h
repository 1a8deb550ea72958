/* The channels that rows keep, and the scratch of masked tiles. Part of body.h. */
#pragma once

#include "blocks.h"
#include "down.h"

struct kept { /* of rows: the channels that each keeps */
    int64_t channels, count;
    int32_t *number, *which; /* [count]; [count, channels], ascending */
    float *a;                /* [count, channels]: of each kept channel u, later silu(gate . x) * u */
    float *gates;            /* [count, channels], by channel: gate . x, later a, and 0 where a row leaves a channel
                              * out; before that a row's u */
    uint8_t *any;            /* [channels]: some row keeps it */
};

/* The parts of the caller's scratch. */
struct masked_scratch {
    struct packed x;
    float *u;              /* [channels, count], in blocks as a product gives them */
    int32_t *sizes;        /* [count, channels] */
    struct tally *tallies; /* [count] */
    float *y;              /* few rows: [count, padded outputs] */
    struct stepped *stepped; /* few rows, int4 and int8: [count] */
    struct stepped first;    /* of the first row; the others follow it */
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
    TAKE(y, least(rows, GATES) * rounded_up(w->outputs, WIDTH) * 4);
    int64_t few = least(rows, GATES), slots = rounded_up(rounded_up(w->outputs, WIDTH) / GROUP, SEGMENT);
    TAKE(stepped, few * (int64_t)sizeof *s.stepped);
    TAKE(first.codes, few * QUADS * slots * 4);
    TAKE(first.step, few * slots * 4);
    TAKE(first.rest, few * slots * 4);
    TAKE(first.sums, few * rounded_up(w->outputs, WIDTH) * 4);
    TAKE(gate_x, rows * (int64_t)sizeof *s.gate_x);
    TAKE(kept.number, rows * 4);
    TAKE(kept.which, rows * channels * 4);
    TAKE(kept.a, rows * channels * 4);
    TAKE(kept.gates, rows * channels * 4);
    TAKE(kept.any, channels);
    s.bytes = at - (uint8_t *)from;
    return s;
}
