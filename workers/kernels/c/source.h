/* Where the tiles of a Work's items lie, and what computes them. Part of body.h. */
#pragma once

#include "masked.h"

struct source {
    const struct weights *w;
    const struct work *work;
    const uint8_t *tiles, *heads; /* of the layer's first expert */
    int64_t expert_bytes, tile_bytes, head_stride, head_bytes;
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
    if (s->w->channel_bits)
        masked_tiles(team, s->w, s->heads + which[0] * s->head_stride + tile * s->head_bytes, s->head_bytes, tiles,
                     s->tile_bytes, number, &s->x, rows, count, &s->mask, y, scratch, s->tallies + at);
    else
        compute_tiles(team, s->w, tiles, number, &s->x.of, rows, count, y, scratch, NULL);
}

/* Bytes of scratch that `rows` rows of a tile need. */
static int64_t part_scratch(const struct weights *w, int64_t rows) {
    return w->channel_bits ? lay_out_masked(w, w->channels, rows, NULL).bytes : tandem_scratch(w, rows);
}
