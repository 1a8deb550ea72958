/* Tiles in bf16, float32 or FP8, row-major: gate rows [T, H], unless ungated, up rows [T, H], down's columns as rows [T,
 * H]; of FP8 then their scales, matrix after matrix. float32, a format for comparison, has a plain loop for down. Matrix
 * units, in variants that have them, compute bf16 and add in an order of their own: not the bits of vectors. Part of
 * body.h. */
#pragma once

#include "blocks.h"
#include "kernels.h"
#include "rows.h"
#include "team.h"
#include "vectors.h"

/* The same size for both operands: 16 rows of A, 16 columns of B, products of 16 pairs of numbers. */
enum { UNIT = 16, UNIT_LINE = 64 };
enum { UNITS_ACROSS = 4 }; /* tiles of B for one of A */
enum { STAGED = 512 };     /* numbers of a row of weights that are copied to pad them */

#ifdef MATRIX_UNITS

static int by_units(int64_t count) { return count >= UNIT_ROWS; }

/* Bytes of x [rows, inputs] as tiles of B: for each UNIT rows their pairs, one of each row in a line. */
static int64_t unit_bytes(int64_t inputs) { return rounded_up(inputs, 2 * UNIT) * UNIT * 2; }

static void arrange_for_units(const float *x, int64_t inputs, const int32_t *chosen, int64_t count, char *to) {
    memset(to, 0, (size_t)(rounded_up(count, UNIT) / UNIT * unit_bytes(inputs)));
    for (int64_t r = 0; r < count; r++) {
        uint16_t *tile = (uint16_t *)(to + r / UNIT * unit_bytes(inputs));
        const float *row = x + chosen[r] * inputs;
        for (int64_t h = 0; h < inputs; h++) tile[(h / 2 * UNIT + r % UNIT) * 2 + h % 2] = narrowed(row[h]);
    }
}

/* y[r][i] = row i . x[r] for rows [lo, hi) of weights, all of `count` rows of x. */
static void products_by_units(const uint16_t *weights, int64_t hidden, int64_t lo, int64_t hi, const char *x,
                              int64_t count, float *y, int64_t stride) {
    uint16_t staged[UNIT * STAGED] __attribute__((aligned(64)));
    float out[UNITS_ACROSS * UNIT * UNIT] __attribute__((aligned(64)));
    for (int64_t first = 0; first < count; first += UNITS_ACROSS * UNIT) {
        const char *strip = x + first / UNIT * unit_bytes(hidden);
        int64_t rows = least(UNITS_ACROSS * UNIT, count - first);
        int across = (int)((rows + UNIT - 1) / UNIT);
        for (int64_t i = lo; i < hi; i += UNIT) {
            int64_t number = least(UNIT, hi - i);
            struct unit_product p = {weights + i * hidden, 2 * hidden, strip, UNIT_LINE, unit_bytes(hidden),
                                     UNIT * UNIT_LINE, hidden / (2 * UNIT), out, UNIT_LINE, UNIT * UNIT_LINE};
            if (number == UNIT && hidden % (2 * UNIT) == 0) {
                multiply_units(&p, across, 0);
            } else {
                p.a = staged, p.a_line = 2 * STAGED;
                for (int64_t h = 0; h < hidden; h += STAGED) {
                    int64_t n = least(STAGED, hidden - h);
                    memset(staged, 0, sizeof staged);
                    for (int64_t r = 0; r < number; r++)
                        memcpy(staged + r * STAGED, weights + (i + r) * hidden + h, (size_t)n * sizeof *weights);
                    p.b = strip + h / (2 * UNIT) * p.b_step, p.depth = (n + 2 * UNIT - 1) / (2 * UNIT);
                    multiply_units(&p, across, h > 0);
                }
            }
            for (int64_t r = 0; r < rows; r++)
                for (int64_t k = 0; k < number; k++)
                    y[(first + r) * stride + i + k] = out[(r / UNIT * UNIT + k) * UNIT + r % UNIT];
        }
    }
}

#else

static int by_units(int64_t count) { return (void)count, 0; }

#endif

enum { TOGETHER = 8 };  /* channels: their rows of down are added in one pass for several rows of x */
enum { COLUMNS = 64 };  /* of down, that are made a panel for many rows of x ... */
enum { DEEP = 128 };    /* ... with so many channels, or pairs of them */
enum { FROM_ROWS = 12 }; /* the least that a panel is made for: two readings by MANY repay making it; changes no bits */

