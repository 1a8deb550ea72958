"""The prefetcher's process on the stand-in for a GPU: orders, SIGKILL in the middle, and memory that is back
once nobody maps it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import numpy as np
import pytest
from child_harness import SHAPE, Child, Surroundings, small_store, surroundings
from fake_gpu import PACKAGES, fake_runtime

from protocol.messages import AttachSlab, Fetch, Fetched, SlabAttached
from shm.store import Store, store_name
from workers import cuda

SLOTS = 2 * SHAPE.tiles
ATTEMPTS = 3


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
    assert place.expect(SlabAttached) == SlabAttached(child.generation)
    return child


def test_prefetchers_that_are_killed_leave_no_wrong_tile_and_no_memory(fingerprint: str) -> None:
    with (
        fake_runtime() as runtime,
        Store.attach(store_name(fingerprint)) as store,
        surroundings("prefetcher", fingerprint) as place,
    ):
        size = store.layout.tile_bytes
        address = cuda.call("cudaMalloc", SLOTS * size)
        slab = np.ctypeslib.as_array((ctypes.c_uint8 * (SLOTS * size)).from_address(address))
        order = AttachSlab("cuda", cuda.ipc_handle(address), 0, SLOTS, size)
        for number in range(ATTEMPTS):
            child = started(place, order)
            slots = np.random.default_rng(number).permutation(SLOTS)[: SHAPE.tiles].tolist()
            place.send(child, Fetch(number, 1, number, 0, tuple(slots), 1, np.zeros(0, np.int32)))
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
                    assert isinstance(late, Fetched)
                    landed = late.landed
            for index in range(landed):
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
