/* What a launch computes: tiles at any addresses, each for some rows. */
#pragma once

#include "device.cuh"

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

/* What a row of the result adds up: the outputs [first + stride * 0, .. parts), times a weight. */
struct term {
    int32_t first, parts, stride;
    float weight;
};
