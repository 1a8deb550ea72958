/* The items of a Work: whether their numbers are right, where their tiles lie, and items with many rows: threads take
 * whole ones, and share the blocks of an item that is a large part of the Work. Part of body.h. */
#pragma once

#include "blocks.h"
#include "kernels.h"
#include "masked.h"
#include "team.h"
#include "vectors.h"

enum { FEW_ROWS = 4 };   /* up to so many rows for each item of a Work, threads take tiles */
enum { WAVE = 1 << 22 }; /* numbers: outputs of items that are kept before they are added, unless one item has more */

static int64_t tiles_of(const struct work *k, int64_t item) {
    return (int64_t)k->items[3 * item + 2] - k->items[3 * item + 1];
}
static int64_t rows_of(const struct work *k, int64_t item) {
    return (int64_t)k->offsets[item + 1] - k->offsets[item];
}

static int64_t all_tiles(const struct work *k) {
    int64_t tiles = 0;
    for (int64_t item = 0; item < k->number; item++) tiles += tiles_of(k, item);
    return tiles;
}

static int64_t most_rows(const struct work *k) {
    int64_t most = 0;
    for (int64_t item = 0; item < k->number; item++) most = rows_of(k, item) > most ? rows_of(k, item) : most;
    return most;
}

/* FINE, or which of a Work's numbers are wrong. */
static int work_fault(const struct work *k) {
    if (k->offsets[0] != 0 || k->offsets[k->number] != k->row_number) return BAD_OFFSETS;
    for (int64_t item = 0; item < k->number; item++)
        if (rows_of(k, item) < 0) return BAD_OFFSETS; /* so all lie between the first and the last */
    if (!rows_within(k->rows, k->row_number, k->x_rows)) return BAD_ROWS;
    for (int64_t item = 0; item < k->number; item++) {
        const int32_t *which = k->items + 3 * item;
        if (which[0] < 0 || which[0] >= k->experts || which[1] < 0 || tiles_of(k, item) < 1 || which[2] > k->tiles)
            return BAD_ITEMS;
        for (int64_t at = k->offsets[item] + 1; at < k->offsets[item + 1]; at++)
            if (k->rows[at] <= k->rows[at - 1]) return BAD_ORDER;
    }
    return FINE;
}

/* Numbers of the outputs of several tiles or items: no more than the Work's rows have with all their tiles. */
static int64_t part_numbers(const struct weights *w, const struct work *k) {
    int64_t most = most_rows(k), room = WAVE / w->outputs, parts = 0;
    if (most > FEW_ROWS) return least(k->row_number, room > most ? room : most) * w->outputs;
    for (int64_t item = 0; item < k->number; item++) parts += tiles_of(k, item) * rows_of(k, item) * w->outputs;
    return parts;
}

/* tandem_tiles without its checks. */
static void compute_tiles(struct team *team, const struct weights *w, const uint8_t *tiles, int64_t number,
                          const struct activations *x, const int32_t *chosen, int64_t count, float *y, void *memory);

int tandem_tiles(struct team *team, const struct weights *w, const uint8_t *tiles, int64_t number,
                 const struct activations *x, int64_t rows, const int32_t *chosen, int64_t count, float *y,
                 void *memory) {
    if (!rows_within(chosen, count, rows)) return BAD_ROWS;
    compute_tiles(team, w, tiles, number, x, chosen, count, y, memory);
    return FINE;
}

struct source {
    const struct weights *w;
    const struct work *work;
    const uint8_t *tiles, *heads; /* of the layer's first expert */
    int64_t expert_bytes, tile_bytes, head_stride, head_bytes, up_biases; /* as of a host */
    struct masked_x x;
    struct mask mask;
    struct tally *tallies; /* of all tiles of the items, where tiles have heads */
    volatile uint64_t *ticks;
};

/* y [rows, H] = the sum of tiles [first, first + number) of an item for its rows. `at`: the number of the first one among
 * all tiles of the Work's items. */
static void compute_part(struct team *team, const struct source *s, int64_t item, int64_t first, int64_t number,
                         int64_t at, float *y, void *scratch) {
    const struct work *k = s->work;
    const int32_t *which = k->items + 3 * item, *rows = k->rows + k->offsets[item];
    int64_t tile = which[1] + first, count = rows_of(k, item);
    const uint8_t *tiles = s->tiles + which[0] * s->expert_bytes + tile * s->tile_bytes;
    if (!s->w->channel_bits) {
        compute_tiles(team, s->w, tiles, number, &s->x.of, rows, count, y, scratch);
        return;
    }
    const uint8_t *heads = s->heads + which[0] * s->head_stride;
    const float *biases = s->up_biases ? (const float *)(heads + s->up_biases) + tile * s->w->channels : NULL;
    masked_tiles(team, s->w, heads + tile * s->head_bytes, s->head_bytes, biases, tiles, s->tile_bytes, number, &s->x,
                 rows, count, &s->mask, y, scratch, s->tallies + at);
}

/* Bytes of scratch that `rows` rows of a tile need. */
static int64_t part_scratch(const struct weights *w, int64_t rows) {
    return w->channel_bits ? lay_out_masked(w, w->channels, rows, NULL).bytes : tandem_scratch(w, rows);
}

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
