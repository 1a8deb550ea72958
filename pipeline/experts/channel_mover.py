"""Moves chosen channels of experts to the device, for one layer each: those that a layer's masks keep, and
those that a mask is predicted to keep.

Channels lie in staging slots beside the resident tiles, gathered one after the other, and are given back once
their expert has been computed: they never become resident. A predicted order goes on as a demanded one where
its expert is needed, and is cancelled where it is not; what the masks keep beyond it is ordered at once. So
a layer's channels are the same whatever was predicted, and they are given tile by tile in the experts' order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pipeline.arrays import IntArray
from pipeline.counters import ChannelCounters
from pipeline.experts.fetch_link import DEMANDED, PREDICTED, Order
from pipeline.experts.shares import Missing
from pipeline.experts.tile_mover import Key, TileMover

SPARE_SLOTS = 2  # that predictions leave to demands: one to compute from while the next is filled


class Wanted(NamedTuple):
    """The channels that a layer's masks keep of an expert's tiles [lo, hi), which are not resident."""

    expert: int
    lo: int
    hi: int
    channels: IntArray  # counted over the expert, ascending


class Landed(NamedTuple):
    """A tile whose wanted channels are on the device. `places`: their records, counted over the slab, in the
    order of `Wanted.channels`; they may be read until the iterator advances."""

    expert: int
    tile: int
    places: IntArray


@dataclass
class _Part:
    """Channels of one tile that an order of their own brings: its channels [start, end)."""

    order: Order
    start: int
    end: int
    last: bool  # the last tile that the order has channels of


@dataclass(eq=False)
class _Demand:
    """An expert's demand: what a predicted order brings of it, and by tile what is ordered beside that."""

    wanted: Wanted
    guess: Order | None
    guessed: IntArray  # of each wanted channel: its place in that order, -1 where it brings it not
    bounds: IntArray  # [tiles + 1]: tile lo + i has the wanted channels [bounds[i], bounds[i + 1])
    parts: dict[int, _Part] = field(default_factory=dict)  # by tile

    def missing(self, tile: int) -> IntArray:
        """The tile's channels that the predicted order does not bring."""
        here = self.here(tile)
        return self.wanted.channels[here][self.guessed[here] < 0]

    def here(self, tile: int) -> slice:
        """The tile's wanted channels."""
        index = tile - self.wanted.lo
        return slice(int(self.bounds[index]), int(self.bounds[index + 1]))


