"""Copiers without a GPU and without time: on a runtime and a clock that the tests provide."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from protocol.messages import AttachSlab, I32Vector
from shm.layout import Bytes
from shm.store import Store
from workers import cuda
from workers.copiers import CudaCopier, PacedCopier, open_copier, paced

CHUNK, SLOT = 100, 300  # bytes of a registration and of a slot
DEVICE = 3


class Handle:
    """A cudaIpcMemHandle_t."""

    def __init__(self, pointer: int = 0) -> None:
        self.data = ctypes.create_string_buffer(pointer.to_bytes(8, "little"), 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.data)


class Runtime(ModuleType):
    """`cuda.bindings.runtime` on host memory: copies happen when an event after them is waited for."""

    cudaStreamNonBlocking, cudaHostRegisterDefault, cudaIpcMemLazyEnablePeerAccess = 1, 0, 8
    cudaEventDisableTiming, cudaEventBlockingSync = 2, 4
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice="to device")
    cudaIpcMemHandle_t = Handle

    def __init__(self, most: int) -> None:
        super().__init__("cuda.bindings.runtime")
        self.most = most  # registrations
        self.device = -1
        self.registered: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self._allocated: list[Bytes] = []
        self.made: set[object] = set()  # streams, events and mappings that are not destroyed
        self.copies: list[tuple[int, int, int]] = []  # that were started
        self.done = 0  # of them, with those waited for
        self.until: dict[int, int] = {}  # event -> number of copies before it, of `copies`
        self.events = 0

    def cudaSetDevice(self, device: int) -> tuple[int]:
        self.device = device
        return (0,)

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, f"error {status}".encode()

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, str]:
        assert (flags, self.device) == (1, DEVICE)
        self.made.add("stream")
        return 0, "stream"

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[int, int]:
        assert flags == 2 | 4
        self.events += 1
        self.made.add(self.events)
        return 0, self.events

    def cudaMemcpyAsync(self, to: int, source: int, n: int, kind: str, stream: str) -> tuple[int]:
        assert (kind, stream) == ("to device", "stream")
        parts = [(start, start + size) for start, size in (self.registered | self.pinned).items()]
        if len(self.registered) == 10:  # all of the memory
            assert any(lo <= source and source + n <= hi for lo, hi in parts)
        self.copies.append((to, source, n))
        return (0,)

    def cudaEventRecord(self, event: int, stream: str) -> tuple[int]:
        assert (event in self.made, stream) == (True, "stream")
        self.until[event] = len(self.copies)
        return (0,)

    def cudaEventSynchronize(self, event: int) -> tuple[int]:
        for to, source, n in self.copies[self.done : self.until[event]]:
            ctypes.memmove(to, source, n)
        self.done = max(self.done, self.until[event])
        return (0,)

    def cudaEventDestroy(self, event: int) -> tuple[int]:
        self.made.remove(event)
        return (0,)

    cudaStreamDestroy = cudaIpcCloseMemHandle = cudaEventDestroy

    def cudaHostRegister(self, start: int, size: int, flags: int) -> tuple[int]:
        if len(self.registered) == self.most:
            return (2,)
        self.registered[start] = size
        return (0,)

    def cudaHostUnregister(self, start: int) -> tuple[int]:
        del self.registered[start]
        return (0,)

    def cudaMallocHost(self, size: int) -> tuple[int, int]:
        self._allocated.append(np.zeros(size, np.uint8))
        address = self._allocated[-1].ctypes.data
        self.pinned[address] = size
        return 0, address

    def cudaFreeHost(self, address: int) -> tuple[int]:
        del self.pinned[address]
        return (0,)

    def cudaIpcGetMemHandle(self, pointer: int) -> tuple[int, Handle]:
        return 0, Handle(pointer)

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[int, int]:
        assert (flags, self.device) == (8, DEVICE)
        pointer = int.from_bytes(handle.data.raw[:8], "little")
        self.made.add(pointer)
        return 0, pointer


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Runtime:
    runtime = Runtime(getattr(request, "param", 10))
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    monkeypatch.setattr(cuda, "REGISTER_CHUNK", CHUNK)
    return runtime


def memory_of_a_store() -> tuple[Bytes, Store]:
    memory = np.random.default_rng(0).integers(1, 256, 10 * CHUNK - 50, np.uint8)
    return memory, cast(Store, SimpleNamespace(segment=SimpleNamespace(array=memory)))


@pytest.mark.parametrize("owned", [True, False])
def test_gpu_copies_land_in_their_slots_when_they_are_finished(runtime: Runtime, owned: bool) -> None:
    memory, store = memory_of_a_store()
    slab = np.zeros((4, SLOT), np.uint8)
    if owned:
        handle = cuda.ipc_handle(slab.ctypes.data)
        copier: Any = open_copier(AttachSlab("cuda", handle, DEVICE, 4, SLOT), store, None, lambda: None)
    else:
        copier = CudaCopier(store, DEVICE, slab.ctypes.data, SLOT, owned=False)
    assert (copier.notes, copier.depth) == ((), 2)
    starts = range(memory.ctypes.data, memory.ctypes.data + 950, CHUNK)
    assert runtime.registered == dict.fromkeys(starts, CHUNK) | {starts[-1]: 50}
    tiles = [(2, memory[130:380]), (0, memory[0:250]), (3, memory[700:950]), (1, memory[400:650])]
    landed = np.zeros_like(slab)
    copier.start(tiles[0][1], tiles[0][0])
    for number, (slot, tile) in enumerate(tiles):
        if number + 1 < len(tiles):
            copier.start(tiles[number + 1][1], tiles[number + 1][0])
            np.testing.assert_array_equal(slab, landed)  # none without waiting
            copier.finish()
        else:
            copier.close()  # waits, too
        landed[slot, :250] = tile
        np.testing.assert_array_equal(slab, landed)
    assert (runtime.registered, runtime.made) == ({}, set())


@pytest.mark.parametrize("threads", [1, 3])
def test_channels_are_gathered_by_threads_and_land_when_they_are_finished(
    monkeypatch: pytest.MonkeyPatch, runtime: Runtime, threads: int
) -> None:
    """As many chunks under way as the copier allows, and a tile among them."""
    monkeypatch.setattr("workers.copiers.gather_threads", lambda: threads)
    memory, store = memory_of_a_store()
    slab = np.zeros((4, SLOT), np.uint8)
    copier = CudaCopier(store, DEVICE, slab.ctypes.data, SLOT, owned=False)
    assert copier.gather_depth == threads + 1
    records = memory[:900].reshape(45, 20)
    random, under_way = np.random.default_rng(0), 0
    expected = np.zeros_like(slab)
    for chunk in range(12):
        slot, place = chunk % 3, chunk // 3
        chosen = np.sort(random.permutation(45)[: 3 if chunk else 1]).astype(np.int32)
        copier.gather(records, chosen, slot, 3 * place)
        expected[slot, 60 * place : 60 * place + 20 * len(chosen)] = records[chosen].reshape(-1)
        under_way += 1
        if under_way == copier.gather_depth:
            copier.finish()
            under_way -= 1
        if chunk == 5:
            copier.finish()
            copier.start(memory[130:380], 3)
            expected[3, :250] = memory[130:380]
    copier.close()
    np.testing.assert_array_equal(slab, expected)
    assert (runtime.registered, runtime.pinned, runtime.made) == ({}, {}, set())


@pytest.mark.parametrize("runtime", [2], indirect=True)
def test_refused_page_locking_is_noted_and_undone_as_far_as_it_went(runtime: Runtime) -> None:
    memory, store = memory_of_a_store()
    copier = CudaCopier(store, DEVICE, 0, SLOT, owned=False)
    assert copier.notes == ("page-locked 21% of the store: cudaHostRegister: error 2",)
    assert len(runtime.registered) == 2
    copier.close()
    assert runtime.registered == {}
    runtime.most = 0
    assert cuda.page_lock(memory) == (0, "cudaHostRegister: error 2")


class Clock:
    """Stands in for the module time."""

    def __init__(self) -> None:
        self.now, self.naps = 100.0, list[float]()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


class Immediate:
    """A copier whose copies take no time."""

    depth, gather_depth, notes = 5, 3, ("a note",)

    def __init__(self) -> None:
        self.calls = list[object]()

    def start(self, tile: Bytes, slot: int) -> None:
        self.calls.append(slot)

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        self.calls.append((slot, place, len(chosen)))

    def finish(self) -> None:
        self.calls.append("finish")

    def close(self) -> None:
        self.calls.append("close")


def test_paced_copies_take_the_links_time_one_after_the_other_and_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, inner, ticks = Clock(), Immediate(), list[float]()
    monkeypatch.setattr("workers.copiers.time", clock)
    monkeypatch.setattr("workers.emulation.time", clock)
    copier = paced(inner, 1e-6, lambda: ticks.append(clock.now))  # 1000 bytes a second
    assert isinstance(copier, PacedCopier)
    assert (copier.depth, copier.gather_depth, copier.notes) == (5, 3, ("a note",))
    tile = np.zeros(1250, np.uint8)
    copier.start(tile, 7)
    copier.start(tile, 8)
    assert clock.now == 100
    copier.finish()
    assert (clock.now, clock.naps, ticks) == (101.25, [0.5, 0.5, 0.25], [100.5, 101, 101.25])
    clock.now = 102  # late: the second copy is due at 102.5 all the same
    copier.finish()
    assert (clock.now, ticks[3:]) == (102.5, [102.5])
    clock.now = 110  # idle time is not saved up
    copier.start(tile, 9)
    copier.finish()
    assert clock.now == 111.25
    copier.gather(tile.reshape(10, 125), np.array([3, 5], np.int32), 4, 2)  # 250 of the bytes
    copier.finish()
    assert clock.now == 111.5
    copier.close()
    assert inner.calls == [7, 8, "finish", "finish", 9, "finish", (4, 2, 2), "finish", "close"]
    assert paced(inner, None, lambda: None) is inner
