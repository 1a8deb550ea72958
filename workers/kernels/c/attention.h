/* Attention of single new tokens: the operations between two products with weights. The tokens that one attends to are
 * divided into parts, which threads take one after the other, and the parts are put together in their order: the bits
 * depend neither on the number of threads nor on other rows. Part of body.h. */
#pragma once

#include "blocks.h"
#include "panels.h"
#include "team.h"

enum { WIDE = 4 };                    /* vectors that are summed in one pass over rows */
enum { PART = 256, MOST_PARTS = 32 }; /* least tokens of a part; most parts of a row */
enum { HEADS_TOGETHER = 32 };         /* most heads that are taken together */
enum { ENOUGH = 64 };                 /* so many parts of all heads keep the threads busy */

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

/* --- parts --------------------------------------------------------------------------------------------------- */

/* Single tokens of `rows` sequences. */
struct decode {
    const struct heads *h;
    const struct token *tokens; /* [rows] */
    int64_t layer, rows;        /* `layer`: whose streams they are, of those of all layers */
    const float *q;             /* [rows, heads, key_width], a row's q_stride numbers after the one before */
    int64_t q_stride;
    void (*finish)(const struct decode *, int64_t row, int64_t head); /* what follows a head's attention */
    const void *context;                                              /* of `finish` */
    /* in scratch: */
    int64_t *first;          /* [rows + 1]: parts of the rows before */
    float *most, *sum, *out; /* of each part and head, as in struct queries */
    char *memory;            /* of each thread, `each` bytes */
    int64_t each;
    /* heads that are taken together, groups of these in a row; what is taken next, atomic, and how much at once: */
    int64_t together, groups, next, chunk;
};

/* Groups of heads that share keys and values, at most so many together. */
static int64_t head_groups(const struct heads *h, int64_t together) {
    return h->kv_heads * ((h->heads / h->kv_heads + together - 1) / together);
}

static int64_t most_parts(const struct heads *h) {
    int64_t parts = ENOUGH / head_groups(h, HEADS_TOGETHER);
    return parts < 4 ? 4 : least(parts, MOST_PARTS);
}

/* The cached tokens [first, tokens) that a row attends to, in `parts` parts of `size`, which begin at multiples of it. */
struct seen {
    int64_t first, tokens, size, parts;
};

static struct seen seen_by(const struct heads *h, int64_t position) {
    struct seen s = {.tokens = position + 1, .size = PART};
    s.first = h->window && s.tokens > h->window ? s.tokens - h->window : 0;
    while (s.tokens - s.first > s.size * most_parts(h)) s.size *= 2;
    s.parts = (s.tokens - 1) / s.size - s.first / s.size + 1;
    return s;
}

/* Bytes; sets `d`'s pointers into the memory from `scratch` on. `tokens`: the most that a row attends to. */
static int64_t lay_out_decode(struct decode *d, int64_t rows, int64_t threads, int64_t tokens, void *scratch) {
    const struct heads *h = d->h;
    char *at = scratch;
    int64_t parts = rows * h->heads * (least(most_parts(h), (tokens + PART - 1) / PART) + 1);
    d->each = lay_out_panels(h, least(HEADS_TOGETHER, h->heads / h->kv_heads), NULL).bytes;
    TAKE(d->first, 8 * (rows + 1));
    TAKE(d->most, 4 * parts);
    TAKE(d->sum, 4 * parts);
    TAKE(d->out, 4 * parts * padded_value(h));
    TAKE(d->memory, threads * d->each);
    return at - (char *)scratch;
}

/* One part of a row for heads [head, head + number). */
static void attend_part(const struct decode *d, int64_t row, int64_t part, int64_t head, int64_t number, void *memory) {
    const struct heads *h = d->h;
    const struct token *token = d->tokens + row;
    struct seen seen = seen_by(h, token->position);
    int64_t from = (seen.first / seen.size + part) * seen.size, at = (d->first[row] + part) * h->heads + head;
    int64_t padded = padded_value(h);
    struct panel_memory m = lay_out_panels(h, number, memory);
    struct queries q = {number, number, seen.tokens, h->window, m.q, d->most + at, d->sum + at, d->out + at * padded};
    for (int64_t r = 0; r < number; r++) {
        q.most[r] = -INFINITY, q.sum[r] = 0.0f;
        arrange_query(h, d->q + row * d->q_stride + (head + r) * h->key_width, query_of(h, &m, r));
    }
    memset(q.out, 0, (size_t)(number * padded) * sizeof *q.out);
    char *const *streams = token->streams + d->layer * streams_of(h);
    struct stream s = stream_of(h, streams, token->blocks, head / (h->heads / h->kv_heads));
    attend_panels(h, &s, from > seen.first ? from : seen.first, least(from + seen.size, seen.tokens), &q, &m);
}

