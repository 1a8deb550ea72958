/* Tiles of experts in a quantized format, and matrices: one launch computes all tiles of a layer, wherever they lie.
 *
 *     quantize   x -> codes
 *     gate_up_N  codes -> inner activations (expert_math.cuh), as codes, of items with at most N rows
 *     down_N     inner -> outputs of tiles
 *
 * Rows do not mix, and sums have one order: a row's bits are those of the host's kernels, whatever is computed beside it
 * and by which of these kernels. A matrix [outputs, inputs] is multiplied by quantize and down_N. */
#include "expert_math.cuh"
#include "few_rows.cuh"
#include "items.cuh"
#include "many_rows.cuh"

enum { INNER_WARPS = INPUTS / LANES }; /* of gate and up: each takes the same 16 channels of both */
enum { INNER_THREADS = INNER_WARPS * WARP };
enum { DOWN_WARPS = 4, DOWN_THREADS = DOWN_WARPS * WARP }; /* each takes two blocks of outputs */

/* x float32 [.., inputs] -> codes [.., groups * GROUP] and factors [.., groups]; `number` of groups. One warp each. */
KERNEL(128, quantize, const float *x, int64_t inputs, int64_t groups, int64_t number, int8_t *codes, factors *to) {
    int64_t at = (int64_t)blockIdx.x * (128 / WARP) + threadIdx.x / WARP;
    if (at >= number) return;
    int64_t row = at / groups, group = at % groups, left = inputs - group * GROUP;
    quantize_group(x + row * inputs + group * GROUP, left < GROUP ? left : GROUP, codes + at * GROUP, to + at);
}

/* Inner activations [rows, INPUTS] of a block of threads, as codes. */
DEVICE void store_inner(const float *numbers, const item &it, int64_t part, int64_t parts, int8_t *inner,
                        factors *inner_factors) {
    __syncthreads();
    for (int r = threadIdx.x / WARP; r < it.rows; r += INNER_WARPS) {
        int64_t at = ((int64_t)(it.entry + r) * parts + part) * TOGETHER;
        for (int k = 0; k < TOGETHER; k++)
            quantize_group(numbers + r * INPUTS + k * GROUP, GROUP, inner + (at + k) * GROUP, inner_factors + at + k);
    }
}

/* The arguments of all gate_up. `groups` of x; a tile's channels are `parts` times INPUTS; its biases and its matrices'
 * factors are so many bytes behind its beginning (0: there are none). */
#define INNER_ARGUMENTS                                                                                          \
    const item *items, const uint8_t *const *tiles, const int32_t *rows, const int8_t *codes, const factors *of, \
        int64_t groups, int64_t parts, int64_t biases, int8_t *inner, factors *inner_factors, int64_t of_matrices

/* INPUTS channels of one item. */
template <int ROWS> DEVICE void few_inner(INNER_ARGUMENTS) {
    SHARED(float, numbers, ROWS * INPUTS);
    const item it = items[blockIdx.x / parts];
    int64_t part = blockIdx.x % parts, records = groups / TOGETHER, block_bytes = records * RECORD;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, i = lane % LANES, up = lane / LANES;
    const int8_t *x[ROWS];
    const factors *x_factors[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int64_t row = rows[it.row + (r < it.rows ? r : 0)];
        x[r] = codes + row * groups * GROUP, x_factors[r] = of + row * groups;
    }
    /* A tile is whole blocks. Ungated, both halves of a warp compute the same. */
    int64_t block = (up * (WIDE_MATRICES - 1) * parts + part) * INNER_WARPS + warp, first = part * INPUTS + warp * LANES;
    float y[ROWS], unit = unit_of(tiles[it.tile], of_matrices + up * (WIDE_MATRICES - 1) * (int64_t)sizeof(float));
    multiply_block<ROWS>(tiles[it.tile] + block * block_bytes, i, records, x, x_factors, y);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float one = in_units(y[r], unit), other = __shfl_down_sync(ALL_LANES, one, LANES);
        if (!up && r < it.rows)
            numbers[r * INPUTS + warp * LANES + i] =
                activated_channel(tiles[it.tile], biases, parts * INPUTS, first + i, one, other);
    }
    store_inner(numbers, it, part, parts, inner, inner_factors);
}

template <int UNITS> DEVICE void many_inner(INNER_ARGUMENTS) {
    SHARED(float, numbers, UNITS * UNIT_ROWS * INPUTS);
    const item it = items[blockIdx.x / parts];
    int64_t part = blockIdx.x % parts, records = groups / TOGETHER, block_bytes = records * RECORD;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int8_t *x[UNITS];
    const factors *x_factors[UNITS][2];
#pragma unroll
    for (int n = 0; n < UNITS; n++) {
        int r = n * UNIT_ROWS, last = it.rows - 1; /* what no row fills is computed from the last one */
        x[n] = codes + (int64_t)rows[it.row + (r + g < last ? r + g : last)] * groups * GROUP;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int of_row = r + 2 * t + c;
            x_factors[n][c] = of + (int64_t)rows[it.row + (of_row < last ? of_row : last)] * groups;
        }
    }
    const uint8_t *gate = tiles[it.tile] + (part * INNER_WARPS + warp) * block_bytes; /* ungated: of up */
    const uint8_t *blocks[2] = {gate, gate + (WIDE_MATRICES - 1) * parts * INNER_WARPS * block_bytes};
    float y[2][UNITS][4], units[2];
#pragma unroll
    for (int m = 0; m < 2; m++)
        units[m] = unit_of(tiles[it.tile], of_matrices + m * (WIDE_MATRICES - 1) * (int64_t)sizeof(float));
    multiply_blocks<UNITS>(blocks, (int)records, x, x_factors, y);
