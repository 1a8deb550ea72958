/* Whether the numbers in a Work's arrays are right; how many outputs are kept, and the tiles function that checks its
 * rows. Part of body.h. */
#pragma once

#include "kernels.h"
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

/* Whether all of rows[0..count) are rows of an array of `limit`. */
static int rows_within(const int32_t *rows, int64_t count, int64_t limit) {
    int outside = 0;
    for (int64_t i = 0; i < count; i++) outside |= (rows[i] < 0) | (rows[i] >= limit);
    return !outside;
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
                          const struct activations *x, const int32_t *chosen, int64_t count, float *y, void *memory,
                          volatile uint64_t *ticks);

int tandem_tiles(struct team *team, const struct weights *w, const uint8_t *tiles, int64_t number,
                 const struct activations *x, int64_t rows, const int32_t *chosen, int64_t count, float *y,
                 void *memory, volatile uint64_t *ticks) {
    if (!rows_within(chosen, count, rows)) return BAD_ROWS;
    compute_tiles(team, w, tiles, number, x, chosen, count, y, memory, ticks);
    return FINE;
}
