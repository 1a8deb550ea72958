"""Copies within host memory, and the emulated link that two processes share, on a clock of the tests."""

from __future__ import annotations

import pytest

from shm.control import ControlSegment
from shm.slab import Slab
from shm.store import Store, store_name
from workers.copiers import EmulatedLink, HostCopier, TileCopy


class Clock:
    """Stands in for the module time."""

    def __init__(self) -> None:
        self.now, self.naps = 100.0, list[float]()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("workers.copiers.time", clock)
    return clock


def links(control: ControlSegment, gbps: float) -> tuple[EmulatedLink, EmulatedLink]:
    """The coordinator's and the prefetcher's."""
    own, other = control.line("coordinator", 0), control.line("prefetcher", 0)
    return EmulatedLink(gbps, own, other), EmulatedLink(gbps, other, own)


def test_copies_of_two_processes_follow_each_other_on_one_link(clock: Clock, control: ControlSegment) -> None:
    coordinator, prefetcher = links(control, 1e-6)  # 1000 bytes a second
    assert prefetcher.occupy(500) == (100.5, 0.5)
    assert coordinator.other_until == 100.5
    assert coordinator.occupy(1000) == (101.5, 1.0)  # behind the other one's
    assert coordinator.occupy(1000) == (102.5, 1.0)
    assert prefetcher.other_until == 102.5
    clock.now = 110.0  # idle time is not saved up
    assert coordinator.occupy(250) == (110.25, 0.25)


def test_paced_copies_take_the_links_time_and_tick(
    clock: Clock, control: ControlSegment, fingerprint: str, slab: Slab
) -> None:
    with Store.attach(store_name(fingerprint)) as store:
        link, _ = links(control, store.layout.tile_bytes / 1.25 / 1e9)  # a tile in 1.25 seconds
        copier, line = HostCopier(store, slab, link), control.line("coordinator", 0)
        first, second = (copier.begin([TileCopy(0, 1, tile, tile)]) for tile in range(2))
        assert clock.now == 100.0
        copier.ready(first)
        assert (clock.now, clock.naps, line.ticks) == (101.25, [0.5, 0.5, 0.25], 3)
        clock.now = 102.0  # late: the second copy is due at 102.5 all the same
        copier.ready(second)
        assert (clock.now, copier.copied) == (102.5, (2, 2.5))