struct plain_tile {
    const struct weights *w;
    const uint8_t *tile;
    const char *x; /* bf16: arranged [count, H]; by units: for them. Others: float32 */
    int64_t count;
    float *gate, *up; /* [count, T] */
    float *inner;     /* inner activations [count, T], of bf16 rounded to it; by pairs [count, pairs] */
    float *part;      /* a sum so far: of a thread's panel [count, COLUMNS]; few rows: of y */
    float *y;         /* [count, H] */
    int add;          /* y += this tile's outputs, and not = */
    int pairs;        /* inner activations and down are taken in pairs of channels, the first one upper */
    int units;        /* by matrix units */
};

/* Numbers that matrix units take together: zero beyond `channels`. */
static int64_t pairs_of(int64_t channels) { return rounded_up(channels, 2 * UNIT) / 2; }

/* Bytes of `x`, `inner` and `part`; matrix units take whole UNITs of rows. */
static int64_t x_bytes(const struct weights *w, int64_t rows) {
    if (w->bits != BF16) return rows * w->inputs * 4;
    return rounded_up(rows, UNIT) * arranged_bytes(rounded_up(w->inputs, 2 * UNIT));
}
static int64_t inner_bytes(const struct weights *w, int64_t rows) {
    return rounded_up(rows, UNIT) * 2 * pairs_of(w->channels) * 4;
}
static int64_t part_bytes(const struct weights *w, int64_t rows) {
    return rounded_up(rows, UNIT) * rounded_up(w->outputs, COLUMNS) * 4;
}

/* A matrix of the tile: the last is down, up is before it. */
static const void *matrix_of(const struct plain_tile *p, int64_t number) {
    return p->tile + number * p->w->channels * p->w->inputs * number_bytes(p->w->bits);
}
static const void *down_of(const struct plain_tile *p) { return matrix_of(p, wide_matrices(p->w)); }

/* The scales of a matrix of the tile [T / SCALED, H / SCALED]; not FP8: unused. */
static const float *scales_in(const struct plain_tile *p, int64_t number) {
    int64_t blocks = p->w->channels / SCALED * blocks_of(p->w->inputs);
    return (const float *)matrix_of(p, wide_matrices(p->w) + 1) + number * blocks;
}

/* LANES numbers from `h` on of a row of down. `kind`: FP8, with their scale times E4M3_UNIT, or BF16. */
INLINE vector down_at(const void *row, int64_t h, const int kind, float scale) {
    if (kind == BF16) return WIDENED((const uint16_t *)row + h);
    return WIDENED_E4M3((const uint8_t *)row + h) * (scale - (vector){0});
}

static void gate_and_up(void *context, int64_t lo, int64_t hi) {
    const struct plain_tile *p = context;
    int64_t channels = p->w->channels, wide = wide_matrices(p->w);
    if (wide > 1) plain_products(p->w, p->tile, scales_in(p, 0), lo, hi, p->x, p->count, p->gate, channels);
    plain_products(p->w, matrix_of(p, wide - 1), scales_in(p, wide - 1), lo, hi, p->x, p->count, p->up, channels);
}

#ifdef MATRIX_UNITS
/* Units [lo, hi) of UNIT channels. */
static void gate_and_up_by_units(void *context, int64_t lo, int64_t hi) {
    const struct plain_tile *p = context;
    int64_t hidden = p->w->inputs, channels = p->w->channels, wide = wide_matrices(p->w);
    lo *= UNIT, hi = least(hi * UNIT, channels);
    bf16_units_begin();
    if (wide > 1) products_by_units(matrix_of(p, 0), hidden, lo, hi, p->x, p->count, p->gate, channels);
    products_by_units(matrix_of(p, wide - 1), hidden, lo, hi, p->x, p->count, p->up, channels);
    units_end();
}

/* part [count, COLUMNS] = or += inner panel; the rows after `count` in its last unit are computed, too. */
static void panel_by_units(const struct plain_tile *p, const float *inner, const float *panel, int64_t depth,
                           float *part, int add) {
    int64_t stride = pairs_of(p->w->channels);
    bf16_units_begin();
    for (int64_t first = 0; first < p->count; first += UNIT) {
        struct unit_product product = {inner + first * stride, 4 * stride, panel, 4 * COLUMNS, UNIT_LINE,
                                       4 * COLUMNS * UNIT, (depth + UNIT - 1) / UNIT, part + first * COLUMNS,
                                       4 * COLUMNS, UNIT_LINE};
        multiply_units(&product, UNITS_ACROSS, add);
    }
    units_end();
}
#endif

