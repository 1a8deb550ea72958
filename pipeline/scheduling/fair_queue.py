"""The queue of requests that wait to be admitted, in an order that is fair to accounts, then to clients.

Next is a request of the account with the fewest running requests. Of several such accounts, the one with the
earliest last admission comes first (or the one that had none while its present requests wait), then the one
with the oldest request. Within an account the same decides between its clients; each client's requests are
in their order. So an account that floods the engine, from however many connections, delays mostly
itself. A preempted request comes before its client's others. Used by the engine's thread alone."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from pipeline.accounts import LOCAL, account_of
from pipeline.scheduling.jobs import Job


class FairQueue:
    """The waiting jobs."""

    def __init__(self) -> None:
        self._by_account: dict[bytes, dict[bytes, deque[Job]]] = {}  # by account and client, none empty
        # The turn of the last admission of a waiting client or account. No account is a client's name:
        # where one is, as in a test, it has that one client.
        self._turns: dict[bytes, int] = {}
        self._turn = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, job: Job) -> None:
        """Queue a new request, or one that was preempted."""
        clients = self._by_account.setdefault(account_of(job.client), {})
        jobs = clients.setdefault(job.client, deque())
        place = len(jobs)
        if job.admission >= 0:
            place = sum(0 <= other.admission < job.admission for other in jobs)
        jobs.insert(place, job)
        self._count += 1

    def admit(self, job: Job) -> None:
        """Remove a job that begins to run, and note the turn of its client and account."""
        self._turn += 1
        self._turns[job.client] = self._turns[account_of(job.client)] = self._turn
        self.remove(job)

    def remove(self, job: Job) -> None:
        """Remove a job that has ended."""
        account = account_of(job.client)
        clients = self._by_account[account]
        clients[job.client].remove(job)
        self._count -= 1
        if not clients[job.client]:
            del clients[job.client]
            self._turns.pop(job.client, None)
        if not clients:
            del self._by_account[account]
            self._turns.pop(account, None)

    def of(self, client: bytes) -> int:
        """The number of this client's waiting requests; of a remote one's, with its account's others."""
        clients = self._by_account.get(account_of(client), {})
        if account_of(client) == LOCAL:
            return len(clients.get(client, ()))
        return sum(map(len, clients.values()))

    def in_order(self, running: Iterable[Job]) -> Iterator[Job]:
        """All waiting jobs in the order of their admission, if none of `running` ended meanwhile."""
        busy = Counter(job.client for job in running)
        busy_accounts: Counter[bytes] = Counter()
        for client, count in busy.items():
            busy_accounts[account_of(client)] += count
        oldest = {a: min(jobs[0].arrival for jobs in c.values()) for a, c in self._by_account.items()}
        orders = {a: self._in_account(clients, busy) for a, clients in self._by_account.items()}
        return self._by_turns(orders, busy_accounts, oldest)

    def _in_account(self, clients: dict[bytes, deque[Job]], busy: Counter[bytes]) -> Iterator[Job]:
        oldest = {client: jobs[0].arrival for client, jobs in clients.items()}
        return self._by_turns({client: iter(list(jobs)) for client, jobs in clients.items()}, busy, oldest)

    def _by_turns(
        self, orders: dict[bytes, Iterator[Job]], busy: Counter[bytes], oldest: dict[bytes, float]
    ) -> Iterator[Job]:
        """The jobs of these clients, or of these accounts, each in its own order. `busy`: the numbers of
        their running jobs."""
        turns = itertools.count(self._turn + 1)
        heap = [(busy[name], self._turns.get(name, 0), oldest[name], name) for name in orders]
        heapq.heapify(heap)
        while heap:
            count, _, _, name = heapq.heappop(heap)
            job = next(orders[name], None)
            if job is not None:
                yield job
                heapq.heappush(heap, (count + 1, next(turns), 0.0, name))
