/* Products for one to four rows: a half-warp is a block, lane i its output i, and each word of a record is an operand of
 * a product of four bytes. No sum crosses lanes. Several records are under way, because a GPU's memory answers late. */
#pragma once

#include "groups.cuh"

struct record {
    uint32_t words[WORDS];
    scaling scales[TOGETHER];

    METHOD void load(const uint8_t *from, int i) {
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) scales[k].load(from, i, k);
#pragma unroll
        for (int j = 0; j < WORDS; j++) words[j] = read_once((const uint32_t *)(from + HEAD) + LANES * j + i);
    }

    /* Group k of the record; x: the group's codes, 16-byte aligned. */
    METHOD int32_t times(int k, const int8_t *x) const {
        int32_t dot = 0;
#pragma unroll
        for (int part = k * GROUP / 16; part < (k + 1) * GROUP / 16; part++) {
            int4 codes = __ldg((const int4 *)x + part - k * GROUP / 16);
            if (E2M1) {
                uint32_t one = words[2 * part], two = words[2 * part + 1];
                dot = __dp4a((int)e2m1_bytes(one), codes.x, dot);
                dot = __dp4a((int)e2m1_bytes(one >> 16), codes.y, dot);
                dot = __dp4a((int)e2m1_bytes(two), codes.z, dot);
                dot = __dp4a((int)e2m1_bytes(two >> 16), codes.w, dot);
            } else if (BITS == 2) {
                uint32_t one = words[part];
                dot = __dp4a((int)(one & 0x03030303u), codes.x, dot);
                dot = __dp4a((int)(one >> 2 & 0x03030303u), codes.y, dot);
                dot = __dp4a((int)(one >> 4 & 0x03030303u), codes.z, dot);
                dot = __dp4a((int)(one >> 6 & 0x03030303u), codes.w, dot);
            } else if (BITS == 4) {
                uint32_t one = words[2 * part], two = words[2 * part + 1];
                dot = __dp4a((int)(one & 0x0F0F0F0Fu), codes.x, dot);
                dot = __dp4a((int)(one >> 4 & 0x0F0F0F0Fu), codes.y, dot);
                dot = __dp4a((int)(two & 0x0F0F0F0Fu), codes.z, dot);
                dot = __dp4a((int)(two >> 4 & 0x0F0F0F0Fu), codes.w, dot);
            } else {
                dot = __dp4a((int)centred_bytes(words[4 * part]), codes.x, dot);
                dot = __dp4a((int)centred_bytes(words[4 * part + 1]), codes.y, dot);
                dot = __dp4a((int)centred_bytes(words[4 * part + 2]), codes.z, dot);
                dot = __dp4a((int)centred_bytes(words[4 * part + 3]), codes.w, dot);
            }
        }
        return dot;
    }
};

/* Adds record `at` of output i of a block to y[r]: of row r the codes x[r] and factors of[r], groups in their order. */
template <int ROWS>
DEVICE void add_record(const record &of_block, int64_t at, const int8_t *const *x, const factors *const *of, float *y) {
#pragma unroll
    for (int k = 0; k < TOGETHER; k++) {
        int64_t g = at * TOGETHER + k;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float2 both = __ldg((const float2 *)(of[r] + g));
            factors here = {both.x, both.y};
            y[r] = of_block.scales[k].added(of_block.times(k, x[r] + g * GROUP), here, y[r]);
        }
    }
}

/* y[r] = output i of a block for ROWS rows; not yet in_units. The main loop has no branches: a record that is loaded
 * conditionally would be waited for at the next branch, and with it all that are under way. */
template <int ROWS>
DEVICE void multiply_block(const uint8_t *block, int i, int64_t records, const int8_t *const *x,
                           const factors *const *of, float *y) {
    const int MOST = E2M1 ? 24 : 32; /* words under way of one row: with the scales of two groups more would not fit */
    const int AHEAD = ROWS == 1 && WORDS <= 16 ? MOST / WORDS : WORDS <= 8 ? 2 : 1; /* records */
    record next[AHEAD];
#pragma unroll
    for (int r = 0; r < ROWS; r++) y[r] = 0.0f;
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
        if (a < records) next[a].load(block + a * RECORD, i);
    int64_t at = 0;
    for (; at + 2 * AHEAD <= records; at += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            add_record<ROWS>(next[a], at + a, x, of, y);
            next[a].load(block + (at + AHEAD + a) * RECORD, i);
        }
    }
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        if (at + a < records) add_record<ROWS>(next[a], at + a, x, of, y);
        if (at + AHEAD + a < records) next[a].load(block + (at + AHEAD + a) * RECORD, i);
    }
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
        if (at + AHEAD + a < records) add_record<ROWS>(next[a], at + AHEAD + a, x, of, y);
}
