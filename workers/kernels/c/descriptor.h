/* A Work as its descriptor says it (shm/descriptor.py): checked, and computed in place. In a process that must go on where
 * an expert worker would exit, in the coordinator, an instruction that crashes ends the Work alone. Nothing has to be
 * undone: without a team a computation holds no lock and allocates nothing. Part of body.h. */
#pragma once

#include "work.h"

#include <setjmp.h>
#include <signal.h>

enum { GENERATION, LAYER = 2, ITEM_NUMBER, ROW_NUMBER, X_ROWS }; /* of the header's numbers */
enum { THRESHOLD = 12, SHARE };                                  /* of its numbers of 4 bytes */
enum { HEADER = 16 };                                            /* numbers of 4 bytes before the arrays */

int tandem_work(struct host *host, const void *descriptor, int64_t numbers, const float *x, int64_t x_numbers, float *y,
                int64_t y_numbers, struct tally *tally) {
    const struct weights *w = &host->weights;
    const int64_t *head = descriptor;
    if (numbers < HEADER) return BAD_SIZES;
    int64_t layer = head[LAYER], items = head[ITEM_NUMBER], rows = head[ROW_NUMBER], x_rows = head[X_ROWS];
    struct mask mask = {((const float *)descriptor)[THRESHOLD], ((const float *)descriptor)[SHARE]};
    if (head[GENERATION] != host->generation) return BAD_GENERATION;
    if (!is_mask(&mask) || (!w->channel_bits && (mask.threshold != 0 || mask.share != 1))) return BAD_MASK;
    if (layer < 0 || layer >= host->layers) return BAD_LAYER;
    if (items < 0 || items > numbers || rows < 0 || rows > numbers || HEADER + 4 * items + 1 + 2 * rows > numbers)
        return BAD_SIZES;
    if (x_rows < 0 || x_rows > x_numbers / w->inputs || x_rows > y_numbers / w->outputs) return BAD_SIZES;
    const int32_t *at = (const int32_t *)descriptor + HEADER;
    struct work work = {.items = at, .offsets = at + 3 * items, .rows = at + 4 * items + 1, .number = items,
                        .row_weights = (const float *)(at + 4 * items + 1 + rows), .row_number = rows, .x_rows = x_rows,
                        .experts = host->experts, .tiles = host->tiles};
    int fault = work_fault(&work);
    if (fault) return fault;

    int64_t padded = padded_inputs(w, w->inputs), tiles = w->channel_bits ? all_tiles(&work) : 0;
    int64_t codes = rounded_up(x_rows * padded * (w->bits >= BF16 ? 4 : 1), 64);
    int64_t factors = w->bits >= BF16 ? 0 : rounded_up(x_rows * (padded / w->group) * 8, 64);
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
                            .head_bytes = host->head_bytes, .up_biases = host->up_biases,
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
    *tally = sum;
    return FINE;
}

static const int CRASHES[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL};
enum { KINDS = sizeof CRASHES / sizeof *CRASHES };

static struct sigaction before[KINDS]; /* of each kind, how the process handled it before */
static _Thread_local sigjmp_buf *volatile rescue; /* while this thread computes a guarded Work */

static void crashed(int number, siginfo_t *info, void *context) {
    (void)context;
    int sent = info->si_code <= 0; /* by a process, not by an instruction */
    if (rescue && !sent) siglongjmp(*rescue, 1);
    for (int kind = 0; kind < KINDS; kind++)
        if (CRASHES[kind] == number) sigaction(number, before + kind, NULL);
    if (sent) raise(number); /* otherwise the instruction is executed again */
}

static void install_guard(void) {
    struct sigaction guard = {.sa_sigaction = crashed, .sa_flags = SA_SIGINFO | SA_NODEFER};
    for (int kind = 0; kind < KINDS; kind++) sigaction(CRASHES[kind], &guard, before + kind);
}

int tandem_guarded_work(struct host *host, const void *descriptor, int64_t numbers, const float *x, int64_t x_numbers,
                        float *y, int64_t y_numbers, struct tally *tally) {
    static int installed;
    if (!installed) install_guard(), installed = 1;
    sigjmp_buf here;
    if (sigsetjmp(here, 0)) {
        rescue = NULL;
        return CRASHED;
    }
    rescue = &here;
    int fault = tandem_work(host, descriptor, numbers, x, x_numbers, y, y_numbers, tally);
    rescue = NULL;
    return fault;
}
