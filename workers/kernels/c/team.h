/* Threads that share one computation. The caller does its part and then watches for the others a few
 * microseconds before it sleeps; they sleep as soon as they have nothing to do: expert workers need the cores. */
#ifndef TANDEM_TEAM_H
#define TANDEM_TEAM_H

#include "kernels.h"

#include <pthread.h>
#include <stdlib.h>

typedef void (*part_t)(void *context, int64_t lo, int64_t hi);

enum { GLANCES = 2000 }; /* looks at the others' end before the caller sleeps: some ten microseconds */

struct team {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    int64_t threads, started; /* `started`: beside the caller */
    int64_t round;            /* counts the computations */
    int64_t left;             /* threads that have not finished this round; atomic */
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

static void *sit(void *given) {
    struct seat seat = *(struct seat *)given;
    struct team *team = seat.team;
    free(given);
    int64_t done = 0;
    pthread_mutex_lock(&team->lock);
    for (;;) {
        while (team->round == done && !team->stop) pthread_cond_wait(&team->begin, &team->lock);
        if (team->stop) break;
        done = team->round;
        pthread_mutex_unlock(&team->lock);
        do_part(team, seat.index);
        pthread_mutex_lock(&team->lock);
        if (__atomic_sub_fetch(&team->left, 1, __ATOMIC_RELEASE) == 0 && team->asleep) pthread_cond_signal(&team->end);
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

/* Call part(context, lo, hi) so that [0, n) is covered once, in equal parts; return when all are done. */
static void share(struct team *team, part_t part, void *context, int64_t n) {
    if (!team || n < 2) {
        part(context, 0, n);
        return;
    }
    pthread_mutex_lock(&team->lock);
    team->part = part, team->context = context, team->n = n;
    __atomic_store_n(&team->left, team->started, __ATOMIC_RELAXED);
    team->round++;
    pthread_cond_broadcast(&team->begin);
    pthread_mutex_unlock(&team->lock);
    do_part(team, 0);
    for (int i = 0; i < GLANCES && __atomic_load_n(&team->left, __ATOMIC_ACQUIRE); i++)
        __asm__ volatile("" ::: "memory");
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
