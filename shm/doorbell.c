/* Numbers and doorbells in memory that two processes map; `ring.py` says which. A doorbell has one process that rings it
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
    uint32_t sleeping; /* 1 while the waiting process may sleep */
};

int tandem_doorbell_version(void) { return 1; }

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* The number, and everything that its writer had written before it. */
int64_t tandem_load(const int64_t *number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }

void tandem_store(int64_t *number, int64_t value) { __atomic_store_n(number, value, __ATOMIC_RELEASE); }

void tandem_ring(struct doorbell *bell) {
    /* Sequentially consistent, like the waiter's writing of `sleeping` and its reading of `rings` in the kernel: one of
     * the two sees the other's. */
    __atomic_add_fetch(&bell->rings, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&bell->sleeping, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &bell->rings, FUTEX_WAKE, 1, 0, 0, 0);
}

/* Wait until `rings` is not `seen`: for `spin` nanoseconds awake, then asleep, `limit` nanoseconds in all. Returns
 * `rings`. A waiter that is awake offers its core to other threads again and again. */
uint32_t tandem_wait(struct doorbell *bell, uint32_t seen, int64_t spin, int64_t limit) {
    int64_t began = nanoseconds(), waited = 0;
    uint32_t rings;
    while ((rings = __atomic_load_n(&bell->rings, __ATOMIC_ACQUIRE)) == seen && waited < spin && waited < limit) {
        sched_yield();
        waited = nanoseconds() - began;
    }
    while (rings == seen && waited < limit) {
        int64_t rest = limit - waited;
        struct timespec timeout = {rest / 1000000000, rest % 1000000000};
        __atomic_store_n(&bell->sleeping, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &bell->rings, FUTEX_WAIT, seen, &timeout, 0, 0);
        __atomic_store_n(&bell->sleeping, 0, __ATOMIC_RELAXED);
        rings = __atomic_load_n(&bell->rings, __ATOMIC_ACQUIRE);
        waited = nanoseconds() - began;
    }
    return rings;
}
