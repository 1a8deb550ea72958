/* Which channels of a tile a row keeps (shm/mask.py), by its |u|. Part of body.h. */
#pragma once

#include "vectors.h"

#include <math.h>

enum { SHARE_ROUNDING = 256 }; /* a share's own rounding is less than such a part of a channel */

/* Whether it is a mask at all. */
static int is_mask(const struct mask *m) {
    return m->threshold >= 0 && m->threshold <= 3.4e38f && m->share >= 0 && m->share <= 1;
}

/* Bit patterns of magnitudes order like them, NaN above all. */
static int32_t magnitude(float number) {
    int32_t bits;
    memcpy(&bits, &number, sizeof bits);
    bits &= 0x7FFFFFFF;
    return bits < INT32_MAX ? bits : INT32_MAX - 1;
}

static int64_t at_least(const int32_t *sizes, int64_t channels, int32_t least) {
    int32_t number = 0;
    for (int64_t c = 0; c < channels; c++) number += sizes[c] >= least;
    return number;
}

/* What is kept: sizes above `least`, and the first `ties` of those that equal it. */
struct bound {
    int32_t least;
    int64_t ties;
};

/* The `number` largest: the range in which the smallest of them lies is halved until its count is `number`. */
static struct bound bound_of_largest(const int32_t *sizes, int64_t channels, int64_t number) {
    int32_t low = INT32_MAX, high = 0;
    for (int64_t c = 0; c < channels; c++) {
        low = sizes[c] < low ? sizes[c] : low;
        high = sizes[c] > high ? sizes[c] : high;
    }
    if (number <= 0) return (struct bound){INT32_MAX, 0};
    if (number >= channels) return (struct bound){low, channels};
    int64_t above = 0; /* that reach `high`, after the first step: fewer than `number`; at least as many reach `low` */
    for (high++; high - low > 1;) {
        int32_t middle = low + (high - low) / 2;
        int64_t reach = at_least(sizes, channels, middle);
        if (reach == number) return (struct bound){middle, channels};
        if (reach > number)
            low = middle;
        else
            high = middle, above = reach;
    }
    return (struct bound){low, number - above};
}

/* Sums of magnitudes: of all channels, and in `out` of those below `least`. */
static float sum_of_sizes(const int32_t *sizes, int64_t channels, int32_t least, float *out) {
    vector all = {0}, below = {0};
    for (int64_t c = 0; c < channels; c += LANES) {
        ints some;
        memcpy(&some, sizes + c, sizeof some);
        all += (vector)some;
        below += (vector)(some & (some < least));
    }
    *out = SUM(below);
    return SUM(all);
}

/* Of LANES channels from `first` on those that are chosen by a bit, and their u; up to LANES more numbers may be
 * overwritten. Returns how many. */
INLINE int packed_lanes(uint32_t chosen, int64_t first, const float *u, int32_t *which, float *of_which) {
    int number = __builtin_popcount(chosen);
#ifdef PACKED
    const ints counted = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ints places = PACKED(counted + (int32_t)first, chosen), numbers = PACKED((ints)loaded(u + first), chosen);
    memcpy(which, &places, sizeof places);
    memcpy(of_which, &numbers, sizeof numbers);
#else
    for (int i = 0; chosen; chosen &= chosen - 1, i++) {
        which[i] = (int32_t)first + __builtin_ctz(chosen);
        of_which[i] = u[which[i]];
    }
#endif
    return number;
}

/* The channels that a row keeps, ascending, and their u; returns how many. u [channels], of whole blocks; `sizes`:
 * scratch of as many numbers. */
static int64_t keep(const struct mask *mask, int64_t channels, const float *u, int32_t *sizes, int32_t *kept,
                    float *of_kept, struct tally *tally) {
    for (int64_t c = 0; c < channels; c++) sizes[c] = magnitude(u[c]);
    struct bound bound = {magnitude(mask->threshold), channels};
    if (mask->share < 1) {
        double number = (double)mask->share * (double)channels - 1.0 / SHARE_ROUNDING;
        int64_t whole = (int64_t)number;
        bound = bound_of_largest(sizes, channels, whole + ((double)whole < number));
    }
    int64_t number = 0, ties = bound.ties;
    for (int64_t c = 0; c < channels; c += LANES) {
        ints some;
        memcpy(&some, sizes + c, sizeof some);
        uint32_t chosen = BITS_OF(some > bound.least), equal = BITS_OF(some == bound.least);
        for (; equal; equal &= equal - 1, ties--)
            if (ties > 0) chosen |= equal & -equal;
        number += packed_lanes(chosen, c, u, kept + number, of_kept + number);
    }
    float left, mass = sum_of_sizes(sizes, channels, bound.least, &left), tied;
    memcpy(&tied, &bound.least, sizeof tied);
    if (ties < 0) left += (float)-ties * tied;
    if (mass < INFINITY) tally->mass += mass, tally->left += left;
    return number;
}
