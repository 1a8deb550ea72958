"""Which experts of a partial store are in memory (`shm/store.py`), and in which of its frames: the only one
that decides it.

    ABSENT -> READING -> RESIDENT -> ABSENT       by an order to the reader, its report, an eviction

A worker must never read a frame that has another expert. So a Work is sent only when its experts are
RESIDENT, and an expert of the layer that is being computed is not evicted: no Work of an earlier layer is
without its answer then, but for those that a failed step has abandoned, whose answers are dropped. A frame
that is being read to is not given to another expert, and a reader that has exited writes nothing more.

**Copies on a device** are made from experts in memory: those that the layer needs are kept as its others, and
one that a prefetch process may be reading is not evicted. An expert all of whose tiles the device has and
computes is not needed here, and is evicted before all others: so what memory and device hold adds up.

**What is evicted** is what will be needed last (`disk_use.py`).

**Ahead of need** the experts are read that the next layer's router names for this layer's input; in a step
that uses most of a layer's experts, those of the next layer in their order. They are read behind those that
are needed, and pause while too few of them are used (`PrefetchMeter`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from heapq import nsmallest
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray
from pipeline.counters import PrefetchMeter
from pipeline.errors import DiskFailed
from pipeline.experts.disk_use import ExpertUse
from pipeline.experts.mover import Key, Mover, Stored
from pipeline.experts.peers import ChildServerSocket, ProgressWatch
from pipeline.policies.predictions import by_probability
from pipeline.policies.view import Routing
from protocol.messages import ExpertRead, ReadExpert, Ready, WorkerDied
from shm.control import ControlLine
from shm.descriptor import HEADER, ITEMS, LAYER, Descriptor, head_of
from shm.store import Store

ABSENT, READING, RESIDENT = range(3)
DEMANDED, PREDICTED = range(2)  # urgencies
MOST = 0.5  # of a layer's experts: a step that uses more is expected to use as many of the next
TRIES = 3  # of an order, by readers that crash or hang
STALL_LIMIT = 30.0  # seconds without a piece after which a reader with orders is hung
LIMIT = 120.0  # seconds without a message of any reader, after which a request fails
WAIT_MS, ROOM_MS = 50, 5
VICTIMS = 32  # that are chosen together
WANTED = 16  # at most, that are read for a device at the same time
NEVER = 1e9  # steps
NONE: IntArray = np.zeros(0, np.int32)


@dataclass(eq=False)
class Order:
    """An expert that is being read."""

    id: int
    layer: int
    expert: int
    urgency: int
    tries: int = 0


@dataclass
class Figures:
    """What has happened so far. Read by any thread."""

    hits: int = 0  # experts of layers that were there when they were needed
    misses: int = 0  # which were not
    read: int = 0  # experts that were read
    bytes: int = 0
    predicted: int = 0  # experts that were read ahead of need
    useful: int = 0  # of them used before they were evicted
    evicted: int = 0
    failed: int = 0  # orders
    waited: float = 0.0  # seconds in which a layer waited for the disk and nothing else


class DiskTier(Stored):
    """Used by the engine's thread alone, but for its figures."""

    def __init__(
        self,
        store: Store,
        top_k: int,
        layers: int,
        socket: ChildServerSocket,
        line: ControlLine,
        nodes: int = 1,
    ) -> None:
        """`store`: with frames; whatever is in them is forgotten. `layers`: that a step computes; `line`: the
        reader's; `nodes`: NUMA nodes, as in `WorkerCores`."""
        shape = store.layout.shape
        self.capacity = store.held.shape.experts
        self.figures, self.file = Figures(), store.manifest.file
        self.probing = False  # the model's routers can be applied ahead
        self._store, self._socket, self._line = store, socket, line
        self._layers, self._experts, self._top_k, self._nodes = layers, shape.experts, top_k, nodes
        self._state = np.zeros((layers, shape.experts), np.int8)
        self._use = ExpertUse(np.full(self._state.shape, top_k / shape.experts))
        self._unused = np.zeros(self._state.shape, bool)  # read ahead, and not used since
        self._used_here = np.zeros(self._state.shape, bool)  # in the latest step that used them
        self._free = list(range(self.capacity))  # frames without an expert that is READING or RESIDENT
        self._frame_of = store.frame_of = np.full(self._state.shape, -1, np.int32)
        self.movers: list[Mover] = []  # to devices that have tiles of some experts
        # Called while a device waits: its host share goes on.
        self.beside: Callable[[], object] = lambda: None
        self._wanted: dict[Mover, list[Key]] = {}  # that they wait for, in the background
        self._layer, self._needed = 0, frozenset[int]()  # what is being computed
        self._early: list[Key] = []  # of the next layer, which is being computed too
        self._ahead: tuple[int, list[int]] = 0, []  # experts of a later layer
        self._orders: dict[tuple[int, int], Order] = {}
        self._numbered: dict[int, Order] = {}  # the same
        self._failed: dict[tuple[int, int], str] = {}
        self._next = 0
        self._heard = 0.0  # monotonic seconds: the reader's latest message, or the first order after none
        self._victims: Iterator[tuple[int, int]] = iter(())
        self._watch, self._meter = ProgressWatch(), PrefetchMeter()

    # --- the engine --------------------------------------------------------------------------------------

    def need(self, layer: int, experts: IntArray, elsewhere: IntArray = NONE) -> None:
        """This layer is computed next, with these experts (ascending): order those that are missing. The
        experts of the layer before may be evicted from now on. `elsewhere`: those that a device has and
        computes."""
        self.update(0)
        named = experts.tolist()
        self._used_here[layer, experts] = True
        self._used_here[layer, elsewhere] = False
        self._early.clear()
        self._layer, self._needed = layer, frozenset(named)
        self._use.book(layer, experts)
        self._failed.clear()
        self._ahead, self._victims = (0, []), iter(())
        states, figures = self._state[layer, experts], self.figures
        figures.useful += int(np.count_nonzero(self._unused[layer, experts]))  # also those that come late
        self._unused[layer, experts] = False
        missing = experts[states != RESIDENT].tolist()
        figures.misses += len(missing)
        figures.hits += len(named) - len(missing)
        for expert in missing:
            self._demand(layer, expert)

    def need_early(self, layer: int, experts: IntArray) -> None:
        """As `need`, of the next layer, while the present one is computed."""
        self._early = [(layer, expert) for expert in experts.tolist()]
        for key in self._early:
            if self._state[key] != RESIDENT:
                self._demand(*key)

    def bring(self, layer: int, *experts: int) -> None:
        """Wait until experts are in memory; they are until others are needed. No Work is being computed.
        Raises DiskFailed."""
        self.need(layer, np.array(experts))
        for expert in experts:
            while self._state[layer, expert] != RESIDENT:
                self._check(layer, expert)
                self._wait()

    @property
    def predicts(self) -> bool:
        """The next layer's router is to be applied to each layer's input."""
        return self.probing and self._meter.on

    def predict(self, routing: Routing | None) -> None:
        """The layer's Works are under way. `routing`: what the next layer's router named, or None. Order what
        that layer will probably need, behind all else, and keep as much memory free as a token demands."""
        following = (self._layer + 1) % self._layers
        ahead: list[int] = []
        if following and len(self._needed) > MOST * self._experts:
            ahead = np.flatnonzero(self._state[following] == ABSENT).tolist()
        elif routing is not None:
            ahead = [e for e in by_probability(routing) if self._state[following, e] == ABSENT]
        if ahead and self.movers:
            whole = self._on_device()[following]
            ahead = [expert for expert in ahead if not whole[expert]]
        self._ahead = following, ahead
        for expert in ahead:
            if not self._read_ahead(following, expert, PREDICTED):
                break
            self._unused[following, expert] = True
            self.figures.predicted += 1
        self._make_room(self._top_k)

    def end_step(self, decoded: bool) -> None:
        if decoded:
            self._meter.step(self.figures.predicted, self.figures.useful)

    # --- the movers --------------------------------------------------------------------------------------

    def has(self, layer: int, expert: int) -> bool:
        return bool(self._state[layer, expert] == RESIDENT)

    def await_one(self, layer: int, experts: Iterable[int]) -> None:
        began = time.perf_counter()
        for expert in experts:
            self._check(layer, expert)
        self._wait()
        self.beside()
        self.figures.waited += time.perf_counter() - began

    def of(self, mover: Mover, keys: set[Key], first: Iterable[Key]) -> set[Key]:
        self.update(0)
        there = {key for key in keys if self._state[key] == RESIDENT}
        absent = keys - there - self._failed.keys()
        chosen = [key for key in first if key in absent][:WANTED]
        chosen += nsmallest(WANTED - len(chosen), absent.difference(chosen))
        self._wanted[mover] = [*chosen, *there]
        for key in chosen:
            if self._state[key] == ABSENT and not self._read_ahead(*key, PREDICTED):
                break
        self._wanted[mover] = chosen  # until the next call; the others are ordered next, which keeps them
        return there

    def reads(self, mover: Mover) -> bool:
        return any(self._state[key] == READING for key in self._awaited(mover))

    def _awaited(self, mover: Mover) -> list[Key]:
        """What a mover still waits for, in the background."""
        return [key for key in self._wanted.get(mover, ()) if key in mover.cache.below_target]

    def _on_device(self) -> NDArray[np.bool_]:
        """The experts of which a device has all tiles, [L, E]."""
        every = [mover.cache.residency == mover.cache.tiles for mover in self.movers]
        whole: NDArray[np.bool_] = np.logical_or.reduce(every)
        return whole

    # --- the pool ----------------------------------------------------------------------------------------

    def placed(self, descriptor: Descriptor) -> Descriptor | None:
        """Return a Work with the frames of its experts; None where not all of them are in memory."""
        layer, experts = _experts_of(descriptor)
        if (self._state[layer, experts] != RESIDENT).any():
            return None
        placed = descriptor.copy()
        _, numbers = _experts_of(placed)
        numbers[:] = self._frame_of[layer, experts]
        head_of(placed)[LAYER] = 0
        return placed

    def wait(self, descriptors: Iterable[Descriptor]) -> None:
        """Wait a moment for experts of these Works. Raises DiskFailed where one cannot be read."""
        began = time.perf_counter()
        for descriptor in descriptors:
            layer, experts = _experts_of(descriptor)
            for expert in experts.tolist():
                self._check(layer, expert)
        self._wait()
        self.figures.waited += time.perf_counter() - began

    def _check(self, layer: int, expert: int) -> None:
        if (why := self._failed.get((layer, expert))) is not None:
            raise DiskFailed(why)

    def _wait(self) -> None:
        if not self.update(WAIT_MS) and time.monotonic() - self._heard > LIMIT:
            raise DiskFailed(f"for {LIMIT:.0f} s nothing was read from {self.file}")

    def update(self, wait_ms: int) -> bool:
        """Handle the reader's reports, starts and exits; False if nothing has arrived."""
        messages = self._socket.receive_of(0, wait_ms)
        for message in messages:
            match message:
                case ExpertRead():
                    self._on_read(message)
                case Ready():
                    self._socket.mark_up(0, message.generation)
                    for order in self._orders.values():
                        self._send(order)
                case WorkerDied():
                    self._on_exit(message)
        if messages:
            self._heard = time.monotonic()
            self._watch.reset()
        elif not self._orders:
            self._watch.reset()
        elif self._watch.stalled(self._line.ticks) > STALL_LIMIT:
            self._socket.report_hung(0)
        return bool(messages)

    def stats(self) -> dict[str, Any]:
        """Return the figures. For any thread."""
        pages = self._store.layout.expert_pages
        sizes = {"capacity_experts": self.capacity, "all_experts": self._state.size, "expert_bytes": pages}
        resident = int(np.count_nonzero(self._state == RESIDENT))
        return sizes | {"file": self.file, "resident_experts": resident} | asdict(self.figures)

    # --- orders and evictions ----------------------------------------------------------------------------

    def _demand(self, layer: int, expert: int) -> None:
        if self._state[layer, expert] == RESIDENT:  # since its layer was looked at
            return
        order = self._orders.get((layer, expert))
        if order is None:
            self._await_room()
            self._order(layer, expert, DEMANDED)
        elif order.urgency != DEMANDED:
            order.urgency = DEMANDED
            self._send(order)

    def _await_room(self) -> None:
        """Return when an expert finds room: all others may be being read, or copied to a device. Raises
        DiskFailed."""
        began = time.monotonic()
        while not self._make_room(1):
            self._wanted.clear()
            for mover in self.movers:
                mover.link.update(0)
            if not self._make_room(1) and not self.update(ROOM_MS) and time.monotonic() - began > LIMIT:
                raise DiskFailed(f"for {LIMIT:.0f} s no expert of {self.file} found room in memory")

    def _read_ahead(self, layer: int, expert: int, urgency: int) -> bool:
        """Order an expert that is not needed yet; False where there is no room."""
        # Demands of a whole layer must find room: what is read can make none.
        if len(self._orders) >= self.capacity - self._experts or not self._make_room(1):
            return False
        self._order(layer, expert, urgency)
        return True

    def _order(self, layer: int, expert: int, urgency: int) -> None:
        order = Order(self._next, layer, expert, urgency)
        self._orders[layer, expert] = self._numbered[order.id] = order
        self._next += 1
        self._state[layer, expert] = READING
        self._frame_of[layer, expert] = self._take_frame(expert)
        if len(self._orders) == 1:
            self._heard = time.monotonic()
        self._send(order)

    def _take_frame(self, expert: int) -> int:
        """A free frame, where there is one whose tiles lie on the same nodes as those of this number
        (`shm/numa.py`): by it the layer is divided among workers."""
        free = self._free
        alike = (at for at in reversed(range(len(free))) if (free[at] - expert) % self._nodes == 0)
        return free.pop(next(alike, -1))

    def _send(self, order: Order) -> None:
        frame = int(self._frame_of[order.layer, order.expert])
        self._socket.send(0, ReadExpert(order.id, order.layer, order.expert, frame, order.urgency))

    def _make_room(self, experts: int) -> bool:
        """Evict until so many more experts find room; False where none can be evicted any more."""
        while len(self._free) < experts:
            key = next(self._victims, None)
            if key is None:
                self._victims = self._choose_victims()
                if (key := next(self._victims, None)) is None:
                    return False
            self._drop(key)
            self.figures.evicted += 1
        return True

    def _choose_victims(self) -> Iterator[tuple[int, int]]:
        """The experts that will be needed last, that one first. It is right until the next layer."""
        expected = self._use.until_needed(self._layer)
        if self.movers:
            expected[self._on_device() & ~self._used_here] += NEVER
        expected[self._state != RESIDENT] = -1
        expected[self._layer, list(self._needed)] = -1
        layer, experts = self._ahead
        expected[layer, experts] = -1
        for key in self._kept():
            expected[key] = -1
        flat = expected.ravel()
        some = np.argpartition(flat, -min(VICTIMS, flat.size))[-VICTIMS:]
        for place in some[np.argsort(-flat[some])].tolist():
            layer, expert = divmod(place, self._experts)
            ahead = layer == self._ahead[0] and expert in self._ahead[1]
            if flat[place] < 0 or self._state[layer, expert] != RESIDENT or ahead:
                continue
            if (layer, expert) not in self._kept():
                yield layer, expert

    def _kept(self) -> set[Key]:
        """What is not evicted beside the experts of this layer: of the next one, and what a mover waits for
        or a prefetch process may be reading."""
        kept = {*self._early, *chain.from_iterable(map(self._awaited, self.movers))}
        return kept.union(*(mover.link.keys for mover in self.movers))

    def _drop(self, key: tuple[int, int]) -> None:
        """An expert is not in memory any more, and nothing is read to its frame."""
        self._state[key] = ABSENT
        self._unused[key] = False
        self._free.append(int(self._frame_of[key]))
        self._frame_of[key] = -1

    # --- the reader's messages ---------------------------------------------------------------------------

    def _on_read(self, report: ExpertRead) -> None:
        if (order := self._numbered.get(report.id)) is None:
            return
        if report.error:
            self._fail(order, report.error)
            return
        self._end(order)
        self._state[order.layer, order.expert] = RESIDENT
        self.figures.read += 1
        self.figures.bytes += report.size

    def _on_exit(self, exited: WorkerDied) -> None:
        """Fail what has ended or hung too many readers; the next reader is asked for the rest."""
        for order in list(self._orders.values()):
            order.tries += exited.crashed
            if order.tries >= TRIES:
                self._fail(order, f"reading {self.file} ended {order.tries} readers")

    def _end(self, order: Order) -> None:
        del self._orders[order.layer, order.expert], self._numbered[order.id]

    def _fail(self, order: Order, why: str) -> None:
        key = order.layer, order.expert
        self._end(order)
        self._failed[key] = why
        self._drop(key)
        self.figures.failed += 1


def _experts_of(descriptor: Descriptor) -> tuple[int, IntArray]:
    """The layer of a Work, and its experts."""
    head = head_of(descriptor)
    return head[LAYER], descriptor[HEADER : HEADER + 3 * head[ITEMS] : 3]
