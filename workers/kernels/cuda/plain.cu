/* Rows of weights, row-major, in bf16 or with FP8 1 in fp8, for up to eight rows of x, as bound by memory as in the
 * quantized formats. Of experts' tiles (gate rows unless ungated, up rows, down's columns as rows: shm/formats.py and shm/fp8.py) the
 * launches are those of tiles.cu; a matrix of the backbone is gate_up_N without what follows its products.
 *
 * bf16 rounds x and the inner activations to it, as the host does, fp8 does not; products are added in float32. The order of
 * the sums is this file's own and depends on the tile's shape alone, so a row's bits do not depend on other rows. */
#include "expert_math.cuh"
#include "items.cuh"

#if FP8
typedef uint8_t stored; /* a weight: E4M3, with a scale for each block of SCALED x SCALED */
typedef float code;     /* a number of x or of inner activations */
#else
typedef uint16_t stored, code;
#endif

enum { BITS = 8 * sizeof(stored), EACH = 4 / sizeof(stored), SCALED = 128 }; /* EACH: in 32 bits */
enum { VECTOR = 4 * EACH }; /* weights that a lane reads together */
enum { UNIT = 256 };

/* Of bf16 to nearest even; NaN stays NaN. */
DEVICE code rounded(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (FP8) return (code)x;
    return (code)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
DEVICE float as_float(code x) { return FP8 ? (float)x : widened((uint32_t)x); }

/* Weight `i` of a word; of fp8 divided by UNIT, as a binary16 number with nearly the same bits. */
DEVICE float weight_of(uint32_t word, int i) {
    uint32_t top = word << (32 - BITS - BITS * i); /* from the highest bit on */
    return FP8 ? half_number((uint32_t)((int32_t)top >> 17) & 0xBF80u) : __uint_as_float(top & 0xFFFF0000u);
}

/* VECTOR weights, and numbers of x. */
struct weights {
    uint32_t words[4];

    METHOD void load(const stored *from) {
        const uint4 all = read_once((const uint4 *)from);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    }
};

struct inputs {
    float x[VECTOR];

    METHOD void load(const code *from) {
        const int PARTS = VECTOR * sizeof(code) / 16;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            uint4 all = __ldg((const uint4 *)from + part);
            const uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
            for (int i = 0; i < VECTOR / PARTS; i++)
                x[VECTOR / PARTS * part + i] = FP8 ? __uint_as_float(words[i]) : weight_of(words[i / EACH], i % EACH);
        }
    }

    /* sum + the dot product with weights that share a scale. */
    METHOD float dot(const weights &with, float scale, float sum) const {
        float part = FP8 ? 0.0f : sum;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) part = __fmaf_rn(weight_of(with.words[i / EACH], i % EACH), x[i], part);
        return FP8 ? __fmaf_rn(part, scale, sum) : part;
    }
};

/* The scales of rows from `row` on of a matrix [.., numbers], whose first ones these are. */
DEVICE const float *scales_of(const float *scales, int64_t row, int64_t numbers) {
    return scales + row / SCALED * ((numbers + SCALED - 1) / SCALED);
}
DEVICE float scale_at(const float *scales, int64_t at) {
    return FP8 ? __fmul_rn(__ldg(scales + at / SCALED), (float)UNIT) : 1.0f;
}

enum { QUANTIZE_THREADS = 128 };
enum { INNER_WARPS = 4, INNER_THREADS = INNER_WARPS * WARP }; /* a channel each */
enum { DOWN_WARPS = 8, DOWN_THREADS = DOWN_WARPS * WARP };    /* each warp a share of the channels */
enum { COLUMNS = EACH * WARP };

/* x float32 [number] as products take it. */
KERNEL(QUANTIZE_THREADS, quantize, const float *x, int64_t, int64_t, int64_t number, code *to, factors *) {
    int64_t at = (int64_t)blockIdx.x * QUANTIZE_THREADS + threadIdx.x;
    if (at < number) to[at] = rounded(x[at]);
}

/* AHEAD vectors of a channel's gate and up are under way while one is multiplied; those behind the last one are loaded from
 * it, so that no branch waits for a load. */
template <int ROWS> DEVICE void inner_of(INNER_ARGUMENTS) {
    const int AHEAD = ROWS > 2 ? 2 : 4, STEP = WARP * VECTOR, last = (int)units - VECTOR;
    const item it = items[blockIdx.x / wide];
    int64_t channel = blockIdx.x % wide * INNER_WARPS + threadIdx.x / WARP;
    if (channel >= inner_units) return; /* the whole warp */
    int lane = threadIdx.x % WARP;
    const uint8_t *tile = tiles[it.tile];
    const stored *gate = (const stored *)tile + channel * units; /* ungated: up */
    const stored *up = gate + (WIDE_MATRICES - 1) * inner_units * units;
    const float *of_gate = scales_of((const float *)(tile + scales), channel, units);
    const float *of_up = scales_of(of_gate, (WIDE_MATRICES - 1) * inner_units, units);
    const code *of[ROWS];
    float gates[ROWS], ups[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        of[r] = x + (int64_t)rows[it.row + (r < it.rows ? r : 0)] * units;
        gates[r] = ups[r] = 0.0f;
    }
    weights next[AHEAD][2];
    const auto load = [&](weights *to, int h) {
        if (!UNGATED) to[0].load(gate + (h < last ? h : last));
        to[1].load(up + (h < last ? h : last));
    };
    const auto add = [&](const weights *from, int h) {
        const float scale_one = scale_at(of_gate, h), scale_two = scale_at(of_up, h);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            inputs numbers;
            numbers.load(of[r] + h);
            if (!UNGATED) gates[r] = numbers.dot(from[0], scale_one, gates[r]);
            ups[r] = numbers.dot(from[1], scale_two, ups[r]);
        }
    };
    int h = lane * VECTOR;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) load(next[a], h + a * STEP);