#pragma unroll
    for (int n = 0; n < UNITS; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int r = n * UNIT_ROWS + 2 * t + c % 2, channel = warp * LANES + g + c / 2 * 8;
            numbers[r * INPUTS + channel] =
                activated_channel(tiles[it.tile], biases, parts * INPUTS, part * INPUTS + channel,
                                  in_units(y[0][n][c], units[0]), in_units(y[1][n][c], units[1]));
        }
    store_inner(numbers, it, part, parts, inner, inner_factors);
}

/* The arguments of all down. A product's matrix begins `skipped` bytes behind each address, its factor is `of_matrix` bytes
 * behind it; `groups` of its inputs; `wide`: blocks of threads for all its outputs. */
#define DOWN_ARGUMENTS                                                                                           \
    const item *items, const uint8_t *const *tiles, int64_t skipped, const int8_t *inner, const factors *of,     \
        int64_t groups, int64_t outputs, int64_t wide, float *out, int64_t of_matrix

DEVICE void store_output(float *to, float y, bool add) { *to = add ? __fadd_rn(*to, y) : y; }

template <int ROWS> DEVICE void few_down(DOWN_ARGUMENTS) {
    const item it = items[blockIdx.x / wide];
    int lane = threadIdx.x % WARP, i = lane % LANES;
    int64_t pair = blockIdx.x % wide * DOWN_WARPS + threadIdx.x / WARP, block = 2 * pair + lane / LANES;
    int64_t records = groups / TOGETHER;
    if (block * LANES >= outputs) return;
    for (int tile = 0; tile < it.tiles; tile++) {
        const int8_t *x[ROWS];
        const factors *x_factors[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int64_t at = (it.entry + (int64_t)tile * it.step + (r < it.rows ? r : 0)) * groups;
            x[r] = inner + at * GROUP, x_factors[r] = of + at;
        }
        float y[ROWS], unit = unit_of(tiles[it.tile + tile], of_matrix);
        multiply_block<ROWS>(tiles[it.tile + tile] + skipped + block * records * RECORD, i, records, x, x_factors, y);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < it.rows && block * LANES + i < outputs)
                store_output(out + (int64_t)(it.out + r) * outputs + block * LANES + i, in_units(y[r], unit),
                             it.add || tile);
    }
}

template <int UNITS> DEVICE void many_down(DOWN_ARGUMENTS) {
    const item it = items[blockIdx.x / wide];
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, last = it.rows - 1;
    int64_t first = 2 * (blockIdx.x % wide * DOWN_WARPS + threadIdx.x / WARP), number = (outputs + LANES - 1) / LANES;
    if (first >= number) return; /* the whole warp */
    int64_t second = first + 1 < number ? first + 1 : first, records = groups / TOGETHER;
    for (int tile = 0; tile < it.tiles; tile++) {
        int64_t entry = it.entry + (int64_t)tile * it.step;
        const int8_t *x[UNITS];
        const factors *x_factors[UNITS][2];
#pragma unroll
        for (int n = 0; n < UNITS; n++) {
            int r = n * UNIT_ROWS;
            x[n] = inner + (entry + (r + g < last ? r + g : last)) * groups * GROUP;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int of_row = r + 2 * t + c;
                x_factors[n][c] = of + (entry + (of_row < last ? of_row : last)) * groups;
            }
        }
        const uint8_t *matrix = tiles[it.tile + tile] + skipped;
        const uint8_t *blocks[2] = {matrix + first * records * RECORD, matrix + second * records * RECORD};
        float y[2][UNITS][4], unit = unit_of(tiles[it.tile + tile], of_matrix);
        multiply_blocks<UNITS>(blocks, (int)records, x, x_factors, y);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < UNITS; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    int r = n * UNIT_ROWS + 2 * t + c % 2;
                    int64_t output = (first + m) * LANES + g + c / 2 * 8;
                    if (r < it.rows && output < outputs)
                        store_output(out + (int64_t)(it.out + r) * outputs + output, in_units(y[m][n][c], unit),
                                     it.add || tile);
                }
    }
}

#define INNER_CALL                                                                                               \
    (table(here, items), table(here, tiles), table(here, rows), codes, of, groups, parts, biases, inner,          \
     inner_factors, of_matrices)
#define DOWN_CALL                                                                                                \
    (table(here, items), table(here, tiles), skipped, inner, of, groups, outputs, wide, out, of_matrix)

KERNEL(INNER_THREADS, gate_up_1, INNER_ARGUMENTS, TABLES) { few_inner<1> INNER_CALL; }
KERNEL(INNER_THREADS, gate_up_2, INNER_ARGUMENTS, TABLES) { few_inner<2> INNER_CALL; }
KERNEL(INNER_THREADS, gate_up_4, INNER_ARGUMENTS, TABLES) { few_inner<4> INNER_CALL; }
KERNEL(INNER_THREADS, gate_up_8, INNER_ARGUMENTS, TABLES) { many_inner<1> INNER_CALL; }
KERNEL(INNER_THREADS, gate_up_32, INNER_ARGUMENTS, TABLES) { many_inner<4> INNER_CALL; }
KERNEL(DOWN_THREADS, down_1, DOWN_ARGUMENTS, TABLES) { few_down<1> DOWN_CALL; }
KERNEL(DOWN_THREADS, down_2, DOWN_ARGUMENTS, TABLES) { few_down<2> DOWN_CALL; }
KERNEL(DOWN_THREADS, down_4, DOWN_ARGUMENTS, TABLES) { few_down<4> DOWN_CALL; }
KERNEL(DOWN_THREADS, down_8, DOWN_ARGUMENTS, TABLES) { many_down<1> DOWN_CALL; }
KERNEL(DOWN_THREADS, down_32, DOWN_ARGUMENTS, TABLES) { many_down<4> DOWN_CALL; }
