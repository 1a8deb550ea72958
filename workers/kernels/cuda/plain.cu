/* Tiles of experts in bf16 or fp8 (gate rows unless ungated, up rows, down's columns as rows: shm/formats.py and
 * shm/fp8.py) for up to eight rows, as bound by memory as in the other quantized formats; the launches are those of tiles.cu.
 *
 * x and the inner activations are in bf16 rounded to it, as the host does; products are added in float32. The order of the
 * sums is this file's own and depends on the tile's shape alone, so a row's bits do not depend on other rows. */
#include "expert_math.cuh"
#include "items.cuh"
#include "plain.cuh"

enum { ROUND_THREADS = 256 };
enum { INNER_WARPS = 4, INNER_THREADS = INNER_WARPS * WARP }; /* a channel each */
enum { DOWN_WARPS = 8, DOWN_THREADS = DOWN_WARPS * WARP };    /* each warp a share of the channels */
enum { COLUMNS = EACH * WARP };

/* x float32 [number] as products take it. */
KERNEL(ROUND_THREADS, quantize, const float *x, int64_t count, number *to) {
    int64_t at = (int64_t)blockIdx.x * ROUND_THREADS + threadIdx.x;
    if (at < count) to[at] = rounded(x[at]);
}

/* The scales of a tile's first matrix; those of the others follow. */
DEVICE const float *scales_in(const stored *tile, int64_t channels, int64_t hidden) {
    return (const float *)(tile + (WIDE_MATRICES + 1) * channels * hidden);
}

#define INNER_ARGUMENTS                                                                                          \
    const item *items, const stored *const *tiles, const int32_t *rows, const number *x, int64_t hidden,         \
        int64_t channels, int64_t biases, int64_t wide, number *inner

template <int ROWS, bool WHOLE> DEVICE void inner_of(INNER_ARGUMENTS) {
    const item it = items[blockIdx.x / wide];
    int64_t channel = blockIdx.x % wide * INNER_WARPS + threadIdx.x / WARP;
    if (channel >= channels) return; /* the whole warp */
    int lane = threadIdx.x % WARP;
    const stored *gate = tiles[it.tile] + channel * hidden; /* ungated: up */
    const stored *up = gate + (WIDE_MATRICES - 1) * channels * hidden;
    const float *of_gate = scales_of(scales_in(tiles[it.tile], channels, hidden), channel, hidden);
    const float *of_up = scales_of(of_gate, (WIDE_MATRICES - 1) * channels, hidden);
    const number *of[ROWS];
    float gates[ROWS], ups[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        of[r] = x + (int64_t)rows[it.row + (r < it.rows ? r : 0)] * hidden;
        gates[r] = ups[r] = 0.0f;
    }
#pragma unroll 4
    for (int h = lane * VECTOR; h < (int)hidden; h += WARP * VECTOR) {
        weights one, two;
        if (!UNGATED) one.load<WHOLE>(gate + h, hidden - h);
        two.load<WHOLE>(up + h, hidden - h);
        float scale_one = scale_at(of_gate, h), scale_two = scale_at(of_up, h);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            inputs numbers;
            numbers.load<WHOLE>(of[r] + h, hidden - h);
            if (!UNGATED) gates[r] = numbers.dot(one, scale_one, gates[r]);
            ups[r] = numbers.dot(two, scale_two, ups[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float gate_of_row = UNGATED ? 0.0f : sum_of_lanes(gates[r]), up_of_row = sum_of_lanes(ups[r]);
        float both = activated_channel(tiles[it.tile], biases, channels, channel, gate_of_row, up_of_row);
        if (lane == 0 && r < it.rows) inner[(int64_t)(it.entry + r) * channels + channel] = rounded(both);
    }
}

template <int ROWS> DEVICE void inner_of_rows(INNER_ARGUMENTS) {
    if (hidden % VECTOR == 0)
        inner_of<ROWS, true>(items, tiles, rows, x, hidden, channels, biases, wide, inner);
    else
        inner_of<ROWS, false>(items, tiles, rows, x, hidden, channels, biases, wide, inner);
}

#define DOWN_ARGUMENTS                                                                                           \
    const item *items, const stored *const *tiles, const number *inner, int64_t hidden, int64_t channels,        \
        int64_t wide, float *out

/* The weights of channel t, or of the last one, for a lane's columns. */
template <bool WHOLE> DEVICE uint32_t column_words(const stored *down, int t, int last, int64_t hidden, int64_t column) {
    const stored *from = down + (t < last ? t : last) * hidden;
    return WHOLE ? read_once((const uint32_t *)from) : word_of(from, hidden - column);
}

/* COLUMNS columns of one tile: a lane has EACH of them, a warp every DOWN_WARPS-th channel. WHOLE: there are no columns
 * behind the last one in a block. AHEAD channels are under way while one is multiplied; those behind the last one are
 * loaded from it, so that no branch waits for a load. */
template <int ROWS, bool WHOLE> DEVICE void down_of(float *parts, DOWN_ARGUMENTS) {
    const int AHEAD = FP8 ? 6 : 16; /* of fp8 more would not fit beside scales */
    const item it = items[blockIdx.x / wide];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, last = (int)channels - 1;
    int64_t first = blockIdx.x % wide * COLUMNS, column = first + EACH * lane;
    const stored *down = tiles[it.tile] + WIDE_MATRICES * channels * hidden + column;
    const float *scales = scales_of(scales_in(tiles[it.tile], channels, hidden), WIDE_MATRICES * channels, hidden);
    uint32_t next[AHEAD];
    float sums[ROWS][EACH];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < EACH; c++) sums[r][c] = 0.0f;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) next[a] = column_words<WHOLE>(down, warp + a * DOWN_WARPS, last, hidden, column);
#pragma unroll 1
    for (int begin = warp; begin <= last; begin += AHEAD * DOWN_WARPS) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int t = begin + a * DOWN_WARPS;
            const uint32_t word = next[a];
            next[a] = column_words<WHOLE>(down, t + AHEAD * DOWN_WARPS, last, hidden, column);
            if (t > last) continue;
            const float scale = scale_at(scales_of(scales, t, hidden), first);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float x = as_float(__ldg(inner + (int64_t)(it.entry + (r < it.rows ? r : 0)) * channels + t));
                if (FP8) x = __fmul_rn(x, scale);
#pragma unroll
                for (int c = 0; c < EACH; c++) sums[r][c] = __fmaf_rn(weight_of(word, c), x, sums[r][c]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < EACH; c++) parts[(warp * ROWS + r) * COLUMNS + EACH * lane + c] = sums[r][c];
    __syncthreads();
    for (int at = threadIdx.x; at < it.rows * COLUMNS; at += DOWN_THREADS) {
        int r = at / COLUMNS, c = at % COLUMNS;
        if (first + c >= hidden) continue;
        float y = parts[r * COLUMNS + c];
        for (int w = 1; w < DOWN_WARPS; w++) y = __fadd_rn(y, parts[(w * ROWS + r) * COLUMNS + c]);
        out[(int64_t)(it.out + r) * hidden + first + c] = y;
    }
}

