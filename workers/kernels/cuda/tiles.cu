/* Tiles of experts in a quantized format, and matrices: one launch computes all tiles of a layer, wherever they lie.
 *
 *     quantize   x -> codes
 *     gate_up_N  codes -> inner activations (expert_math.cuh), as codes, of items with at most N rows
 *     gate_up_1  the same of items of one row, by more blocks of threads
 *     down_N     inner -> outputs of tiles
 *
 * Rows do not mix, and sums have one order: a row's bits are those of the host's kernels, whatever is computed beside it
 * and by which of these kernels. A matrix [outputs, inputs] is multiplied by quantize and down_N. */
#include "expert_math.cuh"
#include "items.cuh"
#include "products.cuh"

typedef int8_t code;

enum { QUANTIZE_THREADS = 128 };
enum { INNER_WARPS = INPUTS / LANES }; /* of gate and up: each takes the same 16 channels of both */
enum { INNER_THREADS = INNER_WARPS * WARP };
enum { SPLIT_THREADS = SPLIT * WARP };
enum { DOWN_WARPS = 4, DOWN_THREADS = DOWN_WARPS * WARP }; /* each takes two blocks of outputs */

/* x float32 [.., inputs] -> codes [.., groups * GROUP] and factors [.., groups]; `number` of groups. One warp each. */
KERNEL(QUANTIZE_THREADS, quantize, const float *x, int64_t inputs, int64_t groups, int64_t number, code *codes,
       factors *to) {
    int64_t at = (int64_t)blockIdx.x * (QUANTIZE_THREADS / WARP) + threadIdx.x / WARP;
    if (at >= number) return;
    int64_t row = at / groups, group = at % groups, left = inputs - group * GROUP;
    quantize_group(x + row * inputs + group * GROUP, left < GROUP ? left : GROUP, codes + at * GROUP, to + at);
}

/* INPUTS channels of one item: gate's and up's blocks of them. Ungated, both are up's. */
template <int UNITS> DEVICE void inner_of(INNER_ARGUMENTS) {
    SHARED(float, numbers, UNITS *UNIT_ROWS *INPUTS);
    const item it = items[blockIdx.x / wide];
    const uint8_t *tile = tiles[it.tile];
    const int64_t part = blockIdx.x % wide, records = units / TOGETHER, before_up = WIDE_MATRICES - 1;
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const uint8_t *gate = tile + (part * INNER_WARPS + warp) * records * RECORD;
    const uint8_t *blocks[2] = {gate, gate + before_up * wide * INNER_WARPS * records * RECORD};
    float y[2][UNITS][4];
    activations<UNITS> of_rows;
    of_rows.find(x, of_x, units, it.rows, [&](int r) { return (int64_t)rows[it.row + r]; });
    float units_of[2] = {unit_of(tile, scales), unit_of(tile, scales + before_up * (int64_t)sizeof(float))};
    of_rows.multiply_blocks(blocks, (int)records, y);
#pragma unroll
    for (int n = 0; n < UNITS; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int r = n * UNIT_ROWS + 2 * t + c % 2, channel = warp * LANES + g + c / 2 * 8;
            numbers[r * INPUTS + channel] =
                activated_channel(tile, biases, wide * INPUTS, part * INPUTS + channel, in_units(y[0][n][c], units_of[0]),
                                  in_units(y[1][n][c], units_of[1]));
        }
    __syncthreads();
    for (int r = warp; r < it.rows; r += INNER_WARPS)
        for (int k = 0; k < TOGETHER; k++) {
            int64_t at = (it.entry + r) * inner_units + part * TOGETHER + k;
            quantize_group(numbers + r * INPUTS + k * GROUP, GROUP, inner + at * GROUP, of_inner + at);
        }
}

/* LANES channels of one item, of `wide` times as many. Their numbers go to float32 [.., wide * LANES]; which of the blocks
 * of threads of a record's channels comes last rounds them. */
KERNEL(SPLIT_THREADS, gate_up_1, INNER_ARGUMENTS, float *numbers, int32_t *arrived, TABLES) {
    SHARED(term, terms, 2 * ROUND_TERMS);
    const item it = table(here, items)[blockIdx.x / wide];
    const uint8_t *tile = table(here, tiles)[it.tile];
    const int64_t part = blockIdx.x % wide, record = part / INNER_WARPS, before_up = WIDE_MATRICES - 1;
    const int64_t bytes = units / TOGETHER * RECORD, channel = part * LANES + threadIdx.x % LANES;
    const uint8_t *blocks[2] = {tile + part * bytes, tile + (part + before_up * wide) * bytes};
    activations<1> of_row;
    of_row.find(x, of_x, units, 1, [&](int) { return (int64_t)table(here, rows)[it.row]; });
    float y = shared_product(blocks, (int)(units / TOGETHER), of_row, terms);
    if (threadIdx.x >= WARP) return; /* the whole warp */
    float up = in_units(__shfl_xor_sync(ALL_LANES, y, LANES), unit_of(tile, scales + before_up * (int64_t)sizeof(float)));
    float *of_row_numbers = numbers + it.entry * wide * LANES;
    if (threadIdx.x < LANES)
        of_row_numbers[channel] =
            activated_channel(tile, biases, wide * LANES, channel, in_units(y, unit_of(tile, scales)), up);
    if (!last_of(arrived + blockIdx.x / INNER_WARPS, INNER_WARPS)) return;
    float *gathered = (float *)terms;
    for (int i = threadIdx.x; i < INPUTS; i += WARP) gathered[i] = __ldcv(of_row_numbers + record * INPUTS + i);
    __syncwarp();
    for (int k = 0; k < TOGETHER; k++) {
        int64_t at = it.entry * inner_units + record * TOGETHER + k;
        quantize_group(gathered + k * GROUP, GROUP, inner + at * GROUP, of_inner + at);
    }
}

template <int UNITS> DEVICE void down_of(DOWN_ARGUMENTS) {
    const item it = items[blockIdx.x / wide];
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    int64_t first = 2 * (blockIdx.x % wide * DOWN_WARPS + threadIdx.x / WARP), number = (outputs + LANES - 1) / LANES;
    if (first >= number) return; /* the whole warp */
    int64_t second = first + 1 < number ? first + 1 : first, records = units / TOGETHER;
    for (int tile = 0; tile < it.tiles; tile++) {
        const uint8_t *data = tiles[it.tile + tile], *matrix = data + skipped;
        const uint8_t *blocks[2] = {matrix + first * records * RECORD, matrix + second * records * RECORD};
        const int64_t entry = it.entry + (int64_t)tile * it.step;
        float y[2][UNITS][4], unit = unit_of(data, scales);
        activations<UNITS> of_rows;
        of_rows.find(inner, of_inner, units, it.rows, [&](int r) { return entry + r; });
        of_rows.multiply_blocks(blocks, (int)records, y);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < UNITS; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    int64_t r = n * UNIT_ROWS + 2 * t + c % 2, output = (first + m) * LANES + g + c / 2 * 8;
                    if (r >= it.rows || output >= outputs) continue;
                    float *to = out + (it.out + r) * outputs + output, one = in_units(y[m][n][c], unit);
                    *to = it.add || tile ? __fadd_rn(*to, one) : one;
                }
    }
}

EXPERT_KERNELS(8, 1)
EXPERT_KERNELS(32, 4)
