"""Moves tiles to the device: keeps residency at the policy's targets in the background of what a step demands
(`experts/demand_stream.py`).

Only these two take slots of the expert cache for whole tiles. An expert has at most one background order; on
a demand, that order becomes a demanded one. So the link finishes the tile that it is copying; then it takes
demanded experts that had a background order, as these were waiting, then other demanded tiles as they were
given, and then the rest. Tiles land in order, so resident tiles are always a prefix. While the prefetcher is
being restarted, nothing is ordered, and demanded tiles are returned as unfetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from pipeline.arrays import IntArray
from pipeline.config import BACKGROUND_ORDERS
from pipeline.counters import PhaseCounters
from pipeline.device import Device
from pipeline.experts.expert_cache import ExpertCache
from pipeline.experts.fetch_link import PLACED, PREDICTED, FetchLink, Order
from pipeline.experts.shares import Missing
from pipeline.experts.tile_orders import BackgroundOrder, Demand, Prediction
from pipeline.policies.view import Target

RESTART_LIMIT = 10.0  # seconds that `wait_idle` waits for a new prefetcher

Key = tuple[int, int]  # layer, expert


class TileMover:
    """Used by the engine's thread alone."""

    def __init__(
        self, cache: ExpertCache, link: FetchLink, device: Device, *, restart_limit: float = RESTART_LIMIT
    ) -> None:
        self.cache = cache
        self.ordered: IntArray = cache.residency.copy()  # as in View
        self.link = link
        self.device = device
        self._restart_limit = restart_limit
        self._background: dict[Key, BackgroundOrder] = {}
        self._predicted: dict[Key, Prediction] = {}
        self.wanted: deque[Missing] = deque()  # demanded tiles that wait for a free slot
        self._demanded: dict[Key, int] = {}  # of the demand that is under way, the end of its tiles
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
        kept = {(c.layer, c.expert): int(self.cache.target[c.layer, c.expert]) for c in changes}
        self.cache.set_targets(changes)
        for key, before in kept.items():
            tiles = int(self.cache.target[key])
            entry = self._background.get(key)
            if entry is not None and entry.order.lo + len(entry.order.slots) > tiles:
                self.link.cancel(entry.order)
            self._note_ordered(key)
            prediction = self._predicted.get(key)
            if predicted and tiles > before:
                if prediction is None:
                    self._predicted[key] = Prediction(self.counters)
                    self.counters.wanted_experts += 1
            elif prediction is not None:
                prediction.evict(tiles)
                self._drop_if_done(key)

    def poll_prefetcher(self) -> None:
        """Handle the prefetcher's start or exit, also while no order is under way; then `update`."""
        self.link.update(0)
        self.update()

    def update(self) -> None:
        """Book landed tiles and order tiles that are still below target."""
        self.collect_landings()
        self.fetch_missing()

    def fetch_missing(self) -> None:
        """Order tiles below target that are not under way: predicted ones first. Residency does not change.
        While demanded tiles wait for slots, no others are ordered."""
        if self.wanted or not self.cache.missing or not self.link.up:
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
            self.link.update(0)
            for key, entry in list(self._background.items()):
                self._book(entry)
                if entry.order.final:
                    del self._background[key]
                self._note_ordered(key)

    def used(self, layer: int, expert: int, tiles: int) -> None:
        """The device computes with an expert's first `tiles` tiles, which are resident."""
        key = (layer, expert)
        if key in self._predicted:
            self._predicted[key].use(tiles)
            self._drop_if_done(key)

    def _drop_if_done(self, key: Key) -> None:
        """Drop a prediction that has no unused tile, where no other tile of it will land."""
        if not self._predicted[key].unused and self.cache.residency[key] == self.cache.target[key]:
            del self._predicted[key]

    def _note_ordered(self, key: Key) -> None:
        """Bring `ordered` up to date."""
        entry, reach = self._background.get(key), int(self.cache.residency[key])
        if key in self._demanded:
            reach = max(reach, min(self._demanded[key], int(self.cache.target[key])))
        elif entry is not None and entry.next_tile == reach:
            reach = max(reach, min(entry.end, int(self.cache.target[key])))
        self.ordered[key] = reach

    def wait_idle(self) -> bool:
        """Wait until residency equals the targets; False where no prefetcher starts within the limit."""
        while self.cache.missing or self._background:
            self.update()
            for entry in list(self._background.values())[:1]:
                self.link.wait(entry.order, entry.order.landed + 1)
            if not (self.link.up or self.link.wait_up(self._restart_limit)):
                return False
        self.cache.audit(idle=True)
        return True

    def begin_demand(self, layer: int, items: dict[int, Missing]) -> list[Demand]:
        """Demand tiles, by expert: no background order of these experts is sent until `end_demand`. Those
        that are under way become demanded ones, in the link's order, and their tiles leave `items`. This
        waits for nothing, because the link would begin other tiles meanwhile."""
        self._demanded = {(layer, item.expert): item.hi for item in items.values()}
        for key, end in self._demanded.items():
            self._note_ordered(key)
            if self._predicted.pop(key, None) is not None:
                late = min(end, int(self.cache.target[key])) - items[key[1]].lo
                self.counters.late_tiles += max(0, late)
        entries = [e for item in items.values() if (e := self._background.get((layer, item.expert)))]
        return list(self._adopt(layer, sorted(entries, key=lambda entry: entry.place), items))

    def _adopt(
        self, layer: int, entries: Iterable[BackgroundOrder], items: dict[int, Missing]
    ) -> Iterator[Demand]:
        for entry in entries:
            order, item = entry.order, items[entry.order.expert]
            # it brings no tile of the demand, or none is certain to land
            if entry.truncated or item.lo != entry.next_tile:
                self.link.cancel(order)
                continue
            tiles = range(entry.booked, min(item.hi - order.lo, len(order.slots)))
            self.link.demand(order, tiles.stop)
            del self._background[layer, item.expert]
            items[item.expert] = Missing(item.expert, order.lo + tiles.stop, item.hi)
            yield Demand(order, tiles, None if tiles.stop == len(order.slots) else entry)

    def resume(self, entry: BackgroundOrder) -> None:
        """What an adopted order brings beyond its demand is in the background again: `update` books it."""
        self._background[entry.order.layer, entry.order.expert] = entry

    def end_demand(self) -> None:
        """All that was demanded has landed, or will not."""
        keys = list(self._demanded)
        self._demanded.clear()
        for key in keys:
            self._note_ordered(key)

    def stop_background_order(self) -> None:
        """Truncate a background order: each slot that is not READY is loading for one of them."""
        key, entry = next(iter(self._background.items()))
        self.link.cancel(entry.order)
        self.link.wait(entry.order, len(entry.order.slots))
        self._book(entry)
        del self._background[key]
        self._note_ordered(key)

    def _order_background(self, key: Key, prediction: Prediction | None) -> bool:
        """Order an expert's tiles below target, unless an order of it is under way; False where the limit of
        orders or of slots is reached."""
        lo = int(self.cache.residency[key])
        count = int(self.cache.target[key]) - lo
        if count <= 0 or key in self._background or key in self._demanded:
            return True
        if len(self._background) == BACKGROUND_ORDERS:
            return False
        order = self.order(*key, lo, count, PLACED if prediction is None else PREDICTED)
        if order is None:
            return False
        self._background[key] = BackgroundOrder(order, prediction)
        self._note_ordered(key)
        if prediction is not None:
            prediction.issue()
        return True

    def order(self, layer: int, expert: int, lo: int, count: int, urgency: int) -> Order | None:
        """Order up to `count` tiles, limited by the free slots; None without a free slot."""
        taken = self.cache.take(count)
        if not taken:
            return None
        for _, fence in taken:
            self.device.wait(fence)
        return self.link.order(layer, expert, lo, [slot for slot, _ in taken], urgency)

    def _book(self, entry: BackgroundOrder) -> None:
        """Book a background order's new landings, and release the slots that a final order did not write."""
        order = entry.order
        key = (order.layer, order.expert)
        for index in range(entry.booked, order.landed):
            self.placed += 1
            tile, slot = order.lo + index, order.slots[index]
            kept = self.cache.land(*key, tile, slot)
            if not kept:
                self.cache.release_loading(slot)
            entry.count_landing(tile, kept, self._predicted.get(key))
        entry.booked = order.landed
        if order.final:
            for slot in order.slots[order.landed :]:
                self.cache.release_loading(slot)
