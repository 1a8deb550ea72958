/* The items of a Work with many rows: threads take whole items, and share the blocks of an item that is a large part of
 * the Work. Part of body.h. */
#pragma once

#include "ranges.h"
#include "source.h"
#include "team.h"

enum { BALANCED = 16 }; /* items smaller than a thread's share by this factor leave all threads busy until the end */

/* y[row][lo, hi) += weight * part[row][lo, hi) for the rows of an item. */
static void add_item(const struct work *k, int64_t item, const float *part, float *y, int64_t width, int64_t lo,
                     int64_t hi) {
    for (int64_t at = k->offsets[item]; at < k->offsets[item + 1]; at++, part += width) {
        float weight = k->row_weights[at];
        float *restrict to = y + k->rows[at] * width;
        for (int64_t i = lo; i < hi; i++) to[i] += part[i] * weight;
    }
}

struct item_queue {
    const struct source *from;
    float *parts, *y; /* `parts`: the outputs [rows, H] of items [first, end), one after the other */
    uint8_t *scratch;
    int64_t scratch_bytes;
    int64_t first, end, next; /* `next` item to take; atomic */
};

static void compute_item(const struct item_queue *q, int64_t item, struct team *team, int64_t thread) {
    const struct source *s = q->from;
    const struct work *k = s->work;
    int64_t before = 0; /* tiles of the items before this one */
    for (int64_t i = 0; i < item; i++) before += tiles_of(k, i);
    compute_part(team, s, item, 0, tiles_of(k, item), before,
                 q->parts + (int64_t)(k->offsets[item] - k->offsets[q->first]) * s->w->outputs,
                 q->scratch + thread * q->scratch_bytes);
    if (s->ticks) __atomic_add_fetch(s->ticks, (uint64_t)tiles_of(k, item), __ATOMIC_RELAXED);
}

static void take_items(void *context, int64_t lo, int64_t hi) {
    struct item_queue *q = context;
    for (int64_t thread = lo; thread < hi; thread++)
        for (int64_t item; (item = __atomic_fetch_add(&q->next, 1, __ATOMIC_RELAXED)) < q->end;)
            compute_item(q, item, NULL, thread);
}

/* Threads add columns of their own, item after item. */
static void add_items(void *context, int64_t lo, int64_t hi) {
    const struct item_queue *q = context;
    const struct work *k = q->from->work;
    int64_t width = q->from->w->outputs;
    for (int64_t item = q->first; item < q->end; item++)
        add_item(k, item, q->parts + (int64_t)(k->offsets[item] - k->offsets[q->first]) * width, q->y, width, lo * BLOCK,
                 least(hi * BLOCK, width));
}

static void compute_items(struct team *team, struct item_queue *q, int64_t room) {
    const struct work *k = q->from->work;
    int64_t large = team ? k->row_number / (team->threads * BALANCED) : k->row_number;
    for (; q->first < k->number; q->first = q->end) {
        int64_t rows = rows_of(k, q->first);
        q->end = q->first + 1, q->next = q->first;
        if (rows > large) {
            compute_item(q, q->first, team, 0);
        } else {
            for (; q->end < k->number && rows_of(k, q->end) <= large && rows + rows_of(k, q->end) <= room; q->end++)
                rows += rows_of(k, q->end);
            parallel_for(team, take_items, q, team ? team->threads : 1, WAKE_NS);
        }
        parallel_for(team, add_items, q, (q->from->w->outputs + BLOCK - 1) / BLOCK, q->end < k->number ? WAKE_NS : 0);
    }
}
