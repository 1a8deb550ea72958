/* A decoder layer up to its routed experts, for single tokens of several sequences, in one call: norm, products,
 * attention, norm, router, shared experts. The team's threads spin between these parts, so that a layer wakes them
 * once. Part of body.h. */
#pragma once

#include "attention.h"
#include "blocks.h"
#include "delta.h"
#include "rows.h"
#include "team.h"
#include "vectors.h"

enum { ROWS_ALONE = 4 };    /* so few rows one thread normalises or quantizes sooner than the others take part */
enum { OUTPUTS_TAKEN = 4 }; /* of a row-major matrix: threads divide it in these units */

/* --- a product ------------------------------------------------------------------------------------------------ */

struct multiplication {
    const struct matrix *matrix;
    const float *x;
    int64_t rows;
    float *y;
    struct packed plain, packed; /* codes of x; packed for the blocks. BF16: `plain` are x's numbers, rounded */
};

/* Bytes; sets `m`'s pointers into the memory from `scratch` on. */
static int64_t lay_out_product(struct multiplication *m, uint8_t *scratch) {
    const struct weights *w = &m->matrix->of;
    uint8_t *at = scratch;
    if (w->bits >= BF16) {
        TAKE(m->plain.codes, w->bits == BF16 ? m->rows * arranged_bytes(w->inputs) : 0);
        return at - scratch;
    }
    int64_t inputs = padded_inputs(w, w->inputs);
    TAKE(m->packed.codes, m->rows * inputs);
    TAKE(m->packed.factors, m->rows * inputs / w->group * 8);
    TAKE(m->plain.codes, m->rows * inputs);
    TAKE(m->plain.factors, m->rows * inputs / w->group * 8);
    return at - scratch;
}

int64_t tandem_product_scratch(const struct matrix *matrix, int64_t rows) {
    struct multiplication m = {.matrix = matrix, .rows = rows};
    return lay_out_product(&m, NULL);
}

static void quantize_rows(void *context, int64_t lo, int64_t hi) {
    const struct multiplication *m = context;
    const struct weights *w = &m->matrix->of;
    int64_t inputs = padded_inputs(w, w->inputs), step = arranged_bytes(inputs);
    for (int64_t r = lo; w->bits == BF16 && r < hi; r++)
        arrange(m->x + r * inputs, inputs, (char *)m->plain.codes + r * step);
    if (w->bits == BF16) return;
    tandem_quantize(w, m->x + lo * w->inputs, hi - lo, m->plain.codes + lo * inputs,
                    m->plain.factors + 2 * lo * (inputs / w->group));
}

static void row_major(void *context, int64_t lo, int64_t hi) {
    const struct multiplication *m = context;
    const struct weights *w = &m->matrix->of;
    lo *= OUTPUTS_TAKEN, hi = least(hi * OUTPUTS_TAKEN, w->outputs);
    const void *x = w->bits == BF16 ? (const void *)m->plain.codes : m->x;
    const float *scales = w->bits == FP8 ? matrix_scales(w, m->matrix->data) : NULL;
    plain_products(w, m->matrix->data, scales, lo, hi, x, m->rows, m->y, w->outputs);
}

void tandem_product(struct team *team, const struct matrix *matrix, const float *x, int64_t rows, float *y,
                    void *scratch, int64_t spin_ns) {
    const struct weights *w = &matrix->of;
    struct multiplication m = {.matrix = matrix, .x = x, .rows = rows, .y = y};
    lay_out_product(&m, scratch);
    if (rows == 1 && w->bits < BF16) m.plain = m.packed; /* a single row's codes are in their order */
    if (w->bits <= BF16) parallel_for(rows < ROWS_ALONE ? NULL : team, quantize_rows, &m, rows, WAKE_NS);
    if (w->bits >= BF16) {
        parallel_for(team, row_major, &m, (w->outputs + OUTPUTS_TAKEN - 1) / OUTPUTS_TAKEN, spin_ns);
    } else {
        struct activations codes = {m.plain.codes, m.plain.factors};
        if (rows > 1) pack(w, w->inputs, &codes, NULL, rows, m.packed);
        struct product product = {.w = w, .matrix = matrix->data, .inputs = w->inputs, .outputs = w->outputs,
                                  .x = m.packed, .count = rows, .y = y, .row_stride = w->outputs,
                                  .block_stride = BLOCK, .factors = (const uint8_t *)matrix->data + w->factors,
                                  .factor_blocks = (w->outputs + BLOCK - 1) / BLOCK};
        parallel_for(team, blocks, &product, (w->outputs + BLOCK - 1) / BLOCK, spin_ns);
    }
    for (int64_t r = 0; matrix->bias && r < rows; r++)
        for (int64_t i = 0; i < w->outputs; i++) y[r * w->outputs + i] += matrix->bias[i];
}

