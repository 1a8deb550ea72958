"""The parts of a mover: a store, a slab and a prefetcher in a thread, over real sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from child_messages import LIMIT, child_socket, control_segment
from failing_prefetcher import FailingPrefetcher
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.checkpoint.model_source import ModelSource
from pipeline.device import Device, SlabMemory, open_device
from pipeline.errors import PlanError
from pipeline.experts.cache import IN_USE, READY, ExpertCache
from pipeline.experts.link import PrefetchLink
from pipeline.experts.mover import Mover, Wanted
from pipeline.experts.peers import ExitEvents
from pipeline.policies.view import Target
from shm.disk_cache import CacheWriter, store_path
from shm.layout import ExpertShape
from shm.segment import unlink
from shm.store import Store, StoreBuilder, StoreManifest, store_name
from workers.copiers import Copier, EmulatedLink

OWN = "f" * 32  # the fingerprint of a store with frames
SLOTS = 24
SHAPE = ExpertShape(layers=2, experts=3, hidden=32, intermediate=38, tile=8)  # 5 tiles of 3072 bytes
_EVERY = [(layer, expert) for layer in range(SHAPE.layers) for expert in range(SHAPE.experts)]
FULL = [Target(layer, expert, 3) for layer, expert in _EVERY]
NONE = [Target(layer, expert, 0) for layer, expert in _EVERY]
# Calls of a mover: the targets of a retarget; a layer and its cuts.
RETARGET = st.lists(
    st.builds(Target, st.integers(0, 1), st.integers(0, 2), st.integers(0, SHAPE.tiles)),
    min_size=1,
    max_size=6,
)
DEMAND = st.tuples(st.integers(0, 1), st.lists(st.integers(0, SHAPE.tiles), min_size=3, max_size=3))


@dataclass(frozen=True)
class MoverParts:
    """Everything that a mover uses."""

    store: Store
    slab: SlabMemory
    device: Device
    link: PrefetchLink
    copier: Copier
    prefetcher: FailingPrefetcher

    def mover(self, capacity: int, staging: int, each: bool = True) -> Mover:
        """A new cache and mover on the first slots of the slab."""
        s = self.store.layout.shape
        slots = capacity + staging
        assert slots <= self.slab.slots
        cache = ExpertCache(s.layers, s.experts, s.tiles, capacity, slots, self.device.fence)
        wait = self.device.wait
        return Mover(cache, self.link, self.copier, wait=wait, each=each, channels=s.tile)

    def records(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """An expert's bytes by channel."""
        s = self.store.layout.shape
        return self.store.tiles(layer, expert, 0, s.tiles).reshape(s.padded, -1)

    def holds(self, slot: int, layer: int, expert: int, tile: int) -> bool:
        """Whether a slot has exactly a tile's bytes."""
        return np.array_equal(self.slab.slot(slot).numpy(), self.store.tiles(layer, expert, tile, tile + 1))


def check_slots(parts: MoverParts, mover: Mover) -> None:
    """The cache is consistent and every READY slot holds its tile: residency is a prefix."""
    mover.cache.audit()
    for layer, expert in np.ndindex(mover.cache.residency.shape):
        slots = mover.cache.slots_of(layer, expert)
        assert len(slots) == mover.cache.residency[layer, expert] <= mover.cache.target[layer, expert]
        for tile, slot in enumerate(slots):
            assert parts.holds(slot, layer, expert, tile)


def check_idle(parts: MoverParts, mover: Mover) -> None:
    """What holds after `wait_idle`."""
    assert np.array_equal(mover.cache.residency, mover.cache.target)
    assert mover.cache.free == mover.cache.slots - mover.cache.target.sum()
    check_slots(parts, mover)


def retarget(mover: Mover, targets: list[Target]) -> None:
    """The mover's new targets; where they are more than the capacity, the old ones stay."""
    before = mover.cache.target.copy()
    try:
        mover.retarget(targets)
    except PlanError:
        assert np.array_equal(mover.cache.target, before)


def missing(mover: Mover, layer: int, cuts: list[int]) -> list[Wanted]:
    """The tiles that are not resident for these cuts, as the engine demands them."""
    residency = mover.cache.residency[layer].tolist()
    return [Wanted(e, r, p) for e, (r, p) in enumerate(zip(residency, cuts, strict=True)) if r < p]


