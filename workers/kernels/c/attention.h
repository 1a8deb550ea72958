/* Attention of single new tokens: the operations between two products with weights. The cached numbers are bf16 or
 * float32, everything else is float32. Heads do not mix, and each is computed by one thread, so the bits do not depend
 * on the number of threads. Part of body.h. */
#pragma once

#include "kernels.h"
#include "team.h"
#include "vectors.h"

#include <math.h>

enum { SHARING = 4 }; /* most query heads that one read of their keys and values serves */
enum { WIDE = 4 };    /* vectors of a value that are summed in one pass over the tokens */

static void store_cached(const float *x, int64_t n, void *to, int64_t at, int64_t bits) {
    if (bits != BF16) {
        memcpy((float *)to + at, x, (size_t)n * sizeof *x);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t rounded;
        float value;
        round_to_bf16(x + i, 1, &value);
        memcpy(&rounded, &value, 4);
        ((uint16_t *)to)[at + i] = (uint16_t)(rounded >> 16);
    }
}

#define SUM_OVER(grown)                                                                                          \
    vector sums[4] = {{0}};                                                                                      \
    int64_t i = 0;                                                                                               \
    for (; i + 4 * LANES <= n; i += 4 * LANES)                                                                   \
        for (int v = 0; v < 4; v++) {                                                                            \
            vector one = loaded(x + i + v * LANES);                                                              \
            sums[v] = grown;                                                                                     \
        }                                                                                                        \
    float sum = SUM((sums[0] + sums[1]) + (sums[2] + sums[3]));

static float sum_of(const float *x, int64_t n) {
    SUM_OVER(sums[v] + one)
    for (; i < n; i++) sum += x[i];
    return sum;
}

static float sum_of_squares(const float *x, int64_t n) {
    SUM_OVER(VFMA(one, one, sums[v]))
    for (; i < n; i++) sum += x[i] * x[i];
    return sum;
}

static void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *out) {
    float scale = 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

/* RoPE in place: number i rotates with number i + width / 2. The sines carry the signs of the halves. */
static void rotate(float *x, const float *cosines, const float *sines, int64_t width) {
    int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] + b * sines[i];
        x[i + half] = b * cosines[i + half] + a * sines[i + half];
    }
}

/* Where the keys and values of a head lie: in slabs of so many heads, or with `blocks` NULL one after the other. */
struct stream {
    const void *keys, *values; /* the same: values are the first numbers of keys */
    const int32_t *blocks;
    int64_t heads, head, key_width, value_width;
};

/* The row of a slab of `heads` heads, [rows, width], that has token t of a head. */
static int64_t slab_row(const int32_t *blocks, int64_t heads, int64_t head, int64_t t) {
    return (blocks[t / KV_BLOCK] * heads + head) * KV_BLOCK + t % KV_BLOCK;
}

static int64_t row_of_token(const struct stream *s, int64_t t) {
    return s->blocks ? slab_row(s->blocks, s->heads, s->head, t) : t;
}

/* Numbers from a value to the next one. */
static int64_t value_step(const struct stream *s) { return s->values == s->keys ? s->key_width : s->value_width; }

static void prefetch_bytes(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) PREFETCH(from + i);
}

/* scores[r][t - first] = scale * q[r] . key t for `heads` (a constant) heads that share keys. Nothing of a sequence is
 * in the caches, which the weights have passed through: its keys are prefetched, and the values that follow. */
