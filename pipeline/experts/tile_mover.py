"""Moves tiles to the device: keeps residency at the policy's targets, and streams the tiles that a step
demands.

It is the only user of the expert cache's slots and of the fetch link. An expert has at most one background
order; on a demand, that order becomes a demanded one. So the link finishes the tile that it is copying; then
it takes demanded experts that had a background order, as these were waiting, then other demanded tiles as
they were given, and then the rest. Tiles land in order, so resident tiles are always a prefix. While the
prefetcher is being restarted, nothing is ordered, and demanded tiles are returned as unfetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.config import BACKGROUND_ORDERS
from pipeline.counters import PhaseCounters
from pipeline.device import Device
from pipeline.experts.expert_cache import ExpertCache
from pipeline.experts.fetch_link import DEMANDED, PLACED, PREDICTED, FetchLink, Order
from pipeline.experts.shares import Missing
from pipeline.policies.view import Target

RESTART_LIMIT = 10.0  # seconds that `wait_idle` waits for a new prefetcher

Key = tuple[int, int]  # layer, expert


@dataclass
class _Prediction:
    """An expert's residency that was predicted and not used yet."""

    counters: PhaseCounters  # of the phase that predicted it: its tiles are counted there
    unused: int = 0  # resident tiles that its orders fetched
    ordered: bool = False  # an order of it was sent


@dataclass
class _BackgroundOrder:
    """An order without a demand."""

    order: Order
    prediction: _Prediction | None  # the prediction that it was sent for, also if that was dropped since
    booked: int = 0  # landed tiles that were passed to the cache and the counters

    @property
    def place(self) -> tuple[int, int]:
        """By which the link sorts."""
        return self.order.urgency, self.order.id


@dataclass
class _Demand:
    """Tiles that an order brings on demand."""

    order: Order
    tiles: range  # of the order's
    background: _BackgroundOrder | None = None  # what it was before, and is for its other tiles


