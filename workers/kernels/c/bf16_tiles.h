/* bf16 tiles, row-major: gate rows [T, H], up rows [T, H], down's columns as rows [T, H]. Part of body.h. */
#pragma once

#include "kernels.h"
#include "prefetch.h"
#include "team.h"
#include "vectors.h"

enum { TOGETHER = 8 }; /* channels: their rows of down are added in one pass for several rows of x */
enum { TALL = 4 };     /* rows of gate or up that are taken together */
enum { FEW = 4 };      /* most rows that one read of the weights is applied to */

/* Rows of gate or up that are taken together for one row of x, which shares no reads. One stream of memory is read
 * faster than several; but each row's products are added one after the other, and narrow registers need several such
 * chains to keep pace with memory. */
enum { ONE_TALL = VECTOR_BYTES < 64 ? TALL : 1 };

#define UP_TO_FEW(call)                                                                                          \
    switch (rows) {                                                                                              \
    case 1: call(1); break;                                                                                      \
    case 2: call(2); break;                                                                                      \
    case 3: call(3); break;                                                                                      \
    default: call(4);                                                                                            \
    }

struct bf16_tile {
    const struct weights *w;
    const uint16_t *tile;
    const float *x; /* [count, H] */
    int64_t count;
    float *gate, *up; /* [count, T] */
    float *y;         /* [count, H] of this tile alone */
};

/* y[r][i] = row i . x[r] for `number` and `rows` (constants) consecutive rows of weights and of x: numbers of x are
 * read once for all rows of weights, and the other way round. `bits` of a weight, a constant: BF16 or FLOAT32. Numbers
 * are prefetched `ahead` before their use. */
INLINE void products(const void *weights, const int bits, const int number, int64_t hidden, const float *x,
                     const int rows, const int hint, int64_t ahead, float *y, int64_t stride) {
    vector sums[TALL][FEW];
    for (int i = 0; i < number; i++)
        for (int r = 0; r < rows; r++) sums[i][r] = (vector){0};
    int64_t whole = hidden / PAIR * PAIR;
    for (int64_t h = 0; h < whole; h += PAIR)
        for (int half = 0; half < PAIR; half += LANES) {
            vector wide[TALL];
            for (int i = 0; i < number; i++) {
                int64_t at = i * hidden + h + half;
                if (!half || bits != BF16) PREFETCH((const char *)weights + (at + ahead) * (bits / 8), hint);
                wide[i] = vector_at(weights, at, bits);
            }
            for (int r = 0; r < rows; r++) {
                vector one = loaded(x + r * hidden + h + half);
                for (int i = 0; i < number; i++) sums[i][r] = VFMA(wide[i], one, sums[i][r]);
            }
        }
    for (int i = 0; i < number; i++)
        for (int r = 0; r < rows; r++) {
            float sum = SUM(sums[i][r]);
            for (int64_t h = whole; h < hidden; h++) sum += number_at(weights, i * hidden + h, bits) * x[r * hidden + h];
            y[r * stride + i] = sum;
        }
}

/* y[i] = row i . x for one row of x and ONE_TALL or 1 rows of weights. */
INLINE void one_row_products(const struct weights *w, const void *weights, const int bits, int64_t number,
                             const float *x, float *y) {
    int64_t hidden = w->inputs, ahead = ONE_TALL > 1 ? ONE_TALL * hidden : w->ahead * 8 / bits;
#define CALL_ONE_TALL(hint) products(weights, bits, ONE_TALL, hidden, x, 1, hint, ahead, y, 0)
    if (number > 1)
        EACH_HINT(w->hint, CALL_ONE_TALL)
#define CALL_ONE_ONE(hint) products(weights, bits, 1, hidden, x, 1, hint, ahead, y, 0)
    else
        EACH_HINT(w->hint, CALL_ONE_ONE)
}

/* y[r][i] = row i . x[r] for `count` rows of x and rows [lo, hi) of `weights` [.., inputs]; y has `stride` numbers a
 * row. `bits` of a weight: a constant. */
INLINE void row_products(const struct weights *w, const void *weights, const int bits, int64_t lo, int64_t hi,
                         const float *x, int64_t count, float *y, int64_t stride) {
    int64_t hidden = w->inputs, tall = count > 1 ? TALL : ONE_TALL;
    for (int64_t i = lo, step; i < hi; i += step) {
        step = i + tall <= hi ? tall : 1;
        const char *from = (const char *)weights + i * hidden * (bits / 8);
        if (count == 1) {
            one_row_products(w, from, bits, step, x, y + i);
            continue;
        }
        for (int64_t first = 0; first < count; first += FEW) {
            const float *few = x + first * hidden;
            float *to = y + first * stride + i;
            int64_t rows = least(FEW, count - first);
#define CALL_TALL(n) products(from, bits, TALL, hidden, few, n, T1, TALL * hidden, to, stride)
#define CALL_ONE(n) products(from, bits, 1, hidden, few, n, T1, hidden, to, stride)
            if (step > 1)
                UP_TO_FEW(CALL_TALL)
            else
                UP_TO_FEW(CALL_ONE)
        }
    }
}

