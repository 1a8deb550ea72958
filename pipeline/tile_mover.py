"""Moves tiles to the device: keeps residency at the policy's targets, streams what a step demands.

The only user of the expert cache's slots and of the fetch link, so the rules that tie the two live here: an
expert has at most one order under way; a demanded expert's background order is truncated first; tiles land
in order, so what is resident is always a prefix. While there is no prefetcher nothing is ordered, and what
was demanded is handed back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from pipeline.device import Device
from pipeline.expert_cache import ExpertCache
from pipeline.fetch_link import DEMANDED, PLACED, FetchLink, Order
from pipeline.policies.view import Target
from pipeline.split import Missing

BACKGROUND = 64  # orders under way at most: more would only fill the prefetcher's socket
COME_LIMIT = 10.0  # seconds for a new prefetcher, where one is waited for


class TileMover:
    """Used by the engine's thread alone."""

    def __init__(self, cache: ExpertCache, link: FetchLink, device: Device) -> None:
        self.cache = cache
        self._link = link
        self._device = device
        self._background: dict[tuple[int, int], Order] = {}
        self._taken_in: dict[int, int] = {}  # order id -> tiles of it that the cache knows of
        self.demanded = 0  # tiles
        self.placed = 0  # tiles that landed in the background

    def retarget(self, targets: Iterable[Target]) -> None:
        """Keep these experts at these residencies from now on: shrink at once, grow by what is demanded
        and, from the next `update` on, in the background."""
        changes = tuple(targets)
        self.cache.set_targets(changes)
        for change in changes:
            order = self._background.get((change.layer, change.expert))
            if order is not None and order.lo + len(order.slots) > change.tiles:
                self._link.cancel(order)

    def keep_up(self) -> None:
        """See whether the prefetcher came or went, also where nothing is under way; then `update`."""
        self._link.update(0)
        self.update()

    def update(self, wait_ms: int = 0) -> None:
        """Take in landings and order what is still lacking."""
        if self._background:
            self._link.update(wait_ms)
            for key, order in list(self._background.items()):
                self._take_in(order)
                if order.final:
                    del self._background[key]
        for layer, expert in self.cache.lacking().tolist() if self._link.up else ():
            if len(self._background) == BACKGROUND:
                return
            if (layer, expert) not in self._background:
                lo = int(self.cache.residency[layer, expert])
                wanted = int(self.cache.target[layer, expert]) - lo
                order_or_none = self._order(layer, expert, lo, wanted, PLACED)
                if order_or_none is None:
                    return
                self._background[layer, expert] = order_or_none

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
        tile, in the order given, once it has landed. A slot whose tile the target does not keep may be read
        until the next one is asked for. What will not come, because there is no prefetcher, is put in `left`;
        of an expert these are its last tiles."""
        wanted = deque(missing)
        running: deque[Order] = deque()
        self._truncate(layer, wanted)
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

    def _truncate(self, layer: int, wanted: Iterable[Missing]) -> None:
        """End the background orders of experts that are about to be demanded. What lands meanwhile is
        dropped: the plan was made without it, and its tiles are demanded in their own order."""
        for item in wanted:
            order = self._background.pop((layer, item.expert), None)
            if order is not None:
                self._link.cancel(order)
                while not order.final:
                    self._link.wait(order, len(order.slots))
                for slot in order.slots[self._taken_in.pop(order.id, 0) :]:
                    self.cache.pass_through(slot)

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
        self._take_in(order)
        del self._background[key]

    def _order(self, layer: int, expert: int, lo: int, count: int, urgency: int) -> Order | None:
        """Order up to `count` tiles, as many as there are free slots; None where there is none."""
        taken = self.cache.take(count)
        if not taken:
            return None
        for _, fence in taken:
            self._device.wait(fence)
        return self._link.order(layer, expert, lo, [slot for slot, _ in taken], urgency)

    def _take_in(self, order: Order) -> None:
        """Book a background order's new landings, and give back what a final one did not write."""
        known = self._taken_in.get(order.id, 0)
        for index in range(known, order.landed):
            self.placed += 1
            slot = order.slots[index]
            if not self.cache.land(order.layer, order.expert, order.lo + index, slot):
                self.cache.pass_through(slot)
        self._taken_in[order.id] = order.landed
        if order.final:
            for slot in order.slots[order.landed :]:
                self.cache.pass_through(slot)
            del self._taken_in[order.id]
