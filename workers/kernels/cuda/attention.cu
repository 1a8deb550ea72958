/* Attention of a decode step: one new token of each of some sequences, whose keys and values lie in blocks of TOKENS
 * tokens anywhere in slabs [blocks, heads, TOKENS, width]. All that changes from one step to the next (positions, tables
 * of blocks) is read from the device's memory, so the same launches serve every step, also from a CUDA graph. A row
 * without a sequence has the position -1; the n-th block of row r is blocks[n * stride + r].
 *
 * Keys and values are of BITS bits: float32, bf16, or int8 with a scale for each RUN numbers of a token, with queries in
 * bf16; sums are float32. Widths are whole vectors of 16 bytes (attention.py).
 * A sequence's tokens are divided into chunks by its own number alone: a block of threads takes one
 * chunk of one head of keys and values with a few query heads, and `merge` adds the chunks in their order. So a row's bits
 * depend on its own sequence alone. */
#include "numbers.cuh"

DEVICE float wide(uint16_t bf16) { return widened(bf16); }
DEVICE float wide(float x) { return x; }
#if BITS == 8
typedef uint16_t number; /* of queries and new tokens */
typedef int8_t cached;
DEVICE float wide(int8_t x) { return (float)x; }
#elif BITS == 16
typedef uint16_t number;
typedef number cached;
#else
typedef float number;
typedef number cached;
#endif

enum { TOKENS = 64, RUN = 128 };
enum { APPEND_THREADS = 128, ATTEND_THREADS = 256, MERGE_THREADS = 128 };
enum { STEP = ATTEND_THREADS / 2 };                 /* tokens at a time: two threads compute the scores of each */
enum { MOST_WIDTH = 576, MOST_CHUNKS = 64 };        /* numbers of a key; chunks of a sequence */
enum { VECTOR = 128 / BITS };                       /* numbers that a thread reads together */
enum { EXTRA = 2 };                                 /* numbers beside the values: largest score, sum of weights */
#define LEAST -3.0e38f

/* The line of a slab, of `width` numbers, that a row's token has in a head: of the first one, the others follow TOKENS
 * lines apart. */
DEVICE int64_t line_of(const int64_t *blocks, int64_t stride, int64_t row, int64_t heads, int64_t token) {
    return blocks[token / TOKENS * stride + row] * heads * TOKENS + token % TOKENS;
}

/* Tokens of a chunk of a row that attends to so many: few chunks for few tokens, so that none waits for a long one. */
DEVICE int64_t chunk_of(int64_t seen, int64_t chunks) {
    int64_t steps = (seen + STEP - 1) / STEP, each = (steps + chunks - 1) / chunks;
    return STEP * (each > 0 ? each : 1);
}

DEVICE float larger(float a, float b) { return a > b ? a : b; }

#if BITS == 8
DEVICE int64_t runs_of(int64_t width) { return (width + RUN - 1) / RUN; }

/* A head's `width` numbers by a warp, whose lanes all call it. No code is beyond 127: a scale is coarse only where its
 * largest number is below 1e-42, and the smallest in bf16 is 9e-41. */
DEVICE void quantize(const number *from, int lane, int64_t width, cached *to, float *scales) {
    for (int64_t lo = 0; lo < width; lo += RUN) {
        int64_t hi = lo + RUN < width ? lo + RUN : width;
        float most = 0.0f;
        for (int64_t at = lo + lane; at < hi; at += WARP)
            most = larger(__uint_as_float(__float_as_uint(wide(from[at])) & 0x7FFFFFFFu), most);
#pragma unroll
        for (int far = WARP / 2; far; far /= 2) most = larger(most, __shfl_xor_sync(ALL_LANES, most, far));
        float scale = __fdiv_rn(most, 127.0f), divisor = scale > 0.0f ? scale : 1.0f;
        for (int64_t at = lo + lane; at < hi; at += WARP) /* adding 1.5 * 2^23 rounds to whole numbers */
            to[at] = (cached)(__float_as_int(__fadd_rn(__fdiv_rn(wide(from[at]), divisor), 12582912.0f)) - 0x4B400000);
        if (lane == 0) scales[lo / RUN] = scale;
    }
}
#endif

/* The new tokens' numbers [rows, heads, width], rows that far apart, to their places; of one stream or two, with their
 * scales. */
