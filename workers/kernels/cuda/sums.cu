/* The sum of the expert workers' partial sums, read where the workers have written them: page-locked memory of the host,
 * over the link. */
#include "device.cuh"

enum { SUM_THREADS = 256, AHEAD = 8 };

/* y [rows, hidden] = 0 + each of `number` parts in turn, float32 [.., hidden] each; `of` [number, rows]: the part's row of
 * a row of y, -1 where it has none. `wide` blocks of threads a row. What crosses the link answers late, so several parts
 * are read before the first is added. */
KERNEL(SUM_THREADS, add_parts, const float *const *parts, const int32_t *of, int64_t number, int64_t rows,
       int64_t hidden, int64_t wide, float *y) {
    int64_t row = blockIdx.x / wide, h = blockIdx.x % wide * SUM_THREADS + threadIdx.x;
    if (h >= hidden) return;
    float sum = 0.0f;
    for (int64_t first = 0; first < number; first += AHEAD) {
        float next[AHEAD];
        bool there[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            int32_t place = first + a < number ? of[(first + a) * rows + row] : -1;
            there[a] = place >= 0;
            next[a] = there[a] ? read_host(parts[first + a] + place * hidden + h) : 0.0f;
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (there[a]) sum = __fadd_rn(sum, next[a]);
    }
    y[row * hidden + h] = sum;
}
