/* Products of the integer formats: activations packed for blocks of outputs, and all blocks of a matrix. Part of body.h,
 * which says what a variant defines before. */
#pragma once

#include "activations.h"
#include "kernels.h"
#include "records.h"
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

/* A part of scratch memory, from `at` on. */
#define TAKE(part, size) ((part) = (void *)at, at += rounded_up((size), 64))

/* --- packing: for each chunk of rows, group by group --------------------------------------------------------- */

struct packed {
    int8_t *codes;
    float *factors;
};

static void pack(const struct weights *w, int64_t inputs, const struct activations *x, const int32_t *chosen,
                 int64_t count, struct packed to) {
    int64_t groups = groups_of(w, inputs), padded = groups * w->group, chunk = chunk_rows(w, count);
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

#define CALL_BLOCK(group, bits, scales, n) block_of(block, groups, group, codes, factors, bits, scales, n, y)
#define CALL_INT2(n) CALL_BLOCK(64, INT2, SCALES_OWN, n)
#define CALL_INT4_64(n) CALL_BLOCK(64, INT4, SCALES_OWN, n)
#define CALL_INT4(n) CALL_BLOCK(w->group, INT4, SCALES_OWN, n)
#define CALL_INT8(n) CALL_BLOCK(w->group, INT8, SCALES_OWN, n)
#define CALL_Q4_0(n) CALL_BLOCK(32, INT4, SCALES_F16, n)
#define CALL_Q8_0(n) CALL_BLOCK(32, INT8, SCALES_F16, n)
#define CALL_INT4_F16(n) CALL_BLOCK(w->group, INT4, SCALES_F16_ZEROS, n)
#define CALL_MXFP4(n) CALL_BLOCK(32, INT4, SCALES_E8M0, n)
#define CALL_NVFP4(n) CALL_BLOCK(16, INT4, SCALES_E4M3, n)

static void one_block(const struct weights *w, const uint8_t *block, int64_t groups, const int8_t *codes,
                      const float *factors, int64_t rows, float *y) {
    if (w->scales == SCALES_F16) {
        if (w->bits == INT8)
            BY_COUNT(rows, ROWS, CALL_Q8_0)
        else
            BY_COUNT(rows, ROWS, CALL_Q4_0)
    } else if (w->scales == SCALES_F16_ZEROS) {
        BY_COUNT(rows, ROWS, CALL_INT4_F16)
    } else if (w->scales == SCALES_E8M0) {
        BY_COUNT(rows, ROWS, CALL_MXFP4)
    } else if (w->scales == SCALES_E4M3) {
        BY_COUNT(rows, ROWS, CALL_NVFP4)
    } else if (w->bits == INT8) {
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
    const uint8_t *factors; /* float32, of formats that have them: each of the next `factor_blocks` blocks */
    int64_t factor_blocks;
};

/* y [numbers] of block b, in the unit of the weights' values. */
static void scale_outputs(const struct product *p, int64_t b, int64_t numbers, float *y) {
    const struct weights *w = p->w;
    if (!is_e2m1(w->scales)) return;
    float unit = unit_of(w->scales), factor = 1.0f;
    if (w->factors) memcpy(&factor, p->factors + b / p->factor_blocks * (int64_t)sizeof factor, sizeof factor);
    unit *= factor;
    for (int64_t i = 0; i < numbers; i++) y[i] *= unit;
}

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
    int64_t size = block_bytes(p->w, p->inputs), group = p->w->group, groups = groups_of(p->w, p->inputs);
    float y[STRIP * BLOCK] __attribute__((aligned(64)));
    units_begin(p->w, p->count % TALL_ROWS);
    for (int64_t first = 0; first < p->count; first += STRIP) {
        int64_t rows = least(STRIP, p->count - first);
        for (int64_t b = lo; b < hi; b++) {
            strip_of(p->w, p->matrix + b * size, groups, p->x.codes + first * groups * group,
                     p->x.factors + 2 * first * groups, rows, y);
            scale_outputs(p, b, rows * BLOCK, y);
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
    int64_t size = block_bytes(p->w, p->inputs), group = p->w->group, groups = groups_of(p->w, p->inputs);
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
                scale_outputs(p, b, rows * BLOCK, y);
                take_outputs(p, b, first, rows, y);
            }
        }
    }
}