KERNEL(APPEND_THREADS, append, const number *first, int64_t first_stride, const number *second, int64_t second_stride,
       const int64_t *positions, const int64_t *blocks, int64_t stride, cached *firsts, cached *seconds,
       float *first_scales, float *second_scales, int64_t heads, int64_t width, int64_t streams) {
    int64_t row = blockIdx.x / streams, position = positions[row];
    bool other = blockIdx.x % streams != 0;
    if (position < 0) return;
    const number *from = other ? second + row * second_stride : first + row * first_stride;
    cached *to = other ? seconds : firsts;
    int64_t line = line_of(blocks, stride, row, heads, position);
#if BITS == 8
    float *scales = other ? second_scales : first_scales;
    int64_t runs = runs_of(width);
    for (int64_t head = threadIdx.x / WARP; head < heads; head += APPEND_THREADS / WARP) {
        int64_t of_head = line + head * TOKENS;
        quantize(from + head * width, threadIdx.x % WARP, width, to + of_head * width, scales + of_head * runs);
    }
#else
    for (int64_t at = threadIdx.x; at < heads * width; at += APPEND_THREADS)
        to[(line + at / width * TOKENS) * width + at % width] = from[at];
#endif
}

/* VECTOR numbers. */
DEVICE void read(const cached *from, float *to) {
    uint4 all = __ldg((const uint4 *)from);
    uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if BITS == 8
#pragma unroll
        for (int k = 0; k < 4; k++) to[4 * i + k] = (float)(int8_t)(words[i] >> 8 * k);
#elif BITS == 16
        to[2 * i] = __uint_as_float(words[i] << 16), to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
#else
        to[i] = __uint_as_float(words[i]);
#endif
    }
}

/* Two numbers that follow each other. */
DEVICE void read_pair(const cached *from, float *to) {
#if BITS == 16
    uint32_t word = __ldg((const uint32_t *)from);
    to[0] = __uint_as_float(word << 16), to[1] = __uint_as_float(word & 0xFFFF0000u);
#else
    to[0] = wide(from[0]), to[1] = wide(from[1]);
#endif
}

#define ATTEND_ARGUMENTS                                                                                         \
    const number *q, int64_t q_stride, const int64_t *positions, const int64_t *blocks, int64_t stride,          \
        const cached *keys, const cached *values, const float *key_scales, const float *value_scales,            \
        int64_t kv_heads, int64_t group, int64_t width, int64_t value_width, int64_t value_stride,               \
        int64_t window, int64_t chunks, int64_t scale, float *parts
