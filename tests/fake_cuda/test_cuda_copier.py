"""The GPU's copier on the stand-in: what lands, what is page-locked, what is given back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import fake_runtime
from fake_runtime import PAGE, FakeRuntime
from mover_parts import random_store

from shm.layout import Bytes, ExpertShape
from shm.store import Store
from workers import cuda
from workers.copiers import TileCopy
from workers.cuda_copier import MOST_AHEAD, CudaCopier

CHUNK = 3 * PAGE  # bytes of a registration
SHAPE = ExpertShape(layers=2, experts=3, hidden=32, intermediate=200, tile=16)
SLOTS = 12


@pytest.fixture(params=[0, 1])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    monkeypatch.setattr(cuda, "REGISTER_CHUNK", CHUNK)
    with fake_runtime(request.param) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with random_store(SHAPE, "cuda_copier") as store:
        yield store


@pytest.fixture
def slab(runtime: FakeRuntime, store: Store) -> Iterator[Bytes]:
    size = store.layout.tile_bytes
    address = cuda.call("cudaMalloc", SLOTS * size)
    memory = (ctypes.c_uint8 * (SLOTS * size)).from_address(address)
    yield np.ctypeslib.as_array(memory).reshape(SLOTS, size)
    cuda.call("cudaFree", address)


def copier_of(store: Store, slab: Bytes, stream: bool = False) -> CudaCopier:
    """`stream`: of the process that computes on stream 0."""
    return CudaCopier(store, 0, slab.ctypes.data, slab.shape[1], stream=(lambda: 0) if stream else None)


def tile(number: int) -> tuple[int, int, int]:
    """Layer, expert and tile."""
    number %= SHAPE.layers * SHAPE.experts * SHAPE.tiles
    rest, index = divmod(number, SHAPE.tiles)
    return rest % SHAPE.layers, rest // SHAPE.layers, index


@pytest.mark.parametrize("lockable", [1 << 30, 2 * CHUNK + PAGE, 0])
def test_tiles_are_there_when_they_are_ready_also_while_pages_are_locked(
    runtime: FakeRuntime, store: Store, slab: Bytes, lockable: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first copies begin before page-locking has ended, or it ends early; tiles cross from one chunk into
    the next."""
    runtime.lockable = lockable
    copier, running = copier_of(store, slab), list[tuple[int, int, object]]()
    for number in range(150):
        if len(running) == min(copier.ahead, SLOTS):
            before, slot, begun = running.pop(0)
            copier.ready(begun)
            layer, expert, index = tile(before)
            np.testing.assert_array_equal(slab[slot], store.tiles(layer, expert, index, index + 1))
        begun = copier.begin([TileCopy(*tile(number), number % SLOTS)])
        running.append((number, number % SLOTS, begun))
    for _, _, begun in running:
        copier.ready(begun)
    tiles, seconds = copier.copied
    assert (tiles, seconds > 0) == (150, True)
    copier.close()
    assert ("page-locked" in caplog.text) == (lockable < store.segment.size)
    assert runtime.leftovers().keys() <= {"device", "registered"}  # the process's exit unlocks faster
    assert runtime.calls["cudaEventCreateWithFlags"] <= 4 * MOST_AHEAD  # events are used again


def test_channels_are_gathered_by_threads(runtime: FakeRuntime, store: Store, slab: Bytes) -> None:
    copier, random = copier_of(store, slab), np.random.default_rng(0)
    expected, begun = {}, []
    for slot in range(SLOTS):
        chosen = np.sort(random.permutation(SHAPE.padded)[: 1 + slot]).astype(np.int32)
        begun.append(copier.begin([TileCopy(1, 2, 0, slot, chosen, 3)]))
        expected[slot] = chosen
    for one in begun:
        copier.ready(one)
    records = store.tiles(1, 2, 0, SHAPE.tiles).reshape(SHAPE.padded, -1)
    for slot, chosen in expected.items():
        found = slab[slot].reshape(SHAPE.tile, -1)[3 : 3 + len(chosen)]
        np.testing.assert_array_equal(found, records[chosen[: SHAPE.tile - 3]])
    copier.close()
    copier.locks.undo()
    assert runtime.leftovers() == {"device": 1}


def test_the_computing_stream_waits_and_this_thread_does_not(
    runtime: FakeRuntime, store: Store, slab: Bytes
) -> None:
    """And a copy waits for the slot's last reader."""
    copier, resume = copier_of(store, slab, stream=True), runtime.hold_copies()
    begun = copier.begin([TileCopy(0, 0, index, index) for index in range(3)])
    copier.ready(begun)
    found: list[Bytes] = []
    runtime.launch(lambda: found.append(slab[:3].copy()))
    assert runtime.calls["cudaEventSynchronize"] == 0
    assert copier.copied == (0, 0.0)
    resume()
    runtime.drain()
    np.testing.assert_array_equal(found[0].reshape(-1), store.tiles(0, 0, 0, 3))
    assert copier.copied[0] == 3
    event = cuda.blocking_event()
    read: list[Bytes] = []
    runtime.launch(lambda: read.append(slab[0].copy()))  # some time later
    cuda.call("cudaEventRecord", event, 0)
    fence = SimpleNamespace(pending=lambda: event)
    copier.ready(copier.begin([TileCopy(1, 1, 0, 0, fence=fence)]))
    runtime.drain()
    np.testing.assert_array_equal(read[0], store.tiles(0, 0, 0, 1))
    np.testing.assert_array_equal(slab[0], store.tiles(1, 1, 0, 1))
    cuda.call("cudaEventDestroy", event)
    copier.close()
    copier.locks.undo()
    assert runtime.leftovers() == {"device": 1}


def test_arena_parts_are_apart_until_it_restarts(runtime) -> None:
    arena, random = cuda.PinnedArena(), np.random.default_rng(0)
    for _ in range(5):
        parts = [arena.take(int(size)) for size in random.integers(1, 5000, 20)]
        for number, part in enumerate(parts):
            part[:] = number
        assert all((part == number).all() for number, part in enumerate(parts))
        arena.restart()
    before = runtime.calls["cudaMallocHost"]
    for _ in range(20):
        arena.take(1000)
    assert runtime.calls["cudaMallocHost"] == before  # the largest buffer is used again
    arena.close()
    assert runtime.leftovers() == {}
