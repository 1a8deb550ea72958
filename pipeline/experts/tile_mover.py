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
from functools import partial

from pipeline.arrays import IntArray
from pipeline.config import BACKGROUND_ORDERS
from pipeline.counters import PhaseCounters
from pipeline.device import Device
from pipeline.experts.expert_cache import ExpertCache
from pipeline.experts.fetch_link import DEMANDED, PLACED, PREDICTED, FetchLink, Order
from pipeline.experts.landings import Landings
from pipeline.experts.shares import Missing
from pipeline.experts.tile_orders import BackgroundOrder, Demand, LandedTiles, Prediction
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
        if self._wanted or not self.cache.missing or not self.link.up:
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
        """Bring `ordered` up to date for an expert that is not being streamed."""
        entry, reach = self._background.get(key), int(self.cache.residency[key])
        if entry is not None and entry.next_tile == reach:
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

    def stream(
        self, layer: int, missing: Iterable[Missing], unfetched: list[Missing], *, ahead: bool = False
    ) -> Iterator[list[tuple[int, int]] | None]:
        """Fetch tiles on demand. Yields (expert, slot) of landed tiles by groups (`LandedTiles`), those of
        background orders first. A slot that is not kept may be read until the iterator advances. `unfetched`:
        tiles not fetched because the prefetcher exited, the last of their expert.

        `ahead`: tiles may be given before they have landed, where the device waits for that by itself. Then
        None may follow: not all have landed, what was computed from them is wrong, and those that have landed
        are given again."""
        items = {item.expert: item for item in missing}
        self._streamed = {(layer, expert) for expert in items}
        for item in items.values():
            kept = min(item.hi, int(self.cache.target[layer, item.expert]))
            self.ordered[layer, item.expert] = max(item.lo, kept)
        running = deque(self._adopt(layer, items))
        wanted = self._wanted = deque(item for item in items.values() if item.lo < item.hi)
        self._demand(layer, wanted, running)
        numbered = running and not wanted and all(demand.order.numbers for demand in running)
        if ahead and numbered and (landings := self.link.landings) and landings.may_wait:
            return self._ahead(layer, running, unfetched, landings)
        return self._landings(layer, wanted, running, unfetched)

    def _ahead(
        self, layer: int, running: Iterable[Demand], unfetched: list[Missing], landings: Landings
    ) -> Iterator[list[tuple[int, int]] | None]:
        """All demanded tiles are ordered: the device waits for each order's last tile of a group."""
        tiles = [(demand, index) for demand in running for index in demand.tiles]
        first = len(tiles) - len(tiles) // 4
        landed = LandedTiles(len(tiles), False)
        awaited: list[int] = []  # slots
        try:
            for group in filter(None, (tiles[:first], tiles[first:])):
                for order, index in {id(d.order): (d.order, index) for d, index in group}.values():
                    awaited.append(order.slots[index])
                    landings.wait(order.slots[index], order.numbers[index])
                yield [(demand.order.expert, demand.order.slots[index]) for demand, index in group]
        except GeneratorExit:  # the engine ends: its sockets may be closed already
            for slot in awaited:
                landings.settle(slot)
            raise
        except BaseException:
            self._settle(layer, running, awaited, unfetched, landed, landings)
            for slot in landed.used:
                self.cache.end_use(slot)
            raise
        self._settle(layer, running, awaited, unfetched, landed, landings)
        if landed.landed == len(tiles) and landings.trusted:
            landed.tiles.clear()
        else:
            yield None
        yield from landed.give(self.cache.end_use)

    def _settle(
        self,
        layer: int,
        running: Iterable[Demand],
        awaited: Iterable[int],
        unfetched: list[Missing],
        landed: LandedTiles,
        landings: Landings,
    ) -> None:
        """Book what has landed, once all has that will: then the device waits for no flag. Until then,
        nothing here may wait for the device."""
        for demand in running:
            self.link.wait(demand.order, demand.tiles.stop)
        for slot in awaited:
            landings.settle(slot)
        for demand in running:
            if not self._follows_lost(demand, unfetched):
                booked = (self._land(layer, demand, index, unfetched, landed) for index in demand.tiles)
                self._end_demand(layer, demand, all(booked))
        self._end_stream()

    def _landings(
        self, layer: int, wanted: deque[Missing], running: deque[Demand], unfetched: list[Missing]
    ) -> Iterator[list[tuple[int, int]]]:
        landed = LandedTiles.of(running, wanted, self.device.on_host)
        while running:
            demand = running.popleft()
            whole = not self._follows_lost(demand, unfetched)
            for index in demand.tiles if whole else ():
                self.link.wait(demand.order, index + 1)
                whole = self._land(layer, demand, index, unfetched, landed)
                if not whole:
                    break
                following = partial(self._has_landed, demand, index + 1, running)
                if landed.due(bool(wanted), following) and (yield from landed.give(self.cache.end_use)):
                    self._demand(layer, wanted, running)
            self._end_demand(layer, demand, whole)
            if not running:
                yield from landed.give(self.cache.end_use)
                self._demand(layer, wanted, running)
        unfetched.extend(wanted)
        wanted.clear()
        self._end_stream()

    def _has_landed(self, demand: Demand, index: int, running: deque[Demand]) -> bool:
        """Whether a demand's next tile, or after its last one the next demand's first, has landed."""
        self.link.update(0)
        if index < demand.tiles.stop:
            return demand.order.landed > index
        return bool(running) and running[0].order.landed > running[0].tiles.start

    def _land(
        self, layer: int, demand: Demand, index: int, unfetched: list[Missing], landed: LandedTiles
    ) -> bool:
        """Book a demanded tile. False: the prefetcher exited before it."""
        order, tile = demand.order, demand.order.lo + index
        if order.landed <= index:
            for unwritten in order.slots[index:]:
                self.cache.release_loading(unwritten)
            unfetched.append(Missing(order.expert, tile, order.lo + demand.tiles.stop))
            return False
        self.demanded += 1
        kept = self.cache.land(layer, order.expert, tile, order.slots[index])
        if not kept:
            self.cache.begin_use(order.slots[index])
        landed.add(order.expert, order.slots[index], kept)
        return True

    def _follows_lost(self, demand: Demand, unfetched: list[Missing]) -> bool:
        """Whether earlier tiles of the expert are lost, and a new prefetcher got the order for these: then
        they are dropped, because what is computed of an expert is a prefix."""
        order = demand.order
        if all(item.expert != order.expert for item in unfetched):
            return False
        self.link.cancel(order)
        self.link.wait(order, order.size)
        for slot in order.slots[demand.tiles.start :]:
            self.cache.release_loading(slot)
        unfetched.append(Missing(order.expert, order.lo + demand.tiles.start, order.lo + demand.tiles.stop))
        return True

    def _end_demand(self, layer: int, demand: Demand, whole: bool) -> None:
        """`update` books what an adopted order brings beyond its demand."""
        if whole and demand.background is not None:
            demand.background.booked = demand.tiles.stop
            self._background[layer, demand.order.expert] = demand.background

    def _end_stream(self) -> None:
        for key in self._streamed:
            self._note_ordered(key)
        self._streamed.clear()

    def _adopt(self, layer: int, items: dict[int, Missing]) -> Iterator[Demand]:
        """Demand the background orders of these experts. Their tiles leave `items`, by expert. This waits for
        nothing, because the link would begin other tiles meanwhile."""
        for item in items.values():
            key = (layer, item.expert)
            if self._predicted.pop(key, None) is not None:
                predicted = min(item.hi, int(self.cache.target[key]))
                self.counters.late_tiles += max(0, predicted - item.lo)
        entries = [e for item in items.values() if (e := self._background.get((layer, item.expert)))]
        for entry in sorted(entries, key=lambda entry: entry.place):
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

    def _demand(self, layer: int, wanted: deque[Missing], running: deque[Demand]) -> None:
        """Order as many wanted tiles as slots are free."""
        while wanted and self.link.up:
            item = wanted[0]
            order = self._order(layer, item.expert, item.lo, item.hi - item.lo, DEMANDED)
            if order is None:
                if running:
                    return
                self.stop_background_order()
                continue
            running.append(Demand(order, range(len(order.slots))))
            wanted.popleft()
            if item.lo + len(order.slots) < item.hi:
                wanted.appendleft(Missing(item.expert, item.lo + len(order.slots), item.hi))

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
        if count <= 0 or key in self._background or key in self._streamed:
            return True
        if len(self._background) == BACKGROUND_ORDERS:
            return False
        order = self._order(*key, lo, count, PLACED if prediction is None else PREDICTED)
        if order is None:
            return False
        self._background[key] = BackgroundOrder(order, prediction)
        self._note_ordered(key)
        if prediction is not None:
            prediction.issue()
        return True

    def _order(self, layer: int, expert: int, lo: int, count: int, urgency: int) -> Order | None:
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
