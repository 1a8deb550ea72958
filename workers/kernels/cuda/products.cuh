/* Products by matrix units, for any number of rows: at one row, too, memory is the limit. Integer sums are exact, so a
 * row's bits do not depend on the rows beside it.
 *
 * The words of a record are the fragments of A (16 outputs x 32 inputs) as they lie: lane 4 g + t of a warp has outputs g
 * and g + 8. Of int4 a word's lower and upper halves are 8 consecutive inputs, so B's fragment of a row is 8 consecutive
 * codes; which inputs meet is the same permutation on both sides. Of int2 a word has the codes of 16 consecutive inputs,
 * which are the operands of two instructions. An instruction of nvfp4 has the inputs of two groups, lanes with t < 2 those
 * of the first: each group's sum is the instruction with 0 for the other's activations. Lane 4 g + t gets outputs g and
 * g + 8 of rows 2 t and 2 t + 1. */
#pragma once

#include "groups.cuh"

enum { UNIT_ROWS = 8 }; /* of one instruction */
enum { STEPS = GROUP < 32 ? 1 : GROUP / 32 }; /* instructions of a group */
enum { ROW_AHEAD = E2M1 ? 4 : WORDS <= 16 ? 32 / WORDS : 2 }; /* records under way; more would not fit */
enum { SPLIT = 4, ROUND = SPLIT * ROW_AHEAD };                /* warps that share the records of one row; records of a round */
enum { ROUND_TERMS = ROUND * TOGETHER * 2 * LANES };          /* that a round gives */

/* Fragments of A of a block's record. */
struct fragments {
    uint32_t words[WORDS / 2];
    scaling scales[TOGETHER][2];

    METHOD void load(const uint8_t *record, int g, int t) {
        const uint32_t *from = (const uint32_t *)(record + HEAD);
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) scales[k][0].load(record, g, k), scales[k][1].load(record, g + 8, k);
#pragma unroll
        for (int j = 0; j < WORDS / 4; j++) {
            words[2 * j] = read_once(from + LANES * (4 * j + t) + g);
            words[2 * j + 1] = read_once(from + LANES * (4 * j + t) + g + 8);
        }
    }

    METHOD void step(int s, uint32_t *a) const {
        if (E2M1) {
            a[0] = e2m1_bytes(words[2 * s]), a[1] = e2m1_bytes(words[2 * s + 1]);
            a[2] = e2m1_bytes(words[2 * s] >> 16), a[3] = e2m1_bytes(words[2 * s + 1] >> 16);
        } else if (BITS == 2) { /* words 0 and 1 serve both steps */
            a[0] = words[0] >> 4 * s & 0x03030303u, a[1] = words[1] >> 4 * s & 0x03030303u;
            a[2] = words[0] >> (4 * s + 2) & 0x03030303u, a[3] = words[1] >> (4 * s + 2) & 0x03030303u;
        } else if (BITS == 4) {
            a[0] = words[2 * s] & 0x0F0F0F0Fu, a[1] = words[2 * s + 1] & 0x0F0F0F0Fu;
            a[2] = words[2 * s] >> 4 & 0x0F0F0F0Fu, a[3] = words[2 * s + 1] >> 4 & 0x0F0F0F0Fu;
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++) a[k] = centred_bytes(words[4 * s + k]);
        }
    }
};

/* B's fragment of step s of a row's record, for its group k. */
DEVICE void load_codes(const int8_t *x, int s, int k, int t, uint32_t *b) {
    if (BITS < 8) {
        int2 both = __ldg((const int2 *)(x + (BITS == 2 ? 16 * t + 8 * s : 32 * s + 8 * t)));
        b[0] = (uint32_t)both.x, b[1] = (uint32_t)both.y;
        if (GROUP < 32 && t / 2 != k) b[0] = b[1] = 0;
    } else {
        b[0] = (uint32_t)__ldg((const int *)(x + 32 * s + 4 * t));
        b[1] = (uint32_t)__ldg((const int *)(x + 32 * s + 16 + 4 * t));
    }
}

/* Rows of activations, as the lanes of a warp read them: of row UNIT_ROWS * n + g the codes x[n], of row
 * UNIT_ROWS * n + 2 t + c the factors of[n][c]. */
