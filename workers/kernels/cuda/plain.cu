/* Tiles of experts in bf16 (gate rows unless ungated, up rows, down's columns as rows: shm/formats.py) for up to eight rows, as bound
 * by memory as in the quantized formats; the launches are those of tiles.cu.
 *
 * x and the inner activations are rounded to bf16 and products are added in float32, as the host does; the order of the sums
 * is this file's own and depends on the tile's shape alone, so a row's bits do not depend on other rows. */
#include "combine.cuh"
#include "expert_math.cuh"

enum { VECTOR = 8 };                          /* numbers that a lane reads together */
enum { ROUND_THREADS = 256 };
enum { INNER_WARPS = 4, INNER_THREADS = INNER_WARPS * WARP };            /* a channel each */
enum { DOWN_WARPS = 8, DOWN_THREADS = DOWN_WARPS * WARP, COLUMNS = 64 }; /* each warp a share of the channels */

/* To nearest even; NaN stays NaN. */
DEVICE uint16_t narrowed(float number) {
    uint32_t bits = __float_as_uint(number);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

DEVICE float lower(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float upper(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

/* x float32 [number] as bf16. */
KERNEL(ROUND_THREADS, quantize, const float *x, int64_t number, uint16_t *to) {
    int64_t at = (int64_t)blockIdx.x * ROUND_THREADS + threadIdx.x;
    if (at < number) to[at] = narrowed(x[at]);
}

/* VECTOR numbers as pairs, 0 beyond `count`. Where rows are no whole vectors, they are not aligned either. */
template <bool WHOLE, bool ONCE> DEVICE uint4 vector_at(const uint16_t *from, int64_t count) {
    if (WHOLE) return ONCE ? read_once((const uint4 *)from) : __ldg((const uint4 *)from);
    uint32_t words[VECTOR / 2];
#pragma unroll
    for (int i = 0; i < VECTOR / 2; i++) {
        words[i] = 2 * i < count ? read_once(from + 2 * i) : 0;
        words[i] |= 2 * i + 1 < count ? read_once(from + 2 * i + 1) << 16 : 0;
    }
    uint4 all = {words[0], words[1], words[2], words[3]};
    return all;
}

DEVICE float added(uint32_t a, uint32_t b, float sum) {
    return __fmaf_rn(upper(a), upper(b), __fmaf_rn(lower(a), lower(b), sum));
}

DEVICE float dot(uint4 a, uint4 b, float sum) {
    return added(a.w, b.w, added(a.z, b.z, added(a.y, b.y, added(a.x, b.x, sum))));
}

DEVICE float sum_of_lanes(float sum) {
#pragma unroll
    for (int far = WARP / 2; far; far /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, far));
    return sum;
}

#define INNER_ARGUMENTS                                                                                          \
    const item *items, const uint16_t *const *tiles, const int32_t *rows, const uint16_t *x, int64_t hidden,     \
        int64_t channels, int64_t biases, int64_t wide, uint16_t *inner

template <int ROWS, bool WHOLE> DEVICE void inner_of(INNER_ARGUMENTS) {
    const item it = items[blockIdx.x / wide];
    int64_t channel = blockIdx.x % wide * INNER_WARPS + threadIdx.x / WARP;
    if (channel >= channels) return; /* the whole warp */
    int lane = threadIdx.x % WARP;
    const uint16_t *gate = tiles[it.tile] + channel * hidden, *of[ROWS]; /* ungated: up */
    const uint16_t *up = gate + (WIDE_MATRICES - 1) * channels * hidden;
    float gates[ROWS], ups[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        of[r] = x + (int64_t)rows[it.row + (r < it.rows ? r : 0)] * hidden;
        gates[r] = ups[r] = 0.0f;
    }
#pragma unroll 4
    for (int h = lane * VECTOR; h < (int)hidden; h += WARP * VECTOR) {
        uint4 one = vector_at<WHOLE, true>(gate + h, hidden - h);
        uint4 two = UNGATED ? one : vector_at<WHOLE, true>(up + h, hidden - h);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            uint4 numbers = vector_at<WHOLE, false>(of[r] + h, hidden - h);
            if (!UNGATED) gates[r] = dot(one, numbers, gates[r]);
            ups[r] = dot(two, numbers, ups[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float gate_of_row = UNGATED ? 0.0f : sum_of_lanes(gates[r]), up_of_row = sum_of_lanes(ups[r]);
        float both = activated_channel(tiles[it.tile], biases, channels, channel, gate_of_row, up_of_row);
        if (lane == 0 && r < it.rows) inner[(int64_t)(it.entry + r) * channels + channel] = narrowed(both);
    }
}

template <int ROWS> DEVICE void inner_of_rows(INNER_ARGUMENTS) {
    if (hidden % VECTOR == 0)
        inner_of<ROWS, true>(items, tiles, rows, x, hidden, channels, biases, wide, inner);
    else
        inner_of<ROWS, false>(items, tiles, rows, x, hidden, channels, biases, wide, inner);
}

#define DOWN_ARGUMENTS                                                                                           \
    const item *items, const uint16_t *const *tiles, const uint16_t *inner, int64_t hidden, int64_t channels,    \
        int64_t wide, float *out

/* COLUMNS columns of one tile: a lane has two of them, a warp every DOWN_WARPS-th channel. */
template <int ROWS> DEVICE void down_of(DOWN_ARGUMENTS) {
    SHARED(float, parts, DOWN_WARPS *ROWS *COLUMNS);
    const item it = items[blockIdx.x / wide];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int64_t first = blockIdx.x % wide * COLUMNS, column = first + 2 * lane;
    const uint16_t *down = tiles[it.tile] + WIDE_MATRICES * channels * hidden + column;
    bool one = column < hidden, two = column + 1 < hidden, pairs = two && hidden % 2 == 0;
    float sums[ROWS][2];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = 0.0f;
#pragma unroll 4
    for (int t = warp; t < (int)channels; t += DOWN_WARPS) {
        const uint16_t *from = down + t * hidden;
        uint32_t pair = pairs ? read_once((const uint32_t *)from) : 0;
        if (!pairs && one) pair = read_once(from) | (two ? read_once(from + 1) << 16 : 0);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float a = widened(__ldg(inner + (int64_t)(it.entry + (r < it.rows ? r : 0)) * channels + t));
            sums[r][0] = __fmaf_rn(lower(pair), a, sums[r][0]), sums[r][1] = __fmaf_rn(upper(pair), a, sums[r][1]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2; c++) parts[(warp * ROWS + r) * COLUMNS + 2 * lane + c] = sums[r][c];
    __syncthreads();
    for (int at = threadIdx.x; at < it.rows * COLUMNS; at += DOWN_THREADS) {
        int r = at / COLUMNS, c = at % COLUMNS;
        if (first + c >= hidden) continue;
        float y = parts[r * COLUMNS + c];
        for (int w = 1; w < DOWN_WARPS; w++) y = __fadd_rn(y, parts[(w * ROWS + r) * COLUMNS + c]);
        out[(int64_t)(it.out + r) * hidden + first + c] = y;
    }
}

#define INNER_CALL (items, tiles, rows, x, hidden, channels, biases, wide, inner)
#define DOWN_CALL (items, tiles, inner, hidden, channels, wide, out)

KERNEL(INNER_THREADS, gate_up_1, INNER_ARGUMENTS) { inner_of_rows<1> INNER_CALL; }
KERNEL(INNER_THREADS, gate_up_2, INNER_ARGUMENTS) { inner_of_rows<2> INNER_CALL; }
KERNEL(INNER_THREADS, gate_up_4, INNER_ARGUMENTS) { inner_of_rows<4> INNER_CALL; }
KERNEL(INNER_THREADS, gate_up_8, INNER_ARGUMENTS) { inner_of_rows<8> INNER_CALL; }
KERNEL(DOWN_THREADS, down_1, DOWN_ARGUMENTS) { down_of<1> DOWN_CALL; }
KERNEL(DOWN_THREADS, down_2, DOWN_ARGUMENTS) { down_of<2> DOWN_CALL; }
KERNEL(DOWN_THREADS, down_4, DOWN_ARGUMENTS) { down_of<4> DOWN_CALL; }
KERNEL(DOWN_THREADS, down_8, DOWN_ARGUMENTS) { down_of<8> DOWN_CALL; }
