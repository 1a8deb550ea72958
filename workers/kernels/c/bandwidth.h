/* Reads memory at full speed on a team's threads, to measure its bandwidth. Part of body.h. */
#pragma once

#include "kernels.h"
#include "prefetch.h"
#include "team.h"
#include "vectors.h"

#include <string.h>

enum { LINE_WORDS = 8, UNROLLED = 4 }; /* 64-bit words of a cache line; lines with a sum of their own */

typedef uint64_t wide_words __attribute__((vector_size(VECTOR_BYTES)));
enum { LINE_VECTORS = 64 / VECTOR_BYTES };

struct reading {
    const uint8_t *memory;
    int64_t hint, ahead;
    uint64_t sum; /* atomic */
};

INLINE void add_line(const uint8_t *at, const int hint, int64_t ahead, wide_words *sums) {
    PREFETCH(at + ahead, hint);
    for (int i = 0; i < LINE_VECTORS; i++) {
        wide_words words;
        memcpy(&words, at + i * VECTOR_BYTES, sizeof words);
        sums[i] += words;
    }
}

INLINE uint64_t sum_of_lines(const uint8_t *memory, int64_t lo, int64_t hi, const int hint, int64_t ahead) {
    wide_words sums[UNROLLED][LINE_VECTORS] = {{{0}}};
    int64_t whole = lo + (hi - lo) / UNROLLED * UNROLLED;
    for (int64_t line = lo; line < whole; line += UNROLLED)
        for (int u = 0; u < UNROLLED; u++) add_line(memory + 64 * (line + u), hint, ahead, sums[u]);
    for (int64_t line = whole; line < hi; line++) add_line(memory + 64 * line, hint, ahead, sums[0]);
    uint64_t words[UNROLLED * LINE_WORDS], sum = 0;
    memcpy(words, sums, sizeof words);
    for (int i = 0; i < UNROLLED * LINE_WORDS; i++) sum += words[i];
    return sum;
}

static void read_lines(void *context, int64_t lo, int64_t hi) {
    struct reading *reading = context;
    uint64_t sum;
#define READ_WITH(hint) sum = sum_of_lines(reading->memory, lo, hi, hint, reading->ahead)
    EACH_HINT(reading->hint, READ_WITH)
    __atomic_add_fetch(&reading->sum, sum, __ATOMIC_RELAXED);
}

uint64_t tandem_read(struct team *team, const uint8_t *memory, int64_t bytes, int64_t hint, int64_t ahead) {
    struct reading reading = {memory, hint, ahead, 0};
    parallel_for(team, read_lines, &reading, bytes / 64, 0);
    return reading.sum;
}
