"""The queue of requests that wait to be admitted, in an order that is fair to clients. Used by the engine's
thread alone."""

from __future__ import annotations

import functools
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from pipeline.fairness import Turns
from pipeline.scheduling.jobs import Job

POSITION_SECONDS = 0.5  # between two reports of queue positions
Paused = Callable[[bytes], bool]  # whether a client does not read its messages


class WaitingQueue:
    """The waiting jobs. Next is one of the client with the fewest running jobs; of several such clients, of
    the one whose turn it is. A client's jobs are in their order, a preempted one before those that have not
    begun."""

    def __init__(self) -> None:
        self._jobs: dict[bytes, list[Job]] = {}  # by client, none of them empty
        self._turns = Turns()
        self._reported = 0.0  # when positions were last reported

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

    def next(
        self, running: Collection[Job], awaits: Callable[[Job, Collection[Job]], bool], paused: Paused
    ) -> Job | None:
        """Returns the job to be admitted next: of a client that is not `paused`, if there is one. Those that
        await another one's prefill are left out."""
        for left_out in (paused, lambda client: False):
            for job in self.in_order(running):
                if not left_out(job.client) and not awaits(job, running):
                    return job
        return None

    def report(self, running: Collection[Job], paused: Paused) -> None:
        """Send the waiting jobs of clients that are not `paused` their positions, where they have changed;
        once in POSITION_SECONDS."""
        now = time.perf_counter()
        if not self._jobs or now - self._reported < POSITION_SECONDS:
            return
        self._reported = now
        paused = functools.cache(paused)
        order = sorted(self.in_order(running), key=lambda job: paused(job.client))
        for position, job in enumerate(order, start=1):
            if not paused(job.client):
                job.report_position(position)

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
