/* The kernels of all variants. Each variant includes this file after it has defined
 *
 *     block_of(block, groups, group, codes, factors, bits, rows, hint, ahead, y)
 *
 * which computes one block of 16 outputs of INT4 or INT8 for `rows` (1 to ROWS) rows into y [rows, 16]; `bits`, `rows`
 * and `hint` are constants. codes and factors are packed: for each group the rows' codes, one row after the other, and
 * the rows' factors.
 *
 * A variant with matrix units defines MATRIX_UNITS and
 *
 *     units_begin(rest), units_end()      before and after calls on one thread; `rest`: rows beyond whole chunks
 *     strip_of(w, block, groups, codes, factors, count, y)
 *
 * which computes the same of `count` rows, at most STRIP, packed in chunks of TALL_ROWS, into y [count, 16].
 */
#include "activations.h"
#include "attention.h"
#include "bandwidth.h"
#include "bf16_tiles.h"
#include "prefetch.h"
#include "spans.h"
#include "team.h"
#include "vectors.h"
#include "work.h"

#include <string.h>

int tandem_kernels_version(void) { return 7; }

enum { MOST_GROUP = 128 }; /* inputs that share a scale */
enum { NEARBY = 1 << 19 }; /* bytes of outputs that a core's own cache holds, beside activations and weights */

/* Rows from which a variant's matrix units compute a product; has no effect on one that has none. */
static int64_t matrix_rows = MATRIX_ROWS;

void tandem_set_matrix_rows(int64_t rows) { matrix_rows = rows; }

/* Rows of a chunk of packed activations. */
static int64_t chunk_rows(int64_t count) {
#ifdef MATRIX_UNITS
    if (count >= matrix_rows) return TALL_ROWS;
#endif
    return count > 0 ? ROWS : 1;
}

static int64_t block_bytes(const struct weights *w, int64_t inputs) {
    int64_t groups = (inputs + w->group - 1) / w->group;
    return groups * (64 + BLOCK * w->group * w->bits / 8);
}

/* --- packing: for each chunk of rows, group by group --------------------------------------------------------- */

struct packed {
    int8_t *codes;
    float *factors;
};

static void pack(const struct weights *w, int64_t inputs, const struct activations *x, const int32_t *chosen,
                 int64_t count, struct packed to) {
    int64_t groups = rounded_up(inputs, w->group) / w->group, padded = groups * w->group, chunk = chunk_rows(count);
    for (int64_t first = 0; first < count; first += chunk) {
        int64_t rows = least(chunk, count - first);
        for (int64_t r = 0; r < rows; r++) {
            int64_t row = chosen ? chosen[first + r] : first + r;
            const int8_t *codes = (const int8_t *)x->codes + row * padded;
            const float *factors = x->factors + 2 * row * groups;
            for (int64_t g = 0; g < groups; g++) {
                memcpy(to.codes + first * padded + (g * rows + r) * w->group, codes + g * w->group,
                       (size_t)w->group);
                memcpy(to.factors + 2 * (first * groups + g * rows + r), factors + 2 * g, 2 * sizeof(float));
            }
        }
    }
}

/* --- blocks --------------------------------------------------------------------------------------------------- */

#define EACH_COUNT(call)                                                                                          \
    switch (rows) {                                                                                               \
    case 2: call(2); break;                                                                                       \
    case 3: call(3); break;                                                                                       \
    case 4: call(4); break;                                                                                       \
    case 5: call(5); break;                                                                                       \
    case 6: call(6); break;                                                                                       \
    case 7: call(7); break;                                                                                       \
    default: call(8);                                                                                             \
    }

/* More rows than one: their codes would evict what is prefetched from the smallest cache before it is used. */
#define CALL_INT4_64(n) block_of(block, groups, 64, codes, factors, INT4, n, T1, w->ahead, y)
#define CALL_INT4(n) block_of(block, groups, w->group, codes, factors, INT4, n, T1, w->ahead, y)
#define CALL_INT8(n) block_of(block, groups, w->group, codes, factors, INT8, n, T1, w->ahead, y)
#define ONE_INT4_64(hint) block_of(block, groups, 64, codes, factors, INT4, 1, hint, w->ahead, y)
#define ONE_INT4(hint) block_of(block, groups, w->group, codes, factors, INT4, 1, hint, w->ahead, y)
#define ONE_INT8(hint) block_of(block, groups, w->group, codes, factors, INT8, 1, hint, w->ahead, y)

