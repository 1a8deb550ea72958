"""ProgressWatch: only time in which the child was watched and stood still counts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from pipeline.experts import progress
from pipeline.experts.progress import STALL_SLICE, LockProgress, ProgressWatch


def test_seconds_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watch = ProgressWatch()

    def stalled(after: float, ticks: int) -> float:
        now[0] += after
        return watch.stalled(ticks)

    assert stalled(0, 0) == 0.0
    assert stalled(0.04, 0) == pytest.approx(0.04)
    assert stalled(0.05, 0) == pytest.approx(0.09)
    assert stalled(60, 0) == pytest.approx(0.09 + STALL_SLICE)  # this process stood still itself
    assert stalled(0.05, 1) == 0.0
    assert stalled(0.03, 1) == pytest.approx(0.03)
    watch.reset()
    assert stalled(0.05, 1) == 0.0
    assert stalled(0.02, 1) == pytest.approx(0.02)


def test_page_locking_is_said_now_and_then_and_at_the_end(monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    locks = LockProgress()
    assert locks.stats() == {}
    for second in range(1, 26):
        now[0] = 100.0 + second
        locks.report(second * 10**9, 25 * 10**9)
    assert locks.stats() == {"locked_bytes": 25 * 10**9, "lockable_bytes": 25 * 10**9}
    now[0] = 200.0
    locks.report(0, 4 * 10**9)  # another prefetcher
    now[0] = 201.0
    locks.report(4 * 10**9, 4 * 10**9)
    found = [re.findall(r"\d+", record.message) for record in caplog.records]
    assert found == [
        ["11", "00", "25", "00", "11"],
        ["22", "00", "25", "00", "22"],
        ["25", "00", "25", "00", "25"],
        ["4", "00", "4", "00", "1"],
    ]