/* --- the layer ------------------------------------------------------------------------------------------------ */

struct layer_run {
    const struct layer *layer;
    const struct step *step;
    int64_t index, threads;
    /* in scratch: */
    float *wide;     /* [rows, outputs of first, query or up] */
    float *narrow;   /* [rows, inputs of output, query or down] */
    float *query;    /* [rows, outputs of query] */
    float *dense;    /* [rows, hidden], the output of a dense block */
    float *absorbed; /* [rows, heads, rank + rope], queries of latents */
    void *product;   /* of one product at a time */
    struct heads heads;
    struct decode attention;
    float *delta;    /* of each thread, `delta_each` numbers */
    int64_t delta_each, next; /* `next` item to take, atomic */
};

static int64_t inputs_of(const struct matrix *m) { return m ? m->of.inputs : 0; }
static int64_t outputs_of(const struct matrix *m) { return m ? m->of.outputs : 0; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Bytes; sets `run`'s pointers into the memory from `scratch` on. */
static int64_t lay_out_layer(struct layer_run *run, int64_t rows, int64_t tokens, uint8_t *scratch) {
    const struct layer *l = run->layer;
    const struct matrix *matrices[] = {l->first, l->query, l->output, l->up, l->down};
    int64_t product = 0;
    for (int n = 0; n < 5; n++)
        if (matrices[n]) product = most(product, tandem_product_scratch(matrices[n], rows));
    if (l->grouped) run->heads = heads_of_grouped(l->grouped);
    if (l->latent) run->heads = heads_of_latent(l->latent);
    run->delta_each = l->delta ? rounded_up(delta_scratch(l->delta), 16) : 0;
    run->attention.h = &run->heads;
    uint8_t *at = scratch;
    TAKE(run->wide, 4 * rows * most(outputs_of(l->first), outputs_of(l->up)));
    TAKE(run->narrow, 4 * rows * most(inputs_of(l->query), most(inputs_of(l->output), inputs_of(l->down))));
    TAKE(run->query, 4 * rows * outputs_of(l->query));
    TAKE(run->dense, 4 * rows * (l->router ? 0 : l->hidden));
    TAKE(run->delta, 4 * run->threads * run->delta_each);
    TAKE(run->absorbed, l->latent ? 4 * rows * run->heads.heads * run->heads.key_width : 0);
    TAKE(run->product, product);
    return at - scratch + (l->delta ? 0 : lay_out_decode(&run->attention, rows, run->threads, tokens, at));
}

int64_t tandem_layer_scratch(const struct layer *layer, int64_t rows, int64_t threads, int64_t tokens) {
    struct layer_run run = {.layer = layer, .threads = threads};
    return lay_out_layer(&run, rows, tokens, NULL);
}

static void normalise(const struct norm *norm, const float *x, int64_t n, float *out) {
    if (!norm->bias) {
        rms_norm(x, norm->weight, n, norm->eps, out);
        return;
    }
    float mean = sum_of(x, n) / (float)n;
    for (int64_t i = 0; i < n; i++) out[i] = x[i] - mean;
    float scale = 1.0f / sqrtf(sum_of_squares(out, n) / (float)n + norm->eps);
    for (int64_t i = 0; i < n; i++) out[i] = out[i] * scale * norm->weight[i] + norm->bias[i];
}

static void enter_attention(void *context, int64_t lo, int64_t hi) {
    const struct layer_run *run = context;
    int64_t hidden = run->layer->hidden;
    for (int64_t r = lo; r < hi; r++)
        normalise(&run->layer->attention_norm, run->step->h + r * hidden, hidden, run->step->x + r * hidden);
}

/* Stores the rows' keys and values, or latents. */
static void prepare_rows(void *context, int64_t lo, int64_t hi) {
    const struct layer_run *run = context;
    const struct layer *l = run->layer;
    for (int64_t r = lo; r < hi; r++) {
        const struct token *token = run->step->tokens + r;
        char *const *streams = token->streams + run->index * streams_of(&run->heads);
        float *row = run->wide + r * l->first->of.outputs;
        if (l->grouped) {
            place_token(l->grouped, row + gates_of(l->grouped), token->cosines, token->sines, streams, token->blocks,
                        token->position);
            continue;
        }
        prepare_latent(l->latent, row + l->first->of.outputs - l->latent->rank - l->latent->rope, token, streams);
        int64_t rank = l->latent->query_rank;
        if (rank) rms_norm(row, l->latent->query_norm, rank, l->latent->eps, run->narrow + r * rank);
    }
}

/* Queries [lo, hi) of latents, heads of the rows in turns. */
static void absorb_queries(void *context, int64_t lo, int64_t hi) {
    const struct layer_run *run = context;
    const struct latent *l = run->layer->latent;
    for (int64_t item = lo; item < hi; item++) {
        int64_t row = item % run->step->rows, head = item / run->step->rows;
        const float *q = (run->layer->query ? run->query + row * run->layer->query->of.outputs
                                            : run->wide + row * run->layer->first->of.outputs);
        absorb_query(l, q + head * (l->nope + l->rope), run->step->tokens + row, head,
                     run->absorbed + (row * l->heads + head) * run->heads.key_width);
    }
}

static void finish_head(const struct decode *d, int64_t row, int64_t head) {
    const struct layer_run *run = d->context;
    const struct grouped *g = run->layer->grouped;
    float *out = run->narrow + row * run->layer->output->of.inputs;
    if (run->layer->latent) {
        expand_latent(run->layer->latent, merged(d, row, head), head, out + head * run->layer->latent->value);
        return;
    }
    int64_t at = head * g->width;
    memcpy(out + at, merged(d, row, head), (size_t)g->width * sizeof *out);
    if (g->gated) apply_gates(run->wide + row * run->layer->first->of.outputs + at, g->width, out + at);
}

/* run->narrow = the heads' outputs. */
static void attend_rows(struct team *team, struct layer_run *run) {
    const struct layer *l = run->layer;
    struct decode *d = &run->attention;
    d->tokens = run->step->tokens, d->layer = run->index, d->rows = run->step->rows;
    d->finish = finish_head, d->context = run;
    if (l->latent) {
        parallel_for(team, absorb_queries, run, d->rows * l->latent->heads, WAKE_NS);
        d->q = run->absorbed, d->q_stride = l->latent->heads * run->heads.key_width;
    } else {
        d->q = run->wide + gates_of(l->grouped), d->q_stride = l->first->of.outputs;
    }
    attend_all(team, d, WAKE_NS);
}

static void recur_rows(void *context, int64_t lo, int64_t hi) {
    struct layer_run *run = context;
    const struct layer *l = run->layer;
    for (int64_t thread = lo; thread < hi; thread++)
        for (;;) {
            int64_t item = __atomic_fetch_add(&run->next, 1, __ATOMIC_RELAXED), row = item / l->delta->key_heads;
            if (row >= run->step->rows) break;
            char *const *at = run->step->tokens[row].states + run->index * 4;
            struct delta_states states = {(float *)at[0], (float *)at[1], (float *)at[2], (float *)at[3]};
            recur(l->delta, run->wide + row * l->first->of.outputs, &states, item % l->delta->key_heads,
                  run->delta + thread * run->delta_each, run->narrow + row * l->output->of.inputs);
        }
}

/* out += h; x = norm(out). */
static void leave_attention(void *context, int64_t lo, int64_t hi) {
    const struct layer_run *run = context;
    int64_t hidden = run->layer->hidden;
    for (int64_t r = lo; r < hi; r++) {
        const float *h = run->step->h + r * hidden;
        float *out = run->step->out + r * hidden;
        for (int64_t i = 0; i < hidden; i++) out[i] += h[i];
        normalise(&run->layer->mlp_norm, out, hidden, run->step->x + r * hidden);
    }
}

static void activate_rows(void *context, int64_t lo, int64_t hi) {
    const struct layer_run *run = context;
    int64_t channels = run->layer->down->of.inputs;
    for (int64_t r = lo; r < hi; r++) {
        float *both = run->wide + r * 2 * channels;
        silu_times(both, both + channels, channels);
        memcpy(run->narrow + r * channels, both, (size_t)channels * sizeof *both);
    }
}

static struct weights float32_weights(const struct layer *l, int64_t outputs) {
    return (struct weights){.bits = FLOAT32, .group = 1, .inputs = l->hidden, .outputs = outputs};
}

/* y = the feed-forward block of x. */
static void feed_forward(struct team *team, struct layer_run *run, float *y) {
    const struct layer *l = run->layer;
    const struct step *s = run->step;
    tandem_product(team, l->up, s->x, s->rows, run->wide, run->product, WAKE_NS);
    parallel_for(s->rows < ROWS_ALONE ? NULL : team, activate_rows, run, s->rows, WAKE_NS);
    tandem_product(team, l->down, run->narrow, s->rows, y, run->product, 0);
    for (int64_t r = 0; l->gate && r < s->rows; r++) {
        float dot;
        struct weights row = float32_weights(l, 1);
        float32_products(&row, l->gate, 0, 1, s->x + r * l->hidden, 1, &dot, 1);
        float scale = 1.0f / (1.0f + exponential(-dot));
        for (int64_t i = 0; i < l->hidden; i++) y[r * l->hidden + i] *= scale;
    }
}

int tandem_layer(struct team *team, const struct layer *l, int64_t index, const struct step *s) {
    struct layer_run run = {.layer = l, .step = s, .index = index, .threads = team ? team->threads : 1};
    struct team *of_rows = s->rows < ROWS_ALONE ? NULL : team;
    int64_t tokens = 0;
    for (int64_t r = 0; r < s->rows; r++) {
        if (s->tokens[r].position < 0 || s->tokens[r].position >= s->tokens[r].capacity) return BAD_POSITION;
        int64_t window = l->grouped ? l->grouped->window : 0, seen = s->tokens[r].position + 1;
        tokens = most(tokens, window ? least(window, seen) : seen);
    }
    if (lay_out_layer(&run, s->rows, tokens, s->scratch) > s->scratch_bytes) return SMALL_BUFFERS;
    parallel_for(of_rows, enter_attention, &run, s->rows, WAKE_NS);
    tandem_product(team, l->first, s->x, s->rows, run.wide, run.product, WAKE_NS);
    if (l->delta) {
        parallel_for(team, recur_rows, &run, run.threads, WAKE_NS);
    } else {
        parallel_for(of_rows, prepare_rows, &run, s->rows, WAKE_NS);
        if (l->query) tandem_product(team, l->query, run.narrow, s->rows, run.query, run.product, WAKE_NS);
        attend_rows(team, &run);
    }
    tandem_product(team, l->output, run.narrow, s->rows, s->out, run.product, WAKE_NS);
    parallel_for(of_rows, leave_attention, &run, s->rows, WAKE_NS);
    if (s->logits) {
        struct matrix router = {float32_weights(l, l->experts), l->router, l->router_bias};
        tandem_product(team, &router, s->x, s->rows, s->logits, NULL, l->up ? WAKE_NS : 0);
    }
    if (!l->up) return FINE;
    feed_forward(team, &run, l->router ? s->shared : run.dense);
    for (int64_t i = 0; !l->router && i < s->rows * l->hidden; i++) s->out[i] += run.dense[i];
    return FINE;
}