static void one_row(const struct weights *w, const uint8_t *block, int64_t groups, const int8_t *codes,
                    const float *factors, float *y) {
    if (w->bits == INT8) {
        EACH_HINT(w->hint, ONE_INT8)
    } else if (w->group == 64) {
        EACH_HINT(w->hint, ONE_INT4_64)
    } else {
        EACH_HINT(w->hint, ONE_INT4)
    }
}

static void one_block(const struct weights *w, const uint8_t *block, int64_t groups, const int8_t *codes,
                      const float *factors, int64_t rows, float *y) {
    if (rows == 1) {
        one_row(w, block, groups, codes, factors, y);
    } else if (w->bits == INT8) {
        EACH_COUNT(CALL_INT8)
    } else if (w->group == 64) {
        EACH_COUNT(CALL_INT4_64)
    } else {
        EACH_COUNT(CALL_INT4)
    }
}

/* y = or += W x for blocks [lo, hi), x packed. Row r of block b begins at y[r * row_stride + b * block_stride]. */
struct product {
    const struct weights *w;
    const uint8_t *matrix;
    int64_t inputs, outputs;
    struct packed x;
    int64_t count;
    float *y;
    int64_t row_stride, block_stride;
    int add;
};

/* y [rows, BLOCK] of block b to rows from `first` on. */
static void take_outputs(const struct product *p, int64_t b, int64_t first, int64_t rows, const float *from) {
    int64_t width = least(BLOCK, p->outputs - b * BLOCK);
    for (int64_t r = 0; r < rows; r++, from += BLOCK) {
        float *to = p->y + (first + r) * p->row_stride + b * p->block_stride;
        if (width < BLOCK)
            for (int64_t i = 0; i < width; i++) to[i] = p->add ? to[i] + from[i] : from[i];
        else if (p->add)
            for (int i = 0; i < BLOCK; i++) to[i] += from[i];
        else
            memcpy(to, from, BLOCK * sizeof(float));
    }
}

#include "strips.h"

static void blocks(void *context, int64_t lo, int64_t hi) {
    const struct product *p = context;
    int64_t size = block_bytes(p->w, p->inputs), group = p->w->group;
    int64_t groups = rounded_up(p->inputs, group) / group;
    if (chunk_rows(p->count) > ROWS) {
        strips(p, lo, hi);
        return;
    }
    float y[ROWS * BLOCK] __attribute__((aligned(64)));
    for (int64_t strip = 0; strip < p->count; strip += STRIP) {
        int64_t end = least(strip + STRIP, p->count);
        for (int64_t b = lo; b < hi; b++) {
            for (int64_t first = strip; first < end; first += ROWS) {
                int64_t rows = least(ROWS, end - first);
                one_block(p->w, p->matrix + b * size, groups, p->x.codes + first * groups * group,
                          p->x.factors + 2 * first * groups, rows, y);
                take_outputs(p, b, first, rows, y);
            }
        }
    }
}

/* --- a matrix ------------------------------------------------------------------------------------------------- */

/* The parts of the caller's scratch. */
struct scratch {
    const struct weights *w;
    struct packed x;     /* [rows, inputs] */
    struct packed inner; /* [rows, channels] */
    float *both;         /* gate and up [2 * channels, rows] in blocks of 16 channels: [16 channels] of each row */
    float *part;         /* bf16: [rows, outputs]. Else the outputs of many rows, in blocks like `both` */
    int64_t bytes;
};

static struct scratch lay_out(const struct weights *w, int64_t rows, void *from) {
    struct scratch s = {.w = w};
    uint8_t *at = from;
    int64_t inputs = rounded_up(w->inputs, w->group), channels = w->channels;
#define TAKE(field, size) (s.field = (void *)at, at += rounded_up((size), 64))
    TAKE(x.codes, rows * inputs * (w->bits == BF16 ? 4 : 1));
    TAKE(x.factors, rows * inputs / w->group * 8);
    TAKE(inner.codes, rows * channels);
    TAKE(inner.factors, rows * channels / w->group * 8);
    TAKE(both, rows * 2 * channels * 4);
    TAKE(part, channels && (w->bits == BF16 || rows > ROWS) ? rows * rounded_up(w->outputs, BLOCK) * 4 : 0);
    s.bytes = at - (uint8_t *)from;
    return s;
}

int64_t tandem_scratch(const struct weights *w, int64_t rows) { return lay_out(w, rows, NULL).bytes; }