/* A head's attention [value_width]: its parts together. */
static float *merged(const struct decode *d, int64_t row, int64_t head) {
    const struct heads *h = d->h;
    int64_t padded = padded_value(h), first = d->first[row], end = d->first[row + 1];
    float most = h->sinks ? h->sinks[head] : -INFINITY, *to = d->out + (first * h->heads + head) * padded;
    for (int64_t p = first; p < end; p++) {
        float of_part = d->most[p * h->heads + head];
        most = of_part > most ? of_part : most;
    }
    float sum = h->sinks ? exponential(h->sinks[head] - most) : 0.0f;
    for (int64_t p = first; p < end; p++) {
        int64_t at = p * h->heads + head;
        float weight = exponential(d->most[at] - most);
        const float *from = d->out + at * padded;
        sum += weight * d->sum[at];
        for (int64_t i = 0; i < padded; i++) to[i] = p > first ? to[i] + weight * from[i] : weight * from[i];
    }
    float scale = 1.0f / sum;
    for (int64_t i = 0; i < padded; i++) to[i] *= scale;
    return to;
}

static void attend_parts(void *context, int64_t lo, int64_t hi) {
    struct decode *d = context;
    int64_t shared = d->h->heads / d->h->kv_heads, per = d->groups / d->h->kv_heads;
    int64_t items = d->first[d->rows] * d->groups;
    for (int64_t thread = lo; thread < hi; thread++)
        for (int64_t from; (from = __atomic_fetch_add(&d->next, d->chunk, __ATOMIC_RELAXED)) < items;)
            for (int64_t item = from, row = 0; item < least(from + d->chunk, items); item++) {
                while (d->first[row + 1] * d->groups <= item) row++;
                int64_t parts = d->first[row + 1] - d->first[row], of_row = item - d->first[row] * d->groups;
                int64_t group = of_row / parts, in_group = group % per * d->together;
                int64_t head = group / per * shared + in_group, number = least(d->together, shared - in_group);
                attend_part(d, row, of_row % parts, head, number, d->memory + thread * d->each);
                for (int64_t i = 0; parts == 1 && i < number; i++) d->finish(d, row, head + i);
            }
}

static void finish_heads(void *context, int64_t lo, int64_t hi) {
    const struct decode *d = context;
    for (int64_t item = lo; item < hi; item++) {
        int64_t row = item % d->rows, head = item / d->rows;
        if (d->first[row + 1] - d->first[row] > 1) d->finish(d, row, head);
    }
}

/* All rows and heads; laid out before. */
static void attend_all(struct team *team, struct decode *d, int64_t spin_ns) {
    int64_t shared = d->h->heads / d->h->kv_heads, threads = team ? team->threads : 1;
    d->first[0] = 0;
    for (int64_t r = 0; r < d->rows; r++) d->first[r + 1] = d->first[r] + seen_by(d->h, d->tokens[r].position).parts;
    int64_t parts = d->first[d->rows];
    /* Heads that share keys are taken together, unless that leaves threads without work. */
    d->together = least(HEADS_TOGETHER, shared);
    while (d->together > 1 && parts * head_groups(d->h, d->together) < threads) d->together--;
    d->groups = head_groups(d->h, d->together);
    d->chunk = parts * d->groups / (8 * threads) + 1;
    d->next = 0;
    parallel_for(team, attend_parts, d, threads, parts > d->rows ? WAKE_NS : spin_ns);
    if (parts > d->rows) parallel_for(team, finish_heads, d, d->rows * d->h->heads, spin_ns);
}

/* --- heads in groups that share keys and values -------------------------------------------------------------- */

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
        int64_t row = slab_row(blocks, g->kv_heads, head, position);
        store_row(k + head * g->width, g->width, streams, row, g->bits);
        store_row(v + head * g->width, g->width, streams + (g->bits == INT8 ? 2 : 1), row, g->bits);
    }
}

