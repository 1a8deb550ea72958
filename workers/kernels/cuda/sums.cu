/* The last launch of a layer: what its experts add to each row. Sources are added up in their order, and each of them by
 * itself before: an expert's tiles in their order, then experts in theirs; the expert workers' partial sums, read where the
 * workers have written them, page-locked memory of the host, over the link.
 *
 * A table says what they are (sums.py): the header, the sources, and what these name by their distances from its beginning. */
#include "items.cuh"

enum { SUM_THREADS = 256, AHEAD = 8 };
enum { TENSOR, WEIGHTED, PARTS };

struct header {
    int64_t rows, sources;
};

struct source {
    int64_t kind;
    const float *base; /* TENSOR: [rows, hidden]. WEIGHTED: lines [.., hidden], which terms name */
    int64_t first;     /* WEIGHTED: where each row's terms begin, int32 [rows + 1]. PARTS: addresses of [rows, hidden] */
    int64_t second;    /* WEIGHTED: the terms. PARTS: how many */
};

/* What a row adds up: the lines [first + stride * 0, .. parts), times a weight. */
struct term {
    int32_t first, parts, stride;
    float weight;
};

DEVICE float weighted(const float *lines, const int32_t *offsets, const term *terms, int64_t row, int64_t hidden,
                      int64_t h) {
    float sum = 0.0f;
    for (int at = offsets[row]; at < offsets[row + 1]; at++) {
        const term one = terms[at];
        float part = lines[(int64_t)one.first * hidden + h];
        for (int n = 1; n < one.parts; n++)
            part = __fadd_rn(part, lines[((int64_t)one.first + (int64_t)n * one.stride) * hidden + h]);
        sum = __fadd_rn(sum, __fmul_rn(part, one.weight));
    }
    return sum;
}

/* 0 + each part in turn, from memory that others have written since the last launch: no cache answers for it. What crosses
 * the link answers late, so several are read before the first is added. */
DEVICE float of_parts(const float *const *parts, int64_t number, int64_t at) {
    float sum = 0.0f;
    for (int64_t first = 0; first < number; first += AHEAD) {
        float next[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) next[a] = first + a < number ? __ldcv(parts[first + a] + at) : 0.0f;
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (first + a < number) sum = __fadd_rn(sum, next[a]);
    }
    return sum;
}

/* y [rows, hidden] becomes the sum, or with `add` more by it; `wide` blocks of threads a row. */
KERNEL(SUM_THREADS, add_outputs, const uint8_t *at, int64_t hidden, int64_t wide, int64_t add, float *y, TABLES) {
    const uint8_t *all = table(here, at);
    const header of = *(const header *)all;
    int64_t row = blockIdx.x / wide, h = blockIdx.x % wide * SUM_THREADS + threadIdx.x;
    if (row >= of.rows || h >= hidden || of.sources == 0) return;
    float sum = 0.0f;
    for (int64_t n = 0; n < of.sources; n++) {
        const source from = ((const source *)(all + sizeof(header)))[n];
        float one;
        if (from.kind == TENSOR)
            one = from.base[row * hidden + h];
        else if (from.kind == WEIGHTED)
            one = weighted(from.base, (const int32_t *)(all + from.first), (const term *)(all + from.second), row,
                           hidden, h);
        else
            one = of_parts((const float *const *)(all + from.first), from.second, row * hidden + h);
        sum = n ? __fadd_rn(sum, one) : one;
    }
    float *to = y + row * hidden + h;
    *to = add ? __fadd_rn(*to, sum) : sum;
}
