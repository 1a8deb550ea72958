"""A real store, a real slab and the real prefetcher loop in a thread, over real sockets: what moves tiles."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.device import Device, SlabMemory, open_device
from pipeline.experts.expert_cache import ExpertCache
from pipeline.experts.fetch_link import FetchLink
from pipeline.experts.peers import ChildServerSocket, ExitEvents
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
LIMIT = 10.0  # seconds for a thread to say or do something
_CONTROLS = itertools.count()
KEY = b"k" * 32  # the engine's, that its children prove themselves with


@dataclass(frozen=True)
class Parts:
    """Everything below the tile mover."""

    store: Store
    slab: SlabMemory
    device: Device
    link: FetchLink

    def mover(self, capacity: int, staging: int) -> TileMover:
        """A new cache and mover on the first slots of the slab."""
        s = self.store.layout.shape
        slots = capacity + staging
        assert slots <= self.slab.slots
        return TileMover(
            ExpertCache(s.layers, s.experts, s.tiles, capacity, slots, self.device.fence),
            self.link,
            self.device,
        )

    def holds(self, slot: int, layer: int, expert: int, tile: int) -> bool:
        """Whether a slot has exactly a tile's bytes."""
        return np.array_equal(self.slab.slot(slot).numpy(), self.store.tiles(layer, expert, tile, tile + 1))


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
    """The store of this source that somebody in this process made."""
    with Store.attach(store_name(_fingerprint(source)), _fingerprint(source), writable=True) as store:
        yield store


def _fingerprint(source: str) -> str:
    return f"{os.getpid():x}{abs(hash(source)):x}"[:32].ljust(32, "0")


@contextmanager
def control_segment(workers: int) -> Iterator[ControlSegment]:
    """Where so many workers and the prefetcher count their progress; removed at the end."""
    name = f"/tandem-tests{os.getpid()}-control-{next(_CONTROLS)}"
    control = ControlSegment.create(name, workers)
    try:
        yield control
    finally:
        control.close()
        unlink(name)


@contextmanager
def peer_socket(
    runtime: Path,
    socket: str,
    role: str,
    fingerprint: str,
    deaths: ExitEvents | None = None,
    said: list[object] | None = None,
) -> Iterator[ChildServerSocket]:
    """`deaths`: as the supervisor reports them; `said`: what it is told."""
    tell = ([] if said is None else said).append
    peers = ChildServerSocket(runtime, socket, role, fingerprint, KEY, deaths or ExitEvents(), tell)
    try:
        yield peers
    finally:
        peers.close()


def peer_of(
    runtime: Path, role: str, socket: str, fingerprint: str, index: int = 0, incarnation: int = 0
) -> ChildEndpoint:
    """The other end of a ChildServerSocket; used by the thread that makes it."""
    who = {"role": role, "index": index, "incarnation": incarnation}
    told = {"runtime": str(runtime), "fingerprint": fingerprint, "identity": Identity(**who).prove(KEY)}
    return ChildEndpoint(who | told, socket, supervised=False)


def no_tick() -> None:
    """Nobody watches a thread."""


@contextmanager
def copying(parts: Parts, runtime: Path, peers: ChildServerSocket, link_gbps: float | None) -> Iterator[None]:
    """The prefetcher's loop in a thread, until Shutdown."""
    fingerprint = parts.store.fingerprint

    def copy() -> None:
        peer = peer_of(runtime, "prefetcher", "fetch.sock", fingerprint)
        loop = CopyLoop(peer, parts.store, link_gbps, no_tick)
        loop.attach(paced(parts.slab.local_copier(parts.store), link_gbps, no_tick))
        peer.announce()
        loop.run()
        peer.close()

    thread = threading.Thread(target=copy, name="prefetcher", daemon=True)
    thread.start()
    try:
        assert parts.link.wait_up(LIMIT)
        yield
    finally:
        peers.send(0, Shutdown())
        thread.join(LIMIT)
        assert not thread.is_alive()


@contextmanager
def moving_parts(runtime: Path, store: Store, slots: int, link_gbps: float | None) -> Iterator[Parts]:
    """A slab of `slots` slots beside a store, and a prefetcher at `link_gbps` or at full speed."""
    runtime.chmod(0o700)
    with ExitStack() as stack:
        device = open_device("cpu")
        name = f"/tandem-tests{os.getpid()}-slab-{runtime.name}"
        slab = device.open_slab(name, slots, store.layout.tile_bytes)
        stack.callback(slab.close)
        peers = stack.enter_context(peer_socket(runtime, "fetch.sock", "prefetcher", store.fingerprint))
        parts = Parts(store, slab, device, FetchLink(peers, None, None))
        stack.enter_context(copying(parts, runtime, peers, link_gbps))
        yield parts
