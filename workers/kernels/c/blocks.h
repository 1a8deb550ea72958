/* Products of the integer formats: activations packed for blocks of outputs, and all blocks of a matrix. Part of body.h,
 * which says what a variant defines before. */
#pragma once

#include "activations.h"
#include "kernels.h"
#include "vectors.h"

#include <string.h>

/* Rows of a chunk of packed activations: for matrix units, in a variant that has them, if there are many. */
static int64_t chunk_rows(const struct weights *w, int64_t count) {
#ifdef MATRIX_UNITS
    if (count >= UNIT_ROWS && w->bits != INT2) return TALL_ROWS;
#else
    (void)w;
#endif
    return count > 0 ? ROWS : 1;
}

static int64_t block_bytes(const struct weights *w, int64_t inputs) {
    int64_t groups = (inputs + w->group - 1) / w->group;
    return groups * (64 + BLOCK * w->group * w->bits / 8);
}

/* A part of scratch memory, from `at` on. */
#define TAKE(part, size) ((part) = (void *)at, at += rounded_up((size), 64))

/* --- packing: for each chunk of rows, group by group --------------------------------------------------------- */

struct packed {
    int8_t *codes;
    float *factors;
};

static void pack(const struct weights *w, int64_t inputs, const struct activations *x, const int32_t *chosen,
                 int64_t count, struct packed to) {
    int64_t groups = rounded_up(inputs, w->group) / w->group, padded = groups * w->group, chunk = chunk_rows(w, count);
    for (int64_t first = 0; first < count; first += chunk) {
        int64_t rows = least(chunk, count - first);
        for (int64_t r = 0; r < rows; r++) {
            int64_t row = chosen ? chosen[first + r] : first + r;
            const int8_t *codes = (const int8_t *)x->codes + row * padded;
            const float *factors = x->factors + 2 * row * groups;
            for (int64_t g = 0; g < groups; g++) {
                memcpy(to.codes + first * padded + (g * rows + r) * w->group, codes + g * w->group,
                       (size_t)w->group);
                memcpy(to.factors + 2 * (first * groups + g * rows + r), factors + 2 * g, 2 * sizeof(float));
            }
        }
    }
}

/* --- blocks --------------------------------------------------------------------------------------------------- */

#define CALL_INT2(n) block_of(block, groups, 64, codes, factors, INT2, n, y)
#define CALL_INT4_64(n) block_of(block, groups, 64, codes, factors, INT4, n, y)
#define CALL_INT4(n) block_of(block, groups, w->group, codes, factors, INT4, n, y)
#define CALL_INT8(n) block_of(block, groups, w->group, codes, factors, INT8, n, y)

static void one_block(const struct weights *w, const uint8_t *block, int64_t groups, const int8_t *codes,
                      const float *factors, int64_t rows, float *y) {
    if (w->bits == INT8) {
        BY_COUNT(rows, ROWS, CALL_INT8)
    } else if (w->bits == INT2) {
        BY_COUNT(rows, ROWS, CALL_INT2)
    } else if (w->group == 64) {
        BY_COUNT(rows, ROWS, CALL_INT4_64)
    } else {
        BY_COUNT(rows, ROWS, CALL_INT4)
    }
}

/* y = or += W x for blocks [lo, hi), x packed. Row r of block b begins at y[r * row_stride + b * block_stride]. */
struct product {
    const struct weights *w;
    const uint8_t *matrix;
    int64_t inputs, outputs;
    struct packed x;
    int64_t count;
    float *y;
    int64_t row_stride, block_stride;
    int add;
};

/* y [rows, BLOCK] of block b to rows from `first` on. */
static void take_outputs(const struct product *p, int64_t b, int64_t first, int64_t rows, const float *from) {
    int64_t width = least(BLOCK, p->outputs - b * BLOCK);
    for (int64_t r = 0; r < rows; r++, from += BLOCK) {
        float *to = p->y + (first + r) * p->row_stride + b * p->block_stride;
        if (width < BLOCK)
            for (int64_t i = 0; i < width; i++) to[i] = p->add ? to[i] + from[i] : from[i];
        else if (p->add)
            for (int i = 0; i < BLOCK; i++) to[i] += from[i];
        else
            memcpy(to, from, BLOCK * sizeof(float));
    }
}

/* Products by matrix units, in variants that have them. */
#ifdef MATRIX_UNITS
static void strips(const struct product *p, int64_t lo, int64_t hi) {
    int64_t size = block_bytes(p->w, p->inputs), group = p->w->group;
    int64_t groups = rounded_up(p->inputs, group) / group;
    float y[STRIP * BLOCK] __attribute__((aligned(64)));
    units_begin(p->count % TALL_ROWS);
    for (int64_t first = 0; first < p->count; first += STRIP) {
        int64_t rows = least(STRIP, p->count - first);
        for (int64_t b = lo; b < hi; b++) {
            strip_of(p->w, p->matrix + b * size, groups, p->x.codes + first * groups * group,
                     p->x.factors + 2 * first * groups, rows, y);
            take_outputs(p, b, first, rows, y);
        }
    }
    units_end();
}
#else
static void strips(const struct product *p, int64_t lo, int64_t hi) { (void)p, (void)lo, (void)hi; }
#endif

static void blocks(void *context, int64_t lo, int64_t hi) {
    const struct product *p = context;
    int64_t size = block_bytes(p->w, p->inputs), group = p->w->group;
    int64_t groups = rounded_up(p->inputs, group) / group;
    if (chunk_rows(p->w, p->count) > ROWS) {
        strips(p, lo, hi);
        return;
    }
    float y[ROWS * BLOCK] __attribute__((aligned(64)));
    for (int64_t strip = 0; strip < p->count; strip += STRIP) {
        int64_t end = least(strip + STRIP, p->count);
        for (int64_t b = lo; b < hi; b++) {
            for (int64_t first = strip; first < end; first += ROWS) {
                int64_t rows = least(ROWS, end - first);
                one_block(p->w, p->matrix + b * size, groups, p->x.codes + first * groups * group,
                          p->x.factors + 2 * first * groups, rows, y);
                take_outputs(p, b, first, rows, y);
            }
        }
    }
}
