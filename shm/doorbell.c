/* Numbers and doorbells in memory that two processes map; `lane.py` says which. A doorbell has one process that rings it
 * and one that waits for it. The waiting one may be killed at any instruction: the other then makes a system call too
 * many. If the ringing one is, a wait ends at its limit. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct doorbell {
    uint32_t rings;    /* counted by the ringing process; wraps */
    uint32_t sleeping; /* while the waiting process may sleep: 1 + its core; else 0 */
};

int tandem_doorbell_version(void) { return 4; }

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* The number, and everything that its writer had written before it. */
int64_t tandem_load(const int64_t *number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }

void tandem_store(int64_t *number, int64_t value) { __atomic_store_n(number, value, __ATOMIC_RELEASE); }

/* Of `count` numbers, each `step` bytes after the one before, the index of the smallest above `after`; -1 if there is
 * none. Everything that its writer had written before it. */
int64_t tandem_next(const char *first, int64_t step, int64_t count, int64_t after) {
    int64_t found = -1, least = INT64_MAX;
    for (int64_t i = 0; i < count; i++) {
        int64_t number = tandem_load((const int64_t *)(first + i * step));
        if (number > after && number < least) found = i, least = number;
    }
    return found;
}

static void wake(struct doorbell *bell) { syscall(SYS_futex, &bell->rings, FUTEX_WAKE, 1, 0, 0, 0); }

/* Ring doorbells. A process that sleeps on the caller's core is woken last: it may run there at once, and the caller and
 * its other calls would wait for it. */
void tandem_ring(struct doorbell *const *bells, int64_t number) {
    uint32_t here = (uint32_t)sched_getcpu() + 1;
    uint64_t later = 0; /* a bit for each of the first 64 */
    for (int64_t i = 0; i < number; i++) {
        /* Sequentially consistent, like the waiter's writing of `sleeping` and its reading of `rings` in the kernel: one
         * of the two sees the other's. */
        __atomic_add_fetch(&bells[i]->rings, 1, __ATOMIC_SEQ_CST);
        uint32_t sleeping = __atomic_load_n(&bells[i]->sleeping, __ATOMIC_SEQ_CST);
        if (sleeping == here && i < 64)
            later |= 1ull << i;
        else if (sleeping)
            wake(bells[i]);
    }
    for (int64_t i = 0; later; i++, later >>= 1)
        if (later & 1) wake(bells[i]);
}

/* Ring the doorbells of the processes that sleep on other cores than the caller's, which will soon have work for them.
 * Returns the index of the first that sleeps on the caller's core, -1 where none does. */
int64_t tandem_rouse(struct doorbell *const *bells, int64_t number) {
    uint32_t here = (uint32_t)sched_getcpu() + 1;
    int64_t beside = -1;
    for (int64_t i = 0; i < number; i++) {
        uint32_t sleeping = __atomic_load_n(&bells[i]->sleeping, __ATOMIC_SEQ_CST);
        if (sleeping == here) {
            if (beside < 0) beside = i;
        } else if (sleeping) {
            __atomic_add_fetch(&bells[i]->rings, 1, __ATOMIC_SEQ_CST);
            wake(bells[i]);
        }
    }
    return beside;
}

/* Wait until `rings` is not `seen`, `limit` nanoseconds at most. Returns `rings`. For the first `spin` nanoseconds the
 * caller stays awake, but offers its core to other threads all the time. */
uint32_t tandem_wait(struct doorbell *bell, uint32_t seen, int64_t spin, int64_t limit) {
    int64_t began = nanoseconds(), waited = 0;
    uint32_t rings;
    while ((rings = __atomic_load_n(&bell->rings, __ATOMIC_ACQUIRE)) == seen && waited < limit) {
        if (waited < spin) {
            sched_yield();
        } else {
            int64_t rest = limit - waited;
            struct timespec timeout = {rest / 1000000000, rest % 1000000000};
            __atomic_store_n(&bell->sleeping, (uint32_t)sched_getcpu() + 1, __ATOMIC_SEQ_CST);
            syscall(SYS_futex, &bell->rings, FUTEX_WAIT, seen, &timeout, 0, 0);
            __atomic_store_n(&bell->sleeping, 0, __ATOMIC_RELAXED);
        }
        waited = nanoseconds() - began;
    }
    return rings;
}
