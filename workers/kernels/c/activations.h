/* Activations in the form of their weights' format: int8 codes with a scale and a sum for each group, or bf16; and the
 * check of a list of their rows. Part of body.h. */
#pragma once

#include "groups.h"
#include "kernels.h"
#include "records.h"
#include "vectors.h"

/* Whether all of rows[0..count) are rows of an array of `limit`. */
static int rows_within(const int32_t *rows, int64_t count, int64_t limit) {
    int outside = 0;
    for (int64_t i = 0; i < count; i++) outside |= (rows[i] < 0) | (rows[i] >= limit);
    return !outside;
}

/* `padded` codes in groups for `inputs` numbers. */
static void quantize_row(const float *x, int64_t inputs, int64_t padded, int64_t group, int8_t *codes, float *factors) {
    for (int64_t start = 0; start < padded; start += group, factors += 2) {
        int64_t n = inputs > start ? least(group, inputs - start) : 0;
        quantize_group(x + start, n, group, largest_magnitude(x + start, n), codes + start, factors);
    }
}

void tandem_quantize(const struct weights *w, const float *x, int64_t rows, void *codes, float *factors) {
    int64_t padded = padded_inputs(w, w->inputs);
    if (w->bits == BF16) round_to_bf16(x, rows * w->inputs, codes);
    if (w->bits > BF16) memcpy(codes, x, (size_t)(rows * w->inputs) * sizeof *x);
    if (w->bits >= BF16) return;
    for (int64_t r = 0; r < rows; r++)
        quantize_row(x + r * w->inputs, w->inputs, padded, w->group, (int8_t *)codes + r * padded,
                     factors + 2 * r * (padded / w->group));
}
