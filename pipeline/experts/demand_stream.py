"""A layer's demanded tiles on their way to the device: orders them, and gives them once they have landed, or
once the device waits for their landing.

Background orders of the layer's experts become demanded ones (`experts/tile_mover.py`), and come first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

from pipeline.experts.fetch_link import DEMANDED
from pipeline.experts.landings import Landings
from pipeline.experts.shares import Missing
from pipeline.experts.tile_mover import TileMover
from pipeline.experts.tile_orders import Demand, LandedTiles


class DemandStream:
    """Of one layer, in one step. A mover has one at a time; it is used by the engine's thread alone."""

    def __init__(
        self, mover: TileMover, layer: int, missing: Iterable[Missing], unfetched: list[Missing]
    ) -> None:
        """Order the tiles. `unfetched` gets those that are not fetched because the prefetcher exited, the
        last of their expert."""
        self._mover, self._cache, self._link = mover, mover.cache, mover.link
        self._layer, self._unfetched = layer, unfetched
        items = {item.expert: item for item in missing}
        self._running = deque(mover.begin_demand(layer, items))
        self._wanted = mover.wanted = deque(item for item in items.values() if item.lo < item.hi)
        self._order_wanted()

    def groups(self, *, ahead: bool = False) -> Iterator[list[tuple[int, int]] | None]:
        """Yields (expert, slot) of landed tiles by groups (`LandedTiles`), those of background orders first.
        A slot that is not kept may be read until the iterator advances. Called once.

        `ahead`: tiles may be given before they have landed, where the device waits for that by itself. Then
        None may follow: not all have landed, what was computed from them is wrong, and those that have landed
        are given again."""
        numbered = self._running and not self._wanted
        numbered = numbered and all(demand.order.numbers for demand in self._running)
        if ahead and numbered and (landings := self._link.landings) and landings.may_wait:
            return self._ahead(landings)
        return self._landed()

    def _ahead(self, landings: Landings) -> Iterator[list[tuple[int, int]] | None]:
        """All demanded tiles are ordered: the device waits for each order's last tile of a group."""
        tiles = [(demand, index) for demand in self._running for index in demand.tiles]
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
            self._settle(awaited, landed, landings)
            for slot in landed.used:
                self._cache.end_use(slot)
            raise
        self._settle(awaited, landed, landings)
        if landed.landed == len(tiles) and landings.trusted:
            landed.tiles.clear()
        else:
            yield None
        yield from landed.give(self._cache.end_use)

    def _settle(self, awaited: Iterable[int], landed: LandedTiles, landings: Landings) -> None:
        """Book what has landed, once all has that will: then the device waits for no flag. Until then,
        nothing here may wait for the device."""
        for demand in self._running:
            self._link.wait(demand.order, demand.tiles.stop)
        for slot in awaited:
            landings.settle(slot)
        for demand in self._running:
            if not self._follows_lost(demand):
                self._end(demand, all(self._land(demand, index, landed) for index in demand.tiles))
        self._mover.end_demand()

    def _landed(self) -> Iterator[list[tuple[int, int]]]:
        landed = LandedTiles.of(self._running, self._wanted, self._mover.device.on_host)
        while self._running:
            demand = self._running.popleft()
            whole = not self._follows_lost(demand)
            for index in demand.tiles if whole else ():
                self._link.wait(demand.order, index + 1)
                whole = self._land(demand, index, landed)
                if not whole:
                    break
                following = partial(self._has_landed, demand, index + 1)
                if landed.due(bool(self._wanted), following) and (
                    yield from landed.give(self._cache.end_use)
                ):
                    self._order_wanted()
            self._end(demand, whole)
            if not self._running:
                yield from landed.give(self._cache.end_use)
                self._order_wanted()
        self._unfetched.extend(self._wanted)
        self._wanted.clear()
        self._mover.end_demand()

    def _has_landed(self, demand: Demand, index: int) -> bool:
        """Whether a demand's next tile, or after its last one the next demand's first, has landed."""
        self._link.update(0)
        if index < demand.tiles.stop:
            return demand.order.landed > index
        return bool(self._running) and self._running[0].order.landed > self._running[0].tiles.start

    def _land(self, demand: Demand, index: int, landed: LandedTiles) -> bool:
        """Book a demanded tile. False: the prefetcher exited before it."""
        order, tile = demand.order, demand.order.lo + index
        if order.landed <= index:
            for unwritten in order.slots[index:]:
                self._cache.release_loading(unwritten)
            self._unfetched.append(Missing(order.expert, tile, order.lo + demand.tiles.stop))
            return False
        self._mover.demanded += 1
        kept = self._cache.land(self._layer, order.expert, tile, order.slots[index])
        if not kept:
            self._cache.begin_use(order.slots[index])
        landed.add(order.expert, order.slots[index], kept)
        return True

    def _follows_lost(self, demand: Demand) -> bool:
        """Whether earlier tiles of the expert are lost, and a new prefetcher got the order for these: then
        they are dropped, because what is computed of an expert is a prefix."""
        order = demand.order
        if all(item.expert != order.expert for item in self._unfetched):
            return False
        self._link.cancel(order)
        self._link.wait(order, order.size)
        for slot in order.slots[demand.tiles.start :]:
            self._cache.release_loading(slot)
        lost = Missing(order.expert, order.lo + demand.tiles.start, order.lo + demand.tiles.stop)
        self._unfetched.append(lost)
        return True

    def _end(self, demand: Demand, whole: bool) -> None:
        if whole and demand.background is not None:
            demand.background.booked = demand.tiles.stop
            self._mover.resume(demand.background)

    def _order_wanted(self) -> None:
        """Order as many wanted tiles as slots are free."""
        while self._wanted and self._link.up:
            item = self._wanted[0]
            order = self._mover.order(self._layer, item.expert, item.lo, item.hi - item.lo, DEMANDED)
            if order is None:
                if self._running:
                    return
                self._mover.stop_background_order()
                continue
            self._running.append(Demand(order, range(len(order.slots))))
            self._wanted.popleft()
            if item.lo + len(order.slots) < item.hi:
                self._wanted.appendleft(Missing(item.expert, item.lo + len(order.slots), item.hi))
