/* Whether the numbers in a Work's arrays stay within them; how much memory they need, and the tiles
 * function that checks them. Part of body.h. */
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

int tandem_work_buffers(const struct weights *w, const struct work *k, struct buffers *needed) {
    int64_t parts = 0;
    if (k->offsets[0] != 0 || k->offsets[k->number] != k->row_number) return BAD_OFFSETS;
    for (int64_t item = 0; item < k->number; item++) {
        const int32_t *which = k->items + 3 * item;
        int64_t count = rows_of(k, item), tiles = tiles_of(k, item);
        if (count < 0) return BAD_OFFSETS; /* so all lie between the first and the last */
        if (which[0] < 0 || which[0] >= k->experts || which[1] < 0 || tiles < 1 || which[2] > k->tiles)
            return BAD_ITEMS;
        int64_t outputs;
        if (__builtin_mul_overflow(tiles * count, w->outputs, &outputs) ||
            __builtin_add_overflow(parts, outputs, &parts))
            return SMALL_BUFFERS;
    }
    if (!rows_within(k->rows, k->row_number, k->x_rows)) return BAD_ROWS;
    int64_t most = most_rows(k), room = WAVE / w->outputs;
    if (most > FEW_ROWS) parts = least(k->row_number, room > most ? room : most) * w->outputs;
    needed->parts = parts;
    needed->scratch = rounded_up(tandem_scratch(w, most), 64);
    return FINE;
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