template <int UNITS> struct activations {
    const int8_t *x[UNITS];
    const factors *of[UNITS][2];

    /* place(r): where row r of `rows` lies among rows of so many groups. What no row fills is computed from the last. */
    template <class Place> METHOD void find(const int8_t *codes, const factors *all, int64_t groups, int rows, Place place) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < UNITS; n++) {
            int r = UNIT_ROWS * n;
            x[n] = codes + place(r + g < rows ? r + g : rows - 1) * groups * GROUP;
            r += 2 * t;
            of[n][0] = all + place(r < rows ? r : rows - 1) * groups;
            of[n][1] = all + place(r + 1 < rows ? r + 1 : rows - 1) * groups;
        }
    }

    /* Multiplies a record of two blocks. use(m, n, c, k, term) gets what its group k adds to y[m][n][c], as of
     * multiply_blocks. */
    template <class Use> METHOD void multiply(const fragments *of_a, int number, Use use) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < UNITS; n++) {
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                int32_t dots[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
                for (int s = k * GROUP / 32; s < k * GROUP / 32 + STEPS; s++) {
                    uint32_t a[4], b[2];
                    load_codes(x[n] + number * INPUTS, s, k, t, b);
#pragma unroll
                    for (int m = 0; m < 2; m++) of_a[m].step(s, a), multiply_add(dots[m], a, b);
                }
                const int group = number * TOGETHER + k;
                float2 of_row[2] = {__ldg((const float2 *)(of[n][0] + group)), __ldg((const float2 *)(of[n][1] + group))};
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    factors here = {of_row[c % 2].x, of_row[c % 2].y};
#pragma unroll
                    for (int m = 0; m < 2; m++) use(m, n, c, k, of_a[m].scales[k][c / 2].term_of(dots[m][c], here));
                }
            }
        }
    }

    /* y[m][n][0..4), not yet in_units, of block m and of rows from UNIT_ROWS * n on, of all records. AHEAD of them are under way or multiplied; those behind the last one are loaded
     * from it, so that no branch waits for a load. */
    METHOD void multiply_blocks(const uint8_t *const *blocks, int records, float (*y)[UNITS][4]) const {
        const int AHEAD = UNITS > 1 ? 1 : ROW_AHEAD;
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < UNITS; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) y[m][n][c] = 0.0f;
        fragments next[AHEAD][2];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
#pragma unroll
            for (int m = 0; m < 2; m++) next[a][m].load(blocks[m] + (a < records ? a : records - 1) * RECORD, g, t);
        const auto add = [&](int m, int n, int c, int, term one) { y[m][n][c] = added(one, y[m][n][c]); };
        int first = 0;
        for (; first + AHEAD <= records; first += AHEAD) {
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                const int then = first + AHEAD + a;
                multiply(next[a], first + a, add);
#pragma unroll
                for (int m = 0; m < 2; m++)
                    next[a][m].load(blocks[m] + (then < records ? then : records - 1) * RECORD, g, t);
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD - 1; a++)
            if (first + a < records) multiply(next[a], first + a, add);
    }
};

/* The first warp's lane i gets the sum of output i of two blocks that follow one another, for a single row: SPLIT warps
 * share the records and leave their terms in memory of the block, two rounds of them; the first warp adds them up in the
 * order of the records. */
DEVICE float shared_product(const uint8_t *const *blocks, int records, const activations<1> &of_row, term *terms) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, last = records - 1;
    fragments next[ROW_AHEAD][2];
#pragma unroll
    for (int a = 0; a < ROW_AHEAD; a++)
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int number = a * SPLIT + warp;
            next[a][m].load(blocks[m] + (number < last ? number : last) * RECORD, g, t);
        }
    float y = 0.0f;
    for (int first = 0; first < records; first += ROUND) {
        term *of_round = terms + first / ROUND % 2 * ROUND_TERMS;
        term own[ROW_AHEAD][TOGETHER][2][2];
#pragma unroll
        for (int a = 0; a < ROW_AHEAD; a++) {
            const int number = first + a * SPLIT + warp, then = number + ROUND;
            of_row.multiply(next[a], number < last ? number : last, [&](int m, int, int c, int k, term one) {
                if (c % 2 == 0) own[a][k][m][c / 2] = one;
            });
#pragma unroll
            for (int m = 0; m < 2; m++) next[a][m].load(blocks[m] + (then < last ? then : last) * RECORD, g, t);
        }
        if (t == 0) /* all at once, so that no branch waits for a load */
#pragma unroll
            for (int i = 0; i < ROW_AHEAD * TOGETHER * 4; i++) {
                const int a = i / 4 / TOGETHER, k = i / 4 % TOGETHER, m = i / 2 % 2, half = i % 2;
                of_round[(((a * SPLIT + warp) * TOGETHER + k) * 2 + m) * LANES + g + half * 8] = own[a][k][m][half];
            }
        __syncthreads();
        if (warp > 0) continue;
#pragma unroll
        for (int i = 0; i < ROUND * TOGETHER; i++)
            if (first + i / TOGETHER < records) y = added(of_round[i * 2 * LANES + lane], y);
    }
    return y;
}
