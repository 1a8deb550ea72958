"""FairQueue: fair to clients, and every request exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from pipeline.scheduling.fair_queue import FairQueue

ARRIVALS = count()


@dataclass(eq=False)
class Waiting:
    """The part of a job that determines the order."""

    client: bytes
    arrival: float = field(default_factory=lambda: float(next(ARRIVALS)))
    admission: int = -1


def queue_of(clients: str) -> tuple[FairQueue, list[Waiting]]:
    """Jobs in the order of arrival; each letter is a job's client."""
    queue, jobs = FairQueue(), [Waiting(letter.encode()) for letter in clients]
    for job in jobs:
        queue.add(job)
    return queue, jobs


def letters(jobs) -> str:
    return "".join(job.client.decode() for job in jobs)


def test_flooding_client_delays_mostly_itself() -> None:
    queue, jobs = queue_of("aaaaaaaabc")
    assert letters(queue.in_order([])) == "abcaaaaaaa"
    assert letters(queue.in_order([Waiting(b"a")])) == "bcaaaaaaaa"
    assert letters(queue.in_order([Waiting(b"b"), Waiting(b"b")])) == "acabaaaaaa"
    assert len(queue) == 10
    assert queue.of(b"a") == 8
    queue.remove(jobs[0])
    assert next(queue.in_order([])) is jobs[1]


def test_client_that_was_served_last_comes_last() -> None:
    """One admission at a time: later clients have their turns while one client floods."""
    queue, _ = queue_of("aaaaa")
    served = ""
    for newcomer in ("b", "", "cb", ""):
        for letter in newcomer:
            queue.add(Waiting(letter.encode()))
        for _ in range(2):
            job = next(queue.in_order([]))
            queue.admit(job)
            served += job.client.decode()
    assert served == "abaacbaa"


def test_turn_of_a_client_without_waiting_requests_is_forgotten() -> None:
    queue, jobs = queue_of("a")
    queue.admit(jobs[0])
    for letter in ("a", "b"):
        queue.add(Waiting(letter.encode()))
    assert letters(queue.in_order([])) == "ab"  # by arrival: neither has had a turn


def test_preempted_request_comes_before_its_client_s_others() -> None:
    queue, _ = queue_of("aab")
    third = Waiting(b"a", arrival=-1.0, admission=5)
    first = Waiting(b"a", arrival=-2.0, admission=3)
    queue.add(third)
    queue.add(first)
    order = list(queue.in_order([]))
    assert letters(order) == "abaaa"
    assert [job for job in order if job.client == b"a"][:2] == [first, third]
    assert (
        next(queue.in_order([Waiting(b"a")])).client == b"b"
    )  # a preempted request does not block another client
    queue.remove(first)
    assert next(job for job in queue.in_order([]) if job.client == b"a") is third
    assert len(queue) == 4


def test_account_with_many_clients_delays_mostly_itself() -> None:
    """Eight clients of one key, and one of another account; within an account its clients take turns."""
    names = {"x": b"other\0x"} | {letter: b"key\0" + letter.encode() for letter in "abcdefgh"}
    queue = FairQueue()
    for letter in "aabcdefghxx":
        queue.add(Waiting(names[letter]))

    def order(running: str) -> str:
        return "".join(j.client[-1:].decode() for j in queue.in_order([Waiting(names[r]) for r in running]))

    assert order("") == "axbxcdefgha"
    assert order("abc").startswith("xxd")
    assert order("xxxx").startswith("abcdx")
    assert queue.of(names["a"]) == 9  # of a remote client its account's
    for _ in range(3):  # the account that was served last comes last
        queue.admit(next(queue.in_order([])))
    assert order("").startswith("xc")


@given(st.text("abcd", max_size=30), st.text("abcd", max_size=6), st.integers(1, 4))
def test_every_request_once_and_in_its_client_s_order(waiting: str, running: str, slots: int) -> None:
    queue, jobs = queue_of(waiting)
    order = list(queue.in_order([Waiting(letter.encode()) for letter in running]))
    assert sorted(map(id, order)) == sorted(map(id, jobs))
    for client in "abcd":
        own = [job for job in jobs if job.client == client.encode()]
        assert [job for job in order if job.client == client.encode()] == own
    busy = Counter(running)
    for place, job in enumerate(order):  # no client with fewer running requests waits behind
        later = {j.client.decode() for j in order[place:]}
        letter = job.client.decode()
        assert busy[letter] == min(busy[other] for other in later)
        busy[letter] += 1
