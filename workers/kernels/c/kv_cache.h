/* The KV cache: numbers stored in its slabs, and blocks of keys and values as products take them ("panels"). Part of
 * body.h.
 *
 * Keys and values in bf16 or int8 are multiplied as bf16, which holds int8 exactly, by queries and weights rounded to
 * bf16, and added in float32. Numbers are taken in pairs, of which the upper one is added first: where the processor
 * HAS_PAIRS a panel holds pairs, elsewhere float32 in that order, with the same bits (rows.h). */
#pragma once

#include "activations.h"
#include "vectors.h"

enum { PANEL = KV_BLOCK };      /* tokens of a panel */
enum { INT8_UNIT = 1 << 24 }; /* numbers of int8 are so many times as large in a panel of keys */

/* The row of a slab, [rows, width], that has token t of a head. */
static int64_t slab_row(const int32_t *blocks, int64_t heads, int64_t head, int64_t t) {
    return (blocks[t / KV_BLOCK] * heads + head) * KV_BLOCK + t % KV_BLOCK;
}

/* Scales of a row of int8. */
static int64_t runs_of(int64_t width) { return (width + KV_RUN - 1) / KV_RUN; }

/* --- storing -------------------------------------------------------------------------------------------------- */

/* x [width] as row `row` of a stream: streams[0], and in int8 its scales streams[1]. */
static void store_row(const float *x, int64_t width, char *const *streams, int64_t row, int64_t bits) {
    if (bits == FLOAT32) memcpy((float *)streams[0] + row * width, x, (size_t)width * sizeof *x);
    for (int64_t at = 0; bits == INT8 && at < width; at += KV_RUN) {
        int64_t n = least(KV_RUN, width - at);
        float factors[2];
        quantize_row(x + at, n, n, n, (int8_t *)streams[0] + row * width + at, factors);
        ((float *)streams[1])[row * runs_of(width) + at / KV_RUN] = factors[0];
    }
    for (int64_t i = 0; bits == BF16 && i < width; i++) {
        float rounded;
        uint32_t word;
        round_to_bf16(x + i, 1, &rounded);
        memcpy(&word, &rounded, 4);
        ((uint16_t *)streams[0])[row * width + i] = (uint16_t)(word >> 16);
    }
}

/* --- panels --------------------------------------------------------------------------------------------------- */

/* Steps of a product over n numbers: pairs of them, or one after the other. */
static int64_t panel_steps(int64_t n, int64_t bits, int pairs) {
    return bits == FLOAT32 ? n : pairs ? (n + 1) / 2 : rounded_up(n, 2);
}

/* LANES numbers of a row in bf16, each in the upper half of a word; float32 as it is. */
INLINE words numbers_of_row(const void *row, const int bits) {
    if (bits == BF16) return (words)vector_at(row, 0, BF16);
    if (bits == INT8) return (words)__builtin_convertvector(WIDENED_INT8(row), vector);
    return loaded_words(row);
}

/* Of a register's bytes the first `left`; the others are 0. */
static words words_before_end(const void *from, int64_t left) {
    words found = {0};
    memcpy(&found, from, (size_t)left);
    return found;
}

/* Two numbers of each lane, each in bf16 in the upper half of a word, as lines of a panel. */
INLINE void store_pair(words lower, words upper, const int pairs, float *to) {
    words both = lower >> 16 | upper;
    memcpy(to, pairs ? &both : &upper, sizeof both);
    if (!pairs) memcpy(to + PANEL, &lower, sizeof lower);
}

/* Bytes at the top of words as float32 numbers. */
INLINE words top_numbers(words bytes) { return (words)__builtin_convertvector((ints)(bytes & 0xFF000000u), vector); }

/* to [steps, PANEL] = the rows of n tokens from `from` on, transposed; what is beyond them is any numbers. int8 becomes
 * INT8_UNIT times as large. */
