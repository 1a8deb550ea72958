/* All items of a Work in one call, for few rows: threads take whole tiles, one after the other, so that they
 * synchronise once a Work and not three times a tile. Part of body.h. */
#pragma once

#include "kernels.h"
#include "team.h"

struct work {
    const struct weights *w;
    const uint8_t *layer;
    int64_t expert_bytes, tile_bytes, number, tiles; /* `tiles` of all items */
    const int32_t *items, *offsets, *rows;
    const struct activations *x;
    float *parts; /* of each tile the outputs [count, H] of its rows */
    uint8_t *scratch;
    int64_t scratch_bytes; /* bytes of scratch for one thread */
    int64_t next; /* the next tile to take; atomic */
    volatile uint64_t *ticks;
};

static int64_t tiles_of(const struct work *k, int64_t item) { return k->items[3 * item + 2] - k->items[3 * item + 1]; }
static int64_t rows_of(const struct work *k, int64_t item) { return k->offsets[item + 1] - k->offsets[item]; }

static void take_tiles(void *context, int64_t lo, int64_t hi) {
    struct work *k = context;
    for (int64_t thread = lo; thread < hi; thread++) {
        int64_t item = 0, before = 0; /* tiles of the items before this one */
        float *parts = k->parts;
        for (;;) {
            int64_t tile = __atomic_fetch_add(&k->next, 1, __ATOMIC_RELAXED);
            if (tile >= k->tiles) break;
            for (; tile >= before + tiles_of(k, item); item++) {
                before += tiles_of(k, item);
                parts += tiles_of(k, item) * rows_of(k, item) * k->w->outputs;
            }
            int64_t count = rows_of(k, item), at = tile - before;
            const int32_t *which = k->items + 3 * item;
            tandem_tiles(NULL, k->w, k->layer + which[0] * k->expert_bytes + (which[1] + at) * k->tile_bytes, 1, k->x,
                         k->rows + k->offsets[item], count, parts + at * count * k->w->outputs,
                         k->scratch + thread * k->scratch_bytes, NULL);
            if (k->ticks) __atomic_add_fetch(k->ticks, 1, __ATOMIC_RELAXED);
        }
    }
}

/* y[row] += weight * the sum of the tiles' outputs, in their order; items in theirs. */
static void combine_tiles(const struct work *k, const float *weights, float *y) {
    int64_t width = k->w->outputs;
    float *parts = k->parts;
    for (int64_t item = 0; item < k->number; item++) {
        int64_t count = rows_of(k, item), tiles = tiles_of(k, item), step = count * width;
        for (int64_t t = 1; t < tiles; t++)
            for (int64_t i = 0; i < step; i++) parts[i] += parts[t * step + i];
        for (int64_t r = 0; r < count; r++) {
            float weight = weights[k->offsets[item] + r];
            float *restrict to = y + k->rows[k->offsets[item] + r] * width;
            for (int64_t i = 0; i < width; i++) to[i] += parts[r * width + i] * weight;
        }
        parts += tiles * step;
    }
}

void tandem_work(struct team *team, const struct weights *w, const uint8_t *layer, int64_t expert_bytes,
                 int64_t tile_bytes, const int32_t *items, const int32_t *offsets, int64_t number,
                 const struct activations *x, const int32_t *rows, const float *weights, float *y, float *parts,
                 void *scratch, int64_t scratch_bytes, volatile uint64_t *ticks) {
    struct work k = {.w = w, .layer = layer, .expert_bytes = expert_bytes, .tile_bytes = tile_bytes, .number = number,
                     .items = items, .offsets = offsets, .rows = rows, .x = x, .parts = parts, .scratch = scratch,
                     .scratch_bytes = scratch_bytes, .ticks = ticks};
    for (int64_t item = 0; item < number; item++) k.tiles += tiles_of(&k, item);
    parallel_for(team, take_tiles, &k, team ? team->threads : 1, 0);
    combine_tiles(&k, weights, y);
}
