/* Attention of rows of queries that share keys and values, panel by panel: softmax goes from panel to panel with the
 * largest score so far. Rows do not mix, and panels begin at multiples of PANEL. Part of body.h. */
#pragma once

#include "kv_cache.h"
#include "rows.h"

#include <math.h>

enum { READ_ONCE = 8 };                    /* rows whose values are loaded once, without a panel */
enum { HIGH = 4 };                         /* rows multiplied together */
enum { COLUMNS_OF_PANEL = PANEL / LANES }; /* vectors of a row's scores */

/* Memory that is wanted next: `lines` lines from each place on, of which `taken` were prefetched. It is prefetched while
 * products are computed, which leave memory idle. */
struct ahead {
    const char *from[2];
    int64_t lines[2], taken;
};

/* Where to prefetch from in so many steps of two lines each, *step bytes a step: from one line again and again once
 * all are taken. */
static const char *take_ahead(struct ahead *a, int64_t steps, int64_t *step) {
    int which = a->taken >= a->lines[0];
    int64_t at = which ? a->taken - a->lines[0] : a->taken;
    if (at >= a->lines[which]) return a->from[0];
    a->taken += least(2 * steps, a->lines[which] - at);
    *step = 2 * LINE;
    return a->from[which] + at * LINE;
}

/* c [rows, columns] = or += a [rows, steps] b [steps, columns], of float32 or `pairs`; columns: a multiple of LANES. */
static void multiply(const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *c, int64_t c_stride,
                     int64_t rows, int64_t columns, int64_t steps, int pairs, int add, struct ahead *ahead) {
    for (int64_t n = 0, across; n < columns; n += across) {
        across = n + ACROSS * LANES <= columns ? ACROSS * LANES : LANES;
        for (int64_t r = 0, high; r < rows; r += high) {
            high = least(HIGH, rows - r);
            const float *from = a + r * a_stride;
            float *to = c + r * c_stride + n;
            int64_t step = 0;
            const char *next = take_ahead(ahead, steps, &step);
#define MULTIPLY(high, vectors, pairs)                                                                           \
    multiply_part(from, a_stride, b + n, b_stride, pairs, high, vectors, steps, add ? to : NULL, c_stride, to,   \
                  c_stride, 0, next, step)
#define WIDE_PAIRS(high) MULTIPLY(high, ACROSS, 1)
#define WIDE_NUMBERS(high) MULTIPLY(high, ACROSS, 0)
#define THIN_PAIRS(high) MULTIPLY(high, 1, 1)
#define THIN_NUMBERS(high) MULTIPLY(high, 1, 0)
            if (pairs && across > LANES)
                BY_COUNT(high, HIGH, WIDE_PAIRS)
            else if (pairs)
                BY_COUNT(high, HIGH, THIN_PAIRS)
            else if (across > LANES)
                BY_COUNT(high, HIGH, WIDE_NUMBERS)
            else
                BY_COUNT(high, HIGH, THIN_NUMBERS)
        }
    }
}

/* What attends to the tokens of a sequence, and to which: row r to the last `window` (0: all) of the first
 * seen + r / together. */
struct queries {
    int64_t rows, together, seen, window;
    float *q;    /* [rows, steps], arranged */
    float *most; /* [rows], the largest score so far */
    float *sum;  /* [rows], of exp(score - most) */
    float *out;  /* [rows, padded value width], the sum of values times that */
};

/* Memory of one thread for `rows` rows. */
struct panel_memory {
    float *q, *keys, *values, *scores, *weights, *scales;
    struct ahead ahead;
    int64_t bytes;
};

static int64_t padded_value(const struct heads *h) { return rounded_up(h->value_width, LANES); }

static struct panel_memory lay_out_panels(const struct heads *h, int64_t rows, void *from) {
    struct panel_memory m;
    char *at = from;
    TAKE(m.q, 4 * rows * rounded_up(h->key_width, 2));
    TAKE(m.keys, 4 * rounded_up(h->key_width, 2) * PANEL);
    TAKE(m.values, 4 * PANEL * padded_value(h));
    TAKE(m.scores, 4 * rows * PANEL);
    TAKE(m.weights, 4 * rows * PANEL);
    TAKE(m.scales, 4 * PANEL);
    m.bytes = at - (char *)from;
    return m;
}

