"""Moves tiles of experts, or chosen channels of them, to slots of the slab.

Three kinds of moves, of which each expert has its own:

    demanded    a layer computes with them now: copied by this thread (`Copier`), before all else
    predicted   a later layer will probably need them: ordered from the prefetch process (`Link`)
    placed      below the policy's target, in the background: ordered behind the predicted ones

A demand depends on no other process. Orders of a demanded expert are cancelled; what has landed of them is
used, and where the link is moving one of them, the demand waits until that tile is there, or the order has
ended, and copies the rest itself. A tile may so be copied twice: the second copy's slot is given back.

Whole tiles land in their order, so that resident tiles are always a prefix. Chosen channels never become
resident: they lie in slots beside the cached tiles, packed, and are given back once their layer was computed.
No torch and no process is known here: the replay runs the same mover on a clock.

Where some experts are on disk (`disk_tier.py`), tiles are copied from those in host memory alone: a demanded
expert is waited for, others are copied once they were read. An expert that an order may be reading stays
there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.arrays import IntArray
from pipeline.config import BACKGROUND_ORDERS
from pipeline.counters import PhaseCounters, PrefetchedTiles
from pipeline.errors import DiskFailed
from pipeline.experts.cache import ExpertCache
from pipeline.policies.view import Target
from workers.copiers import TileCopy

PREDICTED, PLACED = 1, 2  # urgency; smaller overtakes
SPARE_SLOTS = 2  # that predicted channels leave to demands: one to compute from while the next is filled

Key = tuple[int, int]  # layer, expert


class Wanted(NamedTuple):
    """Tiles [lo, hi) of an expert that are not resident; with `channels` only these of them are wanted."""

    expert: int
    lo: int
    hi: int
    channels: IntArray | None = None  # counted over the expert, ascending


class Landed(NamedTuple):
    """A demanded tile that may be read until the iterator that gave it advances. Of chosen channels `places`
    are the records, counted over the slab, in the order of `Wanted.channels`."""

    expert: int
    tile: int
    slot: int
    places: IntArray | None = None


@dataclass
class Prediction:
    """An expert's predicted tiles. They are counted in the phase that predicted them."""

    counters: PhaseCounters
    unused: PrefetchedTiles = field(default_factory=PrefetchedTiles)
    ordered: bool = False  # an order of it was sent


@dataclass(eq=False)
class Order:
    """An order to the prefetch process and its progress, in tiles or in channels."""

    id: int
    layer: int
    expert: int
    lo: int  # the first tile, of whole ones
    slots: list[int]
    urgency: int
    channels: IntArray | None = None
    landed: int = 0  # so many, from the first on, are in their slots
    final: bool = False  # nothing else will land
    cancelled: bool = False  # at most what moves now will land
    booked: int = 0  # landed tiles that the cache and the counters know
    prediction: Prediction | None = None  # for which it was sent, also where that was dropped since

    @property
    def key(self) -> Key:
        """Its layer and expert."""
        return self.layer, self.expert

    @property
    def size(self) -> int:
        """Its tiles or channels."""
        return len(self.slots if self.channels is None else self.channels)


class Link:
    """Carries orders to the prefetch process (`link.py` beside); this one is down, and takes none."""

    @property
    def up(self) -> bool:
        """Orders are taken."""
        return False

    @property
    def keys(self) -> set[Key]:
        """The experts that it may be reading."""
        return set()

    def order(
        self, layer: int, expert: int, lo: int, slots: list[int], urgency: int, channels: IntArray | None
    ) -> Order:
        """Order tiles from `lo` on, one for each slot, or channels, as many to a slot as a tile has."""
        raise NotImplementedError

    def cancel(self, order: Order) -> None:
        """Drop what has not begun to move; the order stays open until it is final."""

    def moving(self, order: Order) -> bool:
        """Return whether a part of the order is being moved, as far as is known."""
        return False

    def update(self, wait_ms: int) -> None:
        """Bring the progress of all orders up to date; wait at most so long for news."""

    def wait(self, order: Order, landed: int) -> None:
        """Return when so many have landed, or the order is final. The wait is bounded."""


