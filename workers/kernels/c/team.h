/* Threads that share one computation. Who waits sleeps, for expert workers need the cores; only within a
 * computation of several parts, and for as long as one wake-up takes, does it watch first. */
#ifndef TANDEM_TEAM_H
#define TANDEM_TEAM_H

#include "kernels.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

typedef void (*part_t)(void *context, int64_t lo, int64_t hi);

enum { MOMENT = 50000 }; /* nanoseconds of watching before sleep: what waking another core takes */
enum { LOOKS = 64 };     /* between two looks at the clock */

struct team {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    int64_t threads, started; /* `started`: beside the caller */
    int64_t round;            /* counts what was shared; atomic */
    int64_t left;             /* threads that have not finished this round; atomic */
    int64_t sleeping;         /* threads that wait on `begin` */
    int64_t watch;            /* nanoseconds to look for the next round before they sleep */
    int stop, asleep;         /* `asleep`: the caller waits on `end` */
    part_t part;
    void *context;
    int64_t n;
    pthread_t *thread;
};

struct seat {
    struct team *team;
    int64_t index;
};

static void do_part(const struct team *team, int64_t index) {
    int64_t lo = team->n * index / team->threads, hi = team->n * (index + 1) / team->threads;
    if (lo < hi) team->part(team->context, lo, hi);
}

static void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("" ::: "memory");
#endif
}

/* Wait until `*number` is `wanted` (or, with `other`, no longer is), for at most so many nanoseconds. */
static void look(const int64_t *number, int64_t wanted, int other, int64_t nanoseconds) {
    struct timespec now;
    int64_t until = 0;
    for (int64_t i = 0; nanoseconds > 0 && (__atomic_load_n(number, __ATOMIC_ACQUIRE) == wanted) == other; i++) {
        rest();
        if (i % LOOKS) continue;
        clock_gettime(CLOCK_MONOTONIC, &now);
        int64_t at = now.tv_sec * 1000000000LL + now.tv_nsec;
        if (!until) until = at + nanoseconds;
        if (at > until) return;
    }
}

static void *sit(void *given) {
    struct seat seat = *(struct seat *)given;
    struct team *team = seat.team;
    free(given);
    for (int64_t done = 0, watch = 0;;) {
        look(&team->round, done, 1, watch);
        pthread_mutex_lock(&team->lock);
        team->sleeping++;
        while (team->round == done && !team->stop) pthread_cond_wait(&team->begin, &team->lock);
        team->sleeping--;
        int stop = team->stop;
        done = team->round, watch = team->watch;
        pthread_mutex_unlock(&team->lock);
        if (stop) return NULL;
        do_part(team, seat.index);
        if (__atomic_sub_fetch(&team->left, 1, __ATOMIC_ACQ_REL) == 0) {
            pthread_mutex_lock(&team->lock);
            if (team->asleep) pthread_cond_signal(&team->end);
            pthread_mutex_unlock(&team->lock);
        }
    }
}

/* Call part(context, lo, hi) so that [0, n) is covered once, in equal parts; return when all are done. `watch`:
 * nanoseconds in which the threads look for the next call before they sleep. */
static void share(struct team *team, part_t part, void *context, int64_t n, int64_t watch) {
    if (!team) {
        part(context, 0, n);
        return;
    }
    pthread_mutex_lock(&team->lock);
    team->part = part, team->context = context, team->n = n, team->watch = watch;
    __atomic_store_n(&team->left, team->started, __ATOMIC_RELAXED);
    __atomic_store_n(&team->round, team->round + 1, __ATOMIC_RELEASE);
    if (team->sleeping) pthread_cond_broadcast(&team->begin);
    pthread_mutex_unlock(&team->lock);
    do_part(team, 0);
    look(&team->left, 0, 0, MOMENT);
    if (!__atomic_load_n(&team->left, __ATOMIC_ACQUIRE)) return;
    pthread_mutex_lock(&team->lock);
    team->asleep = 1;
    while (__atomic_load_n(&team->left, __ATOMIC_ACQUIRE)) pthread_cond_wait(&team->end, &team->lock);
    team->asleep = 0;
    pthread_mutex_unlock(&team->lock);
}

void tandem_dismiss(struct team *team) {
    pthread_mutex_lock(&team->lock);
    team->stop = 1;
    pthread_cond_broadcast(&team->begin);
    pthread_mutex_unlock(&team->lock);
    for (int64_t i = 0; i < team->started; i++) pthread_join(team->thread[i], NULL);
    pthread_mutex_destroy(&team->lock);
    pthread_cond_destroy(&team->begin);
    pthread_cond_destroy(&team->end);
    free(team->thread);
    free(team);
}

struct team *tandem_team(int64_t threads) {
    struct team *team = calloc(1, sizeof *team);
    if (!team) return NULL;
    team->thread = calloc((size_t)threads, sizeof *team->thread);
    if (!team->thread) {
        free(team);
        return NULL;
    }
    team->threads = threads;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->begin, NULL);
    pthread_cond_init(&team->end, NULL);
    for (int64_t i = 1; i < threads; i++) {
        struct seat *seat = malloc(sizeof *seat);
        if (seat) *seat = (struct seat){team, i};
        if (!seat || pthread_create(&team->thread[i - 1], NULL, sit, seat)) {
            free(seat);
            tandem_dismiss(team);
            return NULL;
        }
        team->started++;
    }
    return team;
}

#endif
