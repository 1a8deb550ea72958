/* Products of a matrix of the backbone in fp8 with a few rows. The order of the sums depends on the matrix's shape alone, so a
 * row's bits do not depend on other rows. */
#define FP8 1
#include "plain.cuh"

enum { WARPS = 4, THREADS = WARPS * WARP }; /* an output each */

/* y [rows, outputs] = x [rows, inputs] @ W.T for a matrix W of the backbone; `wide` blocks of threads for each ROWS rows, a warp
 * an output. */
#define PRODUCT_ARGUMENTS                                                                                        \
    const stored *matrix, const float *scales, const float *x, int64_t rows, int64_t inputs_of_row, int64_t outputs, \
        int64_t wide, float *y

template <int ROWS, bool WHOLE> DEVICE void product_of(PRODUCT_ARGUMENTS) {
    int64_t begin = blockIdx.x / wide * ROWS, output = blockIdx.x % wide * WARPS + threadIdx.x / WARP;
    if (output >= outputs) return; /* the whole warp */
    int lane = threadIdx.x % WARP;
    const stored *row = matrix + output * inputs_of_row;
    const float *of_row = scales_of(scales, output, inputs_of_row);
    float sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = 0.0f;
#pragma unroll 4
    for (int h = lane * VECTOR; h < (int)inputs_of_row; h += WARP * VECTOR) {
        weights one;
        one.load<WHOLE>(row + h, inputs_of_row - h);
        float scale = scale_at(of_row, h);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            inputs numbers;
            numbers.load<WHOLE>(x + (begin + r < rows ? begin + r : begin) * inputs_of_row + h, inputs_of_row - h);
            sums[r] = numbers.dot(one, scale, sums[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = sum_of_lanes(sums[r]);
        if (lane == 0 && begin + r < rows) y[(begin + r) * outputs + output] = sum;
    }
}

template <int ROWS> DEVICE void product_of_rows(PRODUCT_ARGUMENTS) {
    if (inputs_of_row % VECTOR == 0)
        product_of<ROWS, true>(matrix, scales, x, rows, inputs_of_row, outputs, wide, y);
    else
        product_of<ROWS, false>(matrix, scales, x, rows, inputs_of_row, outputs, wide, y);
}

#define PRODUCT_CALL (matrix, scales, x, rows, inputs_of_row, outputs, wide, y)
KERNEL(THREADS, product_1, PRODUCT_ARGUMENTS) { product_of_rows<1> PRODUCT_CALL; }
KERNEL(THREADS, product_2, PRODUCT_ARGUMENTS) { product_of_rows<2> PRODUCT_CALL; }
KERNEL(THREADS, product_4, PRODUCT_ARGUMENTS) { product_of_rows<4> PRODUCT_CALL; }
KERNEL(THREADS, product_8, PRODUCT_ARGUMENTS) { product_of_rows<8> PRODUCT_CALL; }
