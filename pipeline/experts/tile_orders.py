"""The tile mover's records: predictions, and orders under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.counters import PhaseCounters, PrefetchedTiles
from pipeline.experts.fetch_link import Order


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
