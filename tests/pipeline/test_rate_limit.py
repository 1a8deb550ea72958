"""The limits on answers and log lines, on a clock of the test."""

from __future__ import annotations

import logging

import pytest
from clock import Clock

from pipeline import rate_limit
from pipeline.rate_limit import RateLimiter, SparseLog, TimeShare


@pytest.fixture
def clock(clock, monkeypatch) -> Clock:
    monkeypatch.setattr(rate_limit, "time", clock)
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
