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
