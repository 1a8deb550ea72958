/* Records of the integer formats, as shm/blocks.py draws them: a head, and the lines of one group's codes or of two
 * groups'. Their sizes are constants where `bits` and `scales` are. Part of body.h, after a variant has defined INLINE. */
#pragma once

#include "kernels.h"

enum { E2M1_ZERO = 12 }; /* the number that stands for 0 */

/* What stands for each E2M1 code. */
#define E2M1_NUMBERS 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

INLINE int is_e2m1(const int64_t scales) { return scales >= SCALES_E8M0; }

/* Groups of a record, and bytes of its head. */
INLINE int groups_together(const int64_t scales) { return is_e2m1(scales) ? 2 : 1; }
INLINE int record_head(const int64_t scales) { return scales == SCALES_OWN || scales == SCALES_F16_ZEROS ? 64 : 32; }

/* The zero of a format whose records have none. */
INLINE float constant_zero(const int bits, const int scales) {
    return is_e2m1(scales) ? E2M1_ZERO : bits == INT4 ? 8.0f : 128.0f;
}

/* An E4M3 number as float16 has the same bits but for 256 in the exponent, denormal ones too: this is left out, as is the
 * half of twice the values of E2M1. (NaN, which no file should have, counts as 480.) */
INLINE float unit_of(const int64_t scales) { return scales == SCALES_E4M3 ? 128.0f : scales == SCALES_E8M0 ? 0.5f : 1.0f; }

/* Groups of `inputs`, in whole records, and their inputs. */
static int64_t groups_of(const struct weights *w, int64_t inputs) {
    int64_t together = groups_together(w->scales), record = w->group * together;
    return (inputs + record - 1) / record * together;
}
static int64_t padded_inputs(const struct weights *w, int64_t inputs) { return groups_of(w, inputs) * w->group; }

/* Bytes of the records of BLOCK outputs. */
static int64_t block_bytes(const struct weights *w, int64_t inputs) {
    int64_t groups = groups_of(w, inputs);
    return groups / groups_together(w->scales) * record_head(w->scales) + groups * BLOCK * w->group * w->bits / 8;
}