/* Where row r's query is. */
static float *query_of(const struct heads *h, const struct panel_memory *m, int64_t r) {
    return m->q + r * panel_steps(h->key_width, h->bits, HAS_PAIRS());
}

/* q of a row, as products with keys take it. */
static void arrange_query(const struct heads *h, const float *q, float *to) {
    if (h->bits == FLOAT32)
        memcpy(to, q, (size_t)h->key_width * sizeof *q);
    else if (HAS_PAIRS())
        arrange_pairs(q, NULL, h->key_width, 1, to);
    else
        arrange_pairs(q, NULL, h->key_width, 0, to);
}

/* A row's scores [PANEL] to exp(scale * score - the largest so far) within [lo, hi), and 0 elsewhere. The sum and the
 * output so far follow the largest score. */
static void follow(float *scores, int64_t lo, int64_t hi, float scale, float *most, float *sum, float *out,
                   int64_t padded) {
    vector x[COLUMNS_OF_PANEL], largest = every(*most), added = {0};
    ints lanes = {0};
    for (int l = 0; l < LANES; l++) lanes[l] = l;
    int whole = lo <= 0 && hi >= PANEL;
    for (int v = 0; v < COLUMNS_OF_PANEL; v++) {
        x[v] = loaded(scores + v * LANES) * scale;
        ints t = lanes + v * LANES;
        if (!whole) x[v] = chosen((t >= (int)lo) & (t < (int)hi), x[v], every(-INFINITY));
        largest = LARGER(x[v], largest);
    }
    float now = MOST(largest);
    for (int v = 0; v < COLUMNS_OF_PANEL; v++) {
        ints t = lanes + v * LANES;
        x[v] = exponentials(x[v] - now);
        if (!whole) x[v] = chosen((t >= (int)lo) & (t < (int)hi), x[v], every(0.0f));
        added += x[v];
        memcpy(scores + v * LANES, x + v, sizeof(vector));
    }
    if (now > *most) {
        float shrink = *sum > 0.0f ? exponential(*most - now) : 0.0f;
        *sum *= shrink, *most = now;
        for (int64_t i = 0; i < padded; i++) out[i] *= shrink;
    }
    *sum += SUM(added);
}

/* --- int8: scales of runs ------------------------------------------------------------------------------------- */

/* to [PANEL] = the scales of a run of n rows, times `unit`; 0 beyond them. */
static void scales_of_run(const float *scales, int64_t runs, int64_t run, int64_t n, float unit, float *to) {
    for (int64_t t = 0; t < PANEL; t++) to[t] = t < n ? scales[t * runs + run] * unit : 0.0f;
}

/* scores [rows, PANEL] of int8 keys, whose runs are multiplied one by one. */
static void int8_scores(const struct heads *h, const float *q, int64_t rows, const float *scales, int64_t n, int pairs,
                        struct panel_memory *m, float *scores) {
    int64_t stride = panel_steps(h->key_width, INT8, pairs), runs = runs_of(h->key_width), columns = rounded_up(n, LANES);
    for (int64_t run = 0; run < runs; run++) {
        int64_t at = panel_steps(run * KV_RUN, INT8, pairs), end = least(at + panel_steps(KV_RUN, INT8, pairs), stride);
        float *part = run ? m->weights : scores;
        multiply(q + at, stride, m->keys + at * PANEL, PANEL, part, PANEL, rows, columns, end - at, pairs, 0,
                 &m->ahead);
        scales_of_run(scales, runs, run, n, 1.0f / INT8_UNIT, m->scales);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t t = 0; t < columns; t++) {
                float scaled = part[r * PANEL + t] * m->scales[t];
                scores[r * PANEL + t] = run ? scores[r * PANEL + t] + scaled : scaled;
            }
    }
}

/* --- the panels ----------------------------------------------------------------------------------------------- */

