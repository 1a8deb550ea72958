"""ProgressWatch: only time in which the child was watched and stood still counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeline.experts import progress
from pipeline.experts.progress import STALL_SLICE, ProgressWatch


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
