"""Moves tiles to the device: keeps residency at the policy's targets, streams what a step demands.

The only user of the expert cache's slots and of the fetch link, so the rules that tie the two live here: an
expert has at most one order under way; a demanded expert's background order is truncated first, and what it
has brought is used; tiles land in order, so what is resident is always a prefix. While there is no prefetcher
nothing is ordered, and what was demanded is handed back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.counters import PhaseCounters
from pipeline.device import Device
from pipeline.experts.expert_cache import ExpertCache
from pipeline.experts.fetch_link import DEMANDED, PLACED, PREDICTED, FetchLink, Order
from pipeline.experts.shares import Missing
from pipeline.policies.view import Target

BACKGROUND = 64  # orders under way at most: more would only fill the prefetcher's socket
COME_LIMIT = 10.0  # seconds for a new prefetcher, where one is waited for


@dataclass
class _Prediction:
    """An expert that is kept because it was predicted, and not used yet."""

    counters: PhaseCounters  # of the phase that predicted it: what comes of it is booked there
    tiles: int = 0  # that this brought


class TileMover:
    """Used by the engine's thread alone."""

    def __init__(self, cache: ExpertCache, link: FetchLink, device: Device) -> None:
        self.cache = cache
        self._link = link
        self._device = device
        self._background: dict[tuple[int, int], Order] = {}
        self._taken_in: dict[int, int] = {}  # order id -> tiles of it that the cache knows of
        self._booked_to: dict[int, PhaseCounters] = {}  # order id of a prediction -> as in `_Prediction`
        self._predicted: dict[tuple[int, int], _Prediction] = {}
        self.counters = PhaseCounters(len(cache.residency))  # of the phase that runs
        self.demanded = 0  # tiles
        self.placed = 0  # tiles that landed in the background

    def retarget(self, targets: Iterable[Target], predicted: bool = False) -> None:
        """Keep these experts at these residencies from now on: shrink at once, grow by what is demanded
        and, from the next `update` on, in the background. What is `predicted` overtakes what is not."""
        changes = tuple(targets)
        if not changes:
            return
        kept = {(c.layer, c.expert): int(self.cache.residency[c.layer, c.expert]) for c in changes}
        self.cache.set_targets(changes)
        for change in changes:
            key = (change.layer, change.expert)
            order = self._background.get(key)
            if order is not None and order.lo + len(order.slots) > change.tiles:
                self._link.cancel(order)
            if predicted and change.tiles > kept[key]:
                self._predicted.setdefault(key, _Prediction(self.counters))
            elif key in self._predicted and change.tiles < kept[key]:
                self._forget(key, kept[key] - change.tiles)
            elif change.tiles == 0:
                self._predicted.pop(key, None)

    def keep_up(self) -> None:
        """See whether the prefetcher came or went, also where nothing is under way; then `update`."""
        self._link.update(0)
        self.update()

    def update(self, wait_ms: int = 0) -> None:
        """Take in landings and order what is still lacking."""
        self.take_in(wait_ms)
        self.order_lacking()

    def order_lacking(self) -> None:
        """Order what is below its target and not under way. Residency stays what it is."""
        if not self._link.up:
            return
        for key in list(self._predicted):
            if not self._order_background(key, PREDICTED):
                return
        for layer, expert in self.cache.lacking().tolist():
            if not self._order_background((layer, expert), PLACED):
                return

    def take_in(self, wait_ms: int = 0) -> None:
        """Take in what has landed in the background."""
        if self._background:
            self._link.update(wait_ms)
            for key, order in list(self._background.items()):
                self._book(order)
                if order.final:
                    del self._background[key]

    def used(self, layer: int, expert: int) -> None:
        """The device computes with what is resident of an expert."""
        key = (layer, expert)
        if key in self._predicted:
            prediction = self._predicted[key]
            prediction.counters.useful_tiles += prediction.tiles
            prediction.tiles = 0
            if self.cache.residency[key] == self.cache.target[key]:  # nothing of it is still to come
                del self._predicted[key]

    @property
    def moving(self) -> bool:
        """Something is under way in the background."""
        return bool(self._background)

    def settle(self) -> bool:
        """Wait until residency equals the targets; False where no prefetcher comes: the rest lands when one
        does."""
        while self.cache.lacking().size or self._background:
            self.update()
            for order in list(self._background.values())[:1]:
                self._link.wait(order, order.landed + 1)
            if not (self._link.up or self._link.wait_up(COME_LIMIT)):
                return False
        self.cache.audit()
        return True

    def stream(
        self, layer: int, missing: Iterable[Missing], left: list[Missing]
    ) -> Iterator[tuple[int, int]]:
        """Fetch tiles on demand: the first orders leave now, and the result yields (expert, slot) for each
        tile, in the order given, once it has landed; first those that were under way and have landed by now.
        A slot whose tile the target does not keep may be read until the next one is asked for. What will not
        come, because there is no prefetcher, is put in `left`; of an expert these are its last tiles."""
        wanted = deque(missing)
        running = deque(self._adopt(layer, wanted))
        self._demand(layer, wanted, running)
        return self._landings(layer, wanted, running, left)

    def _landings(
        self, layer: int, wanted: deque[Missing], running: deque[Order], left: list[Missing]
    ) -> Iterator[tuple[int, int]]:
        while running:
            order = running.popleft()
            for index in range(len(order.slots)):
                self._link.wait(order, index + 1)
                if order.landed <= index:  # the prefetcher died over it
                    for slot in order.slots[index:]:
                        self.cache.pass_through(slot)
                    left.append(Missing(order.expert, order.lo + index, order.lo + len(order.slots)))
                    break
                slot, tile = order.slots[index], order.lo + index
                self.demanded += 1
                kept = self.cache.land(layer, order.expert, tile, slot)
                yield order.expert, slot
                if not kept:
                    self.cache.pass_through(slot)
                    self._demand(layer, wanted, running)
            if not running:
                self._demand(layer, wanted, running)
        left.extend(wanted)

    def _adopt(self, layer: int, wanted: deque[Missing]) -> Iterator[Order]:
        """End the background orders of experts that are about to be demanded. What they have brought since
        the plan was made is the first of what is demanded; the rest leaves `wanted` by so much."""
        for index, item in enumerate(list(wanted)):
            key = (layer, item.expert)
            if self._predicted.pop(key, None) is not None:
                self.counters.late_tiles += item.hi - item.lo
            order = self._background.pop(key, None)
            if order is None:
                continue
            self._link.cancel(order)
            while not order.final:
                self._link.wait(order, len(order.slots))
            known = self._taken_in.pop(order.id, 0)
            counters = self._booked_to.pop(order.id, self.counters)
            came = order.landed - known
            use = min(came, item.hi - item.lo) if item.lo == order.lo + known else 0
            if order.urgency == PREDICTED:
                counters.predicted_tiles += came - use
                counters.wasted_tiles += came - use
            for slot in order.slots[known + use :]:
                self.cache.pass_through(slot)
            slots = order.slots[known : known + use]
            wanted[index] = Missing(item.expert, item.lo + use, item.hi)
            if slots:
                yield Order(order.id, layer, item.expert, item.lo, slots, DEMANDED, use, final=True)
        for item in [item for item in wanted if item.lo == item.hi]:
            wanted.remove(item)

    def _demand(self, layer: int, wanted: deque[Missing], running: deque[Order]) -> None:
        """Order as much of what is wanted as there are slots. With no order running there always are."""
        while wanted and self._link.up:
            item = wanted[0]
            order = self._order(layer, item.expert, item.lo, item.hi - item.lo, DEMANDED)
            if order is None:
                if not running:
                    self._make_room()
                    continue
                return
            running.append(order)
            wanted.popleft()
            if item.lo + len(order.slots) < item.hi:
                wanted.appendleft(Missing(item.expert, item.lo + len(order.slots), item.hi))

    def _make_room(self) -> None:
        """Every slot is kept or being loaded in the background: wait for one of those orders to end."""
        key, order = next(iter(self._background.items()))
        self._link.cancel(order)
        while not order.final:
            self._link.wait(order, len(order.slots))
        self._book(order)
        del self._background[key]

    def _order_background(self, key: tuple[int, int], urgency: int) -> bool:
        """Order what an expert lacks, unless that is under way; False where no more can be ordered."""
        lo = int(self.cache.residency[key])
        count = int(self.cache.target[key]) - lo
        if count <= 0 or key in self._background:
            return True
        if len(self._background) == BACKGROUND:
            return False
        order = self._order(*key, lo, count, urgency)
        if order is not None:
            self._background[key] = order
            if urgency == PREDICTED:
                self._booked_to[order.id] = self._predicted[key].counters
        return order is not None

    def _order(self, layer: int, expert: int, lo: int, count: int, urgency: int) -> Order | None:
        """Order up to `count` tiles, as many as there are free slots; None where there is none."""
        taken = self.cache.take(count)
        if not taken:
            return None
        for _, fence in taken:
            self._device.wait(fence)
        return self._link.order(layer, expert, lo, [slot for slot, _ in taken], urgency)

    def _book(self, order: Order) -> None:
        """Book a background order's new landings, and give back what a final one did not write."""
        known = self._taken_in.get(order.id, 0)
        predicted = order.urgency == PREDICTED
        prediction = self._predicted.get((order.layer, order.expert)) if predicted else None
        # a prediction that was dropped meanwhile is still booked to the phase that made it
        counters = self._booked_to.get(order.id, self.counters) if prediction is None else prediction.counters
        for index in range(known, order.landed):
            self.placed += 1
            counters.predicted_tiles += predicted
            slot = order.slots[index]
            if not self.cache.land(order.layer, order.expert, order.lo + index, slot):
                self.cache.pass_through(slot)
                counters.wasted_tiles += predicted
            elif prediction is not None:
                prediction.tiles += 1
        self._taken_in[order.id] = order.landed
        if order.final:
            for slot in order.slots[order.landed :]:
                self.cache.pass_through(slot)
            del self._taken_in[order.id]
            self._booked_to.pop(order.id, None)

    def _forget(self, key: tuple[int, int], tiles: int) -> None:
        """So many tiles of an expert were dropped, those that prediction brought last among them."""
        prediction = self._predicted[key]
        lost = min(prediction.tiles, tiles)
        prediction.counters.wasted_tiles += lost
        prediction.tiles -= lost
        if self.cache.target[key] == 0:
            del self._predicted[key]
