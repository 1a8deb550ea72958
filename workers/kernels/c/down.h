/* Down of channels in int4 and int8 (shm/floe.py), in integers. Part of body.h.
 *
 * A down row has a scale for each group of 64 outputs, so a = silu(gate . x) * u times the scales is rounded instead of
 * a alone. Of one row of x, STEPPED channels and one group g of outputs
 *
 *     t[c] = a[c] * scale[c, g]      step = largest |t| / 127      code[c] = t[c] / step, rounded to an integer
 *     y[64 g + i] += step * (sum of code[c] * q[c, 64 g + i] - sum of code[c] * zero[c, g])
 *
 * where the first sum is an exact integer, and the second one is of STRANDS sums of every STRANDS-th channel. Channels
 * that a row leaves out have the code 0 and change no bit; which channels have a step in common depends on their numbers
 * alone. So a row's bits depend on no other row's mask, nor on how many channels are taken together.
 *
 * Four channels make a QUAD: their lines are transposed, so that a lane of 32 bits has the codes q of one output in four
 * channels. y stays in the order that this gives, and is put in order at the end. */
#pragma once

#include "channels.h"

enum { STEPPED = 128 };              /* channels whose products share a step */
enum { QUAD = 4 };                   /* channels of a lane */
enum { QUADS = STEPPED / QUAD };
enum { STRANDS = 16 };
enum { PASSED = 2 };                 /* quads that are added to the sums in one pass */
enum { DOWN_ROWS = VECTOR_BYTES == 64 ? 4 : 1 }; /* of x that share a read of transposed lines: by registers */

#define ROUNDER 12582912.0f       /* added, it rounds to an integer, half to even: the lowest bits are that integer */
#define LEAST_LARGEST 1e-36f      /* of |t|, below which a step is 0: 127 / |t| could be infinite */

#ifndef TRANSPOSE_BYTES
/* to[k], 32-bit lane i = byte k of lane i of four registers. */
INLINE void transpose_bytes(const words *from, words *to) {
    const words even = (words){0} + 0x00FF00FFu, low = (words){0} + 0xFFFFu;
    words a = (from[0] & even) | (from[1] & even) << 8, b = (from[0] >> 8 & even) | (from[1] & ~even);
    words c = (from[2] & even) | (from[3] & even) << 8, d = (from[2] >> 8 & even) | (from[3] & ~even);
    to[0] = (a & low) | c << 16, to[1] = (b & low) | d << 16;
    to[2] = a >> 16 | (c & ~low), to[3] = b >> 16 | (d & ~low);
}
#define TRANSPOSE_BYTES(from, to) transpose_bytes(from, to)
#define PUT_IN_ORDER(vectors) ((void)(vectors))
#endif

#ifndef STORE_BYTES
INLINE void store_bytes(words all, int8_t *to) {
    for (int l = 0; l < LANES; l++) to[l] = (int8_t)all[l];
}
#define STORE_BYTES(vector, to) store_bytes((words)(vector), to) /* the lowest byte of each lane */
#endif

#ifndef LARGER
INLINE ints larger(ints a, ints b) { return (a & (a > b)) | (b & ~(a > b)); }
#define LARGER(a, b) larger(a, b)
#endif

/* --- rounding ------------------------------------------------------------------------------------------------- */

INLINE ints magnitudes(vector t) { return (ints)t & 0x7FFFFFFF; }

INLINE words splat_word(uint32_t word) { return word + (words){0}; }

/* 127 over the largest |t|; NaN gives 0, and its step NaN. */
INLINE vector inverse_step(vector largest) {
    return (vector)((ints)(splat(127.0f) / largest) & (largest >= splat(LEAST_LARGEST)));
}

/* Of one row of x and `number` channels `rows` with numbers[i], taken in STEPPED: codes [quads, slots], four channels to
 * a word; step and rest [slots], rest as the sums are: of an int4 line's second group UPPER times as large. */
