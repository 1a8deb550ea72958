/* AMX: products of many rows by matrix units, on the same bytes and with the same integer sums as the vectors of
 * avx512.c, which compute everything else. A tile is 16 rows of 64 bytes. Of one group of inputs, tile A has 16 rows'
 * codes, 64 inputs each or all of a smaller group; tile B the same inputs of a block's 16 outputs, four beside each other,
 * as they lie in an int8 record; C is their integer product [16 rows, 16 outputs]. bf16 at the end. */
#include "kernels.h"

#define tandem_supported vectors_supported
#define MATRIX_UNITS
static void units_begin(const struct weights *w, int64_t rest);
static void units_end(void);
static void strip_of(const struct weights *w, const uint8_t *block, int64_t groups, const int8_t *codes,
                     const float *factors, int64_t count, float *y);
static void bf16_units_begin(void);
/* c_n [16, 16] = or += a b_n for tiles n of B: a [16, 2 * 16 * depth] bf16; b_n [16 * depth, 16] pairs of bf16, whose
 * lower number belongs to the lower one of a's pair. Distances in bytes: of lines, from b_n and c_n to the next n, and
 * from 16 lines of b_n to the next. */
struct unit_product {
    const void *a;
    int64_t a_line;
    const void *b;
    int64_t b_line, b_next, b_step, depth;
    float *c;
    int64_t c_line, c_next;
};
static void multiply_units(const struct unit_product *p, int across, int add);
#include "avx512.c"
#undef tandem_supported

enum { DEPTH = 64, TILE_LINE = 64, PALETTE = 1 }; /* most inputs and bytes of a tile's line */

/* Numbers of tiles, which compilers want as literals. REST: of the rows beyond whole chunks. */
#define C_FULL 0
#define C_REST 1
#define A_FULL 2
#define A_REST 3
#define B_LINES 4
enum { TILES = 5 };

/* The operand of LDTILECFG. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t line_bytes[16];
    uint8_t rows[16];
};

#ifdef TANDEM_EMULATED_TILES /* a file, for tests on processors without AMX */
#include TANDEM_EMULATED_TILES
#else
#include <sys/syscall.h>
#include <unistd.h>
/* Compilers' intrinsics do not say that these two read memory: without this, gcc leaves out stores before them. */
#define STORED(from) __asm__ volatile("" : : "r"(from) : "memory")
#define tile_configure(config) do { STORED(config); _tile_loadconfig(config); } while (0)
#define tile_release() _tile_release()
#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride) do { STORED(from); _tile_loadd(tile, from, stride); } while (0)
#define tile_store(tile, to, stride) _tile_stored(tile, to, stride)
#define tile_dot(c, a, b) _tile_dpbsud(c, a, b) /* a signed, b unsigned */
#define tile_dot_bf16(c, a, b) _tile_dpbf16ps(c, a, b)

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */

static int tiles_permitted(void) {
    if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-int8") ||
        !__builtin_cpu_supports("amx-bf16"))
        return 0;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? -1 : 1;
}
#endif

/* The kernel lets a process use tiles only once it has asked; its threads may then, too. */
int tandem_supported(void) { return vectors_supported() ? tiles_permitted() : 0; }

/* Inputs of a tile's line. */
static int64_t depth_of(const struct weights *w) { return least(w->group, DEPTH); }

static void units_begin(const struct weights *w, int64_t rest) {
    struct tile_config config = {.palette = PALETTE};
    const int depth = (int)depth_of(w), rows[TILES] = {TALL_ROWS, (int)rest, TALL_ROWS, (int)rest, depth / 4};
    for (int tile = 0; tile < TILES; tile++) {
        int bytes = tile == A_FULL || tile == A_REST ? depth : TILE_LINE;
        if (rows[tile]) config.rows[tile] = (uint8_t)rows[tile], config.line_bytes[tile] = (uint16_t)bytes;
    }
    tile_configure(&config);
}

static void units_end(void) { tile_release(); }

/* Lines of an int4 record, eight inputs each, as lines of tile B. */
INLINE void unpack(const uint8_t *lines, int64_t inputs, int scales, uint8_t *to) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t line = 0; line < inputs / 8; line++) {
        __m512i both = _mm512_loadu_si512(lines + TILE_LINE * line);
        __m512i first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        _mm512_store_si512(to + TILE_LINE * 2 * line, numbers_of(first, scales));
        _mm512_store_si512(to + TILE_LINE * (2 * line + 1), numbers_of(second, scales));
    }
}

