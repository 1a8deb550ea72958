/* Attention of a decode step: one new token of each of some sequences, whose keys and values lie at any addresses. All
 * that changes from one step to the next (addresses, capacities, positions) is read from the device's memory, so the
 * same launches serve every step, also from a CUDA graph. A row without a sequence has the position -1.
 *
 * Keys and values are of BITS bits, float32 or bf16; sums are float32. A sequence's tokens are divided into chunks, of
 * a size that does not depend on the batch: a block of threads takes one chunk of one head of keys and values with a few
 * query heads, and `merge` adds the chunks in their order. So a row's bits depend on its own sequence alone. */
#include "numbers.cuh"

#if BITS == 16
typedef uint16_t number;
DEVICE float wide(number bf16) { return widened(bf16); }
#else
typedef float number;
DEVICE float wide(number x) { return x; }
#endif

enum { APPEND_THREADS = 128, ATTEND_THREADS = 256, MERGE_THREADS = 128 };
enum { STEP = ATTEND_THREADS / 2 };                 /* tokens at a time: two threads compute the scores of each */
enum { MOST_WIDTH = 576, MOST_CHUNKS = 64 };        /* numbers of a key; chunks of a sequence */
enum { VECTOR = 128 / BITS };                       /* numbers that a thread reads together */
enum { EXTRA = 2 };                                 /* numbers beside the values: largest score, sum of weights */
#define LEAST -3.0e38f

/* The new tokens' numbers [rows, heads, width], rows that far apart, to their places; of one stream or two. */
KERNEL(APPEND_THREADS, append, const number *first, int64_t first_stride, const number *second, int64_t second_stride,
       const int64_t *positions, const int64_t *capacities, number *const *firsts, number *const *seconds,
       int64_t heads, int64_t width, int64_t streams) {
    int64_t row = blockIdx.x / streams, position = positions[row], capacity = capacities[row];
    bool other = blockIdx.x % streams != 0;
    if (position < 0) return;
    const number *from = other ? second + row * second_stride : first + row * first_stride;
    number *to = other ? seconds[row] : firsts[row];
    for (int64_t at = threadIdx.x; at < heads * width; at += APPEND_THREADS)
        to[(at / width * capacity + position) * width + at % width] = from[at];
}

/* VECTOR numbers, 0 beyond `count`. Where rows are no `whole` vectors, they are not aligned either. */
DEVICE void read(const number *from, bool whole, int64_t count, float *to) {
    if (whole) {
        uint4 all = __ldg((const uint4 *)from);
        uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#if BITS == 16
            to[2 * i] = __uint_as_float(words[i] << 16), to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
#else
            to[i] = __uint_as_float(words[i]);
#endif
        }
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) to[i] = i < count ? wide(from[i]) : 0.0f;
    }
}

/* Two numbers that follow each other, the second only if there is one. */
DEVICE void read_pair(const number *from, bool aligned, bool two, float *to) {
#if BITS == 16
    if (aligned) {
        uint32_t word = __ldg((const uint32_t *)from);
        to[0] = __uint_as_float(word << 16), to[1] = two ? __uint_as_float(word & 0xFFFF0000u) : 0.0f;
        return;
    }
#endif
    to[0] = wide(from[0]), to[1] = two ? wide(from[1]) : 0.0f;
}

DEVICE float larger(float a, float b) { return a > b ? a : b; }

#define ATTEND_ARGUMENTS                                                                                         \
    const number *q, int64_t q_stride, const int64_t *positions, const int64_t *capacities,                      \
        const number *const *keys, const number *const *values, int64_t kv_heads, int64_t group, int64_t width,  \
        int64_t value_width, int64_t value_stride, int64_t window, int64_t chunk, int64_t chunks, int64_t scale,  \
        float *parts