INLINE void quantize_channels(const struct row_shape *s, const int bits, const uint8_t *const *rows,
                              const int32_t *numbers, const float *a, int64_t number, uint32_t *codes, float *step,
                              float *rest) {
    int64_t slots = rounded_up(s->groups, SEGMENT), quads = (number + QUAD - 1) / QUAD;
    for (int64_t g = 0; g < s->groups; g += LANES) {
#define SCALES(i) (bits == INT4 ? WIDENED((const uint16_t *)rows[i] + g) : loaded((const float *)rows[i] + g))
        ints most = {0};
        for (int64_t i = 0; i < number; i++)
            if (a[i] != 0.0f) most = LARGER(magnitudes(SCALES(i) * splat(a[i])), most);
        vector largest = (vector)most, inverse = inverse_step(largest), strands[STRANDS], unit = largest / splat(127.0f);
        for (int i = 0; i < STRANDS; i++) strands[i] = (vector){0};
        for (int64_t q = 0; q < quads; q++) {
            words all = {0};
            for (int64_t i = q * QUAD, n = 0; n < QUAD && i < number; i++, n++) {
                if (a[i] == 0.0f) continue;
                vector shifted = VFMA(SCALES(i) * splat(a[i]), inverse, splat(ROUNDER)), code = shifted - splat(ROUNDER);
                vector zero = bits == INT4 ? WIDENED((const uint16_t *)(rows[i] + s->zeros) + g) : splat(128.0f);
                vector *strand = strands + numbers[i] % STRANDS;
                *strand = VFMA(code, zero, *strand);
                all |= ((words)shifted & 255u) << (8 * n);
            }
            memcpy(codes + q * slots + g, &all, sizeof all);
        }
        for (int half = STRANDS / 2; half; half /= 2)
            for (int i = 0; i < half; i++) strands[i] += strands[i + half];
        if (bits == INT4 && UPPER > 1) {
            vector factor;
            for (int i = 0; i < LANES; i++) factor[i] = i % 2 ? UPPER : 1;
            unit /= factor, strands[0] *= factor;
        }
        memcpy(step + g, &unit, sizeof unit);
        memcpy(rest + g, strands, sizeof *strands);
    }
}

/* --- few rows of x: whole rows of down, PASSED quads at a time --------------------------------------------------- */

/* What STEPPED channels add up to, for one row of x. */
struct stepped {
    uint32_t *codes;    /* [QUADS, slots] */
    float *step, *rest; /* [slots] */
    int32_t *sums;      /* [groups * GROUP] */
};

/* The sums of `rows` (a constant) rows of x += PASSED quads' products, from quad `first` on. Other records next[i] bytes
 * further are prefetched. */
INLINE void add_quads(const uint8_t *const *down, const struct row_shape *s, const int bits, int64_t first,
                      const struct stepped *of, const int rows, const int hint, const int64_t *next) {
    const int taken = bits == INT4 ? 2 : 1; /* groups of a line */
    int64_t slots = rounded_up(s->groups, SEGMENT);
    for (int i = 0; i < PASSED * QUAD; i++)
        for (int64_t at = 0; at < s->codes; at += 64) PREFETCH(down[i] + at + next[i], hint);
    for (int64_t g = 0, at = s->codes; g < s->groups; g += taken, at += 64) {
        for (int i = 0; i < PASSED * QUAD; i++) PREFETCH(down[i] + at + next[i], hint);
        for (int h = 0; h < SPLIT; h++) {
            words turned[PASSED][QUAD];
            for (int q = 0; q < PASSED; q++) {
                words lines[QUAD];
                for (int i = 0; i < QUAD; i++) lines[i] = loaded_words(down[q * QUAD + i] + at + h * VECTOR_BYTES);
                TRANSPOSE_BYTES(lines, turned[q]);
            }
            for (int r = 0; r < rows; r++) {
                const uint32_t *codes = of[r].codes + first * slots + g;
                int32_t *to = of[r].sums + g * GROUP + h * QUAD * LANES;
                for (int k = 0; k < QUAD; k++, to += LANES) {
                    ints sum, more;
                    memcpy(&sum, to, sizeof sum);
                    if (bits == INT4) memcpy(&more, to + GROUP, sizeof more);
                    for (int q = 0; q < PASSED; q++) {
                        words all = turned[q][k], low = bits == INT4 ? all & 0x0F0F0F0Fu : all;
                        sum = BYTE_DOTS(sum, low, splat_word(codes[q * slots]), bits);
                        if (bits == INT4)
                            more = BYTE_DOTS(more, upper_codes(all), splat_word(codes[q * slots + 1]), UPPER_BITS);
                    }
                    memcpy(to, &sum, sizeof sum);
                    if (bits == INT4) memcpy(to + GROUP, &more, sizeof more);
                }
            }
        }
    }
}