/* The keys and values of a head. */
struct stream {
    const char *keys, *values; /* slabs */
    const float *key_scales, *value_scales;
    const int32_t *blocks;
    int64_t kv_head;
};

/* Addresses of a layer's streams: in int8 each has slabs of numbers and of scales. */
static int64_t streams_of(const struct heads *h) { return (h->latent ? 1 : 2) * (h->bits == INT8 ? 2 : 1); }

static struct stream stream_of(const struct heads *h, char *const *streams, const int32_t *blocks, int64_t kv_head) {
    int each = h->bits == INT8 ? 2 : 1, values = h->latent ? 0 : each;
    return (struct stream){streams[0], streams[values], (const float *)streams[each - 1],
                           (const float *)streams[values + each - 1], blocks, kv_head};
}

/* The keys and values of a block of the slabs from `row` on, if there is any. */
static struct ahead wanted(const struct heads *h, const struct stream *s, int64_t row, int any) {
    int64_t key_bytes = h->key_width * h->bits / 8, value_bytes = h->value_width * h->bits / 8;
    return (struct ahead){{s->keys + row * key_bytes, s->values + row * value_bytes},
                          {any ? PANEL * key_bytes / LINE : 0, any && !h->latent ? PANEL * value_bytes / LINE : 0}, 0};
}

/* The same as a panel of values and `multiply` do, for few rows, whose values are so loaded once: out [rows, width] +=
 * weights [rows, PANEL / 2] of pairs times PANEL rows of bf16, row_bytes apart; width: a multiple of PAIR. */
INLINE void add_few_rows(const float *weights, const char *values, int64_t row_bytes, int64_t width, const int rows,
                         float *out, struct ahead *ahead) {
    for (int64_t i = 0; i < width; i += PAIR) {
        vector sums[READ_ONCE][2];
        int64_t step = 0;
        const char *next = take_ahead(ahead, PANEL / 2, &step);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) sums[r][v] = loaded(out + r * width + i + v * LANES);
        for (int64_t k = 0; k < PANEL / 2; k++) {
            words both[2];
            INTERLEAVED(values + 2 * k * row_bytes + 2 * i, values + (2 * k + 1) * row_bytes + 2 * i, both);
            PREFETCH(next + k * step);
            PREFETCH(next + k * step + step / 2);
            for (int r = 0; r < rows; r++) {
                uint32_t pair;
                memcpy(&pair, weights + r * (PANEL / 2) + k, sizeof pair);
                for (int v = 0; v < 2; v++) sums[r][v] = WITH_PAIRS(both[v], pair - (words){0}, sums[r][v]);
            }
        }
        for (int r = 0; r < rows; r++) memcpy(out + r * width + i, sums[r], sizeof sums[r]);
    }
}

/* Whether values are taken in this way. */
static int few_rows(const struct heads *h, int64_t rows, int64_t n, int pairs) {
    return pairs && h->bits == BF16 && rows <= READ_ONCE && n == PANEL && h->value_width % PAIR == 0;
}

/* Keys and values of n tokens from `row` of the slabs on. Returns where values are. */
INLINE const float *fill_panels(const struct heads *h, const struct stream *s, const int bits, const int pairs,
                                int64_t row, int64_t n, int64_t rows, struct panel_memory *m) {
    int64_t key_bytes = h->key_width * bits / 8, value_bytes = h->latent ? key_bytes : h->value_width * bits / 8;
    const char *values = s->values + row * value_bytes;
    key_panel(s->keys + row * key_bytes, h->key_width, bits, pairs, n, m->keys);
    if (bits == FLOAT32 && n == PANEL && h->value_width % LANES == 0 && !h->latent) return (const float *)values;
    if (few_rows(h, rows, n, pairs)) return NULL;
    value_panel(values, h->value_width, value_bytes, bits, pairs, n, m->values);
    return m->values;
}

