"""The order in which tiles cross the link: one script of orders on the tile mover with the prefetcher's loop,
and on the replay's cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, cast

import pytest
from pipeline.experts.demand_stream import DemandStream
from pipeline.experts.expert_cache import ExpertCache
from pipeline.experts.fetch_link import FetchLink
from pipeline.experts.tile_mover import TileMover

from pipeline.device.cpu import CpuDevice
from pipeline.experts.shares import Missing
from pipeline.policies.view import ModelShape, Target
from pipeline.replay.cache import SimulatedCache
from pipeline.replay.outcome import PhaseOutcome
from workers.prefetcher import CopyLoop

SHAPE = ModelShape(layers=2, experts=6, tiles=4, top_k=2)
CAPACITY, STAGING = 24, 12
LIMIT = 10.0  # seconds to wait for the loop
Tile = tuple[int, int, int]  # layer, expert, tile


class TickedLink:
    """The coordinator's socket, the prefetcher's endpoint, its store and its copier in one. The test says
    when the tile on the link has moved; the prefetcher's loop then runs until the next one moves, or it is
    idle."""

    depth = 1
    notes: tuple[str, ...] = ()
    locked = 0, 0
    incarnation = 0

    def __init__(self) -> None:
        self.stopped = False
        self.began: list[Tile] = []  # tiles in the order in which they begin to move
        self.ticks = 0
        self.thread: threading.Thread  # of the prefetcher's loop
        self._inbox: list[object] = []
        self._reports: list[object] = []
        self._moving = self._resting = self._ticked = False
        self._changed = threading.Condition()

    def tick(self) -> None:
        """A tile's time passes."""
        with self._changed:
            self.ticks += 1
            self._ticked = True
            self._let_run()

    @property
    def moving(self) -> bool:
        """Whether a tile is on the link."""
        return self._moving

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()
        self.thread.join(LIMIT)

    def is_up(self, index: int) -> bool:
        return True

    def send(self, *message: Any) -> None:
        """From the coordinator, with the child's index, or a report of the loop."""
        with self._changed:
            if len(message) == 1:
                self._reports.append(message[0])
                return
            self._inbox.append(message[1])
            if not self._moving:
                self._let_run()

    def receive(self, wait: int | bool) -> list[Any]:
        if threading.current_thread() is self.thread:
            return self._messages(bool(wait))
        if wait and not self._reports:
            self.tick()
        with self._changed:
            reports, self._reports = self._reports, []
            return [(0, report) for report in reports]

    def tiles(self, layer: int, expert: int, lo: int, hi: int) -> Any:
        return layer, expert, lo

    def start(self, tile: Any, slot: int, number: int) -> None:
        self.began.append(tile)
        self._moving = True

    def finish(self) -> int:
        with self._changed:
            self._rest(lambda: self._ticked)
            self._ticked = self._moving = False
        return 1

    def close(self) -> None:
        """Nothing is held."""

    def _messages(self, wait: bool) -> list[object]:
        with self._changed:
            if wait and not self._inbox:
                self._rest(lambda: bool(self._inbox))
            messages, self._inbox = self._inbox, []
            return messages

    def _rest(self, until: Callable[[], bool]) -> None:
        self._resting = True
        self._changed.notify_all()
        self._changed.wait_for(lambda: until() or self.stopped)

    def _let_run(self) -> None:
        self._resting = False
        self._changed.notify_all()
        assert self._changed.wait_for(lambda: self._resting, LIMIT)


@contextmanager
def ticked_mover() -> Iterator[tuple[TileMover, TickedLink]]:
    link = TickedLink()
    loop = CopyLoop(cast(Any, link), cast(Any, link), None, lambda: None)
    loop.attach(cast(Any, link))
    link.thread = threading.Thread(target=loop.serve, daemon=True)
    link.thread.start()
    device = CpuDevice()
    cache = ExpertCache(SHAPE.layers, SHAPE.experts, SHAPE.tiles, CAPACITY, CAPACITY + STAGING, device.fence)
    try:
        yield TileMover(cache, FetchLink(cast(Any, link), None, None), device), link
    finally:
        link.stop()


@dataclass(frozen=True)
class Script:
    """Targets that are predicted or placed, so many tiles' times, then a demand of layer 0. `landings`: the
    demanded tiles as they are given to the device: expert, and the tiles' times that it takes."""

    predicted: tuple[Target, ...]
    placed: tuple[Target, ...]
    ticks: int
    demand: tuple[Missing, ...]
    landings: list[tuple[int, int]]
    after: list[Tile]  # what moves behind the demanded tiles


SCRIPTS = {
    "a wrong guess behind a right one": Script(
        (Target(0, 1, 1), Target(0, 5, 1)),
        (),
        0,
        (Missing(1, 0, 1), Missing(2, 0, 1)),
        [(1, 1), (2, 2)],
        [(0, 5, 0)],
    ),
    "the rest of an expert that is moving": Script(
        (Target(0, 1, 4), Target(0, 5, 1)), (), 1, (Missing(1, 1, 4),), [(1, 1), (1, 2), (1, 3)], [(0, 5, 0)]
    ),
    "a wrong guess is moving": Script(
        (Target(0, 5, 2), Target(0, 1, 1)),
        (),
        0,
        (Missing(0, 0, 1), Missing(1, 0, 1)),
        [(1, 2), (0, 3)],
        [(0, 5, 1)],
    ),
    "predicted before placed": Script(
        (Target(0, 3, 1),),
        (Target(0, 1, 1), Target(0, 2, 1)),
        0,
        (Missing(1, 0, 1), Missing(3, 0, 2)),
        [(3, 1), (1, 2), (3, 3)],
        [(0, 2, 0)],
    ),
    "fewer tiles than were ordered": Script(
        (Target(0, 1, 4), Target(0, 5, 1)),
        (),
        0,
        (Missing(1, 0, 2), Missing(2, 0, 1)),
        [(1, 1), (1, 2), (2, 3)],
        [(0, 5, 0)],
    ),
    "nothing ordered": Script((), (), 0, (Missing(1, 0, 1), Missing(0, 0, 1)), [(1, 1), (0, 2)], []),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_engine_moves_demanded_tiles_before_waiting_predictions(script: Script) -> None:
    with ticked_mover() as (mover, link):
        mover.retarget(script.placed)
        mover.retarget(script.predicted, predicted=True)
        mover.fetch_missing()
        for _ in range(script.ticks):
            link.tick()
        mover.collect_landings()
        began, landings, unfetched = link.ticks, [], list[Missing]()
        for group in DemandStream(mover, 0, script.demand, unfetched).groups():
            landings += [(expert, link.ticks - began) for expert, _ in group]
        assert (landings, unfetched) == (script.landings, [])
        assert link.began[len(link.began) - len(script.after) :] == script.after


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_replay_moves_tiles_as_the_engine_does(script: Script) -> None:
    """A tile takes one second; the demand comes in the middle of one."""
    cache = SimulatedCache(SHAPE, CAPACITY, 1.0)
    cache.counters = PhaseOutcome(SHAPE.layers)
    cache.retarget(script.placed)
    cache.retarget(script.predicted, predicted=True)
    cache.update(0.0)
    now = script.ticks + 0.5
    cache.advance(now)
    found = cache.demand(0, [tuple(item) for item in script.demand], now)
    assert [(expert, ceil(landing - now)) for expert, landing in found] == script.landings
    end = cache.free
    cache.advance(end + 1)
    for layer, expert, tile in script.after:
        assert cache.residency[layer, expert] == tile + 1
