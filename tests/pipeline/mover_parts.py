"""The parts of a tile mover: a store, a slab and the prefetcher's loop in a thread, over real sockets."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pipeline.device import Device, SlabMemory, open_device
from pipeline.experts.expert_cache import IN_USE, READY, ExpertCache
from pipeline.experts.fetch_link import FetchLink
from pipeline.experts.peers import ChildServerSocket, ExitEvents
from pipeline.experts.shares import Missing
from pipeline.experts.tile_mover import TileMover
from protocol.messages import Shutdown
from protocol.sockets import Identity
from shm.control import ControlSegment
from shm.layout import ExpertShape
from shm.manifest import StoreManifest
from shm.segment import unlink
from shm.store import Store, StoreBuilder, store_name
from workers.child_endpoint import ChildEndpoint
from workers.copiers import paced
from workers.prefetcher import CopyLoop

SLOTS = 24
LIMIT = 10.0  # seconds for a thread to react
_CONTROLS = itertools.count()
KEY = b"k" * 32  # the engine's, with which children prove their identity


@dataclass(frozen=True)
class MoverParts:
    """Everything that a tile mover uses."""

    store: Store
    slab: SlabMemory
    device: Device
    link: FetchLink

    def mover(self, capacity: int, staging: int, **limits: float) -> TileMover:
        """A new cache and mover on the first slots of the slab."""
        s = self.store.layout.shape
        slots = capacity + staging
        assert slots <= self.slab.slots
        return TileMover(
            ExpertCache(s.layers, s.experts, s.tiles, capacity, slots, self.device.fence),
            self.link,
            self.device,
            **limits,
        )

    def holds(self, slot: int, layer: int, expert: int, tile: int) -> bool:
        """Whether a slot has exactly a tile's bytes."""
        return np.array_equal(self.slab.slot(slot).numpy(), self.store.tiles(layer, expert, tile, tile + 1))


def check_slots(parts: MoverParts, mover: TileMover) -> None:
    """The cache is consistent and every READY slot holds its tile: residency is a prefix."""
    mover.cache.audit()
    for layer, expert in np.ndindex(mover.cache.residency.shape):
        slots = mover.cache.slots_of(layer, expert)
        assert len(slots) == mover.cache.residency[layer, expert] <= mover.cache.target[layer, expert]
        for tile, slot in enumerate(slots):
            assert parts.holds(slot, layer, expert, tile)


def check_idle(parts: MoverParts, mover: TileMover) -> None:
    """What holds after `wait_idle`."""
    assert np.array_equal(mover.cache.residency, mover.cache.target)
    assert mover.cache.free == mover.cache.slots - mover.cache.target.sum()
    check_slots(parts, mover)


def missing(mover: TileMover, layer: int, cuts: list[int]) -> list[Missing]:
    """The tiles that are not resident for these cuts, as the engine demands them."""
    residency = mover.cache.residency[layer].tolist()
    return [Missing(e, r, p) for e, (r, p) in enumerate(zip(residency, cuts, strict=True)) if r < p]


def demand(parts: MoverParts, mover: TileMover, layer: int, wanted: list[Missing]) -> list[Missing]:
    """Stream, and check each tile when it is yielded. Returns the tiles that were handed back: together with
    the others each wanted tile once, and the last ones of their expert."""
    due = {item.expert: item.lo for item in wanted}
    unfetched: list[Missing] = []
    for expert, slot in mover.stream(layer, wanted, unfetched):
        assert parts.holds(slot, layer, expert, due[expert])
        assert mover.cache.state(slot) in (READY, IN_USE)
        due[expert] += 1
        check_slots(parts, mover)
    for item in sorted(unfetched, key=lambda item: (item.expert, item.lo)):
        assert item.lo == due[item.expert] < item.hi
        due[item.expert] = item.hi
    assert due == {item.expert: item.hi for item in wanted}
    return unfetched


