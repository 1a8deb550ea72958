/* Products of rows of weights, row-major in bf16, float32 or FP8, with rows of x. Part of body.h.
 *
 * bf16 is taken in pairs, as the 32-bit words that they are on a little-endian machine: lane l of a vector adds the
 * products of numbers 2 l + 1 and 2 l of each PAIR, in this order, however many rows there are and with VDPBF16PS,
 * too.
 *
 * FP8 has a scale for each block of SCALED rows and numbers: [rows / SCALED, numbers / SCALED], both rounded up. Products
 * with x in float32 are added up over a block's numbers, and then scaled. */
#pragma once

#include "kernels.h"
#include "vectors.h"

enum { PAIRS = 1 }; /* like BF16 or FLOAT32: bf16 by WITH_PAIRS */
enum { TALL = 4 };  /* rows of weights that are taken together */
enum { SCALED = 128 };
enum { FEW = VECTOR_BYTES == 64 ? 6 : 2 }; /* most rows of x that one read of the weights is applied to */
enum { MANY = 6 }; /* most rows that are multiplied by a matrix of float32 or pairs together */
enum { STRIP_BYTES = 1 << 19 }; /* of x: they stay in a core's cache while all weights are multiplied */

/* Rows of weights that are taken together for one row of x, which shares no reads. One stream of memory is read
 * faster than several; but each row's products are added one after the other, and narrow registers need several such
 * chains to keep pace with memory. */
enum { ONE_TALL = VECTOR_BYTES < 64 ? TALL : 1 };
enum { FP8_TALL = VECTOR_BYTES < 64 ? TALL : 2 }; /* the same of FP8, which takes longer to widen than to read */

/* --- rows of x as products with bf16 take them ---------------------------------------------------------------- */

/* Bytes from one row to the next: not a power of two, whose lines would evict each other. */
static int64_t arranged_bytes(int64_t inputs) { return rounded_up(inputs, PAIR) * (HAS_PAIRS() ? 2 : 4) + 64; }

static uint16_t narrowed(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return (uint16_t)(bits >> 16);
}

/* One PAIR of x, or with n < PAIR what is left at the end. */
INLINE void arrange_part(const float *x, const int has_pairs, int64_t n, char *to, int64_t at) {
    float rounded[PAIR];
    round_to_bf16(x, n, rounded);
    float *wide = (float *)to + at;
    for (int64_t i = 0; has_pairs && i < n; i++) ((uint16_t *)to)[at + i] = narrowed(rounded[i]);
    for (int64_t i = 0; !has_pairs && n < PAIR && i < n; i++) wide[i] = rounded[i];
    for (int64_t i = 0; !has_pairs && n == PAIR && i < LANES; i++)
        wide[i] = rounded[2 * i + 1], wide[LANES + i] = rounded[2 * i];
}

INLINE void arrange_as(const float *x, const int has_pairs, int64_t inputs, char *to) {
    int64_t h = 0;
    for (; h + PAIR <= inputs; h += PAIR) arrange_part(x + h, has_pairs, PAIR, to, h);
    arrange_part(x + h, has_pairs, inputs - h, to, h);
}

/* x, rounded to bf16: pairs, or float32 numbers of each PAIR in the order of half_of. What is left beyond whole PAIRs
 * keeps its order. */
static void arrange(const float *x, int64_t inputs, char *to) {
    if (HAS_PAIRS())
        arrange_as(x, 1, inputs, to);
    else
        arrange_as(x, 0, inputs, to);
}

enum { LINE = 64 }; /* bytes */

static int64_t number_bytes(int64_t kind) { return kind == FP8 ? 1 : kind == FLOAT32 ? 4 : 2; }

static int64_t blocks_of(int64_t numbers) { return (numbers + SCALED - 1) / SCALED; }

/* --- products ------------------------------------------------------------------------------------------------- */

