"""Copies at an emulated link's pace, on a clock that the tests provide."""

from __future__ import annotations

import numpy as np
import pytest

from protocol.messages import I32Vector
from shm.layout import Bytes
from workers.copiers import PacedCopier, paced


class Clock:
    """Stands in for the module time."""

    def __init__(self) -> None:
        self.now, self.naps = 100.0, list[float]()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


class Immediate:
    """A copier whose copies take no time."""

    depth, gather_depth, notes, flags, locked = 5, 3, ("a note",), True, (4, 8)

    def __init__(self) -> None:
        self.calls = list[object]()

    def start(self, tile: Bytes, slot: int, number: int = 0) -> None:
        assert number == 0  # an emulated link's flags would be written too early
        self.calls.append(slot)

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        self.calls.append((slot, place, len(chosen)))

    def finish(self) -> int:
        self.calls.append("finish")
        return 1

    def close(self) -> None:
        self.calls.append("close")


def test_paced_copies_take_the_links_time_one_after_the_other_and_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, inner, ticks = Clock(), Immediate(), list[float]()
    monkeypatch.setattr("workers.copiers.time", clock)
    monkeypatch.setattr("workers.emulation.time", clock)
    copier = paced(inner, 1e-6, lambda: ticks.append(clock.now))  # 1000 bytes a second
    assert isinstance(copier, PacedCopier)
    assert (copier.depth, copier.gather_depth, copier.notes, copier.locked) == (5, 3, ("a note",), (4, 8))
    tile = np.zeros(1250, np.uint8)
    assert not copier.flags
    copier.start(tile, 7, 2)
    copier.start(tile, 8)
    assert clock.now == 100
    copier.finish()
    assert (clock.now, clock.naps, ticks) == (101.25, [0.5, 0.5, 0.25], [100.5, 101, 101.25])
    clock.now = 102  # late: the second copy is due at 102.5 all the same
    copier.finish()
    assert (clock.now, ticks[3:]) == (102.5, [102.5])
    clock.now = 110  # idle time is not saved up
    copier.start(tile, 9)
    copier.finish()
    assert clock.now == 111.25
    copier.gather(tile.reshape(10, 125), np.array([3, 5], np.int32), 4, 2)  # 250 of the bytes
    copier.finish()
    assert clock.now == 111.5
    copier.close()
    assert inner.calls == [7, 8, "finish", "finish", 9, "finish", (4, 2, 2), "finish", "close"]
    assert paced(inner, None, lambda: None) is inner


def test_chunks_are_gathered_while_the_link_moves_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the emulated link never idles: neither for the time of gathering nor for late awakenings."""

    class Late(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds + 0.05)

    class Gathering(Immediate):
        gather_depth = 1

        def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
            clock.now += 0.15

    clock = Late()
    monkeypatch.setattr("workers.copiers.time", clock)
    monkeypatch.setattr("workers.emulation.time", clock)
    copier = paced(Gathering(), 1e-6, lambda: None)
    under_way, records = 0, np.zeros((10, 125), np.uint8)
    for _ in range(20):
        copier.gather(records, np.array([3, 5], np.int32), 0, 0)  # a quarter of a second
        under_way += 1
        if under_way == copier.gather_depth:
            under_way -= copier.finish()
    while under_way:
        under_way -= copier.finish()
    assert 20 * 0.25 <= clock.now - 100 < 20 * 0.25 + 0.3
