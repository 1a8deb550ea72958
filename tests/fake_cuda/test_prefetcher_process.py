"""The prefetcher's process on the stand-in for a GPU: orders, SIGKILL in the middle, flags of what has
landed, and memory that is back once nobody maps it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from child_harness import SHAPE, Child, Surroundings, small_store, surroundings
from fake_gpu import PACKAGES, fake_runtime
from shm.landing_flags import LandingFlags, next_number

from protocol.messages import AttachSlab, Fetch, Fetched, PagesLocked, SlabAttached
from shm.segment import unlink
from shm.store import Store, store_name
from workers import cuda

SLOTS = 2 * SHAPE.tiles
ATTEMPTS = 3


@contextmanager
def landing_flags(name: str) -> Iterator[LandingFlags]:
    flags = LandingFlags.create(name, SLOTS)
    try:
        yield flags
    finally:
        flags.close()
        unlink(name)


@pytest.fixture(scope="module")
def fingerprint() -> Iterator[str]:
    with small_store() as fingerprint:
        yield fingerprint


def started(place: Surroundings, order: AttachSlab) -> Child:
    """A new prefetcher, which has mapped the slab."""
    child = place.start(python_path=PACKAGES)
    place.receive(place.work)
    place.receive(place.control)
    place.send(child, order)
    assert place.expect(SlabAttached) == SlabAttached(child.incarnation, flags=True)
    return child


def drawn(flags: LandingFlags, seed: int) -> tuple[list[int], list[int]]:
    """Slots for the tiles of an expert, and the numbers that are next there."""
    slots = np.random.default_rng(seed).permutation(SLOTS)[: SHAPE.tiles].tolist()
    return slots, [next_number(int(flags.array[slot])) for slot in slots]


def test_prefetchers_that_are_killed_leave_no_wrong_tile_and_no_memory(fingerprint: str) -> None:
    with (
        fake_runtime() as runtime,
        Store.attach(store_name(fingerprint)) as store,
        surroundings("prefetcher", fingerprint) as place,
        landing_flags(f"{place.progress.segment.name}-slab-flags") as flags,
    ):
        size = store.layout.tile_bytes
        address = cuda.call("cudaMalloc", SLOTS * size)
        slab = np.ctypeslib.as_array((ctypes.c_uint8 * (SLOTS * size)).from_address(address))
        order = AttachSlab("cuda", cuda.ipc_handle(address), 0, SLOTS, size, flags.segment.name)
        for number in range(ATTEMPTS):
            child = started(place, order)
            size_locked = 0
            while size_locked < store.segment.size:  # it is reported while nothing is copied
                locked = place.expect(PagesLocked)
                assert (locked.incarnation, locked.total) == (child.incarnation, store.segment.size)
                size_locked = locked.locked
            slots, numbers = drawn(flags, number)
            place.send(child, Fetch(number, 1, number, 0, tuple(slots), 0, tuple(numbers)))
            landed = 0
            last = number == ATTEMPTS - 1
            while landed < (SHAPE.tiles if last else 3 + 4 * number):
                report = place.expect(Fetched)
                assert landed < report.landed <= SHAPE.tiles
                landed = report.landed
            if not last:
                child.process.kill()
                child.ended()
                while place.work.poll(0):  # sent before it was killed
                    _, late = place.receive(place.work)
                    assert isinstance(late, Fetched | PagesLocked)
                    landed = getattr(late, "landed", landed)
            written = [flags.landed(*pair) for pair in zip(slots, numbers, strict=True)]
            assert written == sorted(written, reverse=True)  # in the order of the tiles
            assert sum(written) >= landed
            for index in range(sum(written)):
                found = slab[slots[index] * size : (slots[index] + 1) * size]
                np.testing.assert_array_equal(found, store.tiles(1, number, index, index + 1))
        runtime.exit()  # the coordinator's; its prefetcher still maps the slab
        assert runtime.cudaMemGetInfo()[1] == runtime.total - SLOTS * size
        child.process.kill()
        child.ended()
        until = time.monotonic() + 10
        while runtime.cudaMemGetInfo()[1] < runtime.total and time.monotonic() < until:
            time.sleep(0.05)
        assert runtime.cudaMemGetInfo()[1] == runtime.total
        assert place.complaints() == ""


@pytest.mark.parametrize("tiles", [0, 1, 5])
def test_a_coordinator_that_exits_during_copies_leaves_no_memory(tiles: int, fingerprint: str) -> None:
    """After so many landings: the prefetcher goes on in the slab that it maps, until it is ended."""
    with (
        fake_runtime() as runtime,
        Store.attach(store_name(fingerprint)) as store,
        surroundings("prefetcher", fingerprint) as place,
        landing_flags(f"{place.progress.segment.name}-slab-flags") as flags,
    ):
        size = store.layout.tile_bytes
        address = cuda.call("cudaMalloc", SLOTS * size)
        order = AttachSlab("cuda", cuda.ipc_handle(address), 0, SLOTS, size, flags.segment.name)
        child = started(place, order)
        slots, numbers = drawn(flags, tiles)
        place.send(child, Fetch(7, 1, 0, 0, tuple(slots), 0, tuple(numbers)))

        def written() -> list[bool]:
            return [flags.landed(*pair) for pair in zip(slots, numbers, strict=True)]

        until = time.monotonic() + 10
        while sum(written()) < tiles and time.monotonic() < until:
            time.sleep(0.0005)
        assert sum(written()) >= tiles
        runtime.exit()
        while not all(found := written()) and time.monotonic() < until:
            assert found == sorted(found, reverse=True)  # in the order of the tiles
            time.sleep(0.0005)
        assert all(written())
        assert runtime.cudaMemGetInfo()[1] == runtime.total - SLOTS * size
        child.process.kill()
        child.ended()
        while runtime.cudaMemGetInfo()[1] < runtime.total and time.monotonic() < until:
            time.sleep(0.05)
        assert runtime.cudaMemGetInfo()[1] == runtime.total
        assert place.complaints() == ""
