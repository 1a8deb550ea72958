/* AMX's tiles in plain C, as Intel's manual defines them, for amx.c compiled with -DTANDEM_EMULATED_TILES="...". What
 * a processor answers with an exception ends the process here; so does a dot product of tiles whose shapes do not fit. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MANUAL_TILES = 8, MANUAL_ROWS = 16, MANUAL_LINE = 64 }; /* of palette 1 */

static __thread struct {
    int configured;
    int rows[MANUAL_TILES], line_bytes[MANUAL_TILES];
    uint8_t data[MANUAL_TILES][MANUAL_ROWS][MANUAL_LINE];
} tiles;

static void must(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "tiles: %s\n", what);
    abort();
}

static int tiles_permitted(void) { return 1; }

static void tile_configure(const struct tile_config *config) {
    must(sizeof *config == 64, "the configuration has 64 bytes");
    must(config->palette == 1, "palette 1");
    must(config->start_row == 0, "no start row");
    for (int i = 0; i < 14; i++) must(config->reserved[i] == 0, "reserved bytes are zero");
    memset(&tiles, 0, sizeof tiles); /* loading a configuration zeroes all tiles */
    tiles.configured = 1;
    for (int i = 0; i < 16; i++) {
        must(config->rows[i] <= MANUAL_ROWS && config->line_bytes[i] <= MANUAL_LINE, "tiles of at most 16 lines of 64");
        must((config->rows[i] == 0) == (config->line_bytes[i] == 0), "rows and bytes are both zero or neither");
        must(i < MANUAL_TILES || config->rows[i] == 0, "eight tiles");
        if (i < MANUAL_TILES) tiles.rows[i] = config->rows[i], tiles.line_bytes[i] = config->line_bytes[i];
    }
}

static void tile_release(void) { memset(&tiles, 0, sizeof tiles); }

static void use(int tile) {
    must(tiles.configured, "this thread has configured no tiles");
    must(tile >= 0 && tile < MANUAL_TILES && tiles.rows[tile] > 0, "this tile is configured");
}

static void tile_zero(int tile) {
    use(tile);
    memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

static void tile_load(int tile, const void *from, int64_t stride) {
    use(tile);
    memset(tiles.data[tile], 0, sizeof tiles.data[tile]); /* beyond its rows and bytes a loaded tile is zero */
    for (int r = 0; r < tiles.rows[tile]; r++)
        memcpy(tiles.data[tile][r], (const char *)from + r * stride, (size_t)tiles.line_bytes[tile]);
}

static void tile_store(int tile, void *to, int64_t stride) {
    use(tile);
    for (int r = 0; r < tiles.rows[tile]; r++)
        memcpy((char *)to + r * stride, tiles.data[tile][r], (size_t)tiles.line_bytes[tile]);
}

static void fitting(int c, int a, int b) {
    use(c), use(a), use(b);
    must(c != a && c != b && a != b, "three different tiles");
    must(tiles.rows[c] == tiles.rows[a], "as many rows of C as of A");
    must(tiles.line_bytes[c] == tiles.line_bytes[b], "lines of C as long as of B");
    must(tiles.line_bytes[a] % 4 == 0 && tiles.line_bytes[a] / 4 == tiles.rows[b], "A as deep as B");
    must(tiles.line_bytes[b] % 4 == 0, "whole numbers of C");
}

/* TDPBSUD: c [m, n] += the sum over k and four bytes of a [m, 4 k + i] (signed) * b [k, 4 n + i] (unsigned). */
static void tile_dot(int c, int a, int b) {
    fitting(c, a, b);
    for (int m = 0; m < tiles.rows[a]; m++)
        for (int n = 0; n < tiles.line_bytes[b] / 4; n++) {
            int32_t sum;
            memcpy(&sum, tiles.data[c][m] + 4 * n, 4);
            for (int k = 0; k < tiles.rows[b]; k++)
                for (int i = 0; i < 4; i++)
                    sum += (int32_t)(int8_t)tiles.data[a][m][4 * k + i] * tiles.data[b][k][4 * n + i];
            memcpy(tiles.data[c][m] + 4 * n, &sum, 4);
        }
}

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

static float number_of(const uint8_t *bf16) {
    uint16_t narrow;
    memcpy(&narrow, bf16, 2);
    uint32_t bits = (uint32_t)narrow << 16;
    float value;
    memcpy(&value, &bits, 4);
    return flushed(value);
}

/* TDPBF16PS: c [m, n] += the sum over k of a [m, 2 k] * b [k, 2 n], plus that of a [m, 2 k + 1] * b [k, 2 n + 1];
 * denormal numbers count as 0. */
static void tile_dot_bf16(int c, int a, int b) {
    fitting(c, a, b);
    for (int m = 0; m < tiles.rows[a]; m++)
        for (int n = 0; n < tiles.line_bytes[b] / 4; n++) {
            float sum, halves[2] = {0, 0};
            memcpy(&sum, tiles.data[c][m] + 4 * n, 4);
            for (int k = 0; k < tiles.rows[b]; k++)
                for (int i = 0; i < 2; i++)
                    halves[i] = flushed(fmaf(number_of(tiles.data[a][m] + 4 * k + 2 * i),
                                             number_of(tiles.data[b][k] + 4 * n + 2 * i), halves[i]));
            sum = flushed(flushed(sum) + flushed(halves[0] + halves[1]));
            memcpy(tiles.data[c][m] + 4 * n, &sum, 4);
        }
}
