"""Which running request has the next prefill chunk, and which is preempted for an account or client without
one: fair to accounts first, then to the clients of each. Used by the engine's thread alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from pipeline.accounts import account_of
from pipeline.scheduling.jobs import Job


class PrefillTurns:
    """One prefill chunk at a time."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._last: dict[bytes, int] = {}  # by running client and account: the number of its last turn

    def next(self, ready: Sequence[Job], running: Sequence[Job]) -> list[Job]:
        """The job of `ready` to prefill next, if any: the oldest one of the client with the earliest last
        turn, in the account with the earliest last turn."""
        prefilling, last = [job for job in ready if job.prefilling], self._last
        if not prefilling:
            return []
        job = min(prefilling, key=lambda j: (last.get(account_of(j.client), -1), last.get(j.client, -1)))
        kept = {name for j in running for name in (j.client, account_of(j.client))}
        self._last = {name: number for name, number in last.items() if name in kept}
        self._last[job.client] = self._last[account_of(job.client)] = next(self._numbers)
        return [job]


def to_preempt(running: Sequence[Job], client: bytes) -> Job | None:
    """The job that gives its place to `client`, which has none of `running`. Where its account has none
    either, the newest of the heaviest client of the account with most of them, at least two; else the newest
    of the client with most of them in this account, at least two. None without such."""
    of_accounts = Counter(account_of(job.client) for job in running)
    of_clients = Counter(job.client for job in running)
    account = account_of(client)
    growing = [job for job in running if job.grows]
    if account in of_accounts:
        candidates = [j for j in growing if account_of(j.client) == account and of_clients[j.client] >= 2]
    else:
        most = max((of_accounts[account_of(job.client)] for job in growing), default=0)
        candidates = [j for j in growing if of_accounts[account_of(j.client)] == most >= 2]
    return max(candidates, key=lambda j: (of_clients[j.client], running.index(j)), default=None)