def demand(parts: MoverParts, mover: Mover, layer: int, wanted: list[Wanted]) -> None:
    """Demand, and check each tile when it is given: of each expert in their order, once, with its bytes."""
    due = {item.expert: item.lo for item in reversed(wanted)}
    chosen = {(item.expert, tile): item.channels for item in wanted for tile in range(item.lo, item.hi)}
    size = parts.store.layout.shape.tile
    for group in mover.demand(layer, wanted):
        for expert, tile, slot, places in group:
            assert tile == due[expert]
            due[expert] += 1
            channels = chosen[expert, tile]
            if places is None:
                assert parts.holds(slot, layer, expert, tile)
                assert mover.cache.state(slot) in (READY, IN_USE)
                continue
            named = channels[channels // size == tile]
            for place, channel in zip(places.tolist(), named.tolist(), strict=True):
                record = parts.slab.slot(place // size).numpy().reshape(size, -1)[place % size]
                np.testing.assert_array_equal(record, parts.records(layer, expert)[channel])
        check_slots(parts, mover)
    assert due == {item.expert: item.hi for item in wanted}


@contextmanager
def random_store(shape: ExpertShape, source: str) -> Iterator[Store]:
    """An f32 store of small random weights, attached; removed at the end."""

    def fill(builder: StoreBuilder) -> None:
        random = np.random.default_rng(0)
        for layer in range(shape.layers):
            numbers = random.standard_normal(builder.layer(layer).nbytes // 4) * 0.1
            builder.layer(layer).view(np.float32)[:] = numbers

    with _filled(shape, source, fill) as store:
        yield store


@contextmanager
def encoded_store(shape: ExpertShape, source: str, format: str) -> Iterator[Store]:
    """A store of random experts in any format, attached; removed at the end."""

    def fill(builder: StoreBuilder) -> None:
        random, wide, high = np.random.default_rng(0), shape.hidden, shape.intermediate
        for place in np.ndindex(shape.layers, shape.experts):
            gate, up = (random.standard_normal((high, wide)).astype(np.float32) * 0.2 for _ in range(2))
            down = random.standard_normal((wide, high)).astype(np.float32) * 0.2
            biases = [random.standard_normal(high).astype(np.float32) for _ in range(shape.math.biases)]
            out, heads = builder.expert(*place), builder.heads(*place)
            wide_gate = gate if shape.math.gated else None
            builder.layout.encode_expert(wide_gate, up, down, out, heads, biases)

    with _filled(shape, source + format, fill, format) as store:
        yield store


@contextmanager
def model_store(shape: ExpertShape, model: ModelSource, format: str = "f32") -> Iterator[Store]:
    """A store of a model's experts, attached; removed at the end."""
    name = model.name if format == "f32" else model.name + format
    with _filled(shape, name, lambda builder: model.fill(builder, lambda done: None), format) as store:
        yield store


@contextmanager
def _filled(
    shape: ExpertShape, source: str, fill: Callable[[StoreBuilder], object], format: str = "f32"
) -> Iterator[Store]:
    fingerprint = _fingerprint(source)
    name = store_name(fingerprint)
    builder = StoreBuilder.create(name, StoreManifest(fingerprint, shape, format, source))
    fill(builder)
    builder.finish()
    try:
        with Store.attach(name, fingerprint, writable=True) as store:
            yield store
    finally:
        unlink(name)


@contextmanager
def with_frames(store: Store, folder: Path, frames: int) -> Iterator[Store]:
    """The same with frames, whose fingerprint is OWN, and with a file; removed at the end."""
    with CacheWriter(folder, store.manifest) as writer:
        for layer, data in enumerate(store.all_tiles().reshape(store.layout.shape.layers, -1)):
            writer.write(layer, data)
        writer.finish(lambda done: None)
    file = str(store_path(folder, store.fingerprint))
    manifest = replace(store.manifest, fingerprint=OWN, file=file, frames=frames)
    StoreBuilder.create(store_name(OWN), manifest).finish()
    try:
        with Store.attach(store_name(OWN), OWN, writable=True) as partial:
            yield partial
    finally:
        unlink(store_name(OWN))


@contextmanager
def attached_again(source: str) -> Iterator[Store]:
    """Another attachment to the store that this process made of this source."""
    with Store.attach(store_name(_fingerprint(source)), _fingerprint(source), writable=True) as store:
        yield store


def _fingerprint(source: str) -> str:
    return f"{os.getpid():x}{abs(hash(source)):x}"[:32].ljust(32, "0")


@contextmanager
def mover_parts(
    runtime: Path,
    store: Store,
    slots: int,
    link_gbps: float | None = None,
    device: Device | None = None,
    others: Store | None = None,
) -> Iterator[MoverParts]:
    """A slab of `slots` slots beside a store, and a running prefetcher, at `link_gbps` or at full speed.
    `others`: the prefetcher's attachment to the store, where it has frames."""
    runtime.chmod(0o700)
    exits = ExitEvents()
    with ExitStack() as stack:
        device = device or open_device("cpu")
        control = stack.enter_context(control_segment(1))
        slab = device.open_slab(f"{control.segment.name}-slab", slots, store.layout.tile_bytes)
        stack.callback(slab.close)
        socket = stack.enter_context(
            child_socket(runtime, "fetch.sock", "prefetcher", store.fingerprint, exits)
        )
        own, other = control.line("coordinator", 0), control.line("prefetcher", 0)
        links = [
            None if link_gbps is None else EmulatedLink(link_gbps, *lines)
            for lines in ((own, other), (other, own))
        ]
        copier = slab.copier(store, links[0])
        stack.callback(copier.close)
        link = PrefetchLink(socket, slab.address(), other, place=store.place)
        prefetcher = FailingPrefetcher(runtime, others or store, socket, exits, other, links[1], slab)
        prefetcher.start()
        assert link.wait_up(LIMIT)
        stack.callback(prefetcher.shut_down)
        yield MoverParts(store, slab, device, link, copier, prefetcher)
