/* What one row of x keeps of tiles whose gate and down lie by channel (shm/floe.py), wherever the records are: of all tiles
 * of a layer the gates in one launch, the rows of down in another. A tile's channels are added in their order. Gates in int8
 * and int4 have the bits of the host's kernels of 16 lanes (workers/kernels/c/channels.h); the order of bf16's is this
 * file's own, for as many lanes. */
#include "expert_math.cuh"
#include "items.cuh"

struct kept { /* of a tile */
    const float *u; /* of all its channels, with biases */
    int32_t first, number;
    int64_t line; /* of the outputs */
};

enum { GATE_THREADS = 128, DOWN_THREADS = 128, TOGETHER = 8 }; /* channels of a block of gates */
enum { LANES = 16, CODES = ROW_BITS != 16, GROUPS = ROW_BITS == 4 ? 2 : 1 }; /* words and groups of a line of 64 bytes */
enum { AHEAD = 8, EACH = 32 / ROW_BITS, OF_GROUP = EACH / GROUPS }; /* loads under way; numbers of a word */

/* A word of a row record of so many lines, and the scales and zeros of its line as they are stored. */
struct part {
    uint32_t word, scales, zeros;

    METHOD static int zeros_at(int lines) { return CODES ? (4 * lines + 63) / 64 * 64 : 0; }
    METHOD static int codes_at(int lines) { return GROUPS * zeros_at(lines); }
    METHOD static int row_bytes(int lines) { return codes_at(lines) + 64 * lines; }
    METHOD void load(const uint8_t *row, int lines, int at) {
        word = read_once((const uint32_t *)(row + codes_at(lines)) + at);
        if (CODES) scales = read_once((const uint32_t *)row + at / LANES);
        if (ROW_BITS == 4) zeros = read_once((const uint32_t *)(row + zeros_at(lines)) + at / LANES);
    }
    METHOD static float half(uint32_t both, int upper) { return __uint_as_float(upper ? both & 0xFFFF0000u : both << 16); }
    METHOD float scale(int group) const { return ROW_BITS == 4 ? half(scales, group) : __uint_as_float(scales); }
    METHOD float zero(int group) const { return ROW_BITS == 4 ? half(zeros, group) : 128.0f; }
    METHOD float number(int group, int i) const { /* of codes in int8 without their zero */
        if (ROW_BITS == 4) return (float)(word >> (8 * i + 4 * group) & 15);
        return CODES ? (float)((int)(word >> 8 * i & 255) - 128) : half(word, i);
    }
};

/* x [lines, GROUPS, 16]: of int8 codes in one word the numbers i, i + 16, i + 32 and i + 48 of a group; of bf16 two. */
KERNEL(GATE_THREADS, gates, const kept *tiles, const uint8_t *const *records, const int32_t *which, const uint32_t *x,
       const factors *of_x, int64_t lines, int64_t wide, float *inner, TABLES) {
    const kept it = table(here, tiles)[blockIdx.x / wide];
    const int first = (int)(blockIdx.x % wide) * TOGETHER, mine = first + (int)threadIdx.x / LANES;
    if (first >= it.number) return; /* the whole block */
    const int at = it.first + (mine < it.number ? mine : it.number - 1);
    const int lane = threadIdx.x % LANES, last = (int)lines - 1;
    const uint8_t *record = table(here, records)[at];
    float sum = 0.0f, rest = 0.0f;
    part next[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) next[a].load(record, (int)lines, (a < last ? a : last) * LANES + lane);
#pragma unroll 1
    for (int begin = 0; begin <= last; begin += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int line = begin + a, then = line + AHEAD;
            const part one = next[a];
            next[a].load(record, (int)lines, (then < last ? then : last) * LANES + lane);
            if (line > last) continue;
#pragma unroll
            for (int h = 0; h < GROUPS; h++) {
                const int g = GROUPS * line + h, with = (int)__ldg(x + LANES * g + lane);
                if (!CODES) {
                    sum = __fmaf_rn(one.number(h, 0), part::half((uint32_t)with, 0), sum);
                    sum = __fmaf_rn(one.number(h, 1), part::half((uint32_t)with, 1), sum);
                    continue;
                }
                const float factor = __fmul_rn(one.scale(h), __ldg(&of_x[g].step));
                const int codes = (int)(ROW_BITS == 4 ? one.word >> 4 * h & 0x0F0F0F0Fu : one.word ^ 0x80808080u);
                const int dot = __dp4a(codes, with, ROW_BITS == 4 ? 0 : 128 * __dp4a(0x01010101, with, 0));
                sum = __fmaf_rn((float)dot, factor, sum);
                const float sum_of_codes = __ldg(&of_x[g].sum);
                if (g % LANES == lane) rest = __fmaf_rn(__fmul_rn(factor, one.zero(h)), sum_of_codes, rest);
            }
        }
    }
    float gate = __fsub_rn(sum_of_lanes<LANES>(sum), sum_of_lanes<LANES>(rest));
    if (BIASED) gate = __fadd_rn(gate, __ldg((const float *)(record + 2 * part::row_bytes((int)lines))));
    if (lane == 0 && mine < it.number) inner[at] = activated(gate, it.u[table(here, which)[at]]);
}

/* out [.., numbers]: a thread has a word of each channel's row; AHEAD of them are under way. */
KERNEL(DOWN_THREADS, downs, const kept *tiles, const uint8_t *const *records, const float *inner, int64_t lines,
       int64_t numbers, int64_t wide, float *out, TABLES) {
    const kept it = table(here, tiles)[blockIdx.x / wide];
    const int word = (int)(blockIdx.x % wide) * DOWN_THREADS + threadIdx.x, last = it.number - 1;
    if (word >= lines * LANES) return;
    const uint8_t *const *from = table(here, records) + it.first;
    const int row = part::row_bytes((int)lines);
    float sums[EACH] = {}, zeros[GROUPS] = {};
    const uint8_t *later[AHEAD]; /* records whose words are loaded next */
    float by[AHEAD];
    part next[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        if (last < 0) break;
        next[a].load(from[a < last ? a : last] + row, (int)lines, word);
        by[a] = __ldg(inner + it.first + (a < last ? a : last));
        later[a] = from[a + AHEAD < last ? a + AHEAD : last];
    }
#pragma unroll 1
    for (int begin = 0; begin <= last; begin += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int k = begin + a, then = k + AHEAD;
            const part one = next[a];
            const float times = by[a];
            next[a].load(later[a] + row, (int)lines, word);
            by[a] = __ldg(inner + it.first + (then < last ? then : last));
            later[a] = from[then + AHEAD < last ? then + AHEAD : last];
            if (k > last) continue;
#pragma unroll
            for (int h = 0; h < GROUPS; h++) {
                const float factor = CODES ? __fmul_rn(one.scale(h), times) : times;
                if (ROW_BITS == 4) zeros[h] = __fmaf_rn(factor, one.zero(h), zeros[h]);
#pragma unroll
                for (int i = 0; i < OF_GROUP; i++)
                    sums[OF_GROUP * h + i] = __fmaf_rn(one.number(h, i), factor, sums[OF_GROUP * h + i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int h = i / OF_GROUP, of_line = CODES ? 64 * h + LANES * (i % OF_GROUP) + word % LANES : 2 * (word % LANES) + i;
        const int64_t to = (int64_t)(word / LANES) * EACH * LANES + of_line;
        if (to < numbers) out[it.line * numbers + to] = __fsub_rn(sums[i], zeros[h]);
    }
}