static void activate_plain(void *context, int64_t lo, int64_t hi) {
    const struct plain_tile *p = context;
    int64_t channels = p->w->channels, pairs = pairs_of(channels);
    for (int64_t r = lo; r < hi; r++) {
        float *gate = p->gate + r * channels;
        activate_channels(p->w, p->tile, 0, gate, p->up + r * channels, channels);
        if (p->w->bits != BF16)
            memcpy(p->inner + r * channels, gate, (size_t)channels * sizeof *gate);
        else
            round_to_bf16(gate, channels, p->pairs ? gate : p->inner + r * channels);
        for (int64_t i = 0; p->pairs && i < pairs; i++) {
            uint32_t upper = 2 * i < channels ? narrowed(gate[2 * i]) : 0;
            uint32_t lower = 2 * i + 1 < channels ? narrowed(gate[2 * i + 1]) : 0, pair = upper << 16 | lower;
            memcpy(p->inner + r * pairs + i, &pair, sizeof pair);
        }
    }
}

/* --- few rows: down is read once ------------------------------------------------------------------------------ */

/* part[r][h] += sum of inner[r][t] * down[t][h] for `number` (a constant) channels from t, h in [lo, hi), and `rows`
 * rows, prefetched `ahead` rows of down before their use. */
INLINE void columns(const struct plain_tile *p, const int kind, float *part, int64_t t, const int number, int64_t lo,
                    int64_t hi, int64_t rows, int64_t ahead) {
    int64_t hidden = p->w->inputs, channels = p->w->channels, row = hidden * number_bytes(kind);
    const char *down = (const char *)down_of(p) + t * row;
    const float *scales = scales_in(p, wide_matrices(p->w)) + t / SCALED * blocks_of(hidden);
    int64_t h = lo;
    for (; h + PAIR <= hi; h += PAIR) {
        vector low[TOGETHER], high[TOGETHER];
        float scale = kind == FP8 ? scales[h / SCALED] * E4M3_UNIT : 1.0f;
        for (int i = 0; i < number; i++) {
            const char *from = down + i * row;
            PREFETCH(from + h * number_bytes(kind) + ahead * row);
            low[i] = down_at(from, h, kind, scale), high[i] = down_at(from, h + LANES, kind, scale);
        }
        for (int64_t r = 0; r < rows; r++) {
            const float *a = p->inner + r * channels + t;
            float *y = part + r * hidden + h;
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
            vector sum = {t ? part[r * hidden + h] : 0.0f}, zero = {0};
            for (int i = 0; i < number; i++) {
                const char *from = down + i * row;
                float weight = kind == FP8 ? e4m3_part(((const uint8_t *)from)[h]) * (scales[h / SCALED] * E4M3_UNIT)
                                           : widened(((const uint16_t *)from)[h]);
                sum = VFMA(weight - zero, p->inner[r * channels + t + i] - zero, sum);
            }
            part[r * hidden + h] = sum[0];
        }
}

INLINE void down_columns(const struct plain_tile *p, const int kind, int64_t lo, int64_t hi) {
    float *part = p->add ? p->part : p->y;
    int64_t channels = p->w->channels, t = 0;
    lo *= PAIR, hi = least(hi * PAIR, p->w->inputs);
    if (p->count == 1 && kind == BF16) { /* FP8 is not read so fast that several streams would hold it up */
        int64_t ahead = AHEAD / (number_bytes(kind) * p->w->inputs) + 1;
        for (; t < channels; t++) columns(p, kind, part, t, 1, lo, hi, 1, ahead);
    }
    for (; t + TOGETHER <= channels; t += TOGETHER) columns(p, kind, part, t, TOGETHER, lo, hi, p->count, TOGETHER);
    for (; t < channels; t++) columns(p, kind, part, t, 1, lo, hi, p->count, TOGETHER);
    for (int64_t r = 0; p->add && r < p->count; r++)
        for (int64_t h = lo; h < hi; h++) p->y[r * p->w->inputs + h] += part[r * p->w->inputs + h];
}

static void down_by_columns(void *context, int64_t lo, int64_t hi) {
    const struct plain_tile *p = context;
    if (p->w->bits == FP8)
        down_columns(p, FP8, lo, hi);
    else
        down_columns(p, BF16, lo, hi);
}

static void float32_down(void *context, int64_t lo, int64_t hi) {
    const struct plain_tile *p = context;
    int64_t hidden = p->w->inputs, channels = p->w->channels;
    const float *down = down_of(p);
    lo *= PAIR, hi = least(hi * PAIR, hidden);
    for (int64_t r = 0; r < p->count; r++) {
        float *restrict part = (p->add ? p->part : p->y) + r * hidden;
        memset(part + lo, 0, (size_t)(hi - lo) * sizeof *part);
        for (int64_t t = 0; t < channels; t++) {
            const float a = p->inner[r * channels + t], *row = down + t * hidden;
            for (int64_t h = lo; h < hi; h++) part[h] += a * row[h];
        }
        for (int64_t h = lo; p->add && h < hi; h++) p->y[r * hidden + h] += part[h];
    }
}

/* --- many rows: down is widened, or its rows paired, once for all of them -------------------------------------- */

/* Of down's rows [t, t + number) and columns [h, h + COLUMNS), which share a scale: widened rows. Zero beyond H. */
static void make_fp8_panel(const struct plain_tile *p, int64_t t, int64_t number, int64_t h, float *panel) {
    int64_t hidden = p->w->inputs, width = least(COLUMNS, hidden - h);
    const uint8_t *down = (const uint8_t *)down_of(p) + t * hidden + h;
    const float *scales = scales_in(p, wide_matrices(p->w)) + t / SCALED * blocks_of(hidden);
    float scale = scales[h / SCALED] * E4M3_UNIT;
    uint8_t edge[COLUMNS] = {0};
    for (int64_t i = 0; i < number; i++, down += hidden, panel += COLUMNS) {
        PREFETCH(down + COLUMNS); /* of the next panel */
        if (width < COLUMNS) memcpy(edge, down, (size_t)width);
        for (int64_t c = 0; c < COLUMNS; c += LANES) {
            vector wide = down_at(width < COLUMNS ? edge : down, c, FP8, scale);
            memcpy(panel + c, &wide, sizeof wide);
        }
    }
}

/* The same of bf16, or pairs of rows. */
static void make_panel(const struct plain_tile *p, int64_t t, int64_t number, int64_t h, float *panel) {
    int64_t hidden = p->w->inputs, width = least(COLUMNS, hidden - h), step = p->pairs ? 2 : 1;
    const uint16_t *down = (const uint16_t *)down_of(p) + t * hidden + h;
    uint16_t edge[2][COLUMNS] = {{0}};
    for (int64_t i = 0; i < number; i += step, panel += COLUMNS) {
        const uint16_t *upper = down + i * hidden, *lower = i + 1 < number ? upper + hidden : NULL;
        for (int64_t c = 0; c < COLUMNS; c += 32) { /* of the next panel: 64 bytes each */
            PREFETCH(upper + COLUMNS + c);
            if (lower && step > 1) PREFETCH(lower + COLUMNS + c);
        }
        if (width < COLUMNS) {
            memcpy(edge[0], upper, (size_t)width * sizeof *upper);
            if (lower) memcpy(edge[1], lower, (size_t)width * sizeof *lower);
            upper = edge[0], lower = lower ? edge[1] : NULL;
        }
        for (int64_t c = 0; c < COLUMNS; c += LANES) {
            vector wide = WIDENED(upper + c);
            if (p->pairs && lower) wide = (vector)((words)wide | (words)WIDENED(lower + c) >> 16);
            memcpy(panel + c, &wide, sizeof wide);
        }
    }
}

/* to [rows, COLUMNS] = from [rows, COLUMNS] (NULL: 0) + inner panel, as multiply_part. */
INLINE void multiply_panel(const float *inner, int64_t stride, const float *panel, const int pairs, const int rows,
                           int64_t depth, const float *from, float *to, int64_t to_stride, int add) {
    for (int64_t c = 0; c < COLUMNS; c += ACROSS * LANES)
        multiply_part(inner, stride, panel + c, COLUMNS, pairs, rows, ACROSS, depth, from ? from + c : NULL, COLUMNS,
                      to + c, to_stride, add, NULL, 0);
}

/* Columns [h, h + width) of y = or += part [rows, COLUMNS], for rows from `first` on. */
static void take_columns(const struct plain_tile *p, int64_t h, int64_t width, int64_t first, int64_t rows,
                         const float *part) {
    for (int64_t r = 0; r < rows; r++, part += COLUMNS) {
        float *y = p->y + (first + r) * p->w->inputs + h;
        for (int64_t c = 0; c < width; c++) y[c] = p->add ? y[c] + part[c] : part[c];
    }
}

/* Panels [lo, hi). */
static void down_by_panels(void *context, int64_t lo, int64_t hi) {
    const struct plain_tile *p = context;
    int64_t hidden = p->w->inputs, channels = p->w->channels, each = p->pairs ? 2 : 1;
    int64_t stride = p->pairs ? pairs_of(channels) : channels;
    float *parts = p->part + lo * rounded_up(p->count, UNIT) * COLUMNS; /* this thread's: it stays in its cache */
    float panel[DEEP * COLUMNS] __attribute__((aligned(64)));
    for (int64_t unit = lo; unit < hi; unit++) {
        int64_t h = unit * COLUMNS, width = least(COLUMNS, hidden - h);
        for (int64_t t = 0; t < channels; t += DEEP * each) {
            int64_t number = least(DEEP * each, channels - t), depth = (number + each - 1) / each;
            int last = t + number == channels, whole = last && width == COLUMNS;
            (p->w->bits == FP8 ? make_fp8_panel : make_panel)(p, t, number, h, panel);
#ifdef MATRIX_UNITS
            if (p->units) {
                int64_t missing = rounded_up(depth, UNIT) - depth;
                memset(panel + depth * COLUMNS, 0, (size_t)(missing * COLUMNS) * sizeof *panel);
                panel_by_units(p, p->inner + t / each, panel, depth, parts, t > 0);
                if (last) take_columns(p, h, width, 0, p->count, parts);
                continue;
            }
#endif
            for (int64_t first = 0; first < p->count; first += MANY) {
                int64_t rows = least(MANY, p->count - first);
                const float *inner = p->inner + first * stride + t / each;
                float *part = parts + first * COLUMNS, *from = t ? part : NULL;
                float *to = whole ? p->y + first * hidden + h : part;
                int64_t to_stride = whole ? hidden : COLUMNS;
                int add = whole && p->add;
#define CALL_PAIRS(n) multiply_panel(inner, stride, panel, 1, n, depth, from, to, to_stride, add)
#define CALL_WIDE(n) multiply_panel(inner, stride, panel, 0, n, depth, from, to, to_stride, add)
                if (p->pairs)
                    BY_COUNT(rows, MANY, CALL_PAIRS)
                else
                    BY_COUNT(rows, MANY, CALL_WIDE)
                if (last && !whole) take_columns(p, h, width, first, rows, part);
            }
        }
    }
}

/* The rows chosen[0..count) of x [.., H] as products take them. */
static void arrange_rows(const struct weights *w, const float *x, const int32_t *chosen, int64_t count, char *to) {
#ifdef MATRIX_UNITS
    if (w->bits == BF16 && by_units(count)) {
        arrange_for_units(x, w->inputs, chosen, count, to);
        return;
    }
#endif
    for (int64_t r = 0; r < count; r++)
        if (w->bits != BF16)
            memcpy(to + r * w->inputs * 4, x + chosen[r] * w->inputs, (size_t)w->inputs * sizeof *x);
        else
            arrange(x + chosen[r] * w->inputs, w->inputs, to + r * arranged_bytes(w->inputs));
}

/* `tile`: of what all tiles share. */
static void plain_tiles(struct team *team, struct plain_tile tile, int64_t number) {
    int64_t count = tile.count, hidden = tile.w->inputs;
    int plain = tile.w->bits == FLOAT32, bf16 = tile.w->bits == BF16, many = !plain && count >= FROM_ROWS;
    tile.units = bf16 && by_units(count);
    many |= tile.units;
    tile.pairs = tile.units || (bf16 && many && HAS_PAIRS());
    for (int64_t n = 0; n < number; n++, tile.tile += tile.w->tile_bytes) {
        int64_t spin_ns = n + 1 < number ? WAKE_NS : 0;
        tile.add = n > 0;
#ifdef MATRIX_UNITS
        if (tile.units)
            parallel_for(team, gate_and_up_by_units, &tile, (tile.w->channels + UNIT - 1) / UNIT, WAKE_NS);
        else
#endif
            parallel_for(team, gate_and_up, &tile, tile.w->channels, WAKE_NS);
        parallel_for(count < ROWS ? NULL : team, activate_plain, &tile, count, WAKE_NS);
        if (many)
            parallel_for(team, down_by_panels, &tile, (hidden + COLUMNS - 1) / COLUMNS, spin_ns);
        else
            parallel_for(team, plain ? float32_down : down_by_columns, &tile, (hidden + PAIR - 1) / PAIR, spin_ns);
    }
}