/* LANES of the numbers [at, at + PAIR) of weights, upper ones of pairs before lower ones. */
INLINE vector half_of(const void *weights, int64_t at, int half, const int kind) {
    if (kind == FLOAT32) return loaded((const float *)weights + at + half * LANES);
    words pairs = loaded_words((const uint16_t *)weights + at);
    return (vector)(half ? pairs << 16 : pairs & 0xFFFF0000u);
}

/* y[r][i] = row i . x[r] for `number` and `rows` (constants) consecutive rows of weights and of x: numbers of x are
 * read once for all rows of weights, and the other way round. `kind`, a constant: BF16, FLOAT32 or PAIRS. Rows of x are
 * `step` bytes apart. Weights are prefetched `ahead` numbers before their use. */
INLINE void products(const void *weights, const int kind, const int number, int64_t hidden, const char *x,
                     int64_t step, const int rows, int64_t ahead, float *y, int64_t stride) {
    const int bytes = kind == FLOAT32 ? 4 : 2;
    vector sums[TALL][FEW];
    for (int i = 0; i < number; i++)
        for (int r = 0; r < rows; r++) sums[i][r] = (vector){0};
    int64_t whole = hidden / PAIR * PAIR;
    for (int64_t h = 0; h < whole; h += PAIR) {
        if (kind == PAIRS) {
            words pairs[TALL];
            for (int i = 0; i < number; i++) {
                const uint16_t *from = (const uint16_t *)weights + i * hidden + h;
                PREFETCH(from + ahead);
                pairs[i] = loaded_words(from);
            }
            for (int r = 0; r < rows; r++) {
                words one = loaded_words((const uint16_t *)(x + r * step) + h);
                for (int i = 0; i < number; i++) sums[i][r] = WITH_PAIRS(pairs[i], one, sums[i][r]);
            }
            continue;
        }
        for (int half = 0; half < 2; half++) {
            vector wide[TALL];
            for (int i = 0; i < number; i++) {
                int64_t at = i * hidden + h;
                if (!half || kind == FLOAT32)
                    PREFETCH((const char *)weights + (at + half * LANES + ahead) * bytes);
                wide[i] = half_of(weights, at, half, kind);
            }
            for (int r = 0; r < rows; r++) {
                vector one = loaded((const float *)(x + r * step) + h + half * LANES);
                for (int i = 0; i < number; i++) sums[i][r] = VFMA(wide[i], one, sums[i][r]);
            }
        }
    }
    if (number == TALL && whole == hidden) {
        for (int r = 0; r < rows; r++) SUM_FOUR(sums[0][r], sums[1][r], sums[2][r], sums[3][r], y + r * stride);
        return;
    }
    for (int i = 0; i < number; i++)
        for (int r = 0; r < rows; r++) {
            float sum = SUM(sums[i][r]);
            for (int64_t h = whole; h < hidden; h++)
                sum += number_at(weights, i * hidden + h, 8 * bytes) *
                       number_at(x + r * step, h, kind == PAIRS ? BF16 : FLOAT32);
            y[r * stride + i] = sum;
        }
}