#define ADD_QUADS_INT4(n, hint) add_quads(down, s, INT4, first, of, n, hint, next)
#define ADD_QUADS_INT8(n, hint) add_quads(down, s, INT8, first, of, n, hint, next)
#define QUADS_INT4(hint) UP_TO_GATES(ADD_QUADS_INT4, hint)
#define QUADS_INT8(hint) UP_TO_GATES(ADD_QUADS_INT8, hint)

/* The same for up to GATES rows of x. */
static void add_some_quads(const struct weights *w, const struct row_shape *s, const uint8_t *const *down,
                           int64_t first, const struct stepped *of, int64_t rows, const int64_t *next) {
    if (s->bits == INT4) {
        EACH_HINT(w->hint, QUADS_INT4)
    } else {
        EACH_HINT(w->hint, QUADS_INT8)
    }
}

/* y += steps times (sums - rests); the sums become 0. */
static void finish_stepped(const struct row_shape *s, const struct stepped *of, float *y) {
    for (int64_t g = 0; g < s->groups; g++)
        for (int p = 0; p < PARTS; p++) {
            int32_t *from = of->sums + g * GROUP + p * LANES;
            float *to = y + g * GROUP + p * LANES;
            ints sum;
            memcpy(&sum, from, sizeof sum);
            vector number = __builtin_convertvector(sum, vector) - splat(of->rest[g]);
            number = VFMA(number, splat(of->step[g]), loaded(to)), sum = (ints){0};
            memcpy(to, &number, sizeof number);
            memcpy(from, &sum, sizeof sum);
        }
}

/* The numbers of whole groups from the order of transposed lines. */
static void put_in_order(const float *from, int64_t groups, float *to) {
    for (int64_t g = 0; g < groups; g++, from += GROUP, to += GROUP)
        for (int h = 0; h < SPLIT; h++) {
            vector four[QUAD];
            memcpy(four, from + h * QUAD * LANES, sizeof four);
            PUT_IN_ORDER(four);
            for (int b = 0; b < QUAD; b++) memcpy(to + b * BLOCK + h * LANES, four + b, sizeof *four);
        }
}

/* --- many rows of x: WIDTH outputs of STEPPED channels at a time -------------------------------------------------- */

struct column { /* of STEPPED channels; those that no row keeps are 0 */
    uint8_t lines[QUADS][WIDTH / GROUP][GROUP * QUAD]; /* transposed, codes of one byte */
    float scales[WIDTH / GROUP][STEPPED], zeros[WIDTH / GROUP][STEPPED];
    int64_t quads; /* the first ones, that channels have */
};

/* Groups g and g + 1 of `number` channels whose down rows are rows[i], or NULL. */
static void read_column(const struct row_shape *s, const uint8_t *const *rows, int64_t number, int64_t g,
                        struct column *to) {
    static const uint8_t nothing[64] __attribute__((aligned(64))) = {0};
    const int groups = WIDTH / GROUP;
    memset(to->scales, 0, sizeof to->scales);
    memset(to->zeros, 0, sizeof to->zeros);
    to->quads = (number + QUAD - 1) / QUAD;
    for (int64_t i = 0; i < number; i++)
        for (int half = 0; rows[i] && half < groups && g + half < s->groups; half++) {
            if (s->bits == INT4) {
                to->scales[half][i] = widened(((const uint16_t *)rows[i])[g + half]);
                to->zeros[half][i] = widened(((const uint16_t *)(rows[i] + s->zeros))[g + half]);
            } else {
                to->scales[half][i] = ((const float *)rows[i])[g + half], to->zeros[half][i] = 128.0f;
            }
        }
    for (int64_t q = 0; q < to->quads; q++)
        for (int half = 0; half < (s->bits == INT4 ? 1 : groups); half++)
            for (int h = 0; h < SPLIT; h++) {
                words lines[QUAD], turned[QUAD];
                int64_t at = s->codes + (s->bits == INT4 ? g / 2 : g + half) * 64;
                for (int i = 0; i < QUAD; i++) {
                    const uint8_t *row = q * QUAD + i < number ? rows[q * QUAD + i] : NULL;
                    lines[i] = loaded_words((row && g + half < s->groups ? row + at : nothing) + h * VECTOR_BYTES);
                }
                TRANSPOSE_BYTES(lines, turned);
                for (int k = 0; k < QUAD; k++) {
                    uint8_t *place = to->lines[q][half] + (h * QUAD + k) * VECTOR_BYTES;
                    words low = s->bits == INT4 ? turned[k] & 0x0F0F0F0Fu : turned[k], high = turned[k] >> 4 & 0x0F0F0F0Fu;
                    memcpy(place, &low, sizeof low);
                    if (s->bits == INT4) memcpy(place + GROUP * QUAD, &high, sizeof high);
                }
            }
}