/* HEADS query heads of a group. q [rows, kv_heads * group, width]; scale: the bits of a float. */
template <int HEADS> DEVICE void attend_of(ATTEND_ARGUMENTS) {
    SHARED(float, queries, HEADS *MOST_WIDTH);
    SHARED(float, scores, HEADS *STEP); /* then weights */
    SHARED(float, sums, 2 * ATTEND_THREADS);
    SHARED(float, most, HEADS);
    SHARED(float, total, HEADS);
    SHARED(float, factor, HEADS);
    int64_t splits = (group + HEADS - 1) / HEADS, at = blockIdx.x;
    int64_t part = at % chunks, split = at / chunks % splits, head = at / chunks / splits % kv_heads;
    int64_t row = at / chunks / splits / kv_heads;
    int64_t tokens = positions[row] + 1, first = window > 0 && tokens > window ? tokens - window : 0;
    int64_t lo = first + part * chunk, hi = lo + chunk < tokens ? lo + chunk : tokens;
    if (lo >= hi) return; /* the whole block */
    int64_t query = head * group + split * HEADS, left = group - split * HEADS, capacity = capacities[row];
    const number *of_keys = keys[row] + head * capacity * width;
    const number *of_values = values[row] + head * capacity * value_stride;
    int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;

    for (int i = thread; i < HEADS * MOST_WIDTH; i += ATTEND_THREADS) {
        int h = i / MOST_WIDTH, c = i % MOST_WIDTH;
        float one = h < left && c < width ? wide(q[row * q_stride + (query + h) * width + c]) : 0.0f;
        queries[i] = __fmul_rn(one, __uint_as_float((uint32_t)scale));
    }
    if (thread < HEADS) most[thread] = LEAST, total[thread] = 0.0f;
    int pairs = (int)(value_width + 1) / 2, strips = ATTEND_THREADS / pairs, strip = thread / pairs;
    int column = 2 * (thread % pairs);
    bool two = column + 1 < value_width, aligned = value_stride % 2 == 0, whole = width % VECTOR == 0;
    float added[HEADS][2];
#pragma unroll
    for (int h = 0; h < HEADS; h++) added[h][0] = added[h][1] = 0.0f;

    for (int64_t base = lo; base < hi; base += STEP) {
        int number_of = (int)(hi - base < STEP ? hi - base : STEP);
        __syncthreads(); /* queries are there; the weights before have been read */
        int token = thread / 2;
        float dots[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) dots[h] = 0.0f;
        if (token < number_of) {
            const number *key = of_keys + (base + token) * width;
#pragma unroll 2
            for (int c = thread % 2 * VECTOR; c < (int)width; c += 2 * VECTOR) {
                float numbers[VECTOR];
                read(key + c, whole, width - c, numbers);
#pragma unroll
                for (int h = 0; h < HEADS; h++)
#pragma unroll
                    for (int i = 0; i < VECTOR; i++)
                        dots[h] = __fmaf_rn(numbers[i], queries[h * MOST_WIDTH + c + i], dots[h]);
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float both = __fadd_rn(dots[h], __shfl_xor_sync(ALL_LANES, dots[h], 1));
            if (thread % 2 == 0 && token < number_of) scores[h * STEP + token] = both;
        }
        __syncthreads();
        if (warp < HEADS) { /* a warp for each head */
            float *of = scores + warp * STEP, before = most[warp], now = before, sum = 0.0f;
            for (int t = lane; t < number_of; t += WARP) now = larger(of[t], now);
#pragma unroll
            for (int far = WARP / 2; far; far /= 2) now = larger(now, __shfl_xor_sync(ALL_LANES, now, far));
            for (int t = lane; t < number_of; t += WARP) {
                float weight = exponential(__fsub_rn(of[t], now));
                of[t] = weight, sum = __fadd_rn(sum, weight);
            }
#pragma unroll
            for (int far = WARP / 2; far; far /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, far));
            if (lane == 0) {
                float less = exponential(__fsub_rn(before, now));
                most[warp] = now, factor[warp] = less, total[warp] = __fmaf_rn(total[warp], less, sum);
            }
        }
        __syncthreads();
        if (strip < strips) {
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                added[h][0] = __fmul_rn(added[h][0], factor[h]), added[h][1] = __fmul_rn(added[h][1], factor[h]);
            const number *value = of_values + base * value_stride + column;
#pragma unroll 8
            for (int t = strip; t < number_of; t += strips) {
                float pair[2];
                read_pair(value + t * value_stride, aligned, two, pair);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    float weight = scores[h * STEP + t];
                    added[h][0] = __fmaf_rn(weight, pair[0], added[h][0]);
                    added[h][1] = __fmaf_rn(weight, pair[1], added[h][1]);
                }
            }
        }
    }
    float *to = parts + ((row * kv_heads * group + query) * chunks + part) * (value_width + EXTRA);
    for (int h = 0; h < HEADS && h < left; h++, to += chunks * (value_width + EXTRA)) {
        __syncthreads(); /* the sums of the head before have been read */
        if (strip < strips)
#pragma unroll
            for (int k = 0; k < HEADS; k++) /* so that `added` stays in registers */
                if (k == h) sums[2 * thread] = added[k][0], sums[2 * thread + 1] = added[k][1];
        __syncthreads();
        if (strip == 0) {
            float one = sums[2 * thread], other = sums[2 * thread + 1];
            for (int s = 1; s < strips; s++) {
                one = __fadd_rn(one, sums[2 * (s * pairs + thread)]);
                other = __fadd_rn(other, sums[2 * (s * pairs + thread) + 1]);
            }
            to[column] = one;
            if (two) to[column + 1] = other;
        }
        if (thread == 0) to[value_width] = most[h], to[value_width + 1] = total[h];
    }
}

