/* What a launch computes: tiles at any addresses, each for some rows. */
#pragma once

#include "device.cuh"

/* Tables that a launch reads. Small ones travel with it, by value, so that nothing has to be copied to the device between
 * two kernels: their "addresses" are then distances from the beginning of `here`. */
enum { TABLE_BYTES = 3840 };
struct alignas(16) tables {
    uint8_t bytes[TABLE_BYTES];
};
#ifdef TANDEM_EMULATED
#define TABLES const tables here
#else
#define TABLES const __grid_constant__ tables here
#endif
template <class T> DEVICE const T *table(const tables &here, const T *at) {
    return (uint64_t)at < TABLE_BYTES ? (const T *)(here.bytes + (uint64_t)at) : at;
}

struct item {
    int32_t tile;  /* the first of its tiles in the table of addresses */
    int32_t tiles; /* consecutive in the table; gate and up: 1 */
    int32_t rows;
    int32_t entry; /* of the first row and tile, among inner activations; consecutive rows follow */
    int32_t step;  /* entries from one tile to the next */
    int32_t row;   /* gate and up: place of the first row in the list of rows of x */
    int32_t out;   /* down: place of the first row among the outputs */
    int32_t add;   /* down: add to the outputs, which earlier tiles of the same rows have written */
};

/* The arguments of all kernels gate_up_N and down_N, in each program for its `code`; plain.cu has no factors. `units`
 * (groups or numbers) of x, and of the inner activations of a tile; `wide`: blocks of threads of an item. So many bytes behind the
 * beginning of a tile are its biases (0: there are none), down (`skipped`), and the factors or scales of its matrices
 * (`scales`; of down_N those of down). */
#define INNER_ARGUMENTS                                                                                          \
    const item *items, const uint8_t *const *tiles, const int32_t *rows, const code *x, const factors *of_x,     \
        int64_t units, int64_t inner_units, int64_t wide, int64_t biases, int64_t scales, code *inner,           \
        factors *of_inner
#define DOWN_ARGUMENTS                                                                                           \
    const item *items, const uint8_t *const *tiles, const code *inner, const factors *of_inner, int64_t units,   \
        int64_t outputs, int64_t wide, int64_t skipped, int64_t scales, float *out

/* Defines both for items of at most so many rows, by `inner_of` and `down_of` with this constant. */
#define EXPERT_KERNELS(rows_of_item, constant)                                                                   \
    KERNEL(INNER_THREADS, gate_up_##rows_of_item, INNER_ARGUMENTS, TABLES) {                                     \
        inner_of<constant>(table(here, items), table(here, tiles), table(here, rows), x, of_x, units,            \
                           inner_units, wide, biases, scales, inner, of_inner);                                  \
    }                                                                                                            \
    KERNEL(DOWN_THREADS, down_##rows_of_item, DOWN_ARGUMENTS, TABLES) {                                          \
        down_of<constant>(table(here, items), table(here, tiles), inner, of_inner, units, outputs, wide,         \
                          skipped, scales, out);                                                                 \
    }