/* The same of FP8 and x in float32; `scales` [number]: of each row's blocks. */
INLINE void fp8_products(const uint8_t *weights, const float *const *scales, const int number, int64_t hidden,
                         const char *x, int64_t step, const int rows, int64_t ahead, float *y, int64_t stride) {
    vector sums[TALL][FEW], zero = {0};
    for (int i = 0; i < number; i++)
        for (int r = 0; r < rows; r++) sums[i][r] = zero;
    int64_t h = 0, block = 0;
    for (; block * SCALED < hidden; block++) {
        int64_t end = least((block + 1) * SCALED, hidden);
        vector parts[TALL][FEW];
        for (int i = 0; i < number; i++)
            for (int r = 0; r < rows; r++) parts[i][r] = zero;
#define ADD_LANES(at)                                                                                            \
    vector wide[TALL];                                                                                           \
    for (int i = 0; i < number; i++) wide[i] = WIDENED_E4M3(weights + i * hidden + (at));                        \
    for (int r = 0; r < rows; r++) {                                                                             \
        vector one = loaded((const float *)(x + r * step) + (at));                                               \
        for (int i = 0; i < number; i++) parts[i][r] = VFMA(wide[i], one, parts[i][r]);                          \
    }
        for (; h + LINE <= end; h += LINE) {
            for (int i = 0; i < number; i++) PREFETCH(weights + i * hidden + h + ahead);
            for (int v = 0; v < LINE; v += LANES) { ADD_LANES(h + v) }
        }
        for (; h + LANES <= end; h += LANES) { ADD_LANES(h) }
        for (int i = 0; i < number; i++) {
            vector scale = scales[i][block] * E4M3_UNIT - zero;
            for (int r = 0; r < rows; r++) sums[i][r] = VFMA(parts[i][r], scale, sums[i][r]);
        }
    }
    for (int r = 0; r < rows; r++)
        if (number == TALL)
            SUM_FOUR(sums[0][r], sums[1][r], sums[2][r], sums[3][r], y + r * stride);
        else
            for (int i = 0; i < number; i++) y[r * stride + i] = SUM(sums[i][r]);
    for (int i = 0; h < hidden && i < number; i++)
        for (int r = 0; r < rows; r++) {
            float rest = 0.0f;
            for (int64_t at = h; at < hidden; at++)
                rest += e4m3_part(weights[i * hidden + at]) * ((const float *)(x + r * step))[at];
            y[r * stride + i] += rest * (scales[i][block - 1] * E4M3_UNIT);
        }
}

/* The same of rows of weights from `i` on, of any kind. */
INLINE void products_from(const void *weights, const float *scales, const int kind, int64_t i, const int number,
                          int64_t hidden, const char *x, int64_t step, const int rows, int64_t ahead, float *y,
                          int64_t stride) {
    if (kind == FP8) {
        const float *of[TALL];
        for (int k = 0; k < number; k++) of[k] = scales + (i + k) / SCALED * blocks_of(hidden);
        fp8_products((const uint8_t *)weights + i * hidden, of, number, hidden, x, step, rows, ahead, y, stride);
        return;
    }
    const char *from = (const char *)weights + i * hidden * (kind == FLOAT32 ? 4 : 2);
    products(from, kind, number, hidden, x, step, rows, ahead, y, stride);
}

/* y[i] = row i . x for one row of x and ONE_TALL, FP8_TALL or 1 rows of weights. */
INLINE void one_row_products(const struct weights *w, const void *weights, const float *scales, const int kind,
                             int64_t i, int64_t number, const char *x, float *y) {
    const int tall = kind == FP8 ? FP8_TALL : ONE_TALL;
    int64_t hidden = w->inputs, ahead = tall > 1 ? tall * hidden : AHEAD / number_bytes(kind);
    if (number > 1)
        products_from(weights, scales, kind, i, tall, hidden, x, 0, 1, ahead, y, 0);
    else
        products_from(weights, scales, kind, i, 1, hidden, x, 0, 1, ahead, y, 0);
}

/* y[r][i] = row i . x[r] for `count` rows of x and rows [lo, hi) of `weights` [.., inputs]; y has `stride` numbers a
 * row. `kind`: a constant. */
INLINE void products_of(const struct weights *w, const void *weights, const float *scales, const int kind, int64_t lo,
                        int64_t hi, const char *x, int64_t step, int64_t count, float *y, int64_t stride) {
    int64_t hidden = w->inputs, tall = count > 1 ? TALL : kind == FP8 ? FP8_TALL : ONE_TALL, strip = STRIP_BYTES / step / FEW * FEW;
    if (strip < FEW) strip = FEW;
    for (int64_t begin = 0; begin < count; begin += strip) {
        int64_t end = least(begin + strip, count);
        for (int64_t i = lo, taken; i < hi; i += taken) {
            taken = i + tall <= hi ? tall : 1;
            if (count == 1) {
                one_row_products(w, weights, scales, kind, i, taken, x, y + i);
                continue;
            }
            for (int64_t first = begin; first < end; first += FEW) {
                const char *few = x + first * step;
                float *to = y + first * stride + i;
                int64_t rows = least(FEW, end - first), ahead = first == begin ? taken * hidden : 0;
#define CALL_TALL(n) products_from(weights, scales, kind, i, TALL, hidden, few, step, n, ahead, to, stride)
#define CALL_ONE(n) products_from(weights, scales, kind, i, 1, hidden, few, step, n, ahead, to, stride)
                if (taken > 1)
                    BY_COUNT(rows, FEW, CALL_TALL)
                else
                    BY_COUNT(rows, FEW, CALL_ONE)
            }
        }
    }
}

