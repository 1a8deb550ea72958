"""What clients share: turns, memory, the queue of waiting requests; limits on answers and log lines."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from pipeline import fairness
from pipeline.fairness import ALL_BYTES, CLIENT_BYTES, Held, RateLimiter, SparseLog, TimeShare, Turns
from pipeline.scheduling.waiting_queue import WaitingQueue, to_preempt

ARRIVALS = count()


@dataclass(eq=False)
class Waiting:
    """The part of a job that determines the order."""

    client: bytes
    arrival: float = field(default_factory=lambda: float(next(ARRIVALS)))
    admission: int = -1
    grows: bool = True


def queue_of(clients: str) -> tuple[WaitingQueue, list[Waiting]]:
    """Jobs in the order of arrival; each letter is a job's client."""
    queue, jobs = WaitingQueue(), [Waiting(letter.encode()) for letter in clients]
    for job in jobs:
        queue.add(job)
    return queue, jobs


def letters(jobs) -> str:
    return "".join(job.client.decode() for job in jobs)


@given(st.lists(st.sets(st.sampled_from("abcd"), min_size=1), max_size=30))
def test_no_client_is_passed_over_twice_for_the_same_other_one(rounds: list[set[str]]) -> None:
    """Whoever else waits; also a client that waits only now and then gains nothing by that."""
    passed: dict[str, list[str]] = {name: [] for name in "abcd"}
    turns = Turns()
    for waiting in rounds:
        client = turns.next(name.encode() for name in sorted(waiting)).decode()
        assert client in waiting
        for other in "abcd":  # which of its rivals have had a turn while it waited
            passed[other] = [*passed[other], client] if other in waiting - {client} else []
            assert passed[other].count(client) <= 1


def test_client_that_begins_to_wait_is_behind_those_that_wait_and_before_the_latest_one() -> None:
    turns = Turns()
    assert turns.order([b"a", b"b"]) == [b"a", b"b"]
    assert turns.next([b"b", b"a", b"c"]) == b"a"
    assert turns.order([b"d", b"a", b"b", b"c"]) == [b"b", b"c", b"d", b"a"]
    assert turns.next([b"d", b"a"]) == b"d"
    assert turns.next([b"a", b"b", b"d"]) == b"a"  # b waits anew
    assert turns.order([b"d", b"b", b"a"]) == [b"b", b"d", b"a"]


def test_bytes_are_held_for_each_client_up_to_its_limit_and_that_of_all() -> None:
    held = Held()
    assert held.take(b"a", CLIENT_BYTES + 1)  # a single one may be larger
    assert not held.take(b"a", 1)
    assert held.take(b"a", 0)
    assert held.take(b"b", ALL_BYTES - CLIENT_BYTES - 1)
    assert not held.take(b"c", 1)
    held.give_back(b"a", CLIENT_BYTES + 1)
    assert held.take(b"a", CLIENT_BYTES)
    assert not held.take(b"c", 2)


def test_flooding_client_delays_mostly_itself() -> None:
    queue, jobs = queue_of("aaaaaaaabc")
    assert letters(queue.in_order([])) == "abcaaaaaaa"
    assert letters(queue.in_order([Waiting(b"a")])) == "bcaaaaaaaa"
    assert letters(queue.in_order([Waiting(b"b"), Waiting(b"b")])) == "acabaaaaaa"
    assert len(queue) == 10
    queue.remove(jobs[0])
    assert next(queue.in_order([])) is jobs[1]


def test_client_that_was_served_last_comes_last() -> None:
    """One admission at a time: later clients have their turns while one client floods, and none gains by
    asking again at once."""
    queue, _ = queue_of("aaaaa")
    served = ""
    for newcomers in ("b", "b", "cb", "b"):
        for letter in newcomers:
            queue.add(Waiting(letter.encode()))
        for _ in range(2):
            job = next(queue.in_order([]))
            queue.admit(job)
            served += job.client.decode()
    assert served == "ababacba"


def test_preempted_request_comes_before_its_client_s_others() -> None:
    queue, _ = queue_of("aab")
    third = Waiting(b"a", arrival=-1.0, admission=5)
    first = Waiting(b"a", arrival=-2.0, admission=3)
    queue.add(third)
    queue.add(first)
    order = list(queue.in_order([]))
    assert letters(order) == "abaaa"
    assert [job for job in order if job.client == b"a"][:2] == [first, third]
    # A preempted request does not block another client.
    assert next(queue.in_order([Waiting(b"a")])).client == b"b"
    queue.remove(first)
    assert next(job for job in queue.in_order([]) if job.client == b"a") is third
    assert len(queue) == 4


@given(st.text("abcd", max_size=30), st.text("abcd", max_size=6))
def test_every_request_once_and_in_its_client_s_order(waiting: str, running: str) -> None:
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


def test_newest_request_of_the_client_with_most_is_preempted_unless_it_cannot_grow() -> None:
    a, b, c = ([Waiting(name), Waiting(name)] for name in (b"a", b"b", b"c"))
    assert to_preempt([*a, *b, Waiting(b"a")]).client == b"a"
    assert to_preempt([a[0], b[0], a[1], b[1]]) is b[1]
    for job in b:
        job.grows = False
    assert to_preempt([*a, *b]) is a[1]
    assert to_preempt([*b, a[0], c[0]]) is None


# --- rates --------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(clock, monkeypatch) -> Clock:
    monkeypatch.setattr(fairness, "time", clock)
    return clock


def test_each_second_has_its_own_limit(clock: Clock) -> None:
    limiter = RateLimiter(3)
    assert [limiter.spend() for _ in range(5)] == [True, True, True, False, False]
    clock.now += 0.99
    assert not limiter.spend()
    clock.now += 0.01
    assert [limiter.spend(cost) for cost in (2, 1, 1)] == [True, True, False]
    clock.now += 1.0
    assert [limiter.spend(cost) for cost in (4, 1)] == [False, False]


def test_time_share_waits_until_the_burst_is_earned_again(clock: Clock) -> None:
    share = TimeShare(0.1, burst=2.0)
    share.spend(1.5)
    assert share.wait == 0.0
    share.spend(1.0)
    assert share.wait == pytest.approx(25.0)
    clock.now += 6.0
    assert share.wait == 0.0
    clock.now += 1000.0  # no more than the burst is saved
    share.spend(2.1)
    assert share.wait == pytest.approx(21.0)


def test_lines_beyond_the_limit_are_counted_in_the_next_one(clock: Clock, caplog) -> None:
    sparse = SparseLog(logging.getLogger("a test"), limit=2)
    for number in range(5):
        sparse.warning(f"line {number}")
    clock.now += 1.0
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        sparse.warning("line 5", failed=True)
    sparse.warning("line 6")
    left_out = "line 5 (3 more lines like this were left out)"
    assert [record.getMessage() for record in caplog.records] == ["line 0", "line 1", left_out, "line 6"]
    assert [bool(record.exc_info) for record in caplog.records] == [False, False, True, False]