class ChannelMover:
    """Used by the engine's thread alone, beside a tile mover with which it shares the slots and the link."""

    def __init__(self, tiles: TileMover, channels: int) -> None:
        """`channels`: of a tile."""
        self.counters = ChannelCounters()  # of the present phase
        self._tiles = tiles
        self._cache, self._link = tiles.cache, tiles.link
        self._channels = channels
        self._predicted: dict[Key, Order] = {}
        self._dropped: list[Order] = []  # cancelled, and perhaps not final yet
        self._unneeded: set[int] = set()  # of them, the numbers of predictions that no layer needed
        self._most = self._cache.slots - self._cache.capacity - SPARE_SLOTS  # slots of predictions

    @property
    def idle(self) -> bool:
        """No predicted channels are held or under way."""
        return not (self._predicted or self._dropped)

    def predict(self, layer: int, expert: int, channels: IntArray) -> None:
        """Order the channels of an expert that a later layer probably needs, behind all demands, as far as
        slots are free for predictions."""
        if (layer, expert) in self._predicted or not self._link.up:
            return
        held = sum(len(order.slots) for order in (*self._predicted.values(), *self._dropped))
        slots = self._take(min(self._slots_of(len(channels)), self._most - held))
        if slots:
            fitting = channels[: len(slots) * self._channels]
            order = self._link.gather(layer, expert, fitting, slots, PREDICTED)
            self._predicted[layer, expert] = order

    def demand(self, layer: int, wanted: Sequence[Wanted], unfetched: list[Missing]) -> Iterator[Landed]:
        """Order what the layer's masks keep, and drop predictions for this layer and earlier ones that name
        other experts. Yields each tile once its channels have landed, the experts as given and their tiles
        in order. `unfetched`: tiles that are not yielded because the prefetcher exited, the last of their
        expert; complete at the end."""
        experts = {item.expert for item in wanted}
        for key in [k for k in self._predicted if k[0] <= layer and (k[0] < layer or k[1] not in experts)]:
            self._drop_prediction(key)
        self._collect_dropped()
        demands = [self._begin(layer, item) for item in wanted]
        waiting = deque((demand, tile) for demand in demands for tile in range(*demand.wanted[1:3]))
        self._order(layer, waiting)
        return self._landings(layer, demands, waiting, unfetched)

    def forget(self) -> None:
        """Drop all predictions, and wait until no channel is under way."""
        for key in list(self._predicted):
            self._drop_prediction(key)
        while self._dropped:
            self._link.wait(self._dropped[0], self._dropped[0].size)
            self._collect_dropped()

    def _begin(self, layer: int, wanted: Wanted) -> _Demand:
        """Demand the predicted order of an expert, if there is one."""
        guess = self._predicted.pop((layer, wanted.expert), None)
        edges = np.arange(wanted.lo, wanted.hi + 1) * self._channels
        bounds = np.searchsorted(wanted.channels, edges).astype(np.int32)
        guessed = np.full(len(wanted.channels), -1, np.int32)
        if guess is not None:
            assert guess.channels is not None
            comes = guess.channels[: guess.landed if guess.final else guess.size]
            if len(comes):
                at = np.searchsorted(comes, wanted.channels).clip(max=len(comes) - 1)
                found = comes[at] == wanted.channels
                guessed[found] = at[found]
            self._link.demand(guess, int(guessed.max(initial=-1)) + 1)
            self.counters.book(len(comes), int((guessed >= 0).sum()), len(wanted.channels))
        return _Demand(wanted, guess, guessed, bounds)

    def _order(self, layer: int, waiting: deque[tuple[_Demand, int]]) -> None:
        """Order the first of the waiting tiles, as many as slots are free for. An order has tiles of one
        expert."""
        while waiting and self._link.up:
            demand, first = waiting[0]
            count, channels = 0, list[IntArray]()
            room = self._cache.free * self._channels
            while count < len(waiting) and waiting[count][0] is demand:
                missing = demand.missing(first + count)
                if len(missing) > room:
                    break
                room -= len(missing)
                channels.append(missing)
                count += 1
            if not count:
                return
            joined = np.concatenate(channels)
            if len(joined):
                slots = self._take(self._slots_of(len(joined)))
                order = self._link.gather(layer, demand.wanted.expert, joined, slots, DEMANDED)
                ends = np.cumsum([len(part) for part in channels]).tolist()
                for i, end in enumerate(ends):
                    start = end - len(channels[i])
                    demand.parts[first + i] = _Part(order, start, end, i == count - 1)
            for _ in range(count):
                waiting.popleft()

    def _landings(
        self,
        layer: int,
        demands: list[_Demand],
        waiting: deque[tuple[_Demand, int]],
        unfetched: list[Missing],
    ) -> Iterator[Landed]:
        for demand in demands:
            expert, lo, hi, _ = demand.wanted
            for tile in range(lo, hi):
                while waiting and waiting[0][0] is demand and waiting[0][1] == tile and self._link.up:
                    self._make_room()
                    self._order(layer, waiting)
                places = self._places(demand, tile)
                if places is None:  # the prefetcher exited before they landed
                    unfetched.append(Missing(expert, tile, hi))
                    break
                yield Landed(expert, tile, places)
                part = demand.parts.get(tile)
                if part is not None and part.last:
                    self._give_back(part.order)
                    self._order(layer, waiting)
            while waiting and waiting[0][0] is demand:
                waiting.popleft()
            self._end(demand)
            self._order(layer, waiting)

    def _places(self, demand: _Demand, tile: int) -> IntArray | None:
        """The records of a tile's channels, once they have landed; None where they will not."""
        here, part = demand.here(tile), demand.parts.get(tile)
        guessed = demand.guessed[here]
        places = np.empty(len(guessed), np.int32)
        if part is None and (guessed < 0).any():
            return None  # they were not ordered
        sources = []
        if demand.guess is not None:
            sources.append((demand.guess, guessed >= 0, guessed[guessed >= 0]))
        if part is not None:
            sources.append((part.order, guessed < 0, np.arange(part.start, part.end, dtype=np.int32)))
        for order, to, indices in sources:
            if not len(indices):
                continue
            last = int(indices[-1])
            self._link.wait(order, last + 1)
            if order.landed <= last:
                return None
            slots = np.array(order.slots, np.int32)
            places[to] = slots[indices // self._channels] * self._channels + indices % self._channels
        return places

    def _end(self, demand: _Demand) -> None:
        """Give back the slots that an expert's orders still hold."""
        for order in {id(part.order): part.order for part in demand.parts.values()}.values():
            if order.slots:
                self._drop(order)
        if demand.guess is not None:
            self._drop(demand.guess)
        self._collect_dropped()

    def _make_room(self) -> None:
        """Free a slot for a demand: of a background order, or of a prediction."""
        if not self._tiles.idle:
            self._tiles.stop_background_order()
            return
        if self._predicted:
            self._drop_prediction(next(reversed(self._predicted)))
        if not self._dropped:
            raise AssertionError("no slot is free, and none can be freed")
        self._link.wait(self._dropped[0], self._dropped[0].size)
        self._collect_dropped()

    def _drop_prediction(self, key: Key) -> None:
        order = self._predicted.pop(key)
        self._unneeded.add(order.id)
        self._drop(order)

    def _drop(self, order: Order) -> None:
        """Cancel an order; its slots are free once it is final."""
        self._link.cancel(order)
        self._dropped.append(order)

    def _collect_dropped(self) -> None:
        if any(not order.final for order in self._dropped):
            self._link.update(0)
        for order in self._dropped:
            if order.final:
                self._give_back(order)
        self._dropped = [order for order in self._dropped if not order.final]

    def _give_back(self, order: Order) -> None:
        """The slots of a final order become free, behind what the device reads of them."""
        self.counters.moved += order.landed
        if order.id in self._unneeded:
            self._unneeded.remove(order.id)
            self.counters.wasted += order.landed
        for slot in order.slots:
            self._cache.release_loading(slot)
        order.slots = []

    def _take(self, count: int) -> list[int]:
        """Up to so many free slots, once the device has read what was in them."""
        taken = self._cache.take(max(0, count))
        for _, fence in taken:
            self._tiles.device.wait(fence)
        return [slot for slot, _ in taken]

    def _slots_of(self, channels: int) -> int:
        return -(-channels // self._channels)
