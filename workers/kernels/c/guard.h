/* A Work in a process that must go on where an expert worker would exit: in the coordinator. An instruction that crashes
 * ends the Work alone. Nothing has to be undone: without a team a computation holds no lock and allocates nothing. Part
 * of body.h. */
#pragma once

#include "descriptor.h"

#include <setjmp.h>
#include <signal.h>

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
