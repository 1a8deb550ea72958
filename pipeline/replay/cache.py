"""The expert cache and its link in a replay: residency, orders under way, and when each tile lands.

The same rules as `experts/tile_mover.py`, `experts/demand_stream.py` and `workers/prefetcher.py`, on a clock
of its own. The link moves one tile at a time and always finishes it, and an order's first tile takes longer
by `Costs.fetch`. Demanded tiles come first, then predicted ones, then placed ones, each kind in the order of
the orders. Of a demand, the experts that had an order come first, as they were waiting. Slots are not
counted: a replay never runs out of slots for streaming.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from heapq import nsmallest
from operator import attrgetter

import numpy as np

from pipeline.arrays import IntArray
from pipeline.config import BACKGROUND_ORDERS
from pipeline.errors import PlanError
from pipeline.policies.costs import Landing
from pipeline.policies.view import ModelShape, Target
from pipeline.replay.orders import Key, Order, Prediction
from pipeline.replay.outcome import PhaseOutcome


class SimulatedCache:
    """Residency, targets and the link. Times are seconds and never decrease."""

    def __init__(
        self, shape: ModelShape, capacity: int, tile_seconds: float, fetch_seconds: float = 0.0
    ) -> None:
        """`capacity`: tiles. The seconds are those of a tile on the link, and of an order beside its
        tiles."""
        self.residency: IntArray = np.zeros((shape.layers, shape.experts), np.int32)
        self.target: IntArray = np.zeros((shape.layers, shape.experts), np.int32)
        self.ordered: IntArray = np.zeros((shape.layers, shape.experts), np.int32)  # as in View
        # the same memory, of which Python reads and writes single numbers twice as fast
        self._resident, self._targets = self.residency.data, self.target.data
        self._on_order = self.ordered.data
        self.counters: PhaseOutcome  # of the present phase
        self.free = 0.0  # when the link has finished its present tile
        self._shape = shape
        self._capacity = capacity
        self._tile_seconds = tile_seconds
        self._fetch_seconds = fetch_seconds
        self._kept = 0  # sum of the targets
        self._below_target: set[Key] = set()  # residency below target
        self._background: dict[Key, Order] = {}
        self._queues: tuple[deque[Order], deque[Order]] = (deque(), deque())  # predicted, placed
        self._number = 0  # of the next prediction
        self._flying: Order | None = None  # the order with a tile on the link, until `free`
        self._predictions: dict[Key, Prediction] = {}

    @property
    def predicted(self) -> int:
        """Experts that are kept for a prediction and not all used."""
        return len(self._predictions)

    @property
    def unused(self) -> int:
        """Resident tiles that predictions fetched and that were not used yet."""
        return sum(len(prediction.unused) for prediction in self._predictions.values())

    def place(self, target: IntArray) -> None:
        """Make a placement resident before the clock runs. Raises PlanError."""
        self.retarget(targets_of(target))
        self.residency[...] = self.ordered[...] = self.target
        self._below_target.clear()

    def retarget(self, changes: Iterable[Target], predicted: bool = False) -> None:
        """As TileMover.retarget. Raises PlanError where the targets are out of range or beyond the
        capacity."""
        layers, experts, most = self._shape.layers, self._shape.experts, self._shape.tiles
        target, resident, below = self._targets, self._resident, self._below_target
        background, predictions, kept = self._background, self._predictions, self._kept
        for change in changes:
            layer, expert, tiles = change
            if not (0 <= layer < layers and 0 <= expert < experts and 0 <= tiles <= most):
                raise PlanError(f"the policy set a target that does not exist: {change}")
            key = (layer, expert)
            before, has = target[key], resident[key]
            kept += tiles - before
            target[key] = tiles
            if has < tiles:
                below.add(key)
            else:
                below.discard(key)
                if has > tiles:
                    resident[key] = self._on_order[key] = tiles
            order = background.get(key)
            if order is not None and order.lo + order.count > tiles:
                self._cancel(order)
            if predicted and tiles > before:
                if key not in predictions:
                    predictions[key] = Prediction(self.counters, self._number)
                    self._number += 1
                    self.counters.wanted_experts += 1
            elif (prediction := predictions.get(key)) is not None:
                prediction.counters.wasted += prediction.unused.evict(tiles)
                self._drop_if_done(key, prediction)
        self._kept = kept
        if kept > self._capacity:
            raise PlanError(f"the policy's targets need {self._kept} tiles, the cache holds {self._capacity}")

    def advance(self, now: float) -> None:
        """Run the link until now."""
        if not self._background:  # nothing is ordered, nor on the link
            return
        counters, tile_seconds = self.counters, self._tile_seconds
        while True:
            if self._flying is not None:
                if self.free > now:
                    return
                self._land(self._flying)
            order = self._next()
            if order is None:
                return
            start = max(self.free, order.ordered_at)
            if start >= now:
                return
            seconds = tile_seconds if order.started else self._fetch_seconds + tile_seconds
            order.started += 1
            free = start + seconds
            counters.link_busy += seconds
            landed = 0
            while order.started < order.count and free < now:  # the next one follows at once
                landed += 1
                order.started += 1
                free += tile_seconds
                counters.link_busy += tile_seconds
            self._flying, self.free = order, free
            if landed:
                self._book(order, landed, kept=True)  # its tiles are the next up to the target

    def update(self, now: float) -> None:
        """Run the link until now, and order tiles below their target in the background."""
        self.advance(now)
        free = BACKGROUND_ORDERS - len(self._background)
        if not free or not self._below_target:
            return
        missing = self._below_target.difference(self._background)
        if not missing:
            return
        predicted = [key for key in missing if key in self._predictions]
        predicted.sort(key=lambda key: self._predictions[key].number)
        del predicted[free:]
        for key in predicted:
            self._order(key, True, now)
        for key in nsmallest(free - len(predicted), missing.difference(predicted)):
            self._order(key, False, now)

    def used(self, key: Key, tiles: int) -> None:
        """The device computes with an expert's first `tiles` tiles, which are resident."""
        if self._predictions and (prediction := self._predictions.get(key)) is not None:
            prediction.counters.useful += prediction.unused.use(tiles)
            self._drop_if_done(key, prediction)

    def _drop_if_done(self, key: Key, prediction: Prediction) -> None:
        """Drop a prediction that has no unused tile, where no other tile of it will land."""
        if not prediction.unused and self._resident[key] == self._targets[key]:
            del self._predictions[key]

    def demand(self, layer: int, missing: list[tuple[int, int, int]], now: float) -> list[tuple[int, float]]:
        """Fetch tiles [lo, hi) of each (expert, lo, hi) before all else: each tile's (expert, landing), in
        the order in which they land. A tile of these experts that is on the link is the first of them."""
        self.advance(now)
        items = {expert: range(lo, hi) for expert, lo, hi in missing}
        for expert, tiles in items.items():
            if self._predictions.pop((layer, expert), None) is not None:
                predicted = min(tiles.stop, self._targets[layer, expert])
                self.counters.late += max(0, predicted - tiles.start)
        # expert, tiles, seconds beside them, and when the first lands if it moves
        demanded: list[tuple[int, int, float, float | None]] = []
        background = self._background
        known = any([(layer, expert) in background for expert in items])
        for order in self._waiting(layer, items) if known else ():
            expert, tiles = order.key[1], items[order.key[1]]
            reached = min(tiles.stop, order.lo + order.count)
            moving = self.free if self._flying is order else None
            beside = 0.0 if order.started else self._fetch_seconds
            self._cancel(order)
            if moving is not None:
                self._flying = None
                del self._background[order.key]
            demanded.append((expert, reached - tiles.start, beside, moving))
            items[expert] = range(reached, tiles.stop)
        if self._flying is not None:
            self._land(self._flying)  # before the first order that has not begun
        demanded += [(expert, len(tiles), self._fetch_seconds, None) for expert, tiles in items.items()]
        landings, busy = [], 0.0
        at = max(self.free, now)
        for expert, count, beside, moving in demanded:
            self._land_demanded((layer, expert), count)
            for _ in range(count):
                if moving is None:
                    seconds = beside + self._tile_seconds
                    at += seconds
                    busy += seconds
                landings.append((expert, at if moving is None else moving))
                beside, moving = 0.0, None
        self.counters.link_busy += busy
        self.free = max(self.free, at) if landings else self.free
        return landings

    def compute(
        self,
        layer: int,
        experts: list[int],
        rows: list[int],
        cuts: list[int],
        seconds: dict[int, tuple[float, float, float]],
        launch: float,
        now: float,
        busy: float,
        waited: float,
    ) -> tuple[float, float, float]:
        """The device's share of a layer: of each expert the first `cuts` tiles, those that are not resident
        as they land. `seconds`: by rows, the second number that of a tile on the device. Returns when it
        ends, and the device's `busy` and `waited` seconds with those of the layer."""
        begun, of_tile, missing = launch, {}, []
        for expert, row, cut in zip(experts, rows, cuts, strict=True):
            if not cut:
                continue
            tile, here = seconds[row][1], min(cut, self._resident[layer, expert])
            if here:
                begun += tile * here
                self.used((layer, expert), here)
            if here < cut:
                of_tile[expert] = tile
                missing.append((expert, here, cut))
        at = now + begun
        busy += begun
        for expert, landing in self.demand(layer, missing, now) if missing else ():
            if landing > at:
                waited += landing - at
                at = landing
            at += of_tile[expert]
            busy += of_tile[expert]
        return at, busy, waited

    def host_seconds(
        self, rows: list[int], cuts: list[int], seconds: dict[int, tuple[float, float, float]]
    ) -> float:
        """Of the host's share of a layer, the tiles from the cut on. `seconds`: by rows, the first number
        that of a tile on the host."""
        tiles, found = self._shape.tiles, 0.0
        for row, cut in zip(rows, cuts, strict=True):
            if cut < tiles:
                found += seconds[row][0] * (tiles - cut)
        return found

    def link_seconds(self, now: float) -> float:
        """Seconds until the link has moved all that is ordered."""
        waiting = [order for queue in self._queues for order in queue]
        return max(0.0, self.free - now) + sum(map(self._seconds_left, waiting))

    def landing(self, layer: int, now: float) -> list[Landing]:
        """As Backlog.landing."""
        if not self._background:
            return []
        found = []
        at = moved = max(0.0, self.free - now)  # from now until the tile on the link has landed
        for order in (order for queue in self._queues for order in queue):
            if order.cancelled or self._background.get(order.key) is not order:
                continue
            left = self._seconds_left(order)
            at += left
            if order.key[0] == layer:
                tiles = order.lo + order.count - self._resident[order.key]
                found.append(Landing(order.key[1], tiles, at if left else moved))
        return sorted(found, key=attrgetter("seconds"))

    def _seconds_left(self, order: Order) -> float:
        """Seconds on the link of those tiles of an order that have not begun to move."""
        left = order.count - order.started
        if not left:
            return 0.0
        return left * self._tile_seconds + (0.0 if order.started else self._fetch_seconds)

    def _waiting(self, layer: int, experts: Container[int]) -> list[Order]:
        """The orders of these experts, in the link's order, without cancelled ones: nothing of them is left
        but a tile that moves."""
        return [
            order
            for queue in self._queues
            for order in queue
            if order.key[0] == layer
            and order.key[1] in experts
            and self._background.get(order.key) is order
            and not order.cancelled
        ]

    def _land_demanded(self, key: Key, count: int) -> None:
        self.counters.demanded += count
        count = min(count, self._targets[key] - self._resident[key])
        if count > 0:
            self._add_tiles(key, count)

    def _add_tiles(self, key: Key, count: int) -> None:
        self._resident[key] = resident = self._resident[key] + count
        if self._on_order[key] < resident:
            self._on_order[key] = resident
        if resident == self._targets[key]:
            self._below_target.discard(key)

    def _order(self, key: Key, predicted: bool, now: float) -> None:
        """Order an expert's tiles below target, of which none is on order."""
        lo = self._resident[key]
        count = self._targets[key] - lo
        booked = None
        if predicted:
            prediction = self._predictions[key]
            booked = prediction.counters
            booked.issued_experts += not prediction.ordered
            prediction.ordered = True
        order = self._background[key] = Order(key, lo, count, booked, now)
        self._queues[0 if predicted else 1].append(order)
        self._on_order[key] = lo + count

    def _cancel(self, order: Order) -> None:
        """Drop the tiles that have not begun to move."""
        order.count, order.cancelled = order.started, True
        self._on_order[order.key] = self._resident[order.key]
        if self._flying is not order:
            del self._background[order.key]

    def _next(self) -> Order | None:
        for queue in self._queues:
            while queue:
                if queue[0].started < queue[0].count:
                    return queue[0]
                queue.popleft()
        return None

    def _land(self, order: Order) -> None:
        """The tile on the link has landed."""
        self._flying = None
        key, tile = order.key, order.lo + order.started - 1
        self._book(order, 1, kept=tile == self._resident[key] < self._targets[key])
        if order.started >= order.count:
            del self._background[key]

    def _book(self, order: Order, count: int, kept: bool) -> None:
        """The next `count` tiles of an order have landed."""
        key = order.key
        prediction = None if order.predicted is None else self._predictions.get(key)
        if kept:
            self._add_tiles(key, count)
        # A prediction that was dropped meanwhile is booked to the phase that made it, unless another target
        # keeps the tile.
        booked = order.predicted if prediction is None else prediction.counters
        if kept and prediction is None:
            booked = None
        if booked is None:
            self.counters.placed += count
        else:
            booked.predicted += count
            booked.wasted += 0 if kept else count
        if kept and prediction is not None:
            prediction.unused.land(self._resident[key] - count, count)


def targets_of(target: IntArray) -> list[Target]:
    """Those of a placement [L, E] that are not 0."""
    layers, experts = target.nonzero()
    found = zip(layers.tolist(), experts.tolist(), target[layers, experts].tolist(), strict=True)
    return [Target(*one) for one in found]