#define ATTEND(heads)                                                                                            \
    attend_of<heads>(q, q_stride, positions, capacities, keys, values, kv_heads, group, width, value_width,      \
                     value_stride, window, chunk, chunks, scale, parts)

KERNEL(ATTEND_THREADS, attend_1, ATTEND_ARGUMENTS) { ATTEND(1); }
KERNEL(ATTEND_THREADS, attend_2, ATTEND_ARGUMENTS) { ATTEND(2); }
KERNEL(ATTEND_THREADS, attend_4, ATTEND_ARGUMENTS) { ATTEND(4); }
KERNEL(ATTEND_THREADS, attend_8, ATTEND_ARGUMENTS) { ATTEND(8); }

/* out [rows, heads, value_width], a block for each row and head; zeros for a row without a sequence. `sinks` [heads], or
 * NULL: each joins its head's softmax as the score of a value of 0. */
KERNEL(MERGE_THREADS, merge, const float *parts, const int64_t *positions, int64_t heads, int64_t value_width,
       int64_t window, int64_t chunk, int64_t chunks, const float *sinks, float *out) {
    SHARED(float, weights, MOST_CHUNKS);
    int64_t tokens = positions[blockIdx.x / heads] + 1, seen = window > 0 && tokens > window ? window : tokens;
    int used = (int)((seen + chunk - 1) / chunk);
    int64_t step = value_width + EXTRA;
    const float *of = parts + blockIdx.x * chunks * step;
    float sink = sinks ? sinks[blockIdx.x % heads] : LEAST, most = sink;
    for (int n = 0; n < used; n++) most = larger(of[n * step + value_width], most);
    for (int n = threadIdx.x; n < used; n += MERGE_THREADS)
        weights[n] = exponential(__fsub_rn(of[n * step + value_width], most));
    __syncthreads();
    float total = sinks ? exponential(__fsub_rn(sink, most)) : 0.0f;
    for (int n = 0; n < used; n++) total = __fmaf_rn(of[n * step + value_width + 1], weights[n], total);
    for (int c = threadIdx.x; c < (int)value_width; c += MERGE_THREADS) {
        float sum = 0.0f;
        for (int n = 0; n < used; n++) sum = __fmaf_rn(of[n * step + c], weights[n], sum);
        out[blockIdx.x * value_width + c] = used ? __fdiv_rn(sum, total) : 0.0f;
    }
}