INLINE void key_panel(const char *from, int64_t width, const int bits, const int pairs, int64_t n, float *to) {
    const int in_word = 32 / bits, lines = pairs ? 2 : 1; /* numbers of a word; `lines`: numbers of a line of the panel */
    int64_t row_bytes = width * bits / 8, all = rounded_up(width, bits == FLOAT32 ? 1 : 2);
    for (int64_t t = 0; t < n; t += LANES)
        for (int64_t at = 0; at < width; at += LANES * in_word) {
            words tile[LANES];
            int64_t left = row_bytes - at * bits / 8;
            const char *row = from + t * row_bytes + at * bits / 8;
            for (int i = 0; i < LANES; i++, row += row_bytes) {
                tile[i] = left < (int)sizeof(words) ? words_before_end(row, left) : loaded_words(row);
            }
            TRANSPOSED(tile);
            for (int i = 0; i < LANES && at + i * in_word < all; i++) {
                float *line = to + (at + i * in_word) / lines * PANEL + t;
                if (bits == FLOAT32) memcpy(line, tile + i, sizeof *tile);
                if (bits == BF16) store_pair(tile[i] << 16, tile[i] & 0xFFFF0000u, pairs, line);
                if (bits != INT8) continue;
                store_pair(top_numbers(tile[i] << 24), top_numbers(tile[i] << 16), pairs, line);
                if (at + i * in_word + 2 < all)
                    store_pair(top_numbers(tile[i] << 8), top_numbers(tile[i]), pairs, line + 2 / lines * PANEL);
            }
        }
}

/* to [steps of whole vectors, padded] = the rows of n tokens, `width` numbers of each, which are row_bytes apart; the
 * rest of the last vector is 0. */
INLINE void value_panel(const char *from, int64_t width, int64_t row_bytes, const int bits, const int pairs, int64_t n,
                        float *to) {
    int64_t padded = rounded_up(width, LANES);
    for (int64_t t = 0; t < rounded_up(n, LANES); t += 2)
        for (int64_t i = 0; i < width; i += LANES) {
            if (bits == BF16 && pairs && t + 1 < n && i + PAIR <= width) {
                const char *row = from + t * row_bytes + 2 * i;
                INTERLEAVED(row, row + row_bytes, to + t / 2 * padded + i);
                i += LANES;
                continue;
            }
            words both[2] = {{0}};
            int64_t left = width - i;
            for (int which = 0; which < 2 && t + which < n; which++) {
                const char *row = from + (t + which) * row_bytes + i * bits / 8;
                words rest;
                if (left < LANES) rest = words_before_end(row, left * bits / 8);
                both[which] = numbers_of_row(left < LANES ? (const char *)&rest : row, bits);
            }
            if (pairs) {
                both[0] = both[0] >> 16 | both[1];
                memcpy(to + t / 2 * padded + i, both, sizeof both[0]);
                continue;
            }
            memcpy(to + t * padded + i, both + (bits != FLOAT32), sizeof both[0]);
            memcpy(to + (t + 1) * padded + i, both + (bits == FLOAT32), sizeof both[0]);
        }
}

/* to [steps of n] = x [n], times factors unless these are NULL, as the other operand of products with panels. */
INLINE void arrange_pairs(const float *x, const float *factors, int64_t n, const int pairs, float *to) {
    for (int64_t i = 0; i < n; i += LANES) {
        float rest[LANES] = {0};
        if (n - i < LANES) memcpy(rest, x + i, (size_t)(n - i) * sizeof *x);
        vector numbers = loaded(n - i < LANES ? rest : x + i);
        if (factors) numbers *= loaded(factors + i); /* of whole vectors */
        words rounded = rounded_words(numbers);
        if (pairs) {
            halves narrow = __builtin_convertvector(rounded >> 16, halves);
            memcpy((uint16_t *)to + i, &narrow, sizeof(uint16_t) * (size_t)least(LANES, rounded_up(n - i, 2)));
            continue;
        }
        longs swapped = (longs)rounded << 32 | (longs)rounded >> 32;
        memcpy(to + i, &swapped, sizeof(float) * (size_t)least(LANES, rounded_up(n - i, 2)));
    }
}
