/* Reads memory at full speed on a team's threads, to measure its bandwidth. Part of body.h. */
#pragma once

#include "kernels.h"
#include "team.h"

#include <string.h>

struct reading {
    const uint8_t *memory;
    uint64_t sum; /* atomic */
};

static void read_lines(void *context, int64_t lo, int64_t hi) {
    struct reading *reading = context;
    uint64_t sums[8] = {0}, sum = 0;
    for (int64_t line = lo; line < hi; line++) {
        const uint8_t *at = reading->memory + 64 * line;
        uint64_t words[8];
        __builtin_prefetch((const char *)at + AHEAD, 0, 0);
        memcpy(words, at, 64);
        for (int i = 0; i < 8; i++) sums[i] += words[i];
    }
    for (int i = 0; i < 8; i++) sum += sums[i];
    __atomic_add_fetch(&reading->sum, sum, __ATOMIC_RELAXED);
}

uint64_t tandem_read(struct team *team, const uint8_t *memory, int64_t bytes) {
    struct reading reading = {memory, 0};
    parallel_for(team, read_lines, &reading, bytes / 64, 0);
    return reading.sum;
}
