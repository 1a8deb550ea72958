/* Reads memory at full speed on a team's threads, to measure its bandwidth. Part of body.h. */
#pragma once

#include "kernels.h"
#include "team.h"
#include "vectors.h"

#include <string.h>

enum { LINE_WORDS = 8, UNROLLED = 4 }; /* 64-bit words of a cache line; lines with a sum of their own */

typedef uint64_t wide_words __attribute__((vector_size(VECTOR_BYTES)));
enum { LINE_VECTORS = 64 / VECTOR_BYTES };

struct reading {
    const uint8_t *memory;
    uint64_t sum; /* atomic */
};

INLINE void add_line(const uint8_t *at, wide_words *sums) {
    PREFETCH(at + AHEAD);
    for (int i = 0; i < LINE_VECTORS; i++) {
        wide_words words;
        memcpy(&words, at + i * VECTOR_BYTES, sizeof words);
        sums[i] += words;
    }
}

INLINE uint64_t sum_of_lines(const uint8_t *memory, int64_t lo, int64_t hi) {
    wide_words sums[UNROLLED][LINE_VECTORS] = {{{0}}};
    int64_t whole = lo + (hi - lo) / UNROLLED * UNROLLED;
    for (int64_t line = lo; line < whole; line += UNROLLED)
        for (int u = 0; u < UNROLLED; u++) add_line(memory + 64 * (line + u), sums[u]);
    for (int64_t line = whole; line < hi; line++) add_line(memory + 64 * line, sums[0]);
    uint64_t words[UNROLLED * LINE_WORDS], sum = 0;
    memcpy(words, sums, sizeof words);
    for (int i = 0; i < UNROLLED * LINE_WORDS; i++) sum += words[i];
    return sum;
}

static void read_lines(void *context, int64_t lo, int64_t hi) {
    struct reading *reading = context;
    __atomic_add_fetch(&reading->sum, sum_of_lines(reading->memory, lo, hi), __ATOMIC_RELAXED);
}

uint64_t tandem_read(struct team *team, const uint8_t *memory, int64_t bytes) {
    struct reading reading = {memory, 0};
    parallel_for(team, read_lines, &reading, bytes / 64, 0);
    return reading.sum;
}