/* out += the values of a panel times the rows' weights, which are in scores. */
static void add_values(const struct heads *h, const struct stream *s, struct queries *q, int64_t first_row, int64_t slab,
                       int64_t n, int pairs, const float *values, struct panel_memory *m) {
    int64_t padded = padded_value(h), rows = q->rows - first_row;
    int64_t taken = rounded_up(n, LANES), steps = panel_steps(taken, h->bits, pairs);
    float *out = q->out + first_row * padded;
    const float *scores = m->scores + first_row * PANEL;
    if (h->bits == FLOAT32) {
        multiply(scores, PANEL, values, padded, out, padded, rows, padded, taken, 0, 1, &m->ahead);
        return;
    }
    int64_t run_width = h->bits == INT8 ? KV_RUN : padded, runs = runs_of(h->latent ? h->key_width : h->value_width);
    for (int64_t at = 0; at < padded; at += run_width) {
        if (h->bits == INT8) scales_of_run(s->value_scales + slab * runs, runs, at / KV_RUN, n, 1.0f, m->scales);
        const float *factors = h->bits == INT8 ? m->scales : NULL;
        for (int64_t r = 0; r < rows; r++)
            if (pairs)
                arrange_pairs(scores + r * PANEL, factors, taken, 1, m->weights + r * steps);
            else
                arrange_pairs(scores + r * PANEL, factors, taken, 0, m->weights + r * steps);
        if (few_rows(h, q->rows, n, pairs)) {
            int64_t value_bytes = 2 * (h->latent ? h->key_width : h->value_width);
            const char *from = s->values + slab * value_bytes;
#define ADD_FEW(rows) add_few_rows(m->weights, from, value_bytes, h->value_width, rows, out, &m->ahead)
            BY_COUNT(rows, READ_ONCE, ADD_FEW)
            return;
        }
        multiply(m->weights, steps, values + at, padded, out + at, padded, rows, least(run_width, padded - at), steps,
                 pairs, 1, &m->ahead);
    }
}

/* The rows attend to tokens [from, to) as far as they see them. */
static void attend_panels(const struct heads *h, const struct stream *s, int64_t from, int64_t to, struct queries *q,
                          struct panel_memory *m) {
    const int pairs = h->bits != FLOAT32 && HAS_PAIRS();
    int64_t steps = panel_steps(h->key_width, h->bits, pairs), padded = padded_value(h);
    int64_t last = q->seen + (q->rows - 1) / q->together; /* tokens that the last row sees */
    for (int64_t panel = from / PANEL * PANEL; panel < to; panel += PANEL) {
        int64_t n = least(PANEL, to - panel), row = slab_row(s->blocks, h->kv_heads, s->kv_head, panel);
        int64_t next = panel + PANEL < last ? slab_row(s->blocks, h->kv_heads, s->kv_head, panel + PANEL) : row;
        const float *values;
        m->ahead = wanted(h, s, next, next != row);
#define FILL(bits, pairs) fill_panels(h, s, bits, pairs, row, n, q->rows, m)
        if (h->bits == FLOAT32)
            values = FILL(FLOAT32, 0);
        else if (h->bits == BF16)
            values = pairs ? FILL(BF16, 1) : FILL(BF16, 0);
        else
            values = pairs ? FILL(INT8, 1) : FILL(INT8, 0);
        int64_t skipped = panel >= q->seen ? (panel - q->seen + 1) * q->together : 0; /* rows before the panel */
        const float *rows = q->q + skipped * steps;
        float *scores = m->scores + skipped * PANEL;
        if (h->bits == INT8)
            int8_scores(h, rows, q->rows - skipped, s->key_scales + row * runs_of(h->key_width), n, pairs, m, scores);
        else
            multiply(rows, steps, m->keys, PANEL, scores, PANEL, q->rows - skipped, rounded_up(n, LANES), steps, pairs, 0,
                     &m->ahead);
        for (int64_t r = skipped; r < q->rows; r++) {
            int64_t seen = q->seen + r / q->together, oldest = q->window && seen > q->window ? seen - q->window : 0;
            follow(m->scores + r * PANEL, oldest - panel, seen - panel, h->scale, q->most + r, q->sum + r,
                   q->out + r * padded, padded);
        }
        add_values(h, s, q, skipped, row, n, pairs, values, m);
    }
}
