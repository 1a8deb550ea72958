/* A Work in a slot of the ring between coordinator and worker, or in memory of the same layout: checked, and computed in
 * place. Part of body.h. */
#pragma once

#include "activations.h"
#include "work.h"

enum { LAYER = 3, ITEM_NUMBER, ROW_NUMBER, X_ROWS }; /* of the slot's numbers (shm/slot.py) */
enum { ANSWER_TALLY = 11 };                          /* mass, left, kept, channels */
enum { THRESHOLD = 14, SHARE };                      /* of its numbers of 4 bytes */
enum { LISTS = 128 };                                /* bytes of a slot before its arrays */

int tandem_work(struct host *host, void *slot, int64_t request, int64_t answer) {
    const struct weights *w = &host->weights;
    const int64_t *head = slot;
    int64_t layer = head[LAYER], items = head[ITEM_NUMBER], rows = head[ROW_NUMBER], x_rows = head[X_ROWS];
    struct mask mask = {((const float *)slot)[THRESHOLD], ((const float *)slot)[SHARE]};
    if (!is_mask(&mask) || (!w->channel_bits && (mask.threshold != 0 || mask.share != 1))) return BAD_MASK;
    if (layer < 0 || layer >= host->layers) return BAD_LAYER;
    if (items < 0 || items > request || rows < 0 || rows > request || x_rows < 0 || x_rows > answer / w->inputs)
        return BAD_SIZES;
    int64_t lists = rounded_up(4 * items + 1 + 2 * rows, 16);
    if (lists + x_rows * w->inputs > request) return BAD_SIZES;
    int32_t *at = (int32_t *)((uint8_t *)slot + LISTS);
    const float *x = (float *)(at + lists);
    float *y = (float *)(at + request);
    struct work work = {.items = at, .offsets = at + 3 * items, .rows = at + 4 * items + 1, .number = items,
                        .row_weights = (float *)(at + 4 * items + 1 + rows), .row_number = rows, .x_rows = x_rows,
                        .experts = host->experts, .tiles = host->tiles};
    int fault = work_fault(&work);
    if (fault) return fault;

    int64_t padded = rounded_up(w->inputs, w->group), tiles = w->channel_bits ? all_tiles(&work) : 0;
    int64_t codes = rounded_up(x_rows * padded * (w->bits == BF16 ? 4 : 1), 64);
    int64_t factors = w->bits == BF16 ? 0 : rounded_up(x_rows * (padded / w->group) * 8, 64);
    int64_t gate_x = w->channel_bits ? x_rows * tandem_gate_x_bytes(w) : 0;
    int64_t tallies = rounded_up(tiles * (int64_t)sizeof(struct tally), 64);
    int64_t parts = rounded_up(4 * part_numbers(w, &work), 64);
    int64_t scratch = rounded_up(part_scratch(w, most_rows(&work)), 64);
    host->needed = codes + factors + gate_x + tallies + parts + scratch * (host->team ? host->team->threads : 1);
    if (host->needed > host->memory_bytes) return SMALL_BUFFERS;
    uint8_t *memory = host->memory, *gate = memory + codes + factors;
    struct source source = {.w = w, .work = &work, .tiles = host->tiles_data + layer * host->layer_bytes,
                            .heads = host->heads_data + layer * host->layer_bytes, .expert_bytes = host->expert_bytes,
                            .tile_bytes = host->tile_bytes, .head_stride = host->head_stride,
                            .head_bytes = host->head_bytes,
                            .x = {.of = {memory, (float *)(memory + codes)}, .gate = gate}, .mask = mask,
                            .tallies = (struct tally *)(gate + gate_x), .ticks = host->ticks};
    tandem_quantize(w, x, x_rows, memory, (float *)(memory + codes));
    if (w->channel_bits) tandem_arrange_gate_x(w, x, &source.x.of, x_rows, gate);
    memset(y, 0, (size_t)(4 * x_rows * w->outputs));
    gate += gate_x + tallies;
    compute_work(host->team, &source, y, (float *)gate, gate + parts, scratch);
    struct tally sum = {0};
    for (int64_t tile = 0; tile < tiles; tile++) {
        const struct tally *of = source.tallies + tile;
        sum.mass += of->mass, sum.left += of->left, sum.kept += of->kept, sum.channels += of->channels;
    }
    memcpy((int64_t *)slot + ANSWER_TALLY, &sum, sizeof sum);
    return FINE;
}
