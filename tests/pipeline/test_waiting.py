"""The order of those who wait: fair to clients, and nobody is lost or served twice."""

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
    """As much of a job as the order looks at."""

    client: bytes
    arrival: float = field(default_factory=lambda: float(next(ARRIVALS)))
    admission: int = -1


def room_of(clients: str) -> tuple[FairQueue, list[Waiting]]:
    """JobFactory in the order of arrival, a letter for each one's client."""
    room, jobs = FairQueue(), [Waiting(letter.encode()) for letter in clients]
    for job in jobs:
        room.add(job)
    return room, jobs


def letters(jobs) -> str:
    return "".join(job.client.decode() for job in jobs)


def test_a_flood_delays_mostly_itself() -> None:
    room, jobs = room_of("aaaaaaaabc")
    assert letters(room.in_order([])) == "abcaaaaaaa"
    assert letters(room.in_order([Waiting(b"a")])) == "bcaaaaaaaa"
    assert letters(room.in_order([Waiting(b"b"), Waiting(b"b")])) == "acabaaaaaa"
    assert len(room) == 10
    assert room.of(b"a") == 8
    room.remove(jobs[0])
    assert next(room.in_order([])) is jobs[1]


def test_who_was_served_last_lets_others_go_first() -> None:
    """One at a time: while the flood of one client goes on, later clients have their turns."""
    room, _ = room_of("aaaaa")
    served = ""
    for newcomer in ("b", "", "cb", ""):
        for letter in newcomer:
            room.add(Waiting(letter.encode()))
        for _ in range(2):
            job = next(room.in_order([]))
            room.admit(job)
            served += job.client.decode()
    assert served == "abaacbaa"


def test_who_had_to_make_way_comes_before_its_client_s_others() -> None:
    room, _ = room_of("aab")
    third = Waiting(b"a", arrival=-1.0, admission=5)
    first = Waiting(b"a", arrival=-2.0, admission=3)
    room.add(third)
    room.add(first)
    order = list(room.in_order([]))
    assert letters(order) == "abaaa"
    assert [job for job in order if job.client == b"a"][:2] == [first, third]
    assert next(room.in_order([Waiting(b"a")])).client == b"b"  # others are not kept out by what comes back
    room.remove(first)
    assert next(job for job in room.in_order([]) if job.client == b"a") is third
    assert len(room) == 4


@given(st.text("abcd", max_size=30), st.text("abcd", max_size=6), st.integers(1, 4))
def test_every_request_once_and_each_client_in_its_own_order(waiting: str, running: str, slots: int) -> None:
    room, jobs = room_of(waiting)
    order = list(room.in_order([Waiting(letter.encode()) for letter in running]))
    assert sorted(map(id, order)) == sorted(map(id, jobs))
    for client in "abcd":
        own = [job for job in jobs if job.client == client.encode()]
        assert [job for job in order if job.client == client.encode()] == own
    busy = Counter(running)
    for place, job in enumerate(order):  # nobody with fewer running waits behind
        later = {j.client.decode() for j in order[place:]}
        letter = job.client.decode()
        assert busy[letter] == min(busy[other] for other in later)
        busy[letter] += 1