class Stored:
    """Tells which experts are in host memory. Here all of them are."""

    def has(self, layer: int, expert: int) -> bool:
        """Return whether an expert of the present layer is there: it stays until the layer was computed."""
        return True

    def await_one(self, layer: int, experts: Iterable[int]) -> None:
        """Wait a moment for one of these experts, which the present layer needs. Raises DiskFailed where one
        cannot be read."""

    def of(self, mover: Mover, keys: set[Key], first: Iterable[Key]) -> set[Key]:
        """Return those of the experts that the mover may order tiles of now. Others are read as memory
        allows, those of `first` first."""
        return keys

    def reads(self, mover: Mover) -> bool:
        """Return whether any is being read for a mover."""
        return False

    def bring(self, layer: int, expert: int) -> None:
        """Wait until an expert is there, while nothing is computed. Raises DiskFailed."""


class Copier(Protocol):
    """Copies demanded tiles; `workers/copiers.py`."""

    def begin(self, copies: Sequence[TileCopy]) -> Any:
        """Begin copies, each behind its fence. Returns what `ready` takes."""

    def ready(self, begun: Any) -> None:
        """Return when the device may be given work that reads these slots."""


@dataclass(slots=True, eq=False)
class _Part:
    """A demanded tile. `channels`: those that are copied for it; None: it is copied whole."""

    expert: int
    tile: int
    channels: IntArray | None = None
    places: IntArray | None = None  # of the wanted channels: where predicted ones lie, -1 for copied ones
    slot: int = -1

    def landed(self, tile_channels: int) -> Landed:
        """Return what is given to the device."""
        if self.places is None or self.channels is None:
            return Landed(self.expert, self.tile, self.slot)
        places = self.places.copy()
        first = self.slot * tile_channels
        places[places < 0] = np.arange(first, first + len(self.channels), dtype=np.int32)
        return Landed(self.expert, self.tile, self.slot, places)