INLINE void score_keys(const struct stream *s, const int bits, const float *q, int64_t stride, const int heads,
                   int64_t first, int64_t tokens, float scale, float *scores, int64_t scores_stride) {
    int64_t whole = s->key_width / LANES * LANES;
    for (int64_t t = first; t < tokens; t++) {
        vector sums[SHARING];
        for (int r = 0; r < heads; r++) sums[r] = (vector){0};
        int64_t row = row_of_token(s, t) * s->key_width, later = t + AHEAD / (s->key_width * (bits / 8));
        if (later < tokens)
            prefetch_bytes((const char *)s->keys + row_of_token(s, later) * s->key_width * (bits / 8),
                           s->key_width * (bits / 8));
        if (s->values != s->keys)
            prefetch_bytes((const char *)s->values + row_of_token(s, t) * s->value_width * (bits / 8),
                           s->value_width * (bits / 8));
        for (int64_t i = 0; i < whole; i += LANES) {
            vector key = vector_at(s->keys, row + i, bits);
            for (int r = 0; r < heads; r++) sums[r] = VFMA(key, loaded(q + r * stride + i), sums[r]);
        }
        for (int r = 0; r < heads; r++) {
            float sum = SUM(sums[r]);
            for (int64_t i = whole; i < s->key_width; i++)
                sum += number_at(s->keys, row + i, bits) * q[r * stride + i];
            scores[r * scores_stride + t - first] = sum * scale;
        }
    }
}

/* `sink`: one more score, whose weight is of no value; or NULL. */
static void softmax(float *scores, int64_t n, const float *sink) {
    float most = sink ? *sink : scores[0];
    for (int64_t i = 0; i < n; i++) most = scores[i] > most ? scores[i] : most;
    float sum = sink ? exponential(*sink - most) : 0.0f;
    for (int64_t i = 0; i < n; i++) scores[i] = exponential(scores[i] - most);
    for (int64_t i = 0; i < n; i++) sum += scores[i];
    float scale = 1.0f / sum;
    for (int64_t i = 0; i < n; i++) scores[i] *= scale;
}

/* out[r] = the sum of scores[r][t - first] * value t. */
INLINE void weigh_values(const struct stream *s, const int bits, const int heads, int64_t first, int64_t tokens,
                     const float *scores, int64_t scores_stride, float *out) {
    int64_t i = 0, width = s->value_width;
    for (; i + WIDE * LANES <= width; i += WIDE * LANES) {
        vector sums[SHARING][WIDE];
        for (int r = 0; r < heads; r++)
            for (int v = 0; v < WIDE; v++) sums[r][v] = (vector){0};
        for (int64_t t = first; t < tokens; t++) {
            int64_t row = row_of_token(s, t) * value_step(s);
            for (int v = 0; v < WIDE; v++) {
                vector value = vector_at(s->values, row + i + v * LANES, bits), zero = {0};
                for (int r = 0; r < heads; r++)
                    sums[r][v] = VFMA(value, scores[r * scores_stride + t - first] - zero, sums[r][v]);
            }
        }
        for (int r = 0; r < heads; r++)
            for (int v = 0; v < WIDE; v++) memcpy(out + r * width + i + v * LANES, &sums[r][v], sizeof(vector));
    }
    for (; i < width; i++)
        for (int r = 0; r < heads; r++) {
            float sum = 0.0f;
            for (int64_t t = first; t < tokens; t++)
                sum += number_at(s->values, row_of_token(s, t) * value_step(s) + i, bits) *
                       scores[r * scores_stride + t - first];
            out[r * width + i] = sum;
        }
}

/* `sinks`: of these heads, or NULL. */
INLINE void attend_heads(const struct stream *s, const int bits, const float *q, int64_t stride, const int heads,
                     int64_t first, int64_t tokens, float scale, const float *sinks, float *scores, float *out) {
    int64_t seen = tokens - first;
    score_keys(s, bits, q, stride, heads, first, tokens, scale, scores, seen);
    for (int r = 0; r < heads; r++) softmax(scores + r * seen, seen, sinks ? sinks + r : NULL);
    weigh_values(s, bits, heads, first, tokens, scores, seen, out);
}

/* `number` heads, at most SHARING, that share keys and values; q [number, stride]. */
static void attend(const struct stream *s, int64_t bits, const float *q, int64_t stride, int64_t number, int64_t first,
                   int64_t tokens, float scale, const float *sinks, float *scores, float *out) {
#define ATTEND(n)                                                                                                \
    (bits == BF16 ? attend_heads(s, BF16, q, stride, n, first, tokens, scale, sinks, scores, out)                \
                  : attend_heads(s, 32, q, stride, n, first, tokens, scale, sinks, scores, out))
    BY_COUNT(number, SHARING, ATTEND)
}