/* Codes [STEPPED] of one row of x in one group, a [STEPPED] with 0 for what is left out: the numbers of
 * quantize_channels. */
INLINE void quantize_column(const float *a, const float *scales, const float *zeros, int8_t *codes, float *step,
                            float *rest) {
    vector strands[STRANDS / LANES];
    int32_t sizes[LANES], most = 0;
    ints size = {0};
    for (int i = 0; i < STEPPED; i += LANES) size = LARGER(magnitudes(loaded(scales + i) * loaded(a + i)), size);
    memcpy(sizes, &size, sizeof sizes);
    for (int l = 0; l < LANES; l++) most = sizes[l] > most ? sizes[l] : most;
    vector largest = (vector)((ints){0} + most), inverse = inverse_step(largest);
    for (int i = 0; i < STRANDS / LANES; i++) strands[i] = (vector){0};
    for (int i = 0; i < STEPPED; i += LANES) {
        vector shifted = VFMA(loaded(scales + i) * loaded(a + i), inverse, splat(ROUNDER));
        vector *strand = strands + i / LANES % (STRANDS / LANES);
        *strand = VFMA(shifted - splat(ROUNDER), loaded(zeros + i), *strand);
        STORE_BYTES(shifted, codes + i);
    }
    float sums[STRANDS], all;
    memcpy(sums, strands, sizeof sums);
    for (int half = STRANDS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    memcpy(&all, &most, sizeof all);
    *step = all / 127.0f, *rest = sums[0];
}

/* y[r] [WIDTH], in the order of transposed lines, += what a column's channels give, for `rows` (a constant) rows; a[r]
 * [STEPPED] is 0 for what is left out. */
INLINE void add_column(const struct column *of, const int bits, const float *const *a, const int rows,
                       float (*y)[WIDTH]) {
    for (int half = 0; half < WIDTH / GROUP; half++) {
        int8_t codes[DOWN_ROWS][STEPPED] __attribute__((aligned(64)));
        float step[DOWN_ROWS], rest[DOWN_ROWS];
        ints sums[DOWN_ROWS][PARTS];
        for (int r = 0; r < rows; r++) {
            quantize_column(a[r], of->scales[half], of->zeros[half], codes[r], step + r, rest + r);
            for (int p = 0; p < PARTS; p++) sums[r][p] = (ints){0};
        }
        for (int64_t q = 0; q < of->quads; q++)
            for (int p = 0; p < PARTS; p++) {
                words line = loaded_words(of->lines[q][half] + p * VECTOR_BYTES);
                for (int r = 0; r < rows; r++) {
                    uint32_t four;
                    memcpy(&four, codes[r] + q * QUAD, sizeof four);
                    sums[r][p] = BYTE_DOTS(sums[r][p], line, splat_word(four), bits);
                }
            }
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < PARTS; p++) {
                float *to = y[r] + half * GROUP + p * LANES;
                vector number = __builtin_convertvector(sums[r][p], vector) - splat(rest[r]);
                number = VFMA(number, splat(step[r]), loaded(to));
                memcpy(to, &number, sizeof number);
            }
    }
}
