/* Attention of many new tokens of one sequence, for heads in groups that share keys and values. Keys and values are
 * taken in panels of PANEL tokens, widened to float32, and each panel serves a block of query rows; softmax goes from
 * panel to panel with the largest score so far. Panels begin at multiples of PANEL and rows do not mix: the bits of a
 * token depend neither on how many come with it nor on the number of threads. Part of body.h. */
#pragma once

#include "attention.h"
#include "blocks.h"
#include "rows.h"

enum { PANEL = KV_BLOCK };                      /* tokens whose keys and values are widened together */
enum { QUERIES = 256 };                         /* query rows of a block, about: what a widened panel serves */
enum { HIGH = 4 };                              /* rows multiplied together */

struct span_attention {
    const struct grouped *g;
    float *qkv; /* [count, row_of], behind the gates */
    const float *cosines, *sines;
    char *const *streams;
    const int32_t *blocks;
    int64_t position, count;
    float *out;
    char *scratch; /* of each task, see span_scratch */
    int64_t row_blocks; /* blocks of query rows, of one head of keys */
};

/* c [rows, columns] = or += a [rows, depth] b [depth, columns]; columns: a multiple of LANES. */
static void multiply(const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *c, int64_t c_stride,
                     int64_t rows, int64_t columns, int64_t depth, int add) {
    for (int64_t n = 0, across; n < columns; n += across) {
        across = n + ACROSS * LANES <= columns ? ACROSS * LANES : LANES;
        for (int64_t r = 0, high; r < rows; r += high) {
            high = r + HIGH <= rows ? HIGH : 1;
            const float *from = a + r * a_stride;
            float *to = c + r * c_stride + n;
#define MULTIPLY(high, vectors)                                                                                  \
    multiply_part(from, a_stride, b + n, b_stride, 0, high, vectors, depth, add ? to : NULL, c_stride, to, c_stride, 0)
            if (across > LANES)
                high > 1 ? MULTIPLY(HIGH, ACROSS) : MULTIPLY(1, ACROSS);
            else
                high > 1 ? MULTIPLY(HIGH, 1) : MULTIPLY(1, 1);
        }
    }
}

/* The parts of one task's scratch. */
struct span_scratch {
    float *q;      /* [rows, width], scaled */
    float *keys;   /* [width, PANEL] */
    float *values; /* [PANEL, padded width] */
    float *scores; /* [rows, PANEL] */
    float *out;    /* [rows, padded width] */
    float *most, *sum;
    int64_t bytes;
};

/* Tokens of a block of query rows. */
static int64_t block_tokens(const struct grouped *g) {
    int64_t shared = g->heads / g->kv_heads;
    return shared < QUERIES ? QUERIES / shared : 1;
}

static struct span_scratch lay_out_span(const struct grouped *g, void *from) {
    struct span_scratch s;
    char *at = from;
    int64_t rows = block_tokens(g) * (g->heads / g->kv_heads), padded = rounded_up(g->width, LANES);
    TAKE(s.q, 4 * rows * g->width);
    TAKE(s.keys, 4 * g->width * PANEL);
    TAKE(s.values, 4 * PANEL * padded);
    TAKE(s.scores, 4 * rows * PANEL);
    TAKE(s.out, 4 * rows * padded);
    TAKE(s.most, 4 * rows);
    TAKE(s.sum, 4 * rows);
    s.bytes = at - (char *)from;
    return s;
}

int64_t tandem_span_scratch(const struct grouped *g) { return lay_out_span(g, NULL).bytes; }

/* Keys transposed [width, PANEL] and values [PANEL, padded] of tokens [first, first + n) of a head; the rest is 0. */
INLINE void widen_panel(const struct span_attention *o, const int bits, int64_t head, int64_t first, int64_t n,
                        float *keys, float *values) {
    int64_t width = o->g->width, padded = rounded_up(width, LANES);
    int64_t from = slab_row(o->blocks, o->g->kv_heads, head, first) * width;
    for (int64_t t = 0; t < PANEL; t++) {
        for (int64_t i = 0; i < width; i++)
            keys[i * PANEL + t] = t < n ? number_at(o->streams[0], from + t * width + i, bits) : 0.0f;
        for (int64_t i = 0; i < padded; i++)
            values[t * padded + i] = t < n && i < width ? number_at(o->streams[1], from + t * width + i, bits) : 0.0f;
    }
}

/* scores [PANEL] of one row to exp(score - the largest so far) within [lo, hi) and 0 elsewhere. The sum and the output
 * so far follow the largest score. */
static void follow(float *scores, int64_t lo, int64_t hi, float *most, float *sum, float *out, int64_t width) {
    float largest = *most, added = 0.0f;
    for (int64_t t = lo; t < hi; t++) largest = scores[t] > largest ? scores[t] : largest;
    for (int64_t t = 0; t < lo; t++) scores[t] = 0.0f;
    for (int64_t t = lo; t < hi; t++) scores[t] = exponential(scores[t] - largest);
    for (int64_t t = hi; t < PANEL; t++) scores[t] = 0.0f;
    for (int64_t t = lo; t < hi; t++) added += scores[t];
    if (largest > *most) {
        float shrink = *sum > 0.0f ? exponential(*most - largest) : 0.0f;
        *sum *= shrink, *most = largest;
        for (int64_t i = 0; i < width; i++) out[i] *= shrink;
    }
    *sum += added;
}

