"""What each account's requests hold, and how many they are. Changed by the engine's thread alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pipeline.accounts import ID_BYTES, LOCAL, Held, account_of
from pipeline.counters import difference
from pipeline.errors import RequestError
from pipeline.scheduling.jobs import Job

JOB_BYTES = 4096  # of a request beside its tokens


class AccountBook:
    """The waiting and running requests of all accounts."""

    def __init__(self) -> None:
        self._held = Held()
        self._sizes: dict[Job, int] = {}
        self._live: Counter[bytes] = Counter()  # by account
        self._ended: Counter[bytes] = Counter()  # by account

    def add(self, job: Job) -> None:
        """Raises RequestError where the requests of its client, its account or all would hold too much."""
        size = JOB_BYTES + ID_BYTES * len(job.tokens)
        if not self._held.take(job.client, size):
            raise RequestError("too many tokens are already queued; try again later")
        self._sizes[job] = size
        self._live[account_of(job.client)] += 1

    def remove(self, job: Job) -> None:
        """A request has ended."""
        self._held.give_back(job.client, self._sizes.pop(job))
        self._live[account_of(job.client)] -= 1
        self._ended[account_of(job.client)] += 1

    def requests_of(self, account: bytes, running: Iterable[Job]) -> dict[str, int]:
        """The numbers of an account's requests. Any thread may call it, with a copy of `running`."""
        runs = sum(account_of(job.client) == account for job in running)
        waiting = max(self._live[account] - runs, 0)
        return {"waiting": waiting, "running": runs, "ended": self._ended[account]}


def counted_for(job: Job, now: dict[str, Any]) -> dict[str, Any] | None:
    """What the engine counted during a job that has begun; `now`: a snapshot. None for a remote client's job
    that did not run alone: the holder of a key sees no activity of others."""
    counted = difference(now, job.counters_before)
    alone = sum(phase["rows"] for phase in counted.values()) == job.computed
    return counted if alone or account_of(job.client) == LOCAL else None
