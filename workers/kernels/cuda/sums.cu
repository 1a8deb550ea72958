/* The sum of the expert workers' partial sums, read where the workers have written them: page-locked memory of the host,
 * over the link. */
#include "device.cuh"

enum { SUM_THREADS = 256, AHEAD = 8 };

/* y [size] = 0 + each of `number` parts [size] in turn. What crosses the link answers late, so several parts are read
 * before the first is added. */
KERNEL(SUM_THREADS, add_parts, const float *const *parts, int64_t number, int64_t size, float *y) {
    int64_t at = (int64_t)blockIdx.x * SUM_THREADS + threadIdx.x;
    if (at >= size) return;
    float sum = 0.0f;
    for (int64_t first = 0; first < number; first += AHEAD) {
        float next[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) next[a] = first + a < number ? read_host(parts[first + a] + at) : 0.0f;
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (first + a < number) sum = __fadd_rn(sum, next[a]);
    }
    y[at] = sum;
}
