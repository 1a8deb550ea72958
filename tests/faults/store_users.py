"""Many short processes that use one store as engines do: sweep, build or attach, take a lease, be killed.

    python store_users.py FINGERPRINT USERS SEED ROOT...

More than USERS are started, at most MOST times as many, until more than a fifth of USERS are done and as many
are killed. Prints one JSON object: the number of users by their end, among them `lost`: the leased store was
removed or replaced. It is a separate process, because it forks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from shm.errors import SegmentMissing, StoreInvalid
from shm.layout import ExpertShape
from shm.locks import StoreLease, build_lock, remove_unused, sweep
from shm.store import Store, StoreBuilder, StoreManifest, store_name

AT_ONCE = 4
MOST = 5
TRIES = 10  # the last user of a store may remove it between two steps of a start
DONE, LOST, NO_STORE, BROKEN = 0, 10, 11, 12  # exit codes of a user
SHAPE = ExpertShape(2, 3, 48, 100, 16)


def have_store(fingerprint: str, pause: float) -> None:
    """Build or attach the store, as a loader does."""
    with build_lock(fingerprint):
        try:
            Store.attach(store_name(fingerprint), fingerprint).close()
            return
        except SegmentMissing:
            pass
        except StoreInvalid:  # a builder was killed
            if not remove_unused(store_name(fingerprint)):
                raise
        builder = StoreBuilder.create(store_name(fingerprint), StoreManifest(fingerprint, SHAPE, "f32", ""))
        time.sleep(pause)
        builder.finish()


def use(fingerprint: str, chance: random.Random) -> int:
    """Use the store as one engine does; returns the exit code."""
    sweep()
    for _ in range(TRIES):
        have_store(fingerprint, chance.uniform(0, 0.02))
        try:
            lease = StoreLease.acquire(fingerprint)
        except SegmentMissing:
            continue
        break
    else:
        return NO_STORE
    segment = Path("/dev/shm") / store_name(fingerprint)[1:]
    first = segment.stat().st_ino
    until = time.monotonic() + chance.uniform(0, 0.05)
    while time.monotonic() < until:
        if not segment.exists() or segment.stat().st_ino != first:
            return LOST
        Store.attach(store_name(fingerprint), fingerprint).close()
        time.sleep(0.001)
    lease.release(keep=chance.random() < 0.1)
    return DONE


def fork_user(fingerprint: str, seed: int) -> int:
    """Fork one user; returns its process id."""
    pid = os.fork()
    if pid == 0:
        code = BROKEN
        try:
            code = use(fingerprint, random.Random(seed))
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", file=sys.stderr)
        finally:
            os._exit(code)
    return pid


def main() -> None:
    fingerprint, users, seed = sys.argv[1:]
    chance = random.Random(int(seed))
    ends: Counter[str] = Counter()
    names = {DONE: "done", LOST: "lost", NO_STORE: "no_store", BROKEN: "broken", -signal.SIGKILL: "killed"}
    running: dict[int, float] = {}  # process id -> time at which it is killed
    started = 0

    def enough() -> bool:
        """How many users are killed before they are done depends on the machine's pace."""
        of_each = min(ends["done"], ends["killed"])
        return started >= int(users) and (of_each > int(users) // 5 or started >= MOST * int(users))

    while running or not enough():
        while not enough() and len(running) < AT_ONCE:
            pid = fork_user(fingerprint, chance.randrange(1 << 32))
            killed = chance.random() < 0.5
            running[pid] = time.monotonic() + (chance.uniform(0, 0.08) if killed else 1e9)
            started += 1
        for pid, moment in list(running.items()):
            if time.monotonic() >= moment:
                os.kill(pid, signal.SIGKILL)
                running[pid] = 1e18
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                ends[names.get(os.waitstatus_to_exitcode(status), "other")] += 1
        time.sleep(0.0005)
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
