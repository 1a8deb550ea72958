/* Quantizes float32 matrices into the records that shm/blocks.py and shm/floe.py draw. A plain C library, loaded by
 * shm/quantize.py with ctypes.
 *
 * A group of weights w is stored as whole numbers q from 0 to a largest code (15 for 4 bits, 3 for 2) that stand for
 * r = scale * (q - zero). Rounding to nearest takes scale and zero from the group's range, so that one outlier makes all
 * steps wide. Badri and Shaji (HQQ, 2023) instead minimise sum |w - r|^p with p < 1, which lets few weights be far off so
 * that most are near, and split it with an auxiliary error e:
 *
 *     e     <- shrink(w - r) = sign(w - r) * max(0, |w - r| - |w - r|^(p-1) / beta)
 *     zero  <- the exact minimiser of |w - e - r|^2 for the codes q
 *     beta  <- kappa * beta
 *
 * for at most `steps` times, until the group's error no longer falls. Here the second step finds the scale too, by least
 * squares of w - e over q, which is no dearer. Both are rounded to bfloat16, as they are stored, before the codes are
 * made, and errors are those of the numbers that would be stored; the first candidate is rounding to nearest, so the
 * result is never worse than that. Errors are in units of the group's first scale: the thresholds of a group do not
 * depend on how large its weights are.
 *
 * With 2 bits (SQUARED) the error is the squared one, p = 2, and so e = 0: of four levels each is used by many weights,
 * and a norm that forgives large errors costs a model more than it gains. Alternating then ends in one of several minima:
 * it starts twice, the second time with a narrower grid around the mean, and the better end counts.
 *
 * The 16 outputs of a block are computed side by side, an output to a lane, so that every sum runs within a lane, input
 * after input. Together with -ffp-contract=off that makes the bytes the same on every processor, whatever its vectors'
 * width. Loops over lanes are what the compiler vectorises; where it can, it makes a variant for each kind of processor
 * and the right one is chosen when the library is loaded. */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define HEAD_BYTES 64
#define MAX_GROUP 256
#define ROW_GROUP 64

#define NORM 0.7f        /* p */
#define BETA 10.0f       /* of the first step */
#define KAPPA 1.01f      /* its growth */
#define SQUARED 3.0f     /* the largest code with which squared errors are minimised */
#define NARROWER 0.7f    /* the second start's scale, of the first one's */
#define SCALE_DRIFT 4.0f /* the most that the scale moves away from its start, either way */

#define LARGEST 0x7b800000u         /* 2^120: a weight beyond, infinite or not a number is refused */
#define SMALLEST 7.523163845e-37f   /* 2^-120: a group with a scale below is all zeros */
#define LARGEST_HALF 0x47800000u    /* 2^16 and 2^-22, so that scales of binary16 may drift by SCALE_DRIFT */
#define SMALLEST_HALF 2.384185791e-7f
#define ROUNDER 12582912.0f         /* 1.5 * 2^23: adding and subtracting it rounds to the nearest integer */