/* One block of tokens [begin, end) of the span and all query heads that share a head of keys. */
static void attend_block(const struct span_attention *o, int64_t kv_head, int64_t begin, int64_t end, char *memory) {
    const struct grouped *g = o->g;
    struct span_scratch s = lay_out_span(g, memory);
    int64_t shared = g->heads / g->kv_heads, width = g->width, padded = rounded_up(width, LANES);
    int64_t rows = (end - begin) * shared, all = row_of(g), gates = gates_of(g);
    for (int64_t r = 0; r < rows; r++) {
        const float *q = o->qkv + (begin + r / shared) * all + (kv_head * shared + r % shared) * width;
        for (int64_t i = 0; i < width; i++) s.q[r * width + i] = q[i] * g->scale;
        const float *sink = g->sinks ? g->sinks + kv_head * shared + r % shared : NULL;
        s.most[r] = sink ? *sink : -INFINITY, s.sum[r] = sink ? 1.0f : 0.0f;
    }
    memset(s.out, 0, (size_t)(rows * padded) * sizeof *s.out);
    int64_t first = o->position + begin + 1, last = o->position + end; /* tokens of the cache that rows see: up to */
    int64_t oldest = g->window && first > g->window ? first - g->window : 0;
    for (int64_t panel = oldest / PANEL * PANEL; panel < last; panel += PANEL) {
        int64_t tokens = least(PANEL, last - panel);
        if (g->bits == BF16)
            widen_panel(o, BF16, kv_head, panel, tokens, s.keys, s.values);
        else
            widen_panel(o, 32, kv_head, panel, tokens, s.keys, s.values);
        int64_t skipped = panel > first - 1 ? (panel - first + 1) * shared : 0; /* rows before the panel */
        multiply(s.q + skipped * width, width, s.keys, PANEL, s.scores + skipped * PANEL, PANEL, rows - skipped, PANEL,
                 width, 0);
        for (int64_t r = skipped; r < rows; r++) {
            int64_t seen = first + r / shared, from = g->window && seen > g->window ? seen - g->window : 0;
            int64_t lo = from > panel ? least(from - panel, PANEL) : 0, hi = least(seen - panel, PANEL);
            follow(s.scores + r * PANEL, lo, hi, s.most + r, s.sum + r, s.out + r * padded, width);
        }
        multiply(s.scores + skipped * PANEL, PANEL, s.values, padded, s.out + skipped * padded, padded, rows - skipped,
                 padded, PANEL, 1);
    }
    for (int64_t r = 0; r < rows; r++) {
        float *to = o->out + ((begin + r / shared) * g->heads + kv_head * shared + r % shared) * width;
        float scale = 1.0f / s.sum[r];
        for (int64_t i = 0; i < width; i++) to[i] = s.out[r * padded + i] * scale;
        if (gates) apply_gates(o->qkv - gates + (begin + r / shared) * all + (kv_head * shared + r % shared) * width, width, to);
    }
}

static void place_tokens(void *context, int64_t lo, int64_t hi) {
    const struct span_attention *o = context;
    int64_t all = row_of(o->g);
    for (int64_t t = lo; t < hi; t++)
        place_token(o->g, o->qkv + t * all, o->cosines + t * o->g->rope, o->sines + t * o->g->rope,
                    o->streams, o->blocks, o->position + t);
}

struct span_queue {
    const struct span_attention *o;
    int64_t next, step; /* `next` block to take, atomic; `step`: bytes of a thread's scratch */
};

/* Late blocks attend to the most tokens, so they are taken first. */
static void take_blocks(void *context, int64_t lo, int64_t hi) {
    struct span_queue *q = context;
    const struct span_attention *o = q->o;
    int64_t height = block_tokens(o->g), number = o->row_blocks * o->g->kv_heads;
    for (int64_t thread = lo; thread < hi; thread++)
        for (int64_t n; (n = __atomic_fetch_add(&q->next, 1, __ATOMIC_RELAXED)) < number;) {
            int64_t block = o->row_blocks - 1 - n / o->g->kv_heads;
            attend_block(o, n % o->g->kv_heads, block * height, least((block + 1) * height, o->count),
                         o->scratch + thread * q->step);
        }
}

int tandem_span(struct team *team, const struct grouped *g, float *qkv, const float *cosines, const float *sines,
                char *const *streams, const int32_t *blocks, int64_t capacity, int64_t position, int64_t count,
                float *out, void *scratch) {
    if (position < 0 || count < 0 || position > capacity || count > capacity - position) return BAD_POSITION;
    int64_t height = block_tokens(g);
    struct span_attention o = {g, qkv + gates_of(g), cosines, sines, streams, blocks, position, count, out, scratch,
                               (count + height - 1) / height};
    struct span_queue queue = {&o, 0, tandem_span_scratch(g)};
    parallel_for(team, place_tokens, &o, count, WAKE_NS);
    parallel_for(team, take_blocks, &queue, team ? team->threads : 1, 0);
    return FINE;
}