/* All chunks go through one group before the next, so that its weights are unpacked once. */
static void strip_of(const struct weights *w, const uint8_t *block, int64_t groups, const int8_t *codes,
                     const float *factors, int64_t count, float *y) {
    const int bits = (int)w->bits, scales = (int)w->scales, together = groups_together(scales);
    int64_t group = w->group, data = group * BLOCK * bits / 8, depth = depth_of(w);
    uint8_t wide[DEPTH * BLOCK * 2] __attribute__((aligned(64))); /* of an int4 group, at most 128 inputs */
    int32_t dot[TALL_ROWS * BLOCK] __attribute__((aligned(64)));
    memset(y, 0, (size_t)(count * BLOCK) * sizeof *y);
    const uint8_t *head = block;
    for (int64_t g = 0; g < groups; g++, block += data) {
        const int part = (int)(g % together);
        if (part == 0) head = block, block += record_head(scales);
        const uint8_t *lines = block;
        for (int64_t line = 0; line < data; line += 64) PREFETCH(block + line + AHEAD);
        if (bits == INT4) {
            unpack(lines, group, scales, wide);
            lines = wide;
        }
        __m512 scale = scales_of(head, bits, scales, part), zero = zeros_of(head, bits, scales);
        for (int64_t first = 0; first < count; first += TALL_ROWS) {
            int64_t rows = least(TALL_ROWS, count - first);
            const int8_t *from = codes + (first * groups + g * rows) * group;
            const float *of = factors + 2 * (first * groups + g * rows);
#define MULTIPLY_TILES(c, a)                                                                                     \
    tile_zero(c);                                                                                                \
    for (int64_t j = 0; j < group; j += depth) {                                                                 \
        tile_load(a, from + j, group);                                                                           \
        tile_load(B_LINES, lines + BLOCK * j, TILE_LINE);                                                        \
        tile_dot(c, a, B_LINES);                                                                                 \
    }                                                                                                            \
    tile_store(c, dot, TILE_LINE);
            if (rows == TALL_ROWS) {
                MULTIPLY_TILES(C_FULL, A_FULL)
            } else {
                MULTIPLY_TILES(C_REST, A_REST)
            }
            for (int64_t r = 0; r < rows; r++) {
                float *sum = y + (first + r) * BLOCK;
                __m512i one = _mm512_load_si512(dot + r * BLOCK);
                _mm512_store_ps(sum, grown(_mm512_load_ps(sum), one, scale, zero, of + 2 * r));
            }
        }
    }
}

/* --- bf16 ----------------------------------------------------------------------------------------------------- */

#define A_BF16 4
#define B_BF16 5
enum { TILES_BF16 = 6 }; /* tiles 0 to 3 are those of C */

static void bf16_units_begin(void) {
    struct tile_config config = {.palette = PALETTE};
    for (int tile = 0; tile < TILES_BF16; tile++) config.rows[tile] = UNIT, config.line_bytes[tile] = UNIT_LINE;
    tile_configure(&config);
}

static void multiply_units(const struct unit_product *p, int across, int add) {
#define EACH_ACROSS(call)                                                                                        \
    call(0);                                                                                                     \
    if (across > 1) { call(1); }                                                                                 \
    if (across > 2) { call(2); }                                                                                 \
    if (across > 3) { call(3); }
#define LOAD_C(n) tile_load(n, (const char *)p->c + n * p->c_next, p->c_line)
#define ZERO_C(n) tile_zero(n)
#define STORE_C(n) tile_store(n, (char *)p->c + n * p->c_next, p->c_line)
#define ADD_PRODUCT(n)                                                                                           \
    tile_load(B_BF16, (const char *)p->b + n * p->b_next + k * p->b_step, p->b_line);                            \
    tile_dot_bf16(n, A_BF16, B_BF16)
    if (add) {
        EACH_ACROSS(LOAD_C)
    } else {
        EACH_ACROSS(ZERO_C)
    }
    for (int64_t k = 0; k < p->depth; k++) {
        tile_load(A_BF16, (const char *)p->a + k * UNIT_LINE, p->a_line);
        EACH_ACROSS(ADD_PRODUCT)
    }
    EACH_ACROSS(STORE_C)
}