class TileMover:
    """Used by the engine's thread alone."""

    def __init__(
        self, cache: ExpertCache, link: FetchLink, device: Device, *, restart_limit: float = RESTART_LIMIT
    ) -> None:
        self.cache = cache
        self._link = link
        self._device = device
        self._restart_limit = restart_limit
        self._background: dict[Key, _BackgroundOrder] = {}
        self._predicted: dict[Key, _Prediction] = {}
        self._wanted: deque[Missing] = deque()  # demanded tiles that wait for a free slot
        self._streamed: set[Key] = set()  # the experts of the demand that is under way
        self.counters = PhaseCounters(len(cache.residency))  # of the present phase
        self.demanded = 0  # tiles that landed on demand
        self.placed = 0  # tiles that landed in the background

    @property
    def idle(self) -> bool:
        """No background order is under way."""
        return not self._background

    def retarget(self, targets: Iterable[Target], predicted: bool = False) -> None:
        """Set these residencies as targets. Tiles beyond them are evicted at once; missing tiles are fetched
        on demand and, from the next `update` on, in the background, predicted targets before others."""
        changes = tuple(targets)
        if not changes:
            return
        resident = {(c.layer, c.expert): int(self.cache.residency[c.layer, c.expert]) for c in changes}
        self.cache.set_targets(changes)
        for key, before in resident.items():
            tiles = int(self.cache.target[key])
            entry = self._background.get(key)
            if entry is not None and entry.order.lo + len(entry.order.slots) > tiles:
                self._link.cancel(entry.order)
            if predicted and tiles > before:
                self._predicted.setdefault(key, _Prediction(self.counters))
            elif (prediction := self._predicted.get(key)) is not None:
                # the last of its tiles are evicted, which predictions have fetched
                wasted = min(prediction.unused, max(0, before - tiles))
                prediction.counters.wasted_tiles += wasted
                prediction.unused -= wasted
                if tiles == 0:
                    del self._predicted[key]

    def poll_prefetcher(self) -> None:
        """Handle the prefetcher's start or exit, also while no order is under way; then `update`."""
        self._link.update(0)
        self.update()

    def update(self) -> None:
        """Book landed tiles and order tiles that are still below target."""
        self.collect_landings()
        self.fetch_missing()

    def fetch_missing(self) -> None:
        """Order tiles below target that are not under way: predicted ones first. Residency does not change.
        While demanded tiles wait for slots, no others are ordered."""
        if self._wanted or not self.cache.missing or not self._link.up:
            return
        for key in list(self._predicted):
            if not self._order_background(key, self._predicted[key]):
                return
        for layer, expert in self.cache.below_target().tolist():
            if not self._order_background((layer, expert), None):
                return

    def collect_landings(self) -> None:
        """Book tiles that have landed in the background."""
        if self._background:
            self._link.update(0)
            for key, entry in list(self._background.items()):
                self._book(entry)
                if entry.order.final:
                    del self._background[key]

    def used(self, layer: int, expert: int) -> None:
        """The device computes with an expert's resident tiles."""
        key = (layer, expert)
        if key in self._predicted:
            prediction = self._predicted[key]
            prediction.counters.useful_tiles += prediction.unused
            prediction.unused = 0
            if self.cache.residency[key] == self.cache.target[key]:  # no other tile of it will land
                del self._predicted[key]

    def wait_idle(self) -> bool:
        """Wait until residency equals the targets; False where no prefetcher starts within the limit."""
        while self.cache.missing or self._background:
            self.update()
            for entry in list(self._background.values())[:1]:
                self._link.wait(entry.order, entry.order.landed + 1)
            if not (self._link.up or self._link.wait_up(self._restart_limit)):
                return False
        self.cache.audit(idle=True)
        return True

    def stream(
        self, layer: int, missing: Iterable[Missing], unfetched: list[Missing]
    ) -> Iterator[tuple[int, int]]:
        """Fetch tiles on demand. Yields (expert, slot) for each tile once it has landed, in the order of the
        link: first those of a background order, then the others as they are given. A slot that the target
        does not keep may be read until the iterator advances. `unfetched`: tiles not fetched because the
        prefetcher exited, the last of their expert."""
        items = {item.expert: item for item in missing}
        self._streamed = {(layer, expert) for expert in items}
        running = deque(self._adopt(layer, items))
        wanted = self._wanted = deque(item for item in items.values() if item.lo < item.hi)
        self._demand(layer, wanted, running)
        return self._landings(layer, wanted, running, unfetched)

    def _landings(
        self, layer: int, wanted: deque[Missing], running: deque[_Demand], unfetched: list[Missing]
    ) -> Iterator[tuple[int, int]]:
        while running:
            demand = running.popleft()
            order, entry = demand.order, demand.background
            for index in demand.tiles:
                slot = order.slots[index]
                self._link.wait(order, index + 1)
                if order.landed <= index:  # the prefetcher exited before this tile
                    for unwritten in order.slots[index:]:
                        self.cache.release_loading(unwritten)
                    unfetched.append(Missing(order.expert, order.lo + index, order.lo + demand.tiles.stop))
                    entry = None
                    break
                self.demanded += 1
                if self.cache.land(layer, order.expert, order.lo + index, slot):
                    yield order.expert, slot
                else:
                    self.cache.begin_use(slot)
                    yield order.expert, slot
                    self.cache.end_use(slot)
                    self._demand(layer, wanted, running)
            if entry is not None:  # `update` books what it brings beyond the demand
                entry.booked = demand.tiles.stop
                self._background[layer, order.expert] = entry
            if not running:
                self._demand(layer, wanted, running)
        unfetched.extend(wanted)
        wanted.clear()
        self._streamed.clear()

    def _adopt(self, layer: int, items: dict[int, Missing]) -> Iterator[_Demand]:
        """Demand the background orders of these experts. Their tiles leave `items`, by expert. This waits for
        nothing, because the link would begin other tiles meanwhile."""
        for item in items.values():
            if self._predicted.pop((layer, item.expert), None) is not None:
                self.counters.late_tiles += item.hi - item.lo
        entries = [e for item in items.values() if (e := self._background.get((layer, item.expert)))]
        for entry in sorted(entries, key=lambda entry: entry.place):
            order, item = entry.order, items[entry.order.expert]
            if order.cancelled or item.lo != order.lo + entry.booked:  # it brings no tile of the demand
                self._link.cancel(order)
                continue
            tiles = range(entry.booked, min(item.hi - order.lo, len(order.slots)))
            self._link.demand(order, tiles.stop)
            del self._background[layer, item.expert]
            items[item.expert] = Missing(item.expert, order.lo + tiles.stop, item.hi)
            yield _Demand(order, tiles, None if tiles.stop == len(order.slots) else entry)

    def _demand(self, layer: int, wanted: deque[Missing], running: deque[_Demand]) -> None:
        """Order as many wanted tiles as slots are free."""
        while wanted and self._link.up:
            item = wanted[0]
            order = self._order(layer, item.expert, item.lo, item.hi - item.lo, DEMANDED)
            if order is None:
                if running:
                    return
                self._stop_background_order()
                continue
            running.append(_Demand(order, range(len(order.slots))))
            wanted.popleft()
            if item.lo + len(order.slots) < item.hi:
                wanted.appendleft(Missing(item.expert, item.lo + len(order.slots), item.hi))

    def _stop_background_order(self) -> None:
        """Truncate a background order: each slot that is not READY is loading for one of them."""
        key, entry = next(iter(self._background.items()))
        self._link.cancel(entry.order)
        self._link.wait(entry.order, len(entry.order.slots))
        self._book(entry)
        del self._background[key]

    def _order_background(self, key: Key, prediction: _Prediction | None) -> bool:
        """Order an expert's tiles below target, unless an order of it is under way; False where the limit of
        orders or of slots is reached."""
        lo = int(self.cache.residency[key])
        count = int(self.cache.target[key]) - lo
        if count <= 0 or key in self._background or key in self._streamed:
            return True
        if len(self._background) == BACKGROUND_ORDERS:
            return False
        order = self._order(*key, lo, count, PLACED if prediction is None else PREDICTED)
        if order is None:
            return False
        self._background[key] = _BackgroundOrder(order, prediction)
        if prediction is not None and not prediction.ordered:
            prediction.ordered = True
            prediction.counters.issued_experts += 1
        return True

    def _order(self, layer: int, expert: int, lo: int, count: int, urgency: int) -> Order | None:
        """Order up to `count` tiles, limited by the free slots; None without a free slot."""
        taken = self.cache.take(count)
        if not taken:
            return None
        for _, fence in taken:
            self._device.wait(fence)
        return self._link.order(layer, expert, lo, [slot for slot, _ in taken], urgency)

    def _book(self, entry: _BackgroundOrder) -> None:
        """Book a background order's new landings, and release the slots that a final order did not write."""
        order = entry.order
        # The expert's present prediction: the order's own, or a later one.
        present = self._predicted.get((order.layer, order.expert))
        for index in range(entry.booked, order.landed):
            self.placed += 1
            slot = order.slots[index]
            kept = self.cache.land(order.layer, order.expert, order.lo + index, slot)
            if not kept:
                self.cache.release_loading(slot)
            if entry.prediction is None:
                continue
            if kept and present is not None:
                present.counters.predicted_tiles += 1
                present.unused += 1
            elif not kept:
                counters = (present or entry.prediction).counters
                counters.predicted_tiles += 1
                counters.wasted_tiles += 1
            # else the prediction was dropped, and another target keeps the tile
        entry.booked = order.landed
        if order.final:
            for slot in order.slots[order.landed :]:
                self.cache.release_loading(slot)
