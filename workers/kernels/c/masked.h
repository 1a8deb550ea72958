/* Tiles whose gate and down lie by channel (shm/floe.py): u of all channels, a mask for each row, then only the
 * channels that some row keeps (kept_channels.h). Part of body.h. */
#pragma once

#include "kept_channels.h"
#include "masks.h"
#include "ranges.h"

/* Activations as masked tiles take them: `codes` and `factors` for up; for gate [rows, gate_x_bytes]. */
struct masked_x {
    struct activations of;
    const uint8_t *gate;
};

struct masking {
    const struct mask *mask;
    const struct masked_scratch *s;
};

/* The masks of rows [lo, hi). */
static void mask_rows(void *context, int64_t lo, int64_t hi) {
    const struct masking *p = context;
    const struct masked_scratch *s = p->s;
    const struct kept *k = &s->kept;
    int64_t channels = k->channels;
    for (int64_t r = lo; r < hi; r++) {
        const float *u = s->u; /* of one row in order already */
        if (k->count > 1) {
            float *row = k->gates + r * channels;
            for (int64_t c = 0; c < channels; c += BLOCK)
                memcpy(row + c, s->u + c * k->count + r * BLOCK, BLOCK * sizeof *row);
            u = row;
        }
        s->tallies[r] = (struct tally){0};
        k->number[r] = (int32_t)keep(p->mask, channels, u, s->sizes + r * channels, k->which + r * channels,
                                     k->a + r * channels, s->tallies + r);
    }
}

static struct tally masked_channels(struct team *team, const struct mask *mask, const struct masked_scratch *s) {
    const struct kept *k = &s->kept;
    struct masking masking = {mask, s};
    struct tally sum = {.channels = k->channels};
    parallel_for(k->count < ROWS ? NULL : team, mask_rows, &masking, k->count, WAKE_NS);
    for (int64_t r = 0; r < k->count; r++) sum.mass += s->tallies[r].mass, sum.left += s->tallies[r].left;
    if (!team && k->count == 1) { /* nobody reads `any` then: see `kept_channels` */
        sum.kept = k->number[0];
        return sum;
    }
    memset(k->any, 0, (size_t)k->channels);
    for (int64_t r = 0; r < k->count; r++)
        for (int32_t i = 0; i < k->number[r]; i++) k->any[k->which[r * k->channels + i]] = 1;
    for (int64_t c = 0; c < k->channels; c++) sum.kept += k->any[c];
    return sum;
}

static void masked_tiles(struct team *team, const struct weights *w, const uint8_t *head, int64_t head_bytes,
                         const uint8_t *body, int64_t body_bytes, int64_t number, const struct masked_x *x,
                         const int32_t *chosen, int64_t count, const struct mask *mask, float *y, void *memory,
                         struct tally *tallies) {
    struct masked_scratch s = lay_out_masked(w, w->channels, count, memory);
    int64_t channels = w->channels, bytes = tandem_gate_x_bytes(w);
    pack(w, w->inputs, &x->of, chosen, count, s.x);
    for (int64_t r = 0; r < count; r++) s.gate_x[r] = x->gate + chosen[r] * bytes;
    for (int64_t tile = 0; tile < number; tile++, head += head_bytes, body += body_bytes) {
        struct product up = {w, head, w->inputs, channels, s.x, count, s.u, BLOCK, count * BLOCK, 0};
        parallel_for(team, blocks, &up, channels / BLOCK, WAKE_NS);
        tallies[tile] = masked_channels(team, mask, &s);
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
    int64_t padded = rounded_up(w->inputs, w->group), bytes = gate_x_bytes(&shape);
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
    memset(k->any, 0, (size_t)channels);
    for (int64_t r = 0; r < count; r++) {
        s.gate_x[r] = gate_x + chosen[r] * bytes;
        int32_t number = 0, *which = k->which + r * channels;
        for (int64_t c = 0; c < channels; c++) {
            which[number] = (int32_t)c, k->a[r * channels + number] = u[r * channels + c];
            int kept = u[r * channels + c] != 0;
            k->any[c] |= (uint8_t)kept, number += kept;
        }
        k->number[r] = number;
    }
    kept_channels(team, w, records, &s, y, 0);
    return FINE;
}