template <int ROWS> DEVICE void down_of_rows(DOWN_ARGUMENTS) {
    SHARED(float, parts, DOWN_WARPS *ROWS *COLUMNS);
    if (hidden % COLUMNS == 0)
        down_of<ROWS, true>(parts, items, tiles, inner, hidden, channels, wide, out);
    else
        down_of<ROWS, false>(parts, items, tiles, inner, hidden, channels, wide, out);
}

#define INNER_CALL (table(here, items), table(here, tiles), table(here, rows), x, hidden, channels, biases, wide, inner)
#define DOWN_CALL (table(here, items), table(here, tiles), inner, hidden, channels, wide, out)

KERNEL(INNER_THREADS, gate_up_1, INNER_ARGUMENTS, TABLES) { inner_of_rows<1> INNER_CALL; }
KERNEL(INNER_THREADS, gate_up_2, INNER_ARGUMENTS, TABLES) { inner_of_rows<2> INNER_CALL; }
KERNEL(INNER_THREADS, gate_up_4, INNER_ARGUMENTS, TABLES) { inner_of_rows<4> INNER_CALL; }
KERNEL(INNER_THREADS, gate_up_8, INNER_ARGUMENTS, TABLES) { inner_of_rows<8> INNER_CALL; }
KERNEL(DOWN_THREADS, down_1, DOWN_ARGUMENTS, TABLES) { down_of_rows<1> DOWN_CALL; }
KERNEL(DOWN_THREADS, down_2, DOWN_ARGUMENTS, TABLES) { down_of_rows<2> DOWN_CALL; }
KERNEL(DOWN_THREADS, down_4, DOWN_ARGUMENTS, TABLES) { down_of_rows<4> DOWN_CALL; }
KERNEL(DOWN_THREADS, down_8, DOWN_ARGUMENTS, TABLES) { down_of_rows<8> DOWN_CALL; }