class Mover:
    """Keeps residency at the policy's targets, and brings what a layer demands. Used by one thread."""

    def __init__(
        self,
        cache: ExpertCache,
        link: Link,
        copier: Copier | None,
        *,
        wait: Callable[[Any], object] = lambda fence: None,
        each: bool = True,
        channels: int = 1,
    ) -> None:
        """`wait`: return once the device has passed a fence. `each`: demanded tiles are given one by one, as
        where the device computes at once; else in few groups, of which the last is small, because the layer
        waits for it. `channels`: of a tile."""
        self.cache, self.link, self.stored = cache, link, Stored()
        # the same memory, of which Python reads and writes single numbers sooner
        self._resident, self._target = cache.residency.data, cache.target.data
        self.counters = PhaseCounters(len(cache.residency))  # of the present phase
        self.demanded = 0  # tiles that landed on demand
        self.placed = 0  # tiles that landed in the background
        self._copier, self._wait, self._each, self._channels = copier, wait, each, channels
        self._orders: dict[Key, Order] = {}  # of whole tiles, in the background
        self._guesses: dict[Key, Order] = {}  # predicted channels
        self._used: list[Order] = []  # those that the present layer reads
        self._ended: list[Order] = []  # cancelled, or read: their slots are free once they are final
        self._predicted: dict[Key, Prediction] = {}
        self._demanded: set[Key] = set()  # of the present demand
        self._waiting: deque[_Part] = deque()  # demanded tiles without a slot
        self._absent: list[_Part] = []  # demanded tiles of experts that are being read from disk
        self._copying: deque[tuple[list[_Part], Any]] = deque()
        self._streamed: list[int] = []  # slots of tiles that are given next and not kept

    @property
    def idle(self) -> bool:
        """No order is under way or waits for the disk, and no channels are held."""
        return not (self._orders or self._guesses or self._ended or self.stored.reads(self))

    # --- targets -------------------------------------------------------------------------------------------

    def retarget(self, targets: Iterable[Target], predicted: bool = False) -> None:
        """Set these residencies as targets. Tiles beyond them are evicted at once; missing tiles are copied
        on demand and, from the next `update` on, in the background, predicted targets before others."""
        changes = tuple(targets)
        if not changes:
            return
        before = self.cache.set_targets(changes)
        for key in before:  # once, where an expert has several targets: the last one counts
            tiles = self._target[key]
            order = self._orders.get(key)
            if order is not None and order.lo + order.size > tiles:
                self._cancel(order)
            prediction = self._predicted.get(key)
            if predicted and tiles > before[key]:
                if prediction is None:
                    self._predicted[key] = Prediction(self.counters)
                    self.counters.wanted_experts += 1
            elif prediction is not None:
                prediction.counters.wasted_tiles += prediction.unused.evict(tiles)
                self._drop_if_done(key)

    def used(self, layer: int, expert: int, tiles: int) -> None:
        """The device computes with an expert's first `tiles` tiles, which are resident."""
        prediction = self._predicted.get((layer, expert))
        if prediction is not None:
            prediction.counters.useful_tiles += prediction.unused.use(tiles)
            self._drop_if_done((layer, expert))

    def _drop_if_done(self, key: Key) -> None:
        """Drop a prediction that has no unused tile, where no other tile of it will land."""
        if not self._predicted[key].unused and self._resident[key] == self._target[key]:
            del self._predicted[key]

    # --- in the background ---------------------------------------------------------------------------------

    def update(self) -> None:
        """Book landed tiles and order tiles that are still below target."""
        self.collect_landings()
        self.fetch_missing()

    def collect_landings(self) -> None:
        """Book what has landed in the background."""
        if self._orders or self._ended:
            self.link.update(0)
            for key, order in list(self._orders.items()):
                if order.final or order.landed > order.booked:
                    self._book(order)
                    if order.final:
                        del self._orders[key]
            self._collect_ended()

    def fetch_missing(self) -> None:
        """Order tiles below target that are not under way: predicted ones first. Residency does not change.
        While demanded tiles wait for slots, no others are ordered."""
        most = BACKGROUND_ORDERS - len(self._orders)
        if self._waiting or self._absent or most <= 0 or not self.cache.below_target or not self.link.up:
            return
        missing = self.cache.below_target.difference(self._orders, self._demanded)
        missing = self.stored.of(self, missing, self._predicted)
        predicted = [key for key in self._predicted if key in missing][:most]
        placed = nsmallest(most - len(predicted), missing.difference(self._predicted))
        for key in predicted + placed:
            if not self._order(key, self._predicted.get(key)):
                return

    def _order(self, key: Key, prediction: Prediction | None) -> bool:
        """Order an expert's tiles below target, of which no order is under way; False without a slot."""
        lo = self._resident[key]
        slots = self._take(self._target[key] - lo)
        if not slots:
            return False
        order = self.link.order(*key, lo, slots, PLACED if prediction is None else PREDICTED, None)
        self._orders[key] = order
        if prediction is not None:
            order.prediction = prediction
            prediction.counters.issued_experts += not prediction.ordered
            prediction.ordered = True
        return True

    def wait_idle(self) -> None:
        """Return when residency equals the targets. What the prefetch process does not bring, because it is
        down, is copied here. Raises DiskFailed where an expert cannot be read."""
        self.forget()
        while self.cache.below_target or not self.idle:
            self.update()
            under_way = [*self._orders.values(), *self._ended]
            if under_way:
                self.link.wait(under_way[0], under_way[0].landed + 1)
            elif self.cache.below_target:
                key = min(self.cache.below_target)
                self.stored.bring(*key)
                if not self.link.up:
                    self._place(key)
        self.cache.audit(idle=True)

    def _place(self, key: Key) -> None:
        """Copy an expert's tiles below target here, as if they had been ordered."""
        lo = self._resident[key]
        slots = self._take(self._target[key] - lo)
        order = Order(-1, *key, lo, slots, PLACED, final=True, prediction=self._predicted.get(key))
        assert self._copier is not None
        copies = [TileCopy(*key, lo + index, slot) for index, slot in enumerate(slots)]
        self._copier.ready(self._copier.begin(copies))
        self._wait(self.cache.fence())  # its expert may be evicted from host memory
        order.landed = len(slots)
        self._book(order)

    def forget(self) -> None:
        """Drop all predicted channels."""
        for key in list(self._guesses):
            self._drop_guess(key)

    def predict(self, layer: int, expert: int, channels: IntArray) -> None:
        """Order channels of an expert that a later layer probably needs, as far as slots are free for
        predictions."""
        if (layer, expert) in self._guesses or not self.link.up:
            return
        held = sum(len(order.slots) for order in (*self._guesses.values(), *self._ended))
        most = self.cache.slots - self.cache.capacity - SPARE_SLOTS - held
        slots = self._take(min(-(-len(channels) // self._channels), most))
        if slots:
            fitting = channels[: len(slots) * self._channels]
            self._guesses[layer, expert] = self.link.order(layer, expert, 0, slots, PREDICTED, fitting)

    def _take(self, count: int) -> list[int]:
        """Return up to so many free slots, once the device has read what was in them."""
        taken = self.cache.take(max(0, count))
        for _, fence in taken:
            self._wait(fence)
        return [slot for slot, _ in taken]

    def _book(self, order: Order) -> None:
        """Book new landings of whole tiles, and release the slots that a final order did not write."""
        key = order.key
        for index in range(order.booked, order.landed):
            self.placed += 1
            tile, slot = order.lo + index, order.slots[index]
            kept = self.cache.land(*key, tile, slot)
            if not kept:
                self.cache.release_loading(slot)
            self._count_landing(order, tile, kept)
        order.booked = order.landed
        if order.final:
            for slot in order.slots[order.landed :]:
                self.cache.release_loading(slot)

    def _count_landing(self, order: Order, tile: int, kept: bool) -> None:
        """Count a landed tile of a predicted order, in the expert's present prediction, which is the order's
        own or a later one. A dropped prediction's tile that another target keeps is no predicted one."""
        present = self._predicted.get(order.key)
        if order.prediction is None or (kept and present is None):
            self.counters.placed_tiles += 1
            return
        counters = (present or order.prediction).counters
        counters.predicted_tiles += 1
        if not kept:
            counters.wasted_tiles += 1
        elif present is not None:
            present.unused.land(tile)

    # --- orders that end -----------------------------------------------------------------------------------

    def _cancel(self, order: Order) -> None:
        if not (order.final or order.cancelled):
            order.cancelled = True
            self.link.cancel(order)

    def _end(self, order: Order) -> None:
        """Cancel an order; its slots are free once it is final."""
        self._cancel(order)
        self._ended.append(order)

    def _drop_guess(self, key: Key) -> None:
        """No layer needs these predicted channels."""
        order = self._guesses.pop(key)
        order.prediction = Prediction(self.counters)  # its channels are counted as wasted
        self._end(order)

    def _collect_ended(self) -> None:
        for order in self._ended:
            if order.channels is None:
                self._book(order)
            elif order.final:
                self.counters.channels.moved += order.landed
                self.counters.channels.wasted += order.landed if order.prediction else 0
                for slot in order.slots:
                    self.cache.release_loading(slot)
        self._ended = [order for order in self._ended if not order.final]

    def _make_room(self) -> None:
        """Free a slot for a demand: of an order in the background, or of a prediction."""
        if not self._ended and self._orders:
            self._end(self._orders.pop(next(reversed(self._orders))))
        elif not self._ended and self._guesses:
            self._drop_guess(next(reversed(self._guesses)))
        if not self._ended:
            raise AssertionError("no slot is free, and none can be freed")
        self.link.wait(self._ended[0], self._ended[0].size)
        self._collect_ended()

    # --- demands -------------------------------------------------------------------------------------------

    def demand(self, layer: int, wanted: Sequence[Wanted]) -> Iterator[list[Landed]]:
        """Begin to copy what a layer needs; predicted channels of this layer and earlier ones that it does
        not need are dropped. Yields groups of landed tiles, those of an expert in their order. The iterator
        has to be exhausted; at its end it raises DiskFailed where an expert could not be read. One demand at
        a time."""
        items: dict[int, list[Wanted]] = {}
        for item in wanted:
            items.setdefault(item.expert, []).append(item)
        for key in [k for k in self._guesses if k[0] < layer or (k[0] == layer and k[1] not in items)]:
            self._drop_guess(key)
        if not items:
            return iter(())
        awaited = []
        for expert, its in items.items():
            self._note_demand((layer, expert), its)
            orders = [self._orders.pop((layer, expert), None), self._guesses.pop((layer, expert), None)]
            moving = [order for order in orders if order is not None and self.link.moving(order)]
            for order in filter(None, orders):
                self._cancel(order)
                if order.channels is not None:
                    self._used.append(order)
                elif order not in moving:
                    self._ended.append(order)
            if moving:
                awaited.append((moving, its))
            else:
                self._want(layer, self._parts(its, orders[1]))
        self._begin_copies(layer, split=not awaited)
        return self._landings(layer, awaited)

    def _want(self, layer: int, parts: Iterable[_Part]) -> None:
        """Have tiles of an expert copied, now or once it is in memory."""
        for part in parts:
            (self._waiting if self.stored.has(layer, part.expert) else self._absent).append(part)

    def _await_disk(self, layer: int) -> None:
        """Wait a moment for the experts that are being read, and have those that are there copied. Raises
        DiskFailed, and forgets them."""
        try:
            self.stored.await_one(layer, {part.expert for part in self._absent})
        except DiskFailed:
            self._absent.clear()
            raise
        absent, self._absent = self._absent, []
        self._want(layer, absent)

    def _note_demand(self, key: Key, items: list[Wanted]) -> None:
        """An expert is demanded: tiles that were predicted for it are late."""
        whole = [item for item in items if item.channels is None]
        if whole:
            self._demanded.add(key)
            if self._predicted.pop(key, None) is not None:
                late = min(whole[-1].hi, self._target[key]) - whole[0].lo
                self.counters.late_tiles += max(0, late)

    def _parts(self, items: list[Wanted], guess: Order | None) -> Iterator[_Part]:
        """The tiles that have to be copied, of one expert; of `guess` is used what has landed."""
        for expert, lo, hi, channels in items:
            if channels is None:
                yield from (_Part(expert, tile) for tile in range(lo, hi))
                continue
            places = self._guessed(channels, guess)
            bounds = np.searchsorted(channels, np.arange(lo, hi + 1) * self._channels).tolist()
            for index, tile in enumerate(range(lo, hi)):
                here = slice(bounds[index], bounds[index + 1])
                yield _Part(expert, tile, channels[here][places[here] < 0], places[here])

    def _guessed(self, channels: IntArray, guess: Order | None) -> IntArray:
        """Return where predicted channels have landed, counted over the slab; -1 for those that have not."""
        places = np.full(len(channels), -1, np.int32)
        if guess is None or guess.channels is None:
            return places
        there = guess.channels[: guess.landed]
        if len(there):
            at = np.searchsorted(there, channels).clip(max=len(there) - 1)
            right = there[at] == channels
            slots, rest = np.array(guess.slots, np.int32), at[right]
            places[right] = slots[rest // self._channels] * self._channels + rest % self._channels
        self.counters.channels.guessed += len(there)
        self.counters.channels.right += int(np.count_nonzero(places >= 0))
        return places

    def _begin_copies(self, layer: int, split: bool = True) -> None:
        """Begin to copy as many waiting tiles as slots are free, in groups: a large and a small one, so that
        little is left to compute when the last tile lands. Without `split` one, as an order is awaited, whose
        rest is another group: a layer has two, whatever was predicted. Where more tiles wait than slots are
        free, two groups share these, so that one is copied while the device computes the other."""
        rest = len(self._waiting) // 4 if split and not self._each else 0
        while self._waiting:
            count = 1 if self._each else len(self._waiting) - rest
            if not self._copying and len(self._waiting) > self.cache.free:
                count = min(count, -(-self.cache.free // 2))
            group = [self._waiting.popleft() for _ in range(count)]
            lacking = [part for part in group if part.channels is None or len(part.channels)]
            taken = self.cache.take(len(lacking))
            if len(taken) < len(lacking):
                first = group.index(lacking[len(taken)])
                self._waiting.extendleft(reversed(group[first:]))
                del group[first:]
            if not group:
                return
            copies = []
            for part, (slot, fence) in zip(lacking, taken, strict=False):
                part.slot = slot
                copies.append(TileCopy(layer, part.expert, part.tile, slot, part.channels, 0, fence))
            rest = 0
            assert self._copier is not None
            self._copying.append((group, self._copier.begin(copies) if copies else None))

    def _landings(
        self, layer: int, awaited: list[tuple[list[Order], list[Wanted]]]
    ) -> Iterator[list[Landed]]:
        adopted: list[Landed] = []
        failure: DiskFailed | None = None
        for orders, (first, *others) in awaited:
            for order in orders:
                self.link.wait(order, order.size)
                if order.channels is None:
                    landed = self._adopt(order, first) if first.channels is None else []
                    self._ended.append(order)
                    adopted += landed
                    first = first._replace(lo=first.lo + len(landed))
            guess = next((used for used in self._used if used.key == orders[0].key), None)
            self._want(layer, self._parts([first, *others], guess))
        self._collect_ended()
        self._begin_copies(layer, split=not awaited)
        if self._each or not self._copying:
            yield from self._give(adopted)
            adopted = []
        while self._copying or self._waiting or self._absent:
            if not self._copying and not self._waiting:
                yield from self._give(adopted)
                adopted = []
                try:
                    self._await_disk(layer)
                except DiskFailed as e:
                    failure = e
            elif not self._copying:
                self._make_room()
            else:
                group, begun = self._copying.popleft()
                if begun is not None and self._copier is not None:
                    self._copier.ready(begun)
                yield from self._give(adopted + [self._land(layer, part) for part in group])
                adopted = []
            self._begin_copies(layer, split=not awaited)
        for order in self._used:
            self._end(order)
        self._used.clear()
        self._collect_ended()
        self._demanded.clear()
        if failure is not None:
            raise failure

    def _give(self, landed: list[Landed]) -> Iterator[list[Landed]]:
        """Yield tiles together, if there are any, and then end the use of slots that are not kept."""
        if not landed:
            return
        self.demanded += sum([one.places is None for one in landed])
        streamed, self._streamed = self._streamed, []
        yield landed
        for slot in streamed:
            self.cache.end_use(slot)

    def _land(self, layer: int, part: _Part) -> Landed:
        """Book a copied tile: it is kept where it is the expert's next one below its target."""
        if part.channels is not None:
            self.counters.channels.moved += len(part.channels)
            if part.slot >= 0:
                self._stream(part.slot)
        elif not self.cache.land(layer, part.expert, part.tile, part.slot):
            self._stream(part.slot)
        return part.landed(self._channels)

    def _stream(self, slot: int) -> None:
        """Note that what has landed in a slot is read once."""
        self.cache.begin_use(slot)
        self._streamed.append(slot)

    def _adopt(self, order: Order, item: Wanted) -> list[Landed]:
        """Return what has landed of an order that moved when its expert was demanded."""
        landed, due = [], item.lo
        for index in range(order.booked, order.landed):
            tile, slot = order.lo + index, order.slots[index]
            if not due == tile < item.hi:
                break
            if not self.cache.land(*order.key, tile, slot):
                self._stream(slot)
            landed.append(Landed(item.expert, tile, slot))
            order.booked, due = index + 1, tile + 1
        return landed
