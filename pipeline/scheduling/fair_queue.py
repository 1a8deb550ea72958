"""The queue of requests that wait to be admitted, in an order that is fair to clients.

Next is the oldest request of the client with the fewest running requests. Of several such clients, the one
with the earliest last admission comes first (or the one that had none while its present requests wait), then
the one with the oldest request. So a client that floods the engine delays mostly itself. A preempted request
comes before its client's others. Used by the engine's thread alone."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from pipeline.scheduling.jobs import Job


class FairQueue:
    """The waiting jobs."""

    def __init__(self) -> None:
        self._by_client: dict[bytes, deque[Job]] = {}
        self._turns: dict[bytes, int] = {}  # by waiting client: the turn of its last admission
        self._turn = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, job: Job) -> None:
        """Queue a new request, or one that was preempted."""
        jobs = self._by_client.setdefault(job.client, deque())
        place = len(jobs)
        if job.admission >= 0:
            place = sum(0 <= other.admission < job.admission for other in jobs)
        jobs.insert(place, job)
        self._count += 1

    def admit(self, job: Job) -> None:
        """Remove a job that begins to run, and note its client's turn."""
        self._turn += 1
        self._turns[job.client] = self._turn
        self.remove(job)

    def remove(self, job: Job) -> None:
        """Remove a job that has ended."""
        jobs = self._by_client[job.client]
        jobs.remove(job)
        self._count -= 1
        if not jobs:
            del self._by_client[job.client]
            self._turns.pop(job.client, None)

    def of(self, client: bytes) -> int:
        """The number of this client's waiting requests."""
        return len(self._by_client.get(client, ()))

    def in_order(self, running: Iterable[Job]) -> Iterator[Job]:
        """All waiting jobs in the order of their admission, if none of `running` ended meanwhile."""
        busy = Counter(job.client for job in running)
        turns = itertools.count(self._turn + 1)
        last = self._turns
        heap = [(busy[c], last.get(c, 0), jobs[0].arrival, c, 0) for c, jobs in self._by_client.items()]
        heapq.heapify(heap)
        while heap:
            count, _, _, client, place = heapq.heappop(heap)
            jobs = self._by_client[client]
            yield jobs[place]
            place += 1
            if place < len(jobs):
                heapq.heappush(heap, (count + 1, next(turns), jobs[place].arrival, client, place))
