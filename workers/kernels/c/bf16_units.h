/* Matrix units for bf16, in variants that have them. They add in an order of their own: not the bits of vectors. Part
 * of body.h. */
#pragma once

#include "blocks.h"
#include "kernels.h"
#include "rows.h"

/* The same size for both operands: 16 rows of A, 16 columns of B, products of 16 pairs of numbers. */
enum { UNIT = 16, UNIT_LINE = 64 };
enum { UNITS_ACROSS = 4 }; /* tiles of B for one of A */
enum { STAGED = 512 };     /* numbers of a row of weights that are copied to pad them */

#ifdef MATRIX_UNITS

static int by_units(int64_t count) { return count >= UNIT_ROWS; }

/* Bytes of x [rows, inputs] as tiles of B: for each UNIT rows their pairs, one of each row in a line. */
static int64_t unit_bytes(int64_t inputs) { return rounded_up(inputs, 2 * UNIT) * UNIT * 2; }

static void arrange_for_units(const float *x, int64_t inputs, const int32_t *chosen, int64_t count, char *to) {
    memset(to, 0, (size_t)(rounded_up(count, UNIT) / UNIT * unit_bytes(inputs)));
    for (int64_t r = 0; r < count; r++) {
        uint16_t *tile = (uint16_t *)(to + r / UNIT * unit_bytes(inputs));
        const float *row = x + chosen[r] * inputs;
        for (int64_t h = 0; h < inputs; h++) tile[(h / 2 * UNIT + r % UNIT) * 2 + h % 2] = narrowed(row[h]);
    }
}

/* y[r][i] = row i . x[r] for rows [lo, hi) of weights, all of `count` rows of x. */
static void products_by_units(const uint16_t *weights, int64_t hidden, int64_t lo, int64_t hi, const char *x,
                              int64_t count, float *y, int64_t stride) {
    uint16_t staged[UNIT * STAGED] __attribute__((aligned(64)));
    float out[UNITS_ACROSS * UNIT * UNIT] __attribute__((aligned(64)));
    for (int64_t first = 0; first < count; first += UNITS_ACROSS * UNIT) {
        const char *strip = x + first / UNIT * unit_bytes(hidden);
        int64_t rows = least(UNITS_ACROSS * UNIT, count - first);
        int across = (int)((rows + UNIT - 1) / UNIT);
        for (int64_t i = lo; i < hi; i += UNIT) {
            int64_t number = least(UNIT, hi - i);
            struct unit_product p = {weights + i * hidden, 2 * hidden, strip, UNIT_LINE, unit_bytes(hidden),
                                     UNIT * UNIT_LINE, hidden / (2 * UNIT), out, UNIT_LINE, UNIT * UNIT_LINE};
            if (number == UNIT && hidden % (2 * UNIT) == 0) {
                multiply_units(&p, across, 0);
            } else {
                p.a = staged, p.a_line = 2 * STAGED;
                for (int64_t h = 0; h < hidden; h += STAGED) {
                    int64_t n = least(STAGED, hidden - h);
                    memset(staged, 0, sizeof staged);
                    for (int64_t r = 0; r < number; r++)
                        memcpy(staged + r * STAGED, weights + (i + r) * hidden + h, (size_t)n * sizeof *weights);
                    p.b = strip + h / (2 * UNIT) * p.b_step, p.depth = (n + 2 * UNIT - 1) / (2 * UNIT);
                    multiply_units(&p, across, h > 0);
                }
            }
            for (int64_t r = 0; r < rows; r++)
                for (int64_t k = 0; k < number; k++)
                    y[(first + r) * stride + i + k] = out[(r / UNIT * UNIT + k) * UNIT + r % UNIT];
        }
    }
}

#else

static int by_units(int64_t count) { return (void)count, 0; }

#endif