static struct heads heads_of_grouped(const struct grouped *g) {
    return (struct heads){g->bits, g->heads, g->kv_heads, g->width, g->width, 0, g->window, g->sinks, g->scale};
}

/* --- latent attention ---------------------------------------------------------------------------------------- */

static struct heads heads_of_latent(const struct latent *l) {
    return (struct heads){l->bits, l->heads, 1, l->rank + l->rope, l->rank, 1, 0, NULL, l->scale};
}

/* Bits of a number of the expansion. */
static int64_t expansion_bits(const struct latent *l) { return l->bits == FLOAT32 ? FLOAT32 : BF16; }

static const char *expansion_of(const struct latent *l, int64_t head) {
    return (const char *)l->expansion + head * (l->nope + l->value) * l->rank * (expansion_bits(l) / 8);
}

/* A token's latent [rank + rope]: normalised, rotated, stored in the cache. */
static void prepare_latent(const struct latent *l, float *latent, const struct token *t, char *const *streams) {
    rms_norm(latent, l->norm, l->rank, l->eps, latent);
    rotate(latent + l->rank, t->cosines, t->sines, l->rope);
    store_row(latent, l->rank + l->rope, streams, slab_row(t->blocks, 1, 0, t->position), l->bits);
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

/* y [number] = rows [number, rank] times x. */
INLINE void row_products(const void *rows, const int bits, int64_t number, int64_t rank, const float *x, float *y) {
    int64_t whole = rank / LANES * LANES;
    for (int64_t n = 0; n < number; n++) {
        vector sums = {0};
        for (int64_t i = 0; i < whole; i += LANES) sums = VFMA(vector_at(rows, n * rank + i, bits), loaded(x + i), sums);
        y[n] = SUM(sums);
        for (int64_t i = whole; i < rank; i++) y[n] += number_at(rows, n * rank + i, bits) * x[i];
    }
}

/* A head's query q [nope + rope] as a query of latents: to [rank + rope]. */
static void absorb_query(const struct latent *l, const float *q, const struct token *t, int64_t head, float *to) {
    if (expansion_bits(l) == BF16)
        weighted_rows(expansion_of(l, head), BF16, l->nope, l->rank, q, to);
    else
        weighted_rows(expansion_of(l, head), FLOAT32, l->nope, l->rank, q, to);
    memcpy(to + l->rank, q + l->nope, (size_t)l->rope * sizeof *q);
    rotate(to + l->rank, t->cosines, t->sines, l->rope);
}

/* A head's attended latent as its output: to [value]. */
static void expand_latent(const struct latent *l, const float *latent, int64_t head, float *to) {
    const char *rows = expansion_of(l, head) + l->nope * l->rank * (expansion_bits(l) / 8);
    if (expansion_bits(l) == BF16)
        row_products(rows, BF16, l->value, l->rank, latent, to);
    else
        row_products(rows, FLOAT32, l->value, l->rank, latent, to);
}

/* --- one token on given queries ------------------------------------------------------------------------------- */

static void copy_head(const struct decode *d, int64_t row, int64_t head) {
    float *out = (float *)d->context;
    int64_t width = d->h->value_width;
    (void)row;
    memcpy(out + head * width, merged(d, 0, head), (size_t)width * sizeof *out);
}

int64_t tandem_attend_scratch(const struct heads *h, int64_t threads, int64_t tokens) {
    struct decode d = {.h = h};
    return lay_out_decode(&d, 1, threads, tokens, NULL);
}

int tandem_attend(struct team *team, const struct heads *h, const float *q, char *const *streams, const int32_t *blocks,
                  int64_t capacity, int64_t position, float *out, void *scratch) {
    if (position < 0 || position >= capacity) return BAD_POSITION;
    struct token token = {.streams = streams, .blocks = blocks, .position = position};
    struct decode d = {.h = h, .tokens = &token, .rows = 1, .q = q, .finish = copy_head, .context = out};
    lay_out_decode(&d, 1, team ? team->threads : 1, position + 1, scratch);
    attend_all(team, &d, 0);
    return FINE;
}

void tandem_rms_norm(const float *x, const float *weight, int64_t rows, int64_t width, float eps, float *out) {
    for (int64_t r = 0; r < rows; r++) rms_norm(x + r * width, weight, width, eps, out + r * width);
}