/* to [rows, columns] = from (NULL: 0) + a [rows, depth] b [depth, columns], or with `add` += that; `vectors` of columns.
 * `rows` (at most MANY), `vectors` and `pairs` (a's and b's numbers are pairs of bf16) are constants. */
INLINE void multiply_part(const float *a, int64_t a_stride, const float *b, int64_t b_stride, const int pairs,
                          const int rows, const int vectors, int64_t depth, const float *from, int64_t from_stride,
                          float *to, int64_t to_stride, int add, const char *ahead, int64_t ahead_step) {
    vector sums[MANY][ACROSS], zero = {0};
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = from ? loaded(from + r * from_stride + v * LANES) : zero;
    for (int64_t k = 0; k < depth; k++) {
        vector across[ACROSS];
        for (int v = 0; v < vectors; v++) across[v] = loaded(b + k * b_stride + v * LANES);
        if (ahead) PREFETCH(ahead + k * ahead_step);
        if (ahead) PREFETCH(ahead + k * ahead_step + ahead_step / 2);
        for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, a + r * a_stride + k, sizeof pair);
            vector every = pairs ? (vector)(pair - (words)zero) : a[r * a_stride + k] - zero;
            for (int v = 0; v < vectors; v++)
                sums[r][v] = pairs ? WITH_PAIRS(across[v], every, sums[r][v]) : VFMA(across[v], every, sums[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            float *at = to + r * to_stride + v * LANES;
            if (add) sums[r][v] = loaded(at) + sums[r][v];
            memcpy(at, &sums[r][v], sizeof(vector));
        }
}

/* The same as products_of; x arranged. */
static void bf16_products(const struct weights *w, const uint16_t *weights, int64_t lo, int64_t hi, const char *x,
                          int64_t count, float *y, int64_t stride) {
    int64_t step = arranged_bytes(w->inputs);
    if (HAS_PAIRS())
        products_of(w, weights, NULL, PAIRS, lo, hi, x, step, count, y, stride);
    else
        products_of(w, weights, NULL, BF16, lo, hi, x, step, count, y, stride);
}

/* The same for float32, x [count, inputs]. */
static void float32_products(const struct weights *w, const float *weights, int64_t lo, int64_t hi, const float *x,
                             int64_t count, float *y, int64_t stride) {
    products_of(w, weights, NULL, FLOAT32, lo, hi, (const char *)x, w->inputs * 4, count, y, stride);
}

/* Scales of a matrix in FP8, which begin on a line. */
static const float *matrix_scales(const struct weights *w, const void *matrix) {
    return (const float *)((const uint8_t *)matrix + rounded_up(w->outputs * w->inputs, LINE));
}

/* The same for any of them, by `bits`; bf16: x arranged. `scales`: of FP8. */
static void plain_products(const struct weights *w, const void *weights, const float *scales, int64_t lo, int64_t hi,
                           const void *x, int64_t count, float *y, int64_t stride) {
    if (w->bits == BF16)
        bf16_products(w, weights, lo, hi, x, count, y, stride);
    else if (w->bits == FP8)
        products_of(w, weights, scales, FP8, lo, hi, x, w->inputs * 4, count, y, stride);
    else
        float32_products(w, weights, lo, hi, x, count, y, stride);
}
