"""The queue of requests that wait to be admitted, in an order that is fair to clients. Used by the engine's
thread alone."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pipeline.fairness import Turns
from pipeline.scheduling.jobs import Job


class WaitingQueue:
    """The waiting jobs. Next is one of the client with the fewest running jobs; of several such clients, of
    the one whose turn it is. A client's jobs are in their order, a preempted one before those that have not
    begun."""

    def __init__(self) -> None:
        self._jobs: dict[bytes, list[Job]] = {}  # by client, none of them empty
        self._turns = Turns()

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def add(self, job: Job) -> None:
        """Queue a new job, or one that was preempted."""
        jobs = self._jobs.setdefault(job.client, [])
        place = len(jobs)
        if job.admission >= 0:
            place = sum(0 <= other.admission < job.admission for other in jobs)
        jobs.insert(place, job)

    def admit(self, job: Job) -> None:
        """Remove a job that begins to run: its client has had its turn."""
        self._turns.take(job.client)
        self.remove(job)

    def remove(self, job: Job) -> None:
        """Remove a job that has ended."""
        self._jobs[job.client].remove(job)
        if not self._jobs[job.client]:
            del self._jobs[job.client]

    def in_order(self, running: Iterable[Job]) -> Iterator[Job]:
        """Yields all waiting jobs in the order of their admission, if none of `running` ended meanwhile."""
        busy = Counter(job.client for job in running)
        left = {client: iter(list(jobs)) for client, jobs in self._jobs.items()}
        places = itertools.count()
        heap = [(busy[client], next(places), client) for client in self._turns.order(self._jobs)]
        heapq.heapify(heap)
        while heap:
            count, _, client = heapq.heappop(heap)
            job = next(left[client], None)
            if job is not None:
                yield job
                heapq.heappush(heap, (count + 1, next(places), client))


def to_preempt(running: Sequence[Job]) -> Job | None:
    """Returns the job that gives its place to a client without one: the newest of the client with most of
    `running`. Returns None where no client has two that grow."""
    counts = Counter(job.client for job in running)
    candidates = [job for job in running if job.grows and counts[job.client] >= 2]
    return max(candidates, key=lambda job: (counts[job.client], running.index(job)), default=None)
