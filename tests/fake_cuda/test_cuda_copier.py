"""The GPU's copier on the stand-in: what lands, what is page-locked, what is given back."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from fake_gpu import fake_runtime
from fake_runtime import PAGE, FakeRuntime

from shm.layout import Bytes
from shm.store import Store
from workers import cuda
from workers.cuda_copier import MOST_AHEAD, CudaCopier

CHUNK = 3 * PAGE  # bytes of a registration
SLOT, SLOTS = 5120, 12
SIZE = 10 * CHUNK + PAGE + 100  # of the host memory: its last chunk and its last page are partial


@pytest.fixture(params=[0, 1])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    monkeypatch.setattr(cuda, "REGISTER_CHUNK", CHUNK)
    with fake_runtime(request.param) as runtime:
        yield runtime


@pytest.fixture
def memory() -> Bytes:
    whole = np.frombuffer(mmap.mmap(-1, -(-SIZE // PAGE) * PAGE), np.uint8)[:SIZE]
    whole[:] = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    return whole


@pytest.fixture
def slab(runtime: FakeRuntime) -> Iterator[Bytes]:
    address = cuda.call("cudaMalloc", SLOTS * SLOT)
    yield np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (SLOTS * SLOT)).from_address(address)).reshape(
        SLOTS, SLOT
    )
    cuda.call("cudaFree", address)


def copier_of(memory: Bytes, slab: Bytes) -> CudaCopier:
    store = cast(Store, SimpleNamespace(segment=SimpleNamespace(array=memory)))
    return CudaCopier(store, 0, slab.ctypes.data, SLOT, owned=False)


def test_tiles_have_landed_when_they_are_finished_also_while_pages_are_locked(runtime, memory, slab) -> None:
    """The first copies start before page-locking has ended; sources cross from one chunk into the next."""
    copier = copier_of(memory, slab)
    random, running = np.random.default_rng(0), []
    for number in range(150):
        while len(running) >= min(copier.depth, SLOTS):
            for _ in range(copier.finish()):
                slot, tile = running.pop(0)
                np.testing.assert_array_equal(slab[slot, : len(tile)], tile)
        size = int(random.integers(1, SLOT + 1))
        start = int(random.integers(0, SIZE - size + 1))
        free = sorted(set(range(SLOTS)) - {slot for slot, _ in running})
        slot, tile = free[number % len(free)], memory[start : start + size]
        copier.start(tile, slot)
        running.append((slot, tile))
    copier.locks.wait()
    assert copier.notes == ()
    assert copier.locks.locked == SIZE
    assert sum(end - start for start, end in runtime.registered.items()) == -(-SIZE // PAGE) * PAGE
    copier.close()
    for slot, tile in running:
        np.testing.assert_array_equal(slab[slot, : len(tile)], tile)
    assert runtime.calls["cudaEventCreateWithFlags"] <= MOST_AHEAD  # events are used again
    assert runtime.leftovers() == {"device": 1, "registered": 11}  # the process's exit unlocks faster
    copier.locks.undo()
    assert runtime.leftovers() == {"device": 1}


@pytest.mark.parametrize("refused", ["limit", "third call"])
def test_page_locking_that_ends_early_is_noted_and_copies_are_right(runtime, memory, slab, refused) -> None:
    if refused == "limit":
        runtime.lockable = 2 * CHUNK + PAGE
    else:
        runtime.failures["cudaHostRegister"] = 2
    copier = copier_of(memory, slab)
    copier.locks.wait()
    share = 2 * CHUNK / SIZE
    assert copier.notes == (f"page-locked {share:.0%} of the store: cudaHostRegister: error 2",)
    tile = memory[2 * CHUNK - 1000 : 2 * CHUNK + 1000]  # one half is locked
    copier.start(tile, 3)
    assert copier.finish() == 1
    np.testing.assert_array_equal(slab[3, :2000], tile)
    copier.close()
    copier.locks.undo()
    assert runtime.leftovers() == {"device": 1}


def test_locking_ends_with_the_copier(runtime, memory, slab) -> None:
    copier_of(memory, slab).close()
    held = len(runtime.registered)
    assert held <= 11
    assert runtime.leftovers().keys() <= {"device", "registered"}


@pytest.mark.parametrize("threads", [1, 3])
def test_channels_are_gathered_by_threads_and_land_in_order(
    runtime, memory, slab, threads, monkeypatch
) -> None:
    monkeypatch.setattr("workers.cuda_copier.gather_threads", lambda: threads)
    copier = copier_of(memory, slab)
    assert copier.gather_depth == threads + 1
    records, random = memory[:20000].reshape(1000, 20), np.random.default_rng(0)
    expected, under_way = {}, 0
    for chunk in range(40):
        chosen = np.sort(random.permutation(1000)[: 1 + chunk % 5]).astype(np.int32)
        copier.gather(records, chosen, chunk % 3, 5 * (chunk // 3))
        expected[chunk] = chosen
        under_way += 1
        if under_way == copier.gather_depth:
            under_way -= copier.finish()
    copier.close()
    for chunk, chosen in expected.items():
        place = 100 * (chunk // 3)
        found = slab[chunk % 3, place : place + 20 * len(chosen)]
        np.testing.assert_array_equal(found, records[chosen].reshape(-1))
    copier.locks.undo()
    assert runtime.leftovers() == {"device": 1}


def test_small_tiles_are_started_ahead_and_large_ones_are_not(runtime, memory, slab) -> None:
    store = cast(Store, SimpleNamespace(segment=SimpleNamespace(array=memory)))
    depths = {}
    for slot_bytes in (4096, 1 << 20, 1 << 24):
        copier = CudaCopier(store, 0, slab.ctypes.data, slot_bytes, owned=False)
        depths[slot_bytes] = copier.depth
        copier.close()
        copier.locks.undo()
    assert depths == {4096: MOST_AHEAD, 1 << 20: 2, 1 << 24: 2}


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


def test_memory_of_a_killed_test_is_removed_by_a_later_one() -> None:
    """Its files have names, and nothing else would."""
    code = (
        "import os, signal\nfrom fake_runtime import FakeRuntime\n"
        "runtime = FakeRuntime('killed-test')\nassert runtime.cudaMalloc(8192)[0] == 0\n"
        "print(runtime.allocations[0].name, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    left = Path("/dev/shm") / done.stdout.strip()
    assert left.is_file()
    with fake_runtime():
        assert left.exists()  # it may have been made just now
    os.utime(left, (0, 0))
    with fake_runtime():
        assert not left.exists()
