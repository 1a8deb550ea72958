/* The kernels of all variants. Each variant includes this file after it has defined
 *
 *     block_of(block, groups, group, codes, factors, bits, scales, rows, y)
 *
 * which computes one block of 16 outputs of INT2 (in groups of 64), INT4 or INT8 for `rows` (1 to ROWS) rows into
 * y [rows, 16], without unit_of(scales); `bits`, `scales` and `rows` are constants. codes and factors are packed: for
 * each group the rows' codes, one row after the other, and the rows' factors. And
 *
 *     BYTE_DOTS(sum, bytes, codes, bits)
 *
 * sum (ints) + the products of a register of bytes with as many codes in memory, four neighbours in each lane; the bytes
 * are codes of INT4 or INT8. A processor that looks 16 float32 numbers up by index also has LOOKED_UP(table, index).
 *
 * A variant with matrix units defines MATRIX_UNITS and
 *
 *     units_begin(w, rest), units_end()   before and after calls on one thread; `rest`: rows beyond whole chunks
 *     strip_of(w, block, groups, codes, factors, count, y)
 *
 * which computes the same of `count` rows, at most STRIP, packed in chunks of TALL_ROWS, into y [count, 16], and
 *
 *     bf16_units_begin()                  instead of units_begin
 *     multiply_units(product, across, add)
 *
 * for tiles of bf16, see amx.c.
 */
#include "blocks.h"
#include "attention.h"
#include "bandwidth.h"
#include "plain_tiles.h"
#include "descriptor.h"
#include "masked.h"
#include "spans.h"
#include "team.h"
#include "vectors.h"

#include <string.h>

int tandem_kernels_version(void) { return 23; }

enum { MOST_GROUP = 128 }; /* inputs that share a scale */
enum { NEARBY = 1 << 19 }; /* bytes of outputs that a core's own cache holds, beside activations and weights */

/* The parts of the caller's scratch. */
struct scratch {
    const struct weights *w;
    struct packed x;     /* [rows, inputs]; bf16: arranged */
    struct packed inner; /* [rows, channels]; bf16: as in plain_tiles.h */
    float *both;         /* gate, unless ungated, and up [channels, rows] in blocks of 16 channels: [16 channels] of each
                          * row */
    float *part;         /* bf16: of a tile. Else the outputs of many rows, in blocks like `both` */
    int64_t bytes;
};

static struct scratch lay_out(const struct weights *w, int64_t rows, void *from) {
    struct scratch s = {.w = w};
    uint8_t *at = from;
    int64_t inputs = padded_inputs(w, w->inputs), channels = w->channels;
    TAKE(s.x.codes, w->bits >= BF16 ? x_bytes(w, rows) : rows * inputs);
    TAKE(s.x.factors, rows * inputs / w->group * 8);
    TAKE(s.inner.codes, w->bits >= BF16 ? inner_bytes(w, rows) : rows * channels);
    TAKE(s.inner.factors, rows * channels / w->group * 8);
    TAKE(s.both, rows * 2 * channels * 4);
    if (w->bits >= BF16)
        TAKE(s.part, part_bytes(w, rows));
    else
        TAKE(s.part, channels && rows > ROWS ? rows * rounded_up(w->outputs, BLOCK) * 4 : 0);
    s.bytes = at - (uint8_t *)from;
    return s;
}

int64_t tandem_scratch(const struct weights *w, int64_t rows) { return lay_out(w, rows, NULL).bytes; }

/* --- tiles of an expert --------------------------------------------------------------------------------------- */

struct inner {
    const struct scratch *s;
    const uint8_t *tile;
    int64_t count;
};

/* Inner activations of rows [lo, hi), quantized and packed. */
static void activate(void *context, int64_t lo, int64_t hi) {
    const struct inner *inner = context;
    const struct scratch *s = inner->s;
    int64_t count = inner->count, channels = s->w->channels, group = s->w->group, groups = channels / group;
    int64_t chunk = chunk_rows(s->w, count), to_up = (wide_matrices(s->w) - 1) * channels * count;
    for (int64_t g = 0; g < groups; g++)
        for (int64_t r = lo; r < hi; r++) {
            float gate[MOST_GROUP], up[MOST_GROUP];
            for (int64_t i = 0; i < group; i += BLOCK) {
                const float *from = s->both + ((g * group + i) * count + r * BLOCK);
                memcpy(gate + i, from, BLOCK * sizeof *from);
                memcpy(up + i, from + to_up, BLOCK * sizeof *from);
            }
            activate_channels(s->w, inner->tile, g * group, gate, up, group);
            int64_t first = r / chunk * chunk, at = first * groups + g * least(chunk, count - first) + r - first;
            quantize_row(gate, group, group, group, s->inner.codes + at * group, s->inner.factors + 2 * at);
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
                          const struct activations *x, const int32_t *chosen, int64_t count, float *y, void *memory) {
    struct scratch s = lay_out(w, count, memory);
    int64_t channels = w->channels;
    if (w->bits >= BF16) {
        arrange_rows(w, x->codes, chosen, count, (char *)s.x.codes);
        struct plain_tile tile = {.w = w, .tile = tiles, .x = (const char *)s.x.codes, .count = count,
                                 .gate = s.both, .up = s.both + count * channels, .inner = (float *)s.inner.codes,
                                 .part = s.part, .y = y};
        plain_tiles(team, tile, number);
        return;
    }
    pack(w, w->inputs, x, chosen, count, s.x);
    /* A tile is whole blocks: gate and up are one matrix of twice as many outputs. */
    int64_t wide_outputs = wide_matrices(w) * channels, wide = wide_outputs / BLOCK * block_bytes(w, w->inputs);
    int64_t blocks_down = (w->outputs + BLOCK - 1) / BLOCK;
    /* Lines at distances of large powers of two evict each other from a cache: large outputs are summed in blocks. */
    int in_blocks = count > ROWS && count * w->outputs * 4 >= NEARBY;
    struct summed summed = {s.part, {.w = w, .inputs = channels, .outputs = w->outputs, .x = s.inner, .count = count,
                                     .y = y, .row_stride = w->outputs, .block_stride = BLOCK}};
    struct inner inner = {&s, tiles, count};
    for (int64_t tile = 0; tile < number; tile++, tiles += w->tile_bytes) {
        int64_t spin_ns = tile + 1 < number || in_blocks ? WAKE_NS : 0;
        struct product in = {.w = w, .matrix = tiles, .inputs = w->inputs, .outputs = wide_outputs, .x = s.x,
                             .count = count, .y = s.both, .row_stride = BLOCK, .block_stride = count * BLOCK,
                             .factors = tiles + w->factors, .factor_blocks = channels / BLOCK};
        struct product out = in_blocks ? in : summed.to;
        out.factors = in.factors + 4 * wide_matrices(w), out.factor_blocks = blocks_down;
        out.matrix = tiles + wide, out.inputs = channels, out.x = s.inner, out.add = tile > 0, inner.tile = tiles;
        if (in_blocks) out.outputs = blocks_down * BLOCK, out.y = s.part;
        parallel_for(team, blocks, &in, wide_outputs / BLOCK, WAKE_NS);
        parallel_for(count < ROWS ? NULL : team, activate, &inner, count, WAKE_NS);
        parallel_for(team, blocks, &out, blocks_down, spin_ns);
    }
    if (in_blocks) parallel_for(team, as_rows, &summed, blocks_down, 0);
}

#include "layer.h"