/* --- heads in groups that share keys and values -------------------------------------------------------------- */

/* A token and the range of the cached tokens that it attends to. */
struct seen {
    char *const *streams;
    const int32_t *blocks;
    int64_t first, tokens;
};

static struct seen seen_by(const struct token *t, int64_t layer, int64_t streams, int64_t window) {
    int64_t tokens = t->position + 1;
    return (struct seen){t->streams + layer * streams, t->blocks, window && tokens > window ? tokens - window : 0, tokens};
}

/* Numbers of a row before its queries, and of all. */
static int64_t gates_of(const struct grouped *g) { return g->gated ? g->heads * g->width : 0; }
static int64_t row_of(const struct grouped *g) { return gates_of(g) + (g->heads + 2 * g->kv_heads) * g->width; }

/* out *= sigmoid(gates) */
static void apply_gates(const float *gates, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) out[i] /= 1.0f + exponential(-gates[i]);
}

/* A token's queries and keys normalised and rotated, all clipped, its keys and values stored in the cache. */
static void place_token(const struct grouped *g, float *qkv, const float *cosines, const float *sines,
                        char *const *streams, const int32_t *blocks, int64_t position) {
    int64_t both[2] = {g->heads * g->width, g->kv_heads * g->width};
    const float *norms[2] = {g->query_norm, g->key_norm};
    float *k = qkv + both[0], *v = k + both[1];
    for (int which = 0; which < 2; which++) {
        float *x = which ? k : qkv;
        for (int64_t i = 0; g->normed && i < both[which];) {
            int64_t n = g->normed == 1 ? g->width : both[which];
            rms_norm(x + i, norms[which], n, g->eps, x + i);
            i += n;
        }
    }
    if (g->clip > 0.0f)
        for (int64_t i = 0; i < both[0] + 2 * both[1]; i++)
            qkv[i] = qkv[i] > g->clip ? g->clip : qkv[i] < -g->clip ? -g->clip : qkv[i];
    for (int64_t head = 0; head < g->heads + g->kv_heads; head++) rotate(qkv + head * g->width, cosines, sines, g->rope);
    for (int64_t head = 0; head < g->kv_heads; head++) {
        int64_t at = slab_row(blocks, g->kv_heads, head, position) * g->width;
        store_cached(k + head * g->width, g->width, streams[0], at, g->bits);
        store_cached(v + head * g->width, g->width, streams[1], at, g->bits);
    }
}

/* Heads [head, head + number) that share keys and values, at most SHARING; q, out: of all heads. scores: number * the
 * tokens attended to. */
static void attend_grouped(const struct grouped *g, const float *q, const struct seen *seen, int64_t head,
                           int64_t number, float *scores, float *out) {
    int64_t kv_head = head / (g->heads / g->kv_heads);
    struct stream s = {seen->streams[0], seen->streams[1], seen->blocks, g->kv_heads, kv_head, g->width, g->width};
    attend(&s, g->bits, q + head * g->width, g->width, number, seen->first, seen->tokens, g->scale,
           g->sinks ? g->sinks + head : NULL, scores, out + head * g->width);
}

/* --- latent attention ---------------------------------------------------------------------------------------- */

/* A token's latent [rank + rope]: normalised, rotated, stored in the cache. */
static void prepare_latent(const struct latent *l, float *latent, const struct token *t, const struct seen *seen) {
    int64_t width = l->rank + l->rope;
    rms_norm(latent, l->norm, l->rank, l->eps, latent);
    rotate(latent + l->rank, t->cosines, t->sines, l->rope);
    store_cached(latent, width, seen->streams[0], slab_row(seen->blocks, 1, 0, t->position) * width, l->bits);
}

