/* All items of a Work in one call. Few rows for each: threads take whole tiles, one after the other, so that they
 * synchronise once a Work and not three times a tile. More rows: items.h. Part of body.h. */
#pragma once

#include "items.h"

struct tile_queue {
    const struct source *from;
    int64_t tiles, scratch_bytes; /* `tiles` of all items, scratch of one thread */
    float *parts;
    uint8_t *scratch;
    int64_t next; /* the next tile to take; atomic */
};

static void take_tiles(void *context, int64_t lo, int64_t hi) {
    struct tile_queue *q = context;
    const struct work *k = q->from->work;
    int64_t width = q->from->w->outputs;
    for (int64_t thread = lo; thread < hi; thread++) {
        int64_t item = 0, before = 0; /* tiles of the items before this one */
        float *parts = q->parts;
        for (;;) {
            int64_t tile = __atomic_fetch_add(&q->next, 1, __ATOMIC_RELAXED);
            if (tile >= q->tiles) break;
            for (; tile >= before + tiles_of(k, item); item++) {
                before += tiles_of(k, item);
                parts += tiles_of(k, item) * rows_of(k, item) * width;
            }
            int64_t at = tile - before;
            compute_part(NULL, q->from, item, at, 1, tile, parts + at * rows_of(k, item) * width,
                         q->scratch + thread * q->scratch_bytes);
            if (q->from->ticks) __atomic_add_fetch(q->from->ticks, 1, __ATOMIC_RELAXED);
        }
    }
}

/* y[row] += weight * the sum of the tiles' outputs, in their order; items in theirs. */
static void combine_tiles(const struct work *k, int64_t width, float *parts, float *y) {
    for (int64_t item = 0; item < k->number; item++) {
        int64_t tiles = tiles_of(k, item), step = rows_of(k, item) * width;
        for (int64_t t = 1; t < tiles; t++)
            for (int64_t i = 0; i < step; i++) parts[i] += parts[t * step + i];
        add_item(k, item, parts, y, width, 0, width);
        parts += tiles * step;
    }
}

/* y += the Work's result. `parts` has part_numbers, `scratch` so many bytes for each thread. */
static void compute_work(struct team *team, const struct source *from, float *y, float *parts, void *scratch,
                         int64_t scratch_bytes) {
    const struct work *work = from->work;
    const struct weights *w = from->w;
    if (most_rows(work) > FEW_ROWS) {
        struct item_queue q = {.from = from, .parts = parts, .y = y, .scratch = scratch,
                               .scratch_bytes = scratch_bytes};
        compute_items(team, &q, part_numbers(w, work) / w->outputs);
        return;
    }
    struct tile_queue q = {.from = from, .parts = parts, .scratch = scratch, .scratch_bytes = scratch_bytes,
                           .tiles = all_tiles(work)};
    parallel_for(team, take_tiles, &q, team ? team->threads : 1, 0);
    combine_tiles(work, w->outputs, parts, y);
}