@contextmanager
def random_store(shape: ExpertShape, source: str) -> Iterator[Store]:
    """An f32 store of small random weights, attached; removed at the end."""
    fingerprint = _fingerprint(source)
    name = store_name(fingerprint)
    builder = StoreBuilder.create(name, StoreManifest(fingerprint, shape, "f32", source))
    random = np.random.default_rng(0)
    for layer in range(shape.layers):
        numbers = random.standard_normal(builder.layer(layer).nbytes // 4) * 0.1
        builder.layer(layer).view(np.float32)[:] = numbers
    builder.finish()
    try:
        with Store.attach(name, fingerprint, writable=True) as store:
            yield store
    finally:
        unlink(name)


@contextmanager
def attached_again(source: str) -> Iterator[Store]:
    """Another attachment to the store that this process made of this source."""
    with Store.attach(store_name(_fingerprint(source)), _fingerprint(source), writable=True) as store:
        yield store


def _fingerprint(source: str) -> str:
    return f"{os.getpid():x}{abs(hash(source)):x}"[:32].ljust(32, "0")


@contextmanager
def control_segment(workers: int) -> Iterator[ControlSegment]:
    """Progress counters of `workers` workers and the prefetcher; removed at the end."""
    name = f"/tandem-tests{os.getpid()}-control-{next(_CONTROLS)}"
    control = ControlSegment.create(name, workers)
    try:
        yield control
    finally:
        control.close()
        unlink(name)


@contextmanager
def child_socket(
    runtime: Path,
    socket: str,
    role: str,
    fingerprint: str,
    exits: ExitEvents | None = None,
    reports: list[object] | None = None,
) -> Iterator[ChildServerSocket]:
    """`exits`: from the supervisor; `reports`: collects the messages to it."""
    report = ([] if reports is None else reports).append
    server = ChildServerSocket(runtime, socket, role, fingerprint, KEY, exits or ExitEvents(), report)
    try:
        yield server
    finally:
        server.close()


def child_endpoint(
    runtime: Path, role: str, socket: str, fingerprint: str, index: int = 0, incarnation: int = 0
) -> ChildEndpoint:
    """The child's end of a ChildServerSocket; used by the thread that makes it."""
    identity = Identity(role, index, incarnation)
    config = {**asdict(identity), "identity": identity.prove(KEY)}
    config |= {"runtime": str(runtime), "fingerprint": fingerprint}
    return ChildEndpoint(config, socket, supervised=False)


def no_tick() -> None:
    """A thread has no progress counter."""


@contextmanager
def copying(
    parts: MoverParts, runtime: Path, socket: ChildServerSocket, link_gbps: float | None
) -> Iterator[None]:
    """The prefetcher's loop in a thread, until Shutdown."""
    fingerprint = parts.store.fingerprint

    def copy() -> None:
        endpoint = child_endpoint(runtime, "prefetcher", "fetch.sock", fingerprint)
        loop = CopyLoop(endpoint, parts.store, link_gbps, no_tick)
        loop.attach(paced(parts.slab.local_copier(parts.store), link_gbps, no_tick))
        endpoint.announce()
        loop.run()
        endpoint.close()

    thread = threading.Thread(target=copy, name="prefetcher", daemon=True)
    thread.start()
    try:
        assert parts.link.wait_up(LIMIT)
        yield
    finally:
        socket.send(0, Shutdown())
        thread.join(LIMIT)
        assert not thread.is_alive()


@contextmanager
def mover_parts(runtime: Path, store: Store, slots: int, link_gbps: float | None) -> Iterator[MoverParts]:
    """A slab of `slots` slots beside a store, and a prefetcher at `link_gbps` or at full speed."""
    runtime.chmod(0o700)
    with ExitStack() as stack:
        device = open_device("cpu")
        name = f"/tandem-tests{os.getpid()}-slab-{runtime.name}"
        slab = device.open_slab(name, slots, store.layout.tile_bytes)
        stack.callback(slab.close)
        socket = stack.enter_context(child_socket(runtime, "fetch.sock", "prefetcher", store.fingerprint))
        parts = MoverParts(store, slab, device, FetchLink(socket, None, None))
        stack.enter_context(copying(parts, runtime, socket, link_gbps))
        yield parts