void tandem_matmul(struct team *team, const struct weights *w, const uint8_t *matrix, const struct activations *x,
                   int64_t rows, float *y, void *memory, int64_t spin_ns) {
    struct scratch s = lay_out(w, rows, memory);
    pack(w, w->inputs, x, NULL, rows, s.x);
    struct product product = {w, matrix, w->inputs, w->outputs, s.x, rows, y, w->outputs, BLOCK, 0};
    parallel_for(team, blocks, &product, (w->outputs + BLOCK - 1) / BLOCK, spin_ns);
}

/* --- tiles of an expert --------------------------------------------------------------------------------------- */

struct inner {
    const struct scratch *s;
    int64_t count;
};

/* silu(gate) * up of rows [lo, hi), quantized and packed. */
static void activate(void *context, int64_t lo, int64_t hi) {
    const struct inner *inner = context;
    const struct scratch *s = inner->s;
    int64_t count = inner->count, channels = s->w->channels, group = s->w->group, groups = channels / group;
    int64_t chunk = chunk_rows(count);
    for (int64_t g = 0; g < groups; g++)
        for (int64_t r = lo; r < hi; r++) {
            float gate[MOST_GROUP], up[MOST_GROUP];
            for (int64_t i = 0; i < group; i += BLOCK) {
                const float *from = s->both + ((g * group + i) * count + r * BLOCK);
                memcpy(gate + i, from, BLOCK * sizeof *from);
                memcpy(up + i, from + channels * count, BLOCK * sizeof *from);
            }
            silu_times(gate, up, group);
            int64_t first = r / chunk * chunk, at = first * groups + g * least(chunk, count - first) + r - first;
            quantize_row(gate, group, group, s->inner.codes + at * group, s->inner.factors + 2 * at);
        }
}

struct summed {
    const float *from; /* outputs in blocks */
    struct product to; /* rows */
};

static void as_rows(void *context, int64_t lo, int64_t hi) {
    const struct summed *s = context;
    int64_t count = s->to.count;
    for (int64_t first = 0; first < count; first += ROWS)
        for (int64_t b = lo; b < hi; b++)
            take_outputs(&s->to, b, first, least(ROWS, count - first), s->from + (b * count + first) * BLOCK);
}

static void compute_tiles(struct team *team, const struct weights *w, const uint8_t *tiles, int64_t number,
                          const struct activations *x, const int32_t *chosen, int64_t count, float *y, void *memory,
                          volatile uint64_t *ticks) {
    struct scratch s = lay_out(w, count, memory);
    int64_t channels = w->channels;
    if (w->bits == BF16) {
        float *rows = (float *)s.x.codes;
        for (int64_t r = 0; r < count; r++)
            memcpy(rows + r * w->inputs, (const float *)x->codes + chosen[r] * w->inputs,
                   (size_t)w->inputs * sizeof(float));
        bf16_tiles(team, w, (const uint16_t *)tiles, number, rows, count, s.both, s.both + count * channels, s.part,
                    y, ticks);
        return;
    }
    pack(w, w->inputs, x, chosen, count, s.x);
    /* A tile is whole blocks: gate and up are one matrix of twice as many outputs. */
    int64_t wide = 2 * channels / BLOCK * block_bytes(w, w->inputs);
    int64_t blocks_down = (w->outputs + BLOCK - 1) / BLOCK;
    /* Lines at distances of large powers of two evict each other from a cache: large outputs are summed in blocks. */
    int in_blocks = count > ROWS && count * w->outputs * 4 >= NEARBY;
    struct summed summed = {s.part, {w, NULL, channels, w->outputs, s.inner, count, y, w->outputs, BLOCK, 0}};
    struct inner inner = {&s, count};
    for (int64_t tile = 0; tile < number; tile++) {
        int64_t spin_ns = tile + 1 < number || in_blocks ? WAKE_NS : 0;
        struct product in = {w, tiles, w->inputs, 2 * channels, s.x, count, s.both, BLOCK, count * BLOCK, 0};
        struct product out = in_blocks ? in : summed.to;
        out.matrix = tiles + wide, out.inputs = channels, out.x = s.inner, out.add = tile > 0;
        if (in_blocks) out.outputs = blocks_down * BLOCK, out.y = s.part;
        parallel_for(team, blocks, &in, 2 * channels / BLOCK, WAKE_NS);
        parallel_for(count < ROWS ? NULL : team, activate, &inner, count, WAKE_NS);
        parallel_for(team, blocks, &out, blocks_down, spin_ns);
        tiles += wide + blocks_down * block_bytes(w, channels);
        if (ticks) (*ticks)++;
    }
    if (in_blocks) parallel_for(team, as_rows, &summed, blocks_down, 0);
}

#include "layer.h"
