/* The gated delta rule of single new tokens, in the place of attention: what comes between two products with weights.
 * All numbers are float32. A head of keys and the heads of values that it serves are one item, computed by one thread,
 * so the bits do not depend on the number of threads. Part of body.h. */
#pragma once

#include "attention.h"

/* A token's states before it and after it, see `struct token`. */
struct delta_states {
    const float *inputs, *matrices;
    float *next_inputs, *next_matrices;
};

/* Numbers of scratch: a query, a key and a value. */
static int64_t delta_scratch(const struct delta *d) { return 2 * d->key_dim + d->value_dim; }

/* out [n] = silu of the convolution of channels [at, at + n); the inputs move up by one token. */
static void convolve(const struct delta *d, const struct delta_states *s, const float *x, int64_t at, int64_t n,
                     float *out) {
    int64_t channels = 2 * d->key_heads * d->key_dim + d->value_heads * d->value_dim, last = d->taps - 1;
    const float *weights = d->tap_weights + at;
    for (int64_t i = 0; i < n; i++) out[i] = 0.0f;
    for (int64_t t = 0; t < d->taps; t++) {
        const float *from = t < last ? s->inputs + t * channels + at : x + at, *w = weights + t * channels;
        for (int64_t i = 0; i < n; i++) out[i] += from[i] * w[i];
        if (t) memcpy(s->next_inputs + (t - 1) * channels + at, from, (size_t)n * sizeof *from);
    }
    for (int64_t i = 0; i < n; i++) out[i] /= 1.0f + exponential(-out[i]);
}

/* x to the length `length`. */
static void to_length(float *x, int64_t n, float length) {
    float scale = length / sqrtf(sum_of_squares(x, n) + 1e-6f);
    for (int64_t i = 0; i < n; i++) x[i] *= scale;
}

/* Columns [j, j + vectors * LANES) of S = decay S + k (rate (v - decay S'k))' and out = S'q. */
INLINE void delta_columns(const float *from, float *to, int64_t rows, int64_t columns, int64_t j, const int vectors,
                          const float *q, const float *k, const float *v, float decay, float rate, float *out) {
    vector known[WIDE], sums[WIDE], zero = {0};
    for (int n = 0; n < vectors; n++) known[n] = sums[n] = zero;
    for (int64_t i = 0; i < rows; i++)
        for (int n = 0; n < vectors; n++)
            known[n] = VFMA(loaded(from + i * columns + j + n * LANES), k[i] - zero, known[n]);
    for (int n = 0; n < vectors; n++) known[n] = (loaded(v + j + n * LANES) - decay * known[n]) * rate;
    for (int64_t i = 0; i < rows; i++)
        for (int n = 0; n < vectors; n++) {
            vector s = VFMA(known[n], k[i] - zero, decay * loaded(from + i * columns + j + n * LANES));
            memcpy(to + i * columns + j + n * LANES, &s, sizeof s);
            sums[n] = VFMA(s, q[i] - zero, sums[n]);
        }
    memcpy(out + j, sums, (size_t)vectors * sizeof(vector));
}

static void delta_head(const float *from, float *to, int64_t rows, int64_t columns, const float *q, const float *k,
                       const float *v, float decay, float rate, float *out) {
    int64_t j = 0;
    for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
        delta_columns(from, to, rows, columns, j, WIDE, q, k, v, decay, rate, out);
    for (; j + LANES <= columns; j += LANES) delta_columns(from, to, rows, columns, j, 1, q, k, v, decay, rate, out);
    for (; j < columns; j++) {
        float known = 0.0f, sum = 0.0f;
        for (int64_t i = 0; i < rows; i++) known += from[i * columns + j] * k[i];
        float change = (v[j] - decay * known) * rate;
        for (int64_t i = 0; i < rows; i++) {
            float s = decay * from[i * columns + j] + k[i] * change;
            to[i * columns + j] = s;
            sum += s * q[i];
        }
        out[j] = sum;
    }
}

/* Head `head` of keys and the heads of values that it serves; row: the layer's first product; out: of all heads. */
static void recur(const struct delta *d, const float *row, const struct delta_states *s, int64_t head, float *scratch,
                  float *out) {
    int64_t keys = d->key_heads * d->key_dim, width = d->value_dim, values = d->value_heads * width;
    int64_t each = d->value_heads / d->key_heads;
    float *q = scratch, *k = q + d->key_dim, *v = k + d->key_dim;
    const float *z = row + 2 * keys + values, *rates = z + values, *decays = rates + d->value_heads;
    convolve(d, s, row, head * d->key_dim, d->key_dim, q);
    convolve(d, s, row, keys + head * d->key_dim, d->key_dim, k);
    to_length(q, d->key_dim, 1.0f / sqrtf((float)d->key_dim));
    to_length(k, d->key_dim, 1.0f);
    for (int64_t h = head * each; h < (head + 1) * each; h++) {
        convolve(d, s, row, 2 * keys + h * width, width, v);
        float x = decays[h] + d->decay_bias[h];
        float decay = expf(d->decay[h] * (x > 20.0f ? x : log1pf(expf(x))));
        float rate = 1.0f / (1.0f + expf(-rates[h]));
        int64_t at = h * d->key_dim * width;
        float *to = out + h * width;
        delta_head(s->matrices + at, s->next_matrices + at, d->key_dim, width, q, k, v, decay, rate, to);
        rms_norm(to, d->norm, width, d->eps, to);
        for (int64_t i = 0; i < width; i++) to[i] *= z[h * width + i] / (1.0f + exponential(-z[h * width + i]));
    }
}
