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
    """Progress counters of so many workers and the prefetcher; removed at the end."""
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