#if defined(__x86_64__) && defined(__GLIBC__) && (!defined(__clang__) || __clang_major__ >= 14)
#define EVERY_PROCESSOR __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define EVERY_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *w; /* [n, k] */
    int64_t n, k, row_stride, column_stride; /* strides in numbers */
} Matrix;

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounded to bfloat16, to nearest even; x is finite. */
INLINE float bf16_of(float x) {
    uint32_t bits = bits_of(x);
    return float_of((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

/* Rounded to binary16, to nearest even; 0 <= x. Below its normal numbers, to a multiple of 2^-24. */
INLINE float f16_of(float x) {
    uint32_t bits = bits_of(x);
    float normal = float_of((bits + 0xfffu + ((bits >> 13) & 1u)) & 0xffffe000u), small = (x + 0.5f) - 0.5f;
    return x < 6.103515625e-5f ? small : normal;
}

/* A scale as it is stored: in binary16 or bfloat16. `half`, here and below, is a constant. */
INLINE float scale_of(const int half, float x) { return half ? f16_of(x) : bf16_of(x); }

/* The pattern of a number that `scale_of` gave, below 65536 in binary16. */
INLINE uint16_t scale_bits(const int half, float x) {
    uint32_t normal = (bits_of(x) >> 13) - (112u << 10), small = (uint32_t)(int32_t)(x * 16777216.0f);
    if (!half) return (uint16_t)(bits_of(x) >> 16);
    return (uint16_t)(x < 6.103515625e-5f ? small : normal);
}

INLINE float clamped(float x, float lo, float hi) {
    x = x > lo ? x : lo;
    return x < hi ? x : hi;
}

/* a^(p-1) of a >= 0, to 3e-5 of it: polynomials for the logarithm of 1 + m and for 2^f. Of 0 it is 2^38. */
INLINE float power(float a) {
    uint32_t bits = bits_of(a);
    float exponent = (float)((int32_t)(bits >> 23) - 127);
    float m = float_of((bits & 0x7fffffu) | 0x3f800000u) - 1.0f; /* 0..1 */
    float log = 1.00189034e-4f + m * (1.43730211f + m * (-0.67293417f + m * (0.3154676f + m * -0.08001088f)));
    float y = (NORM - 1.0f) * (exponent + log);
    float whole = (y + ROUNDER) - ROUNDER;
    float f = y - whole; /* -0.5..0.5 */
    float part = 1.0000001f + f * (0.693121f + f * (0.24022107f + f * (0.055922035f + f * 0.009676037f)));
    return float_of(bits_of(part) + ((uint32_t)(int32_t)whole << 23));
}

/* x[j][lane] of `count` inputs from `first` on, of the 16 outputs from `output` on; outputs beyond n are 0.
 * Returns the bits of the largest magnitude. */
static uint32_t gather(const Matrix *m, int64_t output, int64_t first, int count, float x[][LANES]) {
    const float *from = m->w + output * m->row_stride + first * m->column_stride;
    int lanes = (int)(m->n - output < LANES ? m->n - output : LANES);
    uint32_t most = 0;
    if (lanes < LANES) memset(x, 0, (size_t)count * sizeof *x);
    if (m->row_stride == 1) /* down, transposed: along the lanes, so that a line of memory is read once */
        for (int j = 0; j < count; j++)
            memcpy(x[j], from + j * m->column_stride, (size_t)lanes * sizeof(float));
    else
        for (int lane = 0; lane < lanes; lane++)
            for (int j = 0; j < count; j++) x[j][lane] = from[lane * m->row_stride + j * m->column_stride];
    for (int j = 0; j < count; j++)
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t magnitude = bits_of(x[j][lane]) & 0x7fffffffu;
            most = magnitude > most ? magnitude : most;
        }
    return most;
}

/* One group of 16 outputs: the patterns of scales and, in bfloat16, zeros, and the codes q[j][lane], 0..largest.
 * Weights x are overwritten. `squared`, a constant, so that the loop over
 * lanes has no branch and becomes vectors: whether squared errors are minimised. */
INLINE void coded_group_by(const int squared, const int half, float x[][LANES], int count, float largest,
                           int steps, uint16_t *scales, uint16_t *zeros, uint8_t q[][LANES]) {
    float start[LANES], grid[LANES], scale[LANES], inverse[LANES], zero[LANES];
    float best[LANES], best_scale[LANES], best_zero[LANES];
    float low[LANES], high[LANES];
    int32_t live[LANES];
    float total = (float)count, sum[LANES] = {0};

    for (int l = 0; l < LANES; l++) low[l] = high[l] = 0.0f;
    for (int j = 0; j < count; j++)
        for (int l = 0; l < LANES; l++) {
            low[l] = x[j][l] < low[l] ? x[j][l] : low[l];
            high[l] = x[j][l] > high[l] ? x[j][l] : high[l];
        }
    for (int l = 0; l < LANES; l++) {
        float step = (high[l] - low[l]) / largest;
        live[l] = step >= (half ? SMALLEST_HALF : SMALLEST);
        start[l] = live[l] ? step : 0.0f;
        grid[l] = live[l] ? step : 1.0f;
        inverse[l] = live[l] ? 1.0f / grid[l] : 0.0f;
    }
    for (int j = 0; j < count; j++)
        for (int l = 0; l < LANES; l++) {
            x[j][l] *= inverse[l];
            sum[l] += x[j][l];
        }
    for (int l = 0; l < LANES; l++) {
        scale[l] = live[l] ? scale_of(half, start[l]) / grid[l] : 1.0f;
        /* 0 - x, not -x: there is one 0 */
        zero[l] = bf16_of((0.0f - low[l] * inverse[l]) / scale[l]);
        best[l] = 3e38f;
        best_scale[l] = scale[l];
        best_zero[l] = zero[l];
    }

    for (int again = 0; again <= squared; again++) {
        float least[LANES], beta = BETA;
        for (int l = 0; again && l < LANES; l++) {
            live[l] = start[l] > 0.0f;
            scale[l] = live[l] ? scale_of(half, NARROWER * start[l]) / grid[l] : 1.0f;
            zero[l] = bf16_of(largest / 2.0f - sum[l] / total / scale[l]);
        }
        for (int l = 0; l < LANES; l++) least[l] = 3e38f;
        for (int step = 0; step <= steps; step++) {
            float error[LANES] = {0}, sum_q[LANES] = {0}, sum_qq[LANES] = {0}, sum_t[LANES] = {0},
                  sum_qt[LANES] = {0};
            float threshold = 1.0f / beta;
            int32_t any = 0;
            for (int l = 0; l < LANES; l++) inverse[l] = 1.0f / scale[l];
            for (int j = 0; j < count; j++)
                for (int l = 0; l < LANES; l++) {
                    float code = clamped(x[j][l] * inverse[l] + zero[l], 0.0f, largest);
                    code = (code + ROUNDER) - ROUNDER;
                    float rest = x[j][l] - (code - zero[l]) * scale[l];
                    float target = x[j][l];
                    if (squared) {
                        error[l] += rest * rest;
                    } else {
                        float size = float_of(bits_of(rest) & 0x7fffffffu);
                        float slope = power(size);
                        float kept = size - slope * threshold;
                        kept = kept > 0.0f ? kept : 0.0f;
                        target -= float_of(bits_of(kept) | (bits_of(rest) & 0x80000000u));
                        error[l] += size * slope;
                    }
                    sum_q[l] += code;
                    sum_qq[l] += code * code;
                    sum_t[l] += target;
                    sum_qt[l] += code * target;
                }
            for (int l = 0; l < LANES; l++) {
                int32_t less = live[l] & (error[l] < least[l]), better = less & (error[l] < best[l]);
                least[l] = less ? error[l] : least[l];
                best[l] = better ? error[l] : best[l];
                best_scale[l] = better ? scale[l] : best_scale[l];
                best_zero[l] = better ? zero[l] : best_zero[l];
                live[l] = less;
                any |= less;
            }
            if (!any) break;
            for (int l = 0; l < LANES; l++) {
                float mean_q = sum_q[l] / total, mean_t = sum_t[l] / total;
                float spread = sum_qq[l] - sum_q[l] * mean_q;
                float slope = (sum_qt[l] - sum_q[l] * mean_t) / (spread > 0.5f ? spread : 0.5f);
                int32_t usable = (slope >= 1.0f / SCALE_DRIFT) & (slope <= SCALE_DRIFT) & (start[l] > 0.0f);
                scale[l] = usable ? scale_of(half, slope * start[l]) / grid[l] : scale[l];
                zero[l] = bf16_of(mean_q - mean_t / scale[l]);
            }
            beta *= KAPPA;
        }
    }

    for (int l = 0; l < LANES; l++) {
        inverse[l] = 1.0f / best_scale[l];
        scales[l] = scale_bits(half, scale_of(half, best_scale[l] * start[l]));
        zeros[l] = (uint16_t)(bits_of(best_zero[l]) >> 16);
    }
    for (int j = 0; j < count; j++)
        for (int l = 0; l < LANES; l++) {
            float code = clamped(x[j][l] * inverse[l] + best_zero[l], 0.0f, largest);
            q[j][l] = (uint8_t)(int32_t)((code + ROUNDER) - ROUNDER);
        }
}

EVERY_PROCESSOR static void coded_group(float x[][LANES], int count, float largest, int steps,
                                        uint16_t *scales, uint16_t *zeros, uint8_t q[][LANES]) {
    coded_group_by(0, 0, x, count, largest, steps, scales, zeros, q);
}

EVERY_PROCESSOR static void squared_group(float x[][LANES], int count, float largest, int steps,
                                          uint16_t *scales, uint16_t *zeros, uint8_t q[][LANES]) {
    coded_group_by(1, 0, x, count, largest, steps, scales, zeros, q);
}

EVERY_PROCESSOR static void half_group(float x[][LANES], int count, float largest, int steps,
                                       uint16_t *scales, uint16_t *zeros, uint8_t q[][LANES]) {
    coded_group_by(0, 1, x, count, largest, steps, scales, zeros, q);
}

/* Codes q[j][lane] of `group` inputs as a record holds them: 8 / bits codes in a byte, 4 inputs apart. */
INLINE void pack(uint8_t q[][LANES], int group, int bits, uint8_t *out) {
    for (int j = 0; j < group; j += 32 / bits, out += 64)
        for (int l = 0; l < LANES; l++)
            for (int b = 0; b < 4; b++) {
                int byte = 0;
                for (int field = 0; field < 8 / bits; field++) byte |= q[j + 4 * field + b][l] << bits * field;
                out[4 * l + b] = (uint8_t)byte;
            }
}

EVERY_PROCESSOR static void int8_group(float x[][LANES], int count, float *scales, uint8_t u[][LANES]) {
    float most[LANES] = {0}, inverse[LANES];
    for (int j = 0; j < count; j++)
        for (int l = 0; l < LANES; l++) {
            float size = float_of(bits_of(x[j][l]) & 0x7fffffffu);
            most[l] = size > most[l] ? size : most[l];
        }
    for (int l = 0; l < LANES; l++) {
        float step = most[l] / 127.0f;
        scales[l] = step >= SMALLEST ? step : 0.0f;
        inverse[l] = step >= SMALLEST ? 1.0f / step : 0.0f;
    }
    for (int j = 0; j < count; j++)
        for (int l = 0; l < LANES; l++) {
            float code = clamped(x[j][l] * inverse[l], -127.0f, 127.0f);
            u[j][l] = (uint8_t)((int32_t)((code + ROUNDER) - ROUNDER) + 128);
        }
}

/* One group of 16 outputs: the head of its record, and the codes q[j][lane] of MAX_GROUP inputs, those past
 * `count` as padding. */
static void quantize_group(float x[][LANES], int count, int bits, int half, int steps, uint8_t *head,
                           uint8_t q[][LANES]) {
    uint16_t pairs[2 * LANES]; /* scales, zeros */
    float scales[LANES];
    memset(q, bits == 8 ? 128 : 0, MAX_GROUP * sizeof *q);
    if (bits == 8) {
        int8_group(x, count, scales, q);
        memcpy(head, scales, sizeof scales);
    } else {
        float largest = (float)((1 << bits) - 1);
        if (half)
            half_group(x, count, largest, steps, pairs, pairs + LANES, q);
        else if (largest == SQUARED && steps > 0)
            squared_group(x, count, largest, steps, pairs, pairs + LANES, q);
        else
            coded_group(x, count, largest, steps, pairs, pairs + LANES, q);
        memcpy(head, pairs, sizeof pairs);
    }
}

/* Codes of group g of one row, as a row's lines hold them (shm/floe.py): number 16*b + i in byte 4*i + b. */
static void pack_row(uint8_t q[][LANES], int lane, int64_t g, int bits, uint8_t *lines) {
    uint8_t *line = lines + 64 * (bits == 8 ? g : g / 2);
    int shift = bits == 4 && g % 2 ? 4 : 0;
    for (int i = 0; i < LANES; i++)
        for (int b = 0; b < 4; b++) {
            uint8_t code = (uint8_t)(q[16 * b + i][lane] << shift);
            line[4 * i + b] = shift ? line[4 * i + b] | code : code;
        }
}

int tandem_quantize_version(void) { return 4; }

/* w: float32 [n, k], strides in numbers. bits: 2, 4 or 8. steps: of the optimisation, not of 8 bits. Both
 * return 0, or 1 where a weight is not a number below 2^120: then out is unfinished. */

/* out: ceil(n / 16) * ceil(k / group) records. group: a multiple of 32 / bits, at most MAX_GROUP. half: of 4 bits,
 * scales are in binary16, and weights below 2^16. */
int tandem_encode_blocks(const float *w, int64_t n, int64_t k, int64_t row_stride, int64_t column_stride,
                         int64_t bits, int64_t group, int64_t half, int64_t steps, uint8_t *out) {
    Matrix matrix = {w, n, k, row_stride, column_stride};
    float x[MAX_GROUP][LANES];
    uint8_t q[MAX_GROUP][LANES];
    for (int64_t output = 0; output < n; output += LANES)
        for (int64_t first = 0; first < k; first += group) {
            int count = (int)(k - first < group ? k - first : group);
            if (gather(&matrix, output, first, count, x) >= (half ? LARGEST_HALF : LARGEST)) return 1;
            quantize_group(x, count, (int)bits, (int)half, (int)steps, out, q);
            if (bits == 2) pack(q, (int)group, 2, out + HEAD_BYTES); /* constants: loops without tests */
            if (bits == 4) pack(q, (int)group, 4, out + HEAD_BYTES);
            if (bits == 8) pack(q, (int)group, 8, out + HEAD_BYTES);
            out += HEAD_BYTES + LANES * group * bits / 8;
        }
    return 0;
}

/* out: n zeroed records of rows, `record_stride` bytes apart; `lines`: the first byte of a record's lines.
 * bits: 4 or 8. Zeros of 4 bits begin half way to the lines. */
int tandem_encode_rows(const float *w, int64_t n, int64_t k, int64_t row_stride, int64_t column_stride,
                       int64_t bits, int64_t steps, int64_t record_stride, int64_t lines, uint8_t *out) {
    Matrix matrix = {w, n, k, row_stride, column_stride};
    float x[MAX_GROUP][LANES];
    uint8_t q[MAX_GROUP][LANES], head[HEAD_BYTES];
    int64_t width = bits == 8 ? 4 : 2; /* bytes of a scale */
    for (int64_t output = 0; output < n; output += LANES)
        for (int64_t g = 0; g * ROW_GROUP < k; g++) {
            int64_t first = g * ROW_GROUP;
            int count = (int)(k - first < ROW_GROUP ? k - first : ROW_GROUP);
            if (gather(&matrix, output, first, count, x) >= LARGEST) return 1;
            quantize_group(x, count, (int)bits, 0, (int)steps, head, q);
            for (int lane = 0; lane < LANES && output + lane < n; lane++) {
                uint8_t *record = out + (output + lane) * record_stride;
                memcpy(record + width * g, head + width * lane, (size_t)width);
                if (bits == 4) memcpy(record + lines / 2 + 2 * g, head + 2 * (LANES + lane), 2);
                pack_row(q, lane, g, (int)bits, record + lines);
            }
        }
    return 0;
}