/* HEADS query heads of a group. q [rows, kv_heads * group, width]; scale: the bits of a float. */
template <int HEADS> DEVICE void attend_of(ATTEND_ARGUMENTS) {
    SHARED(float, queries, HEADS *MOST_WIDTH);
    SHARED(float, scores, HEADS *STEP); /* then weights */
    SHARED(float, sums, 2 * ATTEND_THREADS);
    SHARED(float, most, HEADS);
    SHARED(float, total, HEADS);
    SHARED(float, factor, HEADS);
    SHARED(int64_t, lines, STEP); /* of the tokens in this head */
    int64_t splits = (group + HEADS - 1) / HEADS, at = blockIdx.x;
    int64_t part = at % chunks, split = at / chunks % splits, head = at / chunks / splits % kv_heads;
    int64_t row = at / chunks / splits / kv_heads;
    int64_t tokens = positions[row] + 1, first = window > 0 && tokens > window ? tokens - window : 0;
    int64_t chunk = chunk_of(tokens - first, chunks), lo = first + part * chunk, hi = lo + chunk < tokens ? lo + chunk : tokens;
    if (lo >= hi) return; /* the whole block */
    int64_t query = head * group + split * HEADS, left = group - split * HEADS;
    int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;

    for (int i = thread; i < HEADS * MOST_WIDTH; i += ATTEND_THREADS) {
        int h = i / MOST_WIDTH, c = i % MOST_WIDTH;
        float one = h < left && c < width ? wide(q[row * q_stride + (query + h) * width + c]) : 0.0f;
        queries[i] = __fmul_rn(one, __uint_as_float((uint32_t)scale));
    }
    if (thread < HEADS) most[thread] = LEAST, total[thread] = 0.0f;
    int pairs = (int)value_width / 2, strips = ATTEND_THREADS / pairs, strip = thread / pairs;
    int column = 2 * (thread % pairs);
    float added[HEADS][2];
#pragma unroll
    for (int h = 0; h < HEADS; h++) added[h][0] = added[h][1] = 0.0f;

    for (int64_t base = lo; base < hi; base += STEP) {
        int number_of = (int)(hi - base < STEP ? hi - base : STEP);
        __syncthreads(); /* queries are there; the weights and lines before have been read */
        int token = thread / 2;
        float dots[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) dots[h] = 0.0f;
        if (token < number_of) {
            int64_t line = line_of(blocks, stride, row, kv_heads, base + token) + head * TOKENS;
            const cached *key = keys + line * width;
            if (thread % 2 == 0) lines[token] = line;
#pragma unroll 2
            for (int c = thread % 2 * VECTOR; c < (int)width; c += 2 * VECTOR) {
                float numbers[VECTOR];
                read(key + c, numbers);
#if BITS == 8
                float step = key_scales[line * runs_of(width) + c / RUN];
#pragma unroll
                for (int i = 0; i < VECTOR; i++) numbers[i] = __fmul_rn(numbers[i], step);
#endif
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
            sum = sum_of_lanes<WARP>(sum);
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
#pragma unroll 8
            for (int t = strip; t < number_of; t += strips) {
                float pair[2];
                read_pair(values + lines[t] * value_stride + column, pair);
#if BITS == 8
                float step = value_scales[lines[t] * runs_of(value_stride) + column / RUN];
                pair[0] = __fmul_rn(pair[0], step), pair[1] = __fmul_rn(pair[1], step);
#endif
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
            to[column] = one, to[column + 1] = other;
        }
        if (thread == 0) to[value_width] = most[h], to[value_width + 1] = total[h];
    }
}

#define ATTEND(heads)                                                                                            \
    attend_of<heads>(q, q_stride, positions, blocks, stride, keys, values, key_scales, value_scales, kv_heads,   \
                     group, width, value_width, value_stride, window, chunks, scale, parts)

KERNEL(ATTEND_THREADS, attend_1, ATTEND_ARGUMENTS) { ATTEND(1); }
KERNEL(ATTEND_THREADS, attend_2, ATTEND_ARGUMENTS) { ATTEND(2); }
KERNEL(ATTEND_THREADS, attend_4, ATTEND_ARGUMENTS) { ATTEND(4); }
KERNEL(ATTEND_THREADS, attend_8, ATTEND_ARGUMENTS) { ATTEND(8); }

/* out [rows, heads, value_width], a block for each row and head; zeros for a row without a sequence. `sinks` [heads], or
 * NULL: each joins its head's softmax as the score of a value of 0. */
KERNEL(MERGE_THREADS, merge, const float *parts, const int64_t *positions, int64_t heads, int64_t value_width,
       int64_t window, int64_t chunks, const float *sinks, float *out) {
    SHARED(float, weights, MOST_CHUNKS);
    SHARED(float, totals, MOST_CHUNKS);
    int64_t tokens = positions[blockIdx.x / heads] + 1, seen = window > 0 && tokens > window ? window : tokens;
    int64_t chunk = chunk_of(seen, chunks);
    int used = (int)((seen + chunk - 1) / chunk);
    int64_t step = value_width + EXTRA;
    const float *of = parts + blockIdx.x * chunks * step;
    float sink = sinks ? sinks[blockIdx.x % heads] : LEAST, most = sink;
    for (int n = threadIdx.x; n < used; n += MERGE_THREADS) weights[n] = of[n * step + value_width];
    __syncthreads();
    for (int n = 0; n < used; n++) most = larger(weights[n], most);
    __syncthreads(); /* all have read them */
    for (int n = threadIdx.x; n < used; n += MERGE_THREADS) {
        weights[n] = exponential(__fsub_rn(weights[n], most));
        totals[n] = of[n * step + value_width + 1];
    }
    __syncthreads();
    float total = sinks ? exponential(__fsub_rn(sink, most)) : 0.0f;
    for (int n = 0; n < used; n++) total = __fmaf_rn(totals[n], weights[n], total);
    for (int c = threadIdx.x; c < (int)value_width; c += MERGE_THREADS) {
        float sum = 0.0f;
#pragma unroll 16 /* so many are read together */
        for (int n = 0; n < used; n++) sum = __fmaf_rn(of[n * step + c], weights[n], sum);
        out[blockIdx.x * value_width + c] = used ? __fdiv_rn(sum, total) : 0.0f;
    }
}
