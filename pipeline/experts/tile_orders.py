"""The tile mover's records: predictions, and orders under way."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Self

from pipeline.counters import PhaseCounters, PrefetchedTiles
from pipeline.experts.fetch_link import Order
from pipeline.experts.shares import Missing


@dataclass
class Prediction:
    """An expert's predicted tiles. They are counted in the phase that predicted them."""

    counters: PhaseCounters
    unused: PrefetchedTiles = field(default_factory=PrefetchedTiles)
    ordered: bool = False  # an order of it was sent

    def use(self, tiles: int) -> None:
        """The device computes with the expert's first `tiles` tiles."""
        self.counters.useful_tiles += self.unused.use(tiles)

    def evict(self, keep: int) -> None:
        """The expert's tiles from `keep` on are evicted."""
        self.counters.wasted_tiles += self.unused.evict(keep)

    def issue(self) -> None:
        """An order of it is sent."""
        self.counters.issued_experts += not self.ordered
        self.ordered = True


@dataclass
class BackgroundOrder:
    """An order without a demand."""

    order: Order
    prediction: Prediction | None  # the prediction that it was sent for, also if that was dropped since
    booked: int = 0  # landed tiles that were passed to the cache and the counters

    @property
    def place(self) -> tuple[int, int]:
        """By which the link sorts."""
        return self.order.urgency, self.order.id

    @property
    def next_tile(self) -> int:
        """The first of its tiles that was not booked."""
        return self.order.lo + self.booked

    @property
    def end(self) -> int:
        """The end of the tiles that it brings."""
        order = self.order
        return order.lo + (order.landed if order.final else order.reach)

    @property
    def truncated(self) -> bool:
        """Whether it may not bring all of its tiles any more."""
        return self.order.reach < len(self.order.slots)

    def count_landing(self, tile: int, kept: bool, present: Prediction | None) -> None:
        """Count a tile of the order that has landed; `kept`: it is resident now. `present`: the expert's
        present prediction, which is the order's own or a later one. A dropped prediction's tile that another
        target keeps is no predicted one."""
        if self.prediction is None or (kept and present is None):
            return
        counters = (present or self.prediction).counters
        counters.predicted_tiles += 1
        if not kept:
            counters.wasted_tiles += 1
        elif present is not None:
            present.unused.land(tile)


@dataclass
class Demand:
    """Tiles that an order brings on demand."""

    order: Order
    tiles: range  # of the order's
    background: BackgroundOrder | None = None  # what it was before, where it has other tiles


@dataclass
class LandedTiles:
    """Demanded tiles of a layer that have landed and were not given to the device yet. It computes each by
    itself, or all in two parts: where launches cost more than tiles, few of them are made, and the last part
    is small, because the layer waits for it."""

    number: int  # of the layer's demanded tiles
    each: bool
    landed: int = 0
    tiles: list[tuple[int, int]] = field(default_factory=list)  # expert, slot
    used: list[int] = field(default_factory=list)  # of the slots, those that are not kept

    @classmethod
    def of(cls, running: Iterable[Demand], wanted: Iterable[Missing], each: bool) -> Self:
        """Of the tiles that these bring."""
        tiles = sum(len(demand.tiles) for demand in running) + sum(item.hi - item.lo for item in wanted)
        return cls(tiles, each)

    def add(self, expert: int, slot: int, kept: bool) -> None:
        self.landed += 1
        self.tiles.append((expert, slot))
        if not kept:
            self.used.append(slot)

    def due(self, waiting: bool, more: Callable[[], bool]) -> bool:
        """Whether to give them now. `waiting`: other tiles wait for slots; then they are given with all that
        have landed already, of which `more` says whether there are any."""
        first = self.number - self.number // 4
        return self.each or self.landed == first or (waiting and bool(self.used) and not more())

    def give(self, end_use: Callable[[int], None]) -> Generator[list[tuple[int, int]], None, bool]:
        """Yield them, if there are any, and then end the use of slots that are not kept. Returns whether
        there were such slots."""
        if self.tiles:
            yield self.tiles
        for slot in self.used:
            end_use(slot)
        freed = bool(self.used)
        self.tiles, self.used = [], []
        return freed
