"""The link of a replay: what the prefetch process and the coordinator's copies are to an engine's mover, on a
clock.

The link moves one tile, or one chunk of chosen channels, at a time and always finishes it. Demanded tiles
follow what moves when they are demanded; then come predicted orders, then placed ones, each kind in the order
in which they were given. The first tile of an order, and of each expert that is demanded, takes longer by
`Costs.fetch`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.arrays import IntArray
from pipeline.experts.mover import PREDICTED, Link, Order
from workers.copiers import TileCopy

CHUNKS = 16  # of a tile's channels, moved one after the other: as FloE's 50 of Mixtral's 896


@dataclass(eq=False)
class ClockedOrder(Order):
    """An order and when it was given. Counts are tiles or channels."""

    given: float = 0.0
    wanted: int = 0  # fewer than its size once it is cancelled
    started: int = 0  # that have moved or move


class ClockedLink(Link):
    """A mover's `Link` and `Copier`. Whoever uses it sets `now`, which never decreases."""

    up = True

    def __init__(self, slots: int, tile_seconds: float, fetch_seconds: float, channels: int = 1) -> None:
        """`channels`: of a tile."""
        self.now = 0.0  # seconds
        self.landed = [0.0] * (slots + 1)  # by slot: when what is in it has landed; -1: what is in no slot
        self.busy = 0.0  # seconds of all that has moved or moves
        self._tile, self._fetch, self._channels = tile_seconds, fetch_seconds, channels
        self._free = 0.0  # when all that has begun to move will have landed
        self._queues: tuple[deque[ClockedOrder], deque[ClockedOrder]] = (deque(), deque())
        self._flying: ClockedOrder | None = None  # a part of it moves, until `_lands`
        self._lands = 0.0
        self._copied: tuple[int, int, float] | None = None  # the expert demanded last, and when

    # --- orders --------------------------------------------------------------------------------------------

    def order(
        self, layer: int, expert: int, lo: int, slots: list[int], urgency: int, channels: IntArray | None
    ) -> ClockedOrder:
        order = ClockedOrder(0, layer, expert, lo, slots, urgency, channels, given=self.now)
        order.wanted = order.size
        self._queues[urgency - PREDICTED].append(order)
        return order

    def cancel(self, order: Order) -> None:
        assert isinstance(order, ClockedOrder)
        self._advance()
        order.wanted = order.started
        order.final = order.landed == order.wanted

    def moving(self, order: Order) -> bool:
        self._advance()
        return self._flying is order

    def update(self, wait_ms: int) -> None:
        self._advance()

    def wait(self, order: Order, landed: int) -> None:
        """Run the link ahead of the clock until so many have landed or the order is final."""
        while order.landed < landed and not order.final:
            self._start_next()
            self._land()

    def settle(self) -> None:
        """Land everything that is ordered, in no time."""
        while self._start_next():
            self._land()
        self.busy = self._free = 0.0

    # --- demands -------------------------------------------------------------------------------------------

    def begin(self, copies: Sequence[TileCopy]) -> None:
        """Let copies follow what is on the link."""
        self._free = max(self._free, self.now)
        for copy in copies:
            expert = copy.layer, copy.expert, self.now
            part = 1.0 if copy.channels is None else len(copy.channels) / self._channels
            seconds = part * self._tile + (0.0 if expert == self._copied else self._fetch)
            self._copied = expert
            self._free += seconds
            self.busy += seconds
            self.landed[copy.slot] = self._free

    def ready(self, begun: None) -> None:
        """Do nothing: `landed` has said when the copies will be there."""

    # --- the clock -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Run until now."""
        while self._start_next(self.now) and self._lands <= self.now:
            self._land()

    def _start_next(self, now: float = float("inf")) -> bool:
        """Let the next part move if it does before `now`, unless one moves. Returns whether one moves."""
        if self._flying is not None:
            return True
        for queue in self._queues:
            while queue and queue[0].started >= queue[0].wanted:
                queue.popleft()
            if queue:
                order = queue[0]
                start = max(self._free, order.given)
                if start < now:
                    self._start(order, start)
                return start < now
        return False

    def _start(self, order: ClockedOrder, start: float) -> None:
        seconds, count = self._tile, 1
        if order.channels is not None:
            count = min(max(1, self._channels // CHUNKS), order.wanted - order.started)
            seconds *= count / self._channels
        if not order.started:
            seconds += self._fetch
        order.started += count
        self.busy += seconds
        self._flying, self._lands = order, start + seconds
        self._free = self._lands

    def _land(self) -> None:
        order, self._flying = self._flying, None
        assert order is not None
        if order.channels is None:
            self.landed[order.slots[order.landed]] = self._lands
        order.landed = order.started
        order.final = order.landed == order.wanted
