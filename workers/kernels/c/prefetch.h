/* Prefetching with a hint that is a constant where it is used and chosen where the program runs. */
#pragma once

#include "kernels.h"

/* `hint` is a constant. The address may lie beyond the end of memory: then nothing happens. */
#define PREFETCH(at, hint)                                                                                        \
    ((hint) == NTA  ? __builtin_prefetch((const char *)(at), 0, 0)                                                \
     : (hint) == T0 ? __builtin_prefetch((const char *)(at), 0, 3)                                                \
     : (hint) == T1 ? __builtin_prefetch((const char *)(at), 0, 2)                                                \
                    : (void)0)

/* call(hint) with the hint `which` as a constant. */
#define EACH_HINT(which, call)                                                                                    \
    switch (which) {                                                                                              \
    case NTA: call(NTA); break;                                                                                   \
    case T0: call(T0); break;                                                                                     \
    case T1: call(T1); break;                                                                                     \
    default: call(NO_HINT);                                                                                       \
    }
