/* Rows of activations in a quarter of their bytes, for another machine (rows.py). A row is its codes int8 [padded], as the
 * kernels make them, and float32 [padded / group]: each group's largest magnitude, whose 127th part is the step. */
#include "../../workers/kernels/c/groups.h"

enum { FINE, NOT_EXACT };

int tandem_rows_version(void) { return 1; }

/* x float32 [rows, inputs]. NOT_EXACT where a magnitude other than 0 is so small or so large that products with it are. */
int tandem_compact(const float *x, int64_t rows, int64_t inputs, int64_t padded, int64_t group, int8_t *to) {
    for (int64_t r = 0; r < rows; r++, x += inputs) {
        int8_t *codes = to, *largest = to + padded;
        for (int64_t start = 0; start < padded; start += group, largest += 4) {
            int64_t left = inputs - start, n = left < 0 ? 0 : left < group ? left : group;
            float most = largest_magnitude(x + start, n), factors[2];
            if (most != 0.0f && !(most >= 1e-30f && most <= 1e38f)) return NOT_EXACT;
            quantize_group(x + start, n, group, most, codes + start, factors);
            memcpy(largest, &most, 4);
        }
        to = largest;
    }
    return FINE;
}

/* Writes an x of which the kernels make the same codes and steps. */
void tandem_expand(const int8_t *from, int64_t rows, int64_t inputs, int64_t padded, int64_t group, float *x) {
    for (int64_t r = 0; r < rows; r++, x += inputs) {
        const int8_t *codes = from, *largest = from + padded;
        for (int64_t start = 0; start < padded; start += group, largest += 4) {
            int64_t end = start + group < inputs ? start + group : inputs;
            float most, step;
            memcpy(&most, largest, 4);
            step = most / 127.0f;
            for (int64_t i = start; i < end; i++) /* 127 steps are perhaps a rounding away from the largest */
                x[i] = codes[i] == 127 ? most : codes[i] == -127 ? -most : (float)codes[i] * step;
        }
        from = largest;
    }
}