#pragma unroll 1
    for (; h + (AHEAD - 1) * STEP <= last; h += AHEAD * STEP) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) add(next[a], h + a * STEP), load(next[a], h + (AHEAD + a) * STEP);
    }
#pragma unroll
    for (int a = 0; a < AHEAD - 1; a++)
        if (h + a * STEP <= last) add(next[a], h + a * STEP);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float gate_of_row = UNGATED ? 0.0f : sum_of_lanes<WARP>(gates[r]), up_of_row = sum_of_lanes<WARP>(ups[r]);
        float both = activated_channel(tile, biases, inner_units, channel, gate_of_row, up_of_row);
        if (lane == 0 && r < it.rows) inner[(it.entry + r) * inner_units + channel] = rounded(both);
    }
}

/* The weights of channel t, or of the last one, for a lane's columns. */
DEVICE uint32_t column_words(const stored *down, int t, int last, int64_t outputs) {
    return read_once((const uint32_t *)(down + (t < last ? t : last) * outputs));
}

/* COLUMNS columns of one tile: a lane has EACH of them, a warp every DOWN_WARPS-th channel. As above AHEAD channels are
 * under way. */
template <int ROWS> DEVICE void down_of(DOWN_ARGUMENTS) {
    SHARED(float, parts, DOWN_WARPS *ROWS *COLUMNS);
    const int AHEAD = SCALED / DOWN_WARPS; /* so all of a round have one scale */
    const item it = items[blockIdx.x / wide];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, last = (int)units - 1;
    int64_t first = blockIdx.x % wide * COLUMNS, column = first + EACH * lane;
    const uint8_t *tile = tiles[it.tile];
    const stored *down = (const stored *)tile + WIDE_MATRICES * units * outputs + column; /* `skipped` bytes on */
    const float *of_down = (const float *)(tile + scales);
    const code *of[ROWS];
    uint32_t next[AHEAD];
    float sums[ROWS][EACH];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        of[r] = inner + (int64_t)(it.entry + (r < it.rows ? r : 0)) * units;
        for (int c = 0; c < EACH; c++) sums[r][c] = 0.0f;
    }
#pragma unroll
    for (int a = 0; a < AHEAD; a++) next[a] = column_words(down, warp + a * DOWN_WARPS, last, outputs);
    const auto add = [&](uint32_t word, int t, float scale) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float x = as_float(__ldg(of[r] + t));
            if (FP8) x = __fmul_rn(x, scale);
#pragma unroll
            for (int c = 0; c < EACH; c++) sums[r][c] = __fmaf_rn(weight_of(word, c), x, sums[r][c]);
        }
    };
    const auto scale_of = [&](int t) { return scale_at(scales_of(of_down, t < last ? t : last, outputs), first); };
    int t = warp;
    float scale = scale_of(t);
#pragma unroll 1
    for (; t + (AHEAD - 1) * DOWN_WARPS <= last; t += SCALED) {
        const float then = scale_of(t + SCALED);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            add(next[a], t + a * DOWN_WARPS, scale);
            next[a] = column_words(down, t + (AHEAD + a) * DOWN_WARPS, last, outputs);
        }
        scale = then;
    }
#pragma unroll
    for (int a = 0; a < AHEAD - 1; a++)
        if (t + a * DOWN_WARPS <= last) add(next[a], t + a * DOWN_WARPS, scale);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < EACH; c++) parts[(warp * ROWS + r) * COLUMNS + EACH * lane + c] = sums[r][c];
    __syncthreads();
    for (int at = threadIdx.x; at < it.rows * COLUMNS; at += DOWN_THREADS) {
        int r = at / COLUMNS, c = at % COLUMNS;
        float y = parts[r * COLUMNS + c];
        for (int w = 1; w < DOWN_WARPS; w++) y = __fadd_rn(y, parts[(w * ROWS + r) * COLUMNS + c]);
        out[(int64_t)(it.out + r) * outputs + first + c] = y;
    }
}

EXPERT_KERNELS(1, 1)
EXPERT_KERNELS(2, 2)
EXPERT_KERNELS(4, 4)
EXPERT_KERNELS(8, 8)