/* y [rank] = the sum of q[i] * row i of `rows` rows [rank]. */
INLINE void weighted_rows(const void *rows, const int bits, int64_t number, int64_t rank, const float *q, float *y) {
    int64_t i = 0;
    for (; i + WIDE * LANES <= rank; i += WIDE * LANES) {
        vector sums[WIDE] = {{0}}, zero = {0};
        for (int64_t n = 0; n < number; n++)
            for (int v = 0; v < WIDE; v++)
                sums[v] = VFMA(vector_at(rows, n * rank + i + v * LANES, bits), q[n] - zero, sums[v]);
        memcpy(y + i, sums, sizeof sums);
    }
    for (; i < rank; i++) {
        y[i] = 0.0f;
        for (int64_t n = 0; n < number; n++) y[i] += number_at(rows, n * rank + i, bits) * q[n];
    }
}

/* scratch: 2 rank + rope + the tokens attended to. */
INLINE void latent_head(const struct latent *l, const int bits, const float *q, const struct token *t,
                        const struct seen *seen, int64_t head, float *scratch, float *out) {
    int64_t latent = l->rank + l->rope;
    float *down = scratch, *up = scratch + latent, *scores = up + l->rank;
    q += head * (l->nope + l->rope);
    const char *rows = (const char *)l->expansion + head * (l->nope + l->value) * l->rank * (bits / 8);
    weighted_rows(rows, bits, l->nope, l->rank, q, down);
    memcpy(down + l->rank, q + l->nope, (size_t)l->rope * sizeof *q);
    rotate(down + l->rank, t->cosines, t->sines, l->rope);
    struct stream s = {seen->streams[0], seen->streams[0], seen->blocks, 1, 0, latent, l->rank};
    attend_heads(&s, bits, down, latent, 1, seen->first, seen->tokens, l->scale, NULL, scores, up);
    struct stream values = {rows + l->nope * l->rank * (bits / 8), NULL, NULL, 1, 0, l->rank, 0};
    score_keys(&values, bits, up, 0, 1, 0, l->value, 1.0f, out + head * l->value, 0);
}

static void attend_latent(const struct latent *l, const float *q, const struct token *t, const struct seen *seen,
                          int64_t head, float *scratch, float *out) {
    if (l->bits == BF16)
        latent_head(l, BF16, q, t, seen, head, scratch, out);
    else
        latent_head(l, 32, q, t, seen, head, scratch, out);
}

/* --- one token on given queries ------------------------------------------------------------------------------- */

struct attending {
    const struct heads *h;
    const float *q;
    struct seen seen;
    float *scores, *out;
};

static void attend_some(void *context, int64_t lo, int64_t hi) {
    const struct attending *a = context;
    const struct heads *h = a->h;
    for (int64_t head = lo; head < hi; head++) {
        struct stream s = {a->seen.streams[0], a->seen.streams[h->latent ? 0 : 1], a->seen.blocks, h->kv_heads,
                           head / (h->heads / h->kv_heads), h->key_width, h->value_width};
        attend(&s, h->bits, a->q + head * h->key_width, h->key_width, 1, a->seen.first, a->seen.tokens, h->scale,
               h->sinks ? h->sinks + head : NULL, a->scores + head * (a->seen.tokens - a->seen.first),
               a->out + head * h->value_width);
    }
}

int64_t tandem_attend_scratch(const struct heads *h, int64_t threads, int64_t tokens) {
    (void)threads;
    return 4 * h->heads * tokens;
}

int tandem_attend(struct team *team, const struct heads *h, const float *q, char *const *streams, const int32_t *blocks,
                  int64_t capacity, int64_t position, float *out, void *scratch) {
    if (position < 0 || position >= capacity) return BAD_POSITION;
    struct token token = {.streams = streams, .blocks = blocks, .position = position};
    struct attending a = {h, q, seen_by(&token, 0, 0, h->window), scratch, out};
    parallel_for(team, attend_some, &a, h->heads, 0);
    return FINE;
}

void tandem_rms_norm(const float *x, const float *weight, int64_t rows, int64_t width, float eps, float *out) {
    for (int64_t r = 0; r < rows; r++) rms_norm(x + r * width, weight, width, eps, out + r * width);
}
