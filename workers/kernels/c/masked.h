/* Tiles whose gate and down lie by channel (shm/floe.py): u of all channels, a mask for each row by its |u|
 * (shm/mask.py), then only the channels that some row keeps (kept_channels.h). Part of body.h. */
#pragma once

#include "kept_channels.h"
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

/* Activations as masked tiles take them: `codes` and `factors` for up; for gate [rows, gate_x_bytes]. */
struct masked_x {
    struct activations of;
    const uint8_t *gate;
};

struct masking {
    const struct mask *mask;
    const struct masked_scratch *s;
    const float *biases; /* of u [channels], or NULL */
};

/* The masks of rows [lo, hi). */
static void mask_rows(void *context, int64_t lo, int64_t hi) {
    const struct masking *p = context;
    const struct masked_scratch *s = p->s;
    const struct kept *k = &s->kept;
    int64_t channels = k->channels;
    for (int64_t r = lo; r < hi; r++) {
        float *u = s->u; /* of one row in order already */
        if (k->count > 1) {
            u = s->rows + r * channels;
            for (int64_t c = 0; c < channels; c += BLOCK)
                memcpy(u + c, s->u + c * k->count + r * BLOCK, BLOCK * sizeof *u);
        }
        for (int64_t c = 0; p->biases && c < channels; c++) u[c] += p->biases[c];
        s->tallies[r] = (struct tally){0};
        k->number[r] = (int32_t)keep(p->mask, channels, u, s->sizes + r * channels, k->which + r * channels,
                                     k->a + r * channels, s->tallies + r);
    }
}

static struct tally masked_channels(struct team *team, const struct mask *mask, const struct masked_scratch *s,
                                    const float *biases) {
    const struct kept *k = &s->kept;
    struct masking masking = {mask, s, biases};
    struct tally sum = {.channels = k->channels};
    parallel_for(k->count < ROWS ? NULL : team, mask_rows, &masking, k->count, WAKE_NS);
    for (int64_t r = 0; r < k->count; r++) sum.mass += s->tallies[r].mass, sum.left += s->tallies[r].left;
    if (k->count == 1) {
        sum.kept = k->number[0];
        return sum;
    }
    memset(k->any, 0, (size_t)k->channels);
    for (int64_t r = 0; r < k->count; r++)
        for (int32_t i = 0; i < k->number[r]; i++) k->any[k->which[r * k->channels + i]] = 1;
    for (int64_t c = 0; c < k->channels; c++) sum.kept += k->any[c];
    return sum;
}

/* `biases`: of up, of these tiles' channels; NULL: none. */
static void masked_tiles(struct team *team, const struct weights *w, const uint8_t *head, int64_t head_bytes,
                         const float *biases, const uint8_t *body, int64_t body_bytes, int64_t number,
                         const struct masked_x *x,
                         const int32_t *chosen, int64_t count, const struct mask *mask, float *y, void *memory,
                         struct tally *tallies) {
    struct masked_scratch s = lay_out_masked(w, w->channels, count, memory);
    int64_t channels = w->channels, bytes = tandem_gate_x_bytes(w);
    pack(w, w->inputs, &x->of, chosen, count, s.x);
    for (int64_t r = 0; r < count; r++) s.gate_x[r] = x->gate + chosen[r] * bytes;
    for (int64_t tile = 0; tile < number; tile++, head += head_bytes, body += body_bytes) {
        struct product up = {.w = w, .matrix = head, .inputs = w->inputs, .outputs = channels, .x = s.x, .count = count,
                             .y = s.u, .row_stride = BLOCK, .block_stride = count * BLOCK};
        parallel_for(team, blocks, &up, channels / BLOCK, WAKE_NS);
        tallies[tile] = masked_channels(team, mask, &s, biases ? biases + tile * channels : NULL);
        kept_channels(team, w, body, &s, y, tile > 0);
    }
}

/* --- channels that are gathered --------------------------------------------------------------------------------- */

int64_t tandem_gate_x_bytes(const struct weights *w) {
    struct row_shape shape = row_shape_of(w);
    return gate_x_bytes(&shape);
}

void tandem_arrange_gate_x(const struct weights *w, const float *x, const struct activations *of, int64_t rows,
                           uint8_t *to) {
    struct row_shape shape = row_shape_of(w);
    int64_t padded = padded_inputs(w, w->inputs), bytes = gate_x_bytes(&shape);
    for (int64_t r = 0; r < rows; r++)
        arrange_gate_x(&shape, x + r * w->inputs, (const int8_t *)of->codes + r * padded,
                       of->factors + 2 * r * (padded / w->group), to + r * bytes);
}

int64_t tandem_channels_scratch(const struct weights *w, int64_t channels, int64_t rows) {
    return lay_out_masked(w, channels, rows, NULL).bytes;
}

int tandem_channels(struct team *team, const struct weights *w, const uint8_t *records, int64_t channels,
                    const uint8_t *gate_x, int64_t rows, const int32_t *chosen, int64_t count, const float *u,
                    float *y, void *memory) {
    if (!rows_within(chosen, count, rows)) return BAD_ROWS;
    struct masked_scratch s = lay_out_masked(w, channels, count, memory);
    struct kept *k = &s.kept;
    int64_t bytes = tandem_gate_x_bytes(w);
    for (int64_t r = 0; r < count; r++) {
        s.gate_x[r] = gate_x + chosen[r] * bytes;
        int32_t number = 0, *which = k->which + r * channels;
        for (int64_t c = 0; c < channels; c++) {
            which[number] = (int32_t)c, k->a[r * channels + number] = u[r * channels + c];
            number += u[r * channels + c] != 0;
        }
        k->number[r] = number;
    }
    kept_channels(team, w, records, &s, y, 0);
    return FINE;
}