static void gate_and_up(void *context, int64_t lo, int64_t hi) {
    const struct bf16_tile *p = context;
    int64_t hidden = p->w->inputs, channels = p->w->channels;
    for (int half = 0; half < 2; half++)
        row_products(p->w, p->tile + half * channels * hidden, BF16, lo, hi, p->x, p->count, half ? p->up : p->gate,
                     channels);
}

/* y[r][h] += sum of a[r][t] * down[t][h] for `number` (a constant) channels from t, h in [lo, hi), and `rows` rows,
 * prefetched `ahead` rows of down before their use. */
INLINE void columns(const struct bf16_tile *p, int64_t t, const int number, int64_t lo, int64_t hi, int64_t rows,
                    const int hint, int64_t ahead) {
    int64_t hidden = p->w->inputs, channels = p->w->channels;
    const uint16_t *down = p->tile + (2 * channels + t) * hidden;
    int64_t h = lo;
    for (; h + PAIR <= hi; h += PAIR) {
        vector low[TOGETHER], high[TOGETHER];
        for (int i = 0; i < number; i++) {
            const uint16_t *from = down + i * hidden + h;
            PREFETCH(from + ahead * hidden, hint);
            low[i] = WIDENED(from), high[i] = WIDENED(from + LANES);
        }
        for (int64_t r = 0; r < rows; r++) {
            const float *a = p->gate + r * channels + t;
            float *y = p->y + r * hidden + h;
            vector zero = {0}, first = t ? loaded(y) : zero, second = t ? loaded(y + LANES) : zero;
            for (int i = 0; i < number; i++) {
                vector every = a[i] - zero;
                first = VFMA(low[i], every, first);
                second = VFMA(high[i], every, second);
            }
            memcpy(y, &first, sizeof first);
            memcpy(y + LANES, &second, sizeof second);
        }
    }
    for (; h < hi; h++)
        for (int64_t r = 0; r < rows; r++) {
            float sum = t ? p->y[r * hidden + h] : 0.0f;
            for (int i = 0; i < number; i++)
                sum += widened(down[i * hidden + h]) * p->gate[r * channels + t + i];
            p->y[r * hidden + h] = sum;
        }
}

static void down(void *context, int64_t lo, int64_t hi) {
    const struct bf16_tile *p = context;
    int64_t channels = p->w->channels, t = 0;
    lo *= PAIR, hi = least(hi * PAIR, p->w->inputs);
    if (p->count == 1) {
        int64_t ahead = p->w->ahead / (2 * p->w->inputs) + 1;
#define CALL_ROW(hint) for (; t < channels; t++) columns(p, t, 1, lo, hi, 1, hint, ahead)
        EACH_HINT(p->w->hint, CALL_ROW)
    }
    for (; t + TOGETHER <= channels; t += TOGETHER) columns(p, t, TOGETHER, lo, hi, p->count, T1, TOGETHER);
    for (; t < channels; t++) columns(p, t, 1, lo, hi, p->count, T1, TOGETHER);
}

static void activate_bf16(void *context, int64_t lo, int64_t hi) {
    const struct bf16_tile *p = context;
    int64_t channels = p->w->channels;
    silu_times(p->gate + lo * channels, p->up + lo * channels, (hi - lo) * channels);
    round_to_bf16(p->gate + lo * channels, (hi - lo) * channels, p->gate + lo * channels);
}

/* part: scratch [count, H]; x: the chosen rows [count, H]. */
static void bf16_tiles(struct team *team, const struct weights *w, const uint16_t *tiles, int64_t number,
                        const float *x, int64_t count, float *gate, float *up, float *part, float *y,
                        volatile uint64_t *ticks) {
    for (int64_t tile = 0; tile < number; tile++, tiles += 3 * w->channels * w->inputs) {
        struct bf16_tile bf16_tile = {w, tiles, x, count, gate, up, tile ? part : y};
        parallel_for(team, gate_and_up, &bf16_tile, w->channels, WAKE_NS);
        parallel_for(count < ROWS ? NULL : team, activate_bf16, &bf16_tile, count, WAKE_NS);
        parallel_for(team, down, &bf16_tile, (w->inputs + PAIR - 1) / PAIR, tile + 1 < number ? WAKE_NS : 0);
        if (tile)
            for (int64_t i = 0; i < count * w->inputs; i++) y[i] += part[i];
        if (ticks) (*ticks)++;
    }
}
