"""Who is served next: requests that wait for room, in an order that is fair to clients.

The next is the oldest request of the client that has the fewest running ones; of several such clients, the
one that was served longest ago, or never while its present requests wait; and then the one whose request came
first. A client that floods the engine so delays mostly itself. A request that was served already and had to
make way comes before its client's others. Used by the engine's thread alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from pipeline.scheduling.jobs import Job


class FairQueue:
    """The jobs that wait."""

    def __init__(self) -> None:
        self._by_client: dict[bytes, deque[Job]] = {}
        self._turns: dict[bytes, int] = {}  # of clients that wait: when one of their requests was admitted
        self._turn = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, job: Job) -> None:
        """A new request, or one that was running and had to make way."""
        jobs = self._by_client.setdefault(job.client, deque())
        place = len(jobs)
        if job.admission >= 0:
            place = sum(0 <= other.admission < job.admission for other in jobs)
        jobs.insert(place, job)
        self._count += 1

    def admit(self, job: Job) -> None:
        """It does not wait any more, and its client has had its turn."""
        self._turn += 1
        self._turns[job.client] = self._turn
        self.remove(job)

    def remove(self, job: Job) -> None:
        """It has ended."""
        jobs = self._by_client[job.client]
        jobs.remove(job)
        self._count -= 1
        if not jobs:
            del self._by_client[job.client]
            self._turns.pop(job.client, None)

    def of(self, client: bytes) -> int:
        """How many requests of this client wait."""
        return len(self._by_client.get(client, ()))

    def in_order(self, running: Iterable[Job]) -> Iterator[Job]:
        """All that wait, the next first, as they would be admitted if none of `running` ended."""
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
