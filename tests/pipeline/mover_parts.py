"""The parts of a tile mover: a store, a slab and a prefetcher in a thread, over real sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from child_messages import LIMIT, child_socket, control_segment
from failing_prefetcher import FailingPrefetcher
from hypothesis import strategies as st
from pipeline.experts.demand_stream import DemandStream
from pipeline.experts.expert_cache import IN_USE, READY, ExpertCache
from pipeline.experts.fetch_link import FetchLink
from pipeline.experts.landings import Landings
from pipeline.experts.tile_mover import TileMover

from pipeline.checkpoint.model_source import ModelSource
from pipeline.device import Device, SlabMemory, open_device
from pipeline.errors import PlanError
from pipeline.experts.peers import ExitEvents
from pipeline.experts.shares import Missing
from pipeline.policies.view import Target
from shm.layout import ExpertShape
from shm.manifest import StoreManifest
from shm.segment import unlink
from shm.store import Store, StoreBuilder, store_name

SLOTS = 24
SHAPE = ExpertShape(layers=2, experts=3, hidden=32, intermediate=38, tile=8)  # 5 tiles of 3072 bytes
_EVERY = [(layer, expert) for layer in range(SHAPE.layers) for expert in range(SHAPE.experts)]
FULL = [Target(layer, expert, 3) for layer, expert in _EVERY]
NONE = [Target(layer, expert, 0) for layer, expert in _EVERY]
# Calls of a tile mover: the targets of a retarget; a layer and its cuts.
RETARGET = st.lists(
    st.builds(Target, st.integers(0, 1), st.integers(0, 2), st.integers(0, SHAPE.tiles)),
    min_size=1,
    max_size=6,
)
DEMAND = st.tuples(st.integers(0, 1), st.lists(st.integers(0, SHAPE.tiles), min_size=3, max_size=3))


@dataclass(frozen=True)
class MoverParts:
    """Everything that a tile mover uses."""

    store: Store
    slab: SlabMemory
    device: Device
    link: FetchLink
    prefetcher: FailingPrefetcher

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
    assert (mover.cache.residency <= mover.ordered).all()
    assert (mover.ordered <= mover.cache.target).all()
    for layer, expert in np.ndindex(mover.cache.residency.shape):
        slots = mover.cache.slots_of(layer, expert)
        assert len(slots) == mover.cache.residency[layer, expert] <= mover.cache.target[layer, expert]
        for tile, slot in enumerate(slots):
            assert parts.holds(slot, layer, expert, tile)


def check_idle(parts: MoverParts, mover: TileMover) -> None:
    """What holds after `wait_idle`."""
    assert np.array_equal(mover.cache.residency, mover.cache.target)
    assert np.array_equal(mover.cache.residency, mover.ordered)
    assert mover.cache.free == mover.cache.slots - mover.cache.target.sum()
    check_slots(parts, mover)


def retarget(mover: TileMover, targets: list[Target]) -> None:
    """The mover's new targets; where they are more than the capacity, the old ones stay."""
    before = mover.cache.target.copy()
    try:
        mover.retarget(targets)
    except PlanError:
        assert np.array_equal(mover.cache.target, before)


def missing(mover: TileMover, layer: int, cuts: list[int]) -> list[Missing]:
    """The tiles that are not resident for these cuts, as the engine demands them."""
    residency = mover.cache.residency[layer].tolist()
    return [Missing(e, r, p) for e, (r, p) in enumerate(zip(residency, cuts, strict=True)) if r < p]


def demand(parts: MoverParts, mover: TileMover, layer: int, wanted: list[Missing]) -> list[Missing]:
    """Stream, and check each tile when it is yielded. Returns the tiles that were handed back: together with
    the others each wanted tile once, and the last ones of their expert."""
    due = {item.expert: item.lo for item in wanted}
    unfetched: list[Missing] = []
    for group in DemandStream(mover, layer, wanted, unfetched).groups():
        for expert, slot in group:
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
            builder.layout.encode_expert(gate, up, down, builder.expert(*place), builder.heads(*place))

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
    first_number: int = 0,
) -> Iterator[MoverParts]:
    """A slab of `slots` slots beside a store, and a running prefetcher at `link_gbps` or at full speed. A
    `device` other than `cpu` is given the prefetcher's thread as the coordinator does. `first_number`: of all
    landing flags."""
    runtime.chmod(0o700)
    exits = ExitEvents()
    with ExitStack() as stack:
        attached = device is not None
        device = device or open_device("cpu")
        control = stack.enter_context(control_segment(1))
        slab = device.open_slab(f"{control.segment.name}-slab", slots, store.layout.tile_bytes)
        stack.callback(slab.close)
        socket = stack.enter_context(
            child_socket(runtime, "fetch.sock", "prefetcher", store.fingerprint, exits)
        )
        if attached:
            landings = None
            if slab.flags is not None:
                slab.flags.array[:] = first_number
                landings = Landings(
                    slab.flags, slab.wait_landing, ready=lambda: slab.locks is None or slab.locks.ended
                )
                stack.callback(landings.close)
            link = FetchLink(socket, None, None, landings=landings)
        else:
            link = FetchLink(socket, slab.address(), control.line("prefetcher", 0))
        copier = (lambda: slab.local_copier(store)) if attached else None
        prefetcher = FailingPrefetcher(runtime, store, socket, exits, link_gbps, copier)
        prefetcher.start()
        assert link.wait_up(LIMIT)
        stack.callback(prefetcher.shut_down)
        yield MoverParts(store, slab, device, link, prefetcher)
