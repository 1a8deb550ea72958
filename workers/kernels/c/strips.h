/* Products by matrix units, in variants that have them. Part of body.h, which defines what is used here. */
#pragma once

#ifdef MATRIX_UNITS
static void strips(const struct product *p, int64_t lo, int64_t hi) {
    int64_t size = block_bytes(p->w, p->inputs), group = p->w->group;
    int64_t groups = rounded_up(p->inputs, group) / group;
    float y[STRIP * BLOCK] __attribute__((aligned(64)));
    units_begin(p->count % TALL_ROWS);
    for (int64_t first = 0; first < p->count; first += STRIP) {
        int64_t rows = least(STRIP, p->count - first);
        for (int64_t b = lo; b < hi; b++) {
            strip_of(p->w, p->matrix + b * size, groups, p->x.codes + first * groups * group,
                     p->x.factors + 2 * first * groups, rows, y);
            take_outputs(p, b, first, rows, y);
        }
    }
    units_end();
}
#else
static void strips(const struct product *p, int64_t lo, int64_t hi) { (void)p, (void)lo, (void)hi; }
#endif
