/* Attention of many new tokens of one sequence, for heads in groups that share keys and values: each panel serves a
 * block of query rows. The bits of a token depend neither on how many come with it nor on the number of threads. Part
 * of body.h. */
#pragma once

#include "attention.h"

enum { QUERIES = 256 }; /* query rows of a block, about */

struct span_attention {
    const struct grouped *g;
    float *qkv; /* [count, row_of], behind the gates */
    const float *cosines, *sines;
    char *const *streams;
    const int32_t *blocks;
    int64_t position, count;
    float *out;
    char *scratch; /* of each task, see struct span_memory */
    int64_t row_blocks; /* blocks of query rows, of one head of keys */
};

/* Tokens of a block of query rows. */
static int64_t block_tokens(const struct grouped *g) {
    int64_t shared = g->heads / g->kv_heads;
    return shared < QUERIES ? QUERIES / shared : 1;
}

/* The parts of one task's scratch. */
struct span_memory {
    struct panel_memory panels;
    float *most, *sum, *out; /* as in struct queries */
    int64_t bytes;
};

static struct span_memory lay_out_span(const struct heads *h, int64_t rows, void *from) {
    struct span_memory m = {.panels = lay_out_panels(h, rows, from)};
    char *at = (char *)from + m.panels.bytes;
    TAKE(m.most, 4 * rows);
    TAKE(m.sum, 4 * rows);
    TAKE(m.out, 4 * rows * padded_value(h));
    m.bytes = at - (char *)from;
    return m;
}

int64_t tandem_span_scratch(const struct grouped *g) {
    struct heads h = heads_of_grouped(g);
    return lay_out_span(&h, block_tokens(g) * (g->heads / g->kv_heads), NULL).bytes;
}

/* One block of tokens [begin, end) of the span and all query heads that share a head of keys. */
static void attend_block(const struct span_attention *o, int64_t kv_head, int64_t begin, int64_t end, void *memory) {
    const struct grouped *g = o->g;
    struct heads h = heads_of_grouped(g);
    int64_t shared = g->heads / g->kv_heads, width = g->width, padded = padded_value(&h);
    int64_t rows = (end - begin) * shared, all = row_of(g), gates = gates_of(g);
    struct span_memory m = lay_out_span(&h, rows, memory);
    struct queries q = {rows, shared, o->position + begin + 1, g->window, m.panels.q, m.most, m.sum, m.out};
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = kv_head * shared + r % shared;
        arrange_query(&h, o->qkv + (begin + r / shared) * all + head * width, query_of(&h, &m.panels, r));
        q.most[r] = g->sinks ? g->sinks[head] : -INFINITY, q.sum[r] = g->sinks ? 1.0f : 0.0f;
    }
    memset(q.out, 0, (size_t)(rows * padded) * sizeof *q.out);
    struct stream s = stream_of(&h, o->streams, o->blocks, kv_head);
    attend_panels(&h, &s, g->window && q.seen > g->window ? q.seen - g->window : 0, o->position + end, &q, &m.panels);
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = begin + r / shared, head = kv_head * shared + r % shared;
        float *to = o->out + (token * g->heads + head) * width, scale = 1.0f / q.sum[r];
        for (int64_t i = 0; i < width; i++) to[i] = q.out[r * padded + i] * scale;
        if (gates) apply_gates(o->qkv - gates + token * all + head * width, width, to);
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
