/* Threads that share one computation, in pieces: each thread takes those of its own part first and then what is left of
 * the others', so the caller never waits for a thread that does not run yet. A waiting thread sleeps, because expert
 * workers need the cores; it spins first only within a computation of several parts, for about as long as one wake-up
 * takes. */
#pragma once

#include "kernels.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

typedef void (*part_t)(void *context, int64_t lo, int64_t hi);

enum { WAKE_NS = 50000 }; /* nanoseconds to spin before sleeping: about what waking another core takes */
enum { PAUSES = 64 };     /* between two readings of the clock */
enum { PIECES = 4 };      /* of a thread's part of [0, n) */

/* One parallel_for. */
struct round {
    part_t part;
    void *context;
    int64_t n, pieces; /* [0, n) in so many pieces, of about the same size */
};

struct team {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    int64_t threads, started; /* `started`: without the caller */
    int64_t number;           /* of the current round; atomic */
    struct round round;       /* the current one */
    int64_t *taken;           /* [threads * PIECES]: the last round in which each piece was taken; atomic */
    int64_t unfinished;       /* pieces of the current round that are not computed; atomic */
    int64_t sleeping;         /* threads that wait on `begin` and were not woken, at most */
    int64_t spin_ns;          /* nanoseconds to spin for the next round before sleeping */
    int64_t linger_ns;        /* the least that spin_ns is */
    int stop, caller_waits;   /* `caller_waits`: the caller waits on `end` */
    pthread_t *thread;
};

struct member {
    struct team *team;
    int64_t index;
};

/* Compute the pieces of a round that no other thread has taken, from this thread's own part on. Returns their number.
 *
 * A thread may come late, when the round has ended and others have begun. Then it takes nothing: a round ends once all
 * its pieces were taken, and the numbers in `taken` only grow. */
static int64_t take_pieces(struct team *team, int64_t number, const struct round *round, int64_t index) {
    int64_t pieces = round->pieces, computed = 0;
    int64_t first = pieces * index / team->threads, end = pieces * (index + 1) / team->threads;
    for (int64_t i = 0; i < pieces; i++) { /* the others' from their ends */
        int64_t piece = i < end - first ? first + i : (end - 1 - i + pieces) % pieces, *taken = team->taken + piece;
        int64_t last = __atomic_load_n(taken, __ATOMIC_RELAXED);
        if (last >= number) continue;
        if (!__atomic_compare_exchange_n(taken, &last, number, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
        round->part(round->context, round->n * piece / pieces, round->n * (piece + 1) / pieces);
        computed++;
    }
    return computed;
}

static void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("" ::: "memory");
#endif
}

/* Spin for at most so many nanoseconds while (*number == value) is `equal`. */
static void spin_while(const int64_t *number, int64_t value, int equal, int64_t nanoseconds) {
    struct timespec now;
    int64_t until = 0;
    for (int64_t i = 0; nanoseconds > 0 && (__atomic_load_n(number, __ATOMIC_ACQUIRE) == value) == equal; i++) {
        cpu_pause();
        if (i % PAUSES) continue;
        clock_gettime(CLOCK_MONOTONIC, &now);
        int64_t at = now.tv_sec * 1000000000LL + now.tv_nsec;
        if (!until) until = at + nanoseconds;
        if (at > until) return;
    }
}

static void *member_main(void *context) {
    struct member member = *(struct member *)context;
    struct team *team = member.team;
    free(context);
    for (int64_t done = 0, spin_ns = 0;;) {
        spin_while(&team->number, done, 1, spin_ns);
        pthread_mutex_lock(&team->lock);
        while (team->number == done && !team->stop) {
            team->sleeping++;
            pthread_cond_wait(&team->begin, &team->lock);
        }
        int stop = team->stop;
        done = team->number, spin_ns = team->spin_ns;
        struct round round = team->round;
        pthread_mutex_unlock(&team->lock);
        if (stop) return NULL;
        int64_t computed = take_pieces(team, done, &round, member.index);
        if (computed && __atomic_sub_fetch(&team->unfinished, computed, __ATOMIC_ACQ_REL) == 0) {
            pthread_mutex_lock(&team->lock);
            if (team->caller_waits) pthread_cond_signal(&team->end);
            pthread_mutex_unlock(&team->lock);
        }
    }
}

/* Call part(context, lo, hi) so that [0, n) is covered once, in pieces; return when all are done. `spin_ns`: nanoseconds
 * for which the threads spin for the next call before they sleep. */
static void parallel_for(struct team *team, part_t part, void *context, int64_t n, int64_t spin_ns) {
    if (!team) {
        part(context, 0, n);
        return;
    }
    struct round round = {part, context, n, n < team->threads * PIECES ? n : team->threads * PIECES};
    pthread_mutex_lock(&team->lock);
    int64_t number = team->number + 1;
    team->round = round;
    team->spin_ns = spin_ns > team->linger_ns ? spin_ns : team->linger_ns;
    __atomic_store_n(&team->unfinished, round.pieces, __ATOMIC_RELAXED);
    __atomic_store_n(&team->number, number, __ATOMIC_RELEASE);
    if (team->sleeping) pthread_cond_broadcast(&team->begin);
    team->sleeping = 0;
    pthread_mutex_unlock(&team->lock);
    int64_t computed = take_pieces(team, number, &round, 0);
    if (!__atomic_sub_fetch(&team->unfinished, computed, __ATOMIC_ACQ_REL)) return;
    spin_while(&team->unfinished, 0, 0, WAKE_NS);
    if (!__atomic_load_n(&team->unfinished, __ATOMIC_ACQUIRE)) return;
    pthread_mutex_lock(&team->lock);
    team->caller_waits = 1;
    while (__atomic_load_n(&team->unfinished, __ATOMIC_ACQUIRE)) pthread_cond_wait(&team->end, &team->lock);
    team->caller_waits = 0;
    pthread_mutex_unlock(&team->lock);
}

void tandem_team_linger(struct team *team, int64_t nanoseconds) { team->linger_ns = nanoseconds; }

void tandem_team_destroy(struct team *team) {
    pthread_mutex_lock(&team->lock);
    team->stop = 1;
    pthread_cond_broadcast(&team->begin);
    pthread_mutex_unlock(&team->lock);
    for (int64_t i = 0; i < team->started; i++) pthread_join(team->thread[i], NULL);
    pthread_mutex_destroy(&team->lock);
    pthread_cond_destroy(&team->begin);
    pthread_cond_destroy(&team->end);
    free(team->thread);
    free(team->taken);
    free(team);
}

struct team *tandem_team_create(int64_t threads) {
    struct team *team = calloc(1, sizeof *team);
    if (!team) return NULL;
    team->thread = calloc((size_t)threads, sizeof *team->thread);
    team->taken = calloc((size_t)threads * PIECES, sizeof *team->taken);
    if (!team->thread || !team->taken) {
        free(team->thread);
        free(team->taken);
        free(team);
        return NULL;
    }
    team->threads = threads;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->begin, NULL);
    pthread_cond_init(&team->end, NULL);
    for (int64_t i = 1; i < threads; i++) {
        struct member *member = malloc(sizeof *member);
        if (member) *member = (struct member){team, i};
        if (!member || pthread_create(&team->thread[i - 1], NULL, member_main, member)) {
            free(member);
            tandem_team_destroy(team);
            return NULL;
        }
        team->started++;
    }
    return team;
}
