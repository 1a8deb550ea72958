/* bf16 tiles, row-major: gate rows [T, H], up rows [T, H], down's columns as rows [T, H]. Written so that compilers
 * turn the loops over LANES into vectors; FMA(a, b, c) is a * b + c. Part of body.h. */

enum { LANES = 32 };    /* sums that are kept apart while a product of two long rows is formed */
enum { TOGETHER = 8 };  /* channels whose rows of down are added in one pass */
enum { FEW = 4 };       /* rows that one reading of the weights is applied to, at most */

static float widened(uint16_t number) {
    uint32_t bits = (uint32_t)number << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To nearest even; NaN stays NaN. The rounded numbers stay in float32. */
static void round_to_bf16(const float *x, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
        bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : rounded;
        memcpy(out + i, &bits, 4);
    }
}

struct plain {
    const struct weights *w;
    const uint16_t *tile;
    const float *x; /* [count, H] */
    int64_t count;
    float *gate, *up; /* [count, T] */
    float *y;         /* [count, H] of this tile alone */
};

/* y[r] = row . x[r] for `rows` (a constant) rows of x. */
INLINE void products(const uint16_t *row, int64_t hidden, const float *x, const int rows, float *y, int64_t stride) {
    float sums[FEW][LANES];
    for (int r = 0; r < rows; r++)
        for (int l = 0; l < LANES; l++) sums[r][l] = 0.0f;
    int64_t whole = hidden / LANES * LANES;
    for (int64_t h = 0; h < whole; h += LANES) {
        float wide[LANES];
        __builtin_prefetch((const char *)(row + h) + AHEAD, 0, 0);
        for (int l = 0; l < LANES; l++) wide[l] = widened(row[h + l]);
        for (int r = 0; r < rows; r++)
            for (int l = 0; l < LANES; l++) sums[r][l] = FMA(wide[l], x[r * hidden + h + l], sums[r][l]);
    }
    for (int r = 0; r < rows; r++) {
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) sums[r][l] += sums[r][l + half];
        float sum = sums[r][0];
        for (int64_t h = whole; h < hidden; h++) sum = FMA(widened(row[h]), x[r * hidden + h], sum);
        y[r * stride] = sum;
    }
}

static void gate_and_up(void *context, int64_t lo, int64_t hi) {
    const struct plain *p = context;
    int64_t hidden = p->w->inputs, channels = p->w->channels;
    for (int half = 0; half < 2; half++) {
        float *out = half ? p->up : p->gate;
        for (int64_t t = lo; t < hi; t++) {
            const uint16_t *row = p->tile + (half * channels + t) * hidden;
            for (int64_t first = 0; first < p->count; first += FEW) {
                const float *x = p->x + first * hidden;
                float *y = out + first * channels + t;
                switch (least(FEW, p->count - first)) {
                case 1: products(row, hidden, x, 1, y, channels); break;
                case 2: products(row, hidden, x, 2, y, channels); break;
                case 3: products(row, hidden, x, 3, y, channels); break;
                default: products(row, hidden, x, 4, y, channels);
                }
            }
        }
    }
}

/* y[r][h] += sum of a[r][t] * down[t][h] for `number` (a constant) channels from t, h in [lo, hi). */
INLINE void columns(const struct plain *p, int64_t t, const int number, int64_t lo, int64_t hi) {
    int64_t hidden = p->w->inputs, channels = p->w->channels;
    const uint16_t *down = p->tile + (2 * channels + t) * hidden;
    for (int64_t h = lo; h < hi; h += LANES) {
        int n = (int)least(LANES, hi - h);
        float wide[TOGETHER][LANES];
        for (int i = 0; i < number; i++) {
            const uint16_t *from = down + i * hidden + h;
            __builtin_prefetch((const char *)(from + TOGETHER * hidden), 0, 0);
            if (n == LANES)
                for (int l = 0; l < LANES; l++) wide[i][l] = widened(from[l]);
            else
                for (int l = 0; l < LANES; l++) wide[i][l] = l < n ? widened(from[l]) : 0.0f;
        }
        for (int64_t r = 0; r < p->count; r++) {
            const float *a = p->gate + r * channels + t;
            float *y = p->y + r * hidden + h, sums[LANES];
            for (int l = 0; l < LANES; l++) sums[l] = t == 0 || l >= n ? 0.0f : y[l];
            for (int i = 0; i < number; i++)
                for (int l = 0; l < LANES; l++) sums[l] = FMA(wide[i][l], a[i], sums[l]);
            for (int l = 0; l < n; l++) y[l] = sums[l];
        }
    }
}

static void down(void *context, int64_t lo, int64_t hi) {
    const struct plain *p = context;
    int64_t channels = p->w->channels, t = 0;
    lo *= LANES, hi = least(hi * LANES, p->w->inputs);
    for (; t + TOGETHER <= channels; t += TOGETHER) columns(p, t, TOGETHER, lo, hi);
    for (; t < channels; t++) columns(p, t, 1, lo, hi);
}

static void activate_plain(void *context, int64_t lo, int64_t hi) {
    const struct plain *p = context;
    int64_t channels = p->w->channels;
    gated(p->gate + lo * channels, p->up + lo * channels, (hi - lo) * channels);
    round_to_bf16(p->gate + lo * channels, (hi - lo) * channels, p->gate + lo * channels);
}

/* `part` has room for y [count, H]; x are the chosen rows [count, H]. */
static void plain_tiles(struct team *team, const struct weights *w, const uint16_t *tiles, int64_t number,
                        const float *x, int64_t count, float *gate, float *up, float *part, float *y,
                        volatile uint64_t *ticks) {
    for (int64_t tile = 0; tile < number; tile++, tiles += 3 * w->channels * w->inputs) {
        struct plain plain = {w, tiles, x, count, gate, up, tile ? part : y};
        share(team, gate_and_up, &plain, w->channels, GLANCES);
        share(count < ROWS ? NULL : team, activate_plain, &plain, count, GLANCES);
        share(team, down, &plain, (w->inputs + LANES - 1) / LANES, tile + 1 < number ? GLANCES : 0);
        if (tile)
            for (int64_t i = 0; i < count * w->inputs; i++) y[i] += part[i];
        if (ticks) (*ticks)++;
    }
}
