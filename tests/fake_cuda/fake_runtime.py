"""A stand-in for a GPU at the level of `cuda.bindings.runtime`, on real threads.

It is stricter than a GPU, so that what would be wrong now and then there is wrong here:

- a stream is a thread that takes its time; a copy lands piece by piece, in any order, and its target is
  poisoned when it begins; new and freed memory is poisoned too;
- a copy must not run from one registration of host memory into another or out of it;
- a wait for an event or a stream that does not end is `Stuck`.

Stream 0 stands for torch's: torch computes on the CPU here, at once, so what is put into that stream is done
at once, behind what `launch` has put there.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

LIMIT = 20.0  # seconds after which a wait is stuck
PAGE = mmap.PAGESIZE
ILLEGAL_ADDRESS = 700  # after which a context computes nothing
POISON, FREED = 0xCB, 0xDD
INVALID, OUT_OF_MEMORY, INVALID_CONTEXT, REGISTERED, NOT_REGISTERED, NOT_READY = 1, 2, 201, 712, 713, 600
PIECES = 5  # of a copy


class Stuck(Exception):
    """A wait for a stream or an event has not ended."""


@dataclass
class Allocation:
    size: int
    memory: ctypes.Array[ctypes.c_uint8]  # kept after it was freed, so that a late reader finds poison
    freed: bool = False


@dataclass
class Event:
    timed: bool
    done: threading.Event = field(default_factory=threading.Event)
    passed: float = 0.0  # when that was

    def __post_init__(self) -> None:
        self.done.set()  # one that was never recorded has passed

    def pass_(self, done: threading.Event) -> None:
        if done is self.done:  # it was not recorded again
            self.passed = time.perf_counter()
        done.set()


class Stream:
    """Work in its order, in a thread."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()
        self.failed: BaseException | None = None

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def drain(self) -> None:
        ended = threading.Event()
        self.put(ended.set)
        if not ended.wait(LIMIT):
            raise Stuck("a stream")
        if self.failed is not None:
            raise self.failed

    def end(self) -> None:
        self._work.put(None)
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._chance.random() < 0.3:
                time.sleep(self._chance.random() * 1e-3)
            try:
                work()
            except BaseException as e:
                self.failed = e


class Handle:
    """A cudaIpcMemHandle_t."""

    def __init__(self) -> None:
        self.data = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.data)


class Status(int):
    """A CUresult."""

    @property
    def name(self) -> str:
        return f"CUDA error {int(self)}"


class FakeRuntime:
    """The functions return their status and results as cuda-bindings do."""

    cudaStreamNonBlocking, cudaHostRegisterDefault, cudaHostRegisterPortable = 1, 0, 1
    cudaIpcMemLazyEnablePeerAccess = 1
    cudaEventDisableTiming, cudaEventBlockingSync = 2, 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaIpcMemHandle_t = Handle

    def __init__(self, seed: int) -> None:
        self.total = 1 << 28  # bytes of its memory
        self._chance = random.Random(seed)
        self._made = 0
        self._lock = threading.Lock()
        self.allocations: dict[int, Allocation] = {}  # by address
        self.registered: dict[int, int] = {}  # start -> end, whole pages
        self._copies = threading.Event()  # they may go on
        self._copies.set()
        self.limit = LIMIT  # seconds that a stream waits
        self.lockable = 1 << 60  # bytes that may be registered
        self.pinned: dict[int, ctypes.Array[ctypes.c_uint8]] = {}
        self.torch_stream = Stream(self._chance)
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.calls: Counter[str] = Counter()
        self.failures: dict[str, int] = {}  # the calls until one fails, by name
        # fake_graphs.py: the thread that captures and what it records; whether a stream of its own is current
        self.capturing: tuple[int, list[Callable[[], None]]] | None = None
        self.on_side_stream = False
        self.replaying = False  # a graph, which is one call
        self.capture_failed = False  # the present capture, or the latest one
        self.pools: Counter[tuple[int, int]] = Counter()  # of torch's memory: users
        self.pools_underway: set[tuple[int, int]] = set()  # to which it allocates

    # --- for the tests -----------------------------------------------------------------------------------

    def launch(self, work: Callable[[], None]) -> None:
        """A kernel on torch's stream: it runs some time later."""
        self.torch_stream.put(work)

    def hold_copies(self) -> Callable[[], None]:
        """Copies on streams other than torch's wait until the function that is returned was called."""
        self._copies.clear()
        return self._copies.set

    def drain(self) -> None:
        for stream in [self.torch_stream, *self.streams.values()]:
            stream.drain()

    def leftovers(self) -> dict[str, int]:
        """What was not given back, by kind; nothing is left out."""
        live = sum(not allocation.freed for allocation in self.allocations.values())
        held = {
            "device": live, "pinned": len(self.pinned),
            "streams": len(self.streams), "events": len(self.events), "registered": len(self.registered),
        }  # fmt: skip
        return {kind: count for kind, count in held.items() if count}

    def exit(self) -> None:
        """As the process's end: everything is given back."""
        self.drain()
        for stream in [self.torch_stream, *self.streams.values()]:
            stream.end()
        self.streams.clear()
        self.allocations.clear()

    def _fails(self, name: str) -> bool:
        self.calls[name] += 1
        if name not in self.failures:
            return False
        self.failures[name] -= 1
        return self.failures[name] < 0

    # --- memory of the device ----------------------------------------------------------------------------

    def cudaSetDevice(self, device: int) -> tuple[int]:
        return (0,)

    def cudaFree(self, address: int) -> tuple[int]:
        self.calls["cudaFree"] += 1
        if not address:
            return (0,)
        allocation = self.allocations.get(address)
        if allocation is None or allocation.freed:
            return (INVALID,)
        allocation.freed = True
        ctypes.memset(address, FREED, allocation.size)
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        free = self.cudaMemGetInfo()[1]
        if self._fails("cudaMalloc") or size > free:
            return OUT_OF_MEMORY, 0
        memory = (ctypes.c_uint8 * size)()
        address = ctypes.addressof(memory)
        self.allocations[address] = Allocation(size, memory)
        ctypes.memset(address, POISON, size)
        return 0, address

    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        used = sum(allocation.size for allocation in self.allocations.values() if not allocation.freed)
        return 0, self.total - used, self.total

    def cudaDeviceReset(self) -> tuple[int]:
        return (0,)

    def cudaIpcGetMemHandle(self, address: int) -> tuple[int, Handle | None]:
        if self._fails("cudaIpcGetMemHandle"):
            return INVALID, None
        assert not self.allocations[address].freed
        return 0, Handle()

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[int, int]:
        """Refused, as it is for a handle of the same process."""
        return INVALID_CONTEXT, 0

    # --- memory of the host ------------------------------------------------------------------------------

    def cudaHostRegister(self, start: int, size: int, flags: int) -> tuple[int]:
        lo, hi = start // PAGE * PAGE, -(-(start + size) // PAGE) * PAGE
        with self._lock:
            locked = sum(end - begin for begin, end in self.registered.items())
            if self._fails("cudaHostRegister") or locked + hi - lo > self.lockable:
                return (OUT_OF_MEMORY,)
            if any(lo < end and begin < hi for begin, end in self.registered.items()):
                return (REGISTERED,)
            self.registered[lo] = hi
        return (0,)

    def cudaHostUnregister(self, start: int) -> tuple[int]:
        with self._lock:
            return (0,) if self.registered.pop(start // PAGE * PAGE, None) else (NOT_REGISTERED,)

    def cudaHostGetDevicePointer(self, start: int, flags: int) -> tuple[int, int]:
        if self._fails("cudaHostGetDevicePointer") or not self.is_registered(start, 1):
            return INVALID, 0
        return 0, start

    def is_registered(self, start: int, size: int) -> bool:
        """Whether kernels and streams may use this memory of the host."""
        with self._lock:
            return any(lo <= start and start + size <= hi for lo, hi in self.registered.items())

    def page_locked(self, start: int, size: int) -> bool:
        """Whether copies from and to this memory of the host wait for nothing."""
        parts = [(at, at + len(memory)) for at, memory in self.pinned.items()]
        return self.is_registered(start, size) or any(a <= start and start + size <= b for a, b in parts)

    def kernels_read(self, start: int, size: int) -> bool:
        """Whether kernels may read this memory: it lies in an allocation."""
        return any(
            not allocation.freed and address <= start and start + size <= address + allocation.size
            for address, allocation in self.allocations.items()
        )

    def cudaMallocHost(self, size: int) -> tuple[int, int]:
        if self._fails("cudaMallocHost"):
            return OUT_OF_MEMORY, 0
        memory = (ctypes.c_uint8 * size)()
        address = ctypes.addressof(memory)
        self.pinned[address] = memory
        return 0, address

    def cudaFreeHost(self, address: int) -> tuple[int]:
        memory = self.pinned.pop(address)
        ctypes.memset(address, FREED, len(memory))
        return (0,)

    # --- streams, events, copies -------------------------------------------------------------------------

    def _stream(self, number: int) -> Stream:
        return self.streams[number] if number else self.torch_stream

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        self._made += 1
        self.streams[self._made] = Stream(self._chance)
        return 0, self._made

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        self.streams.pop(stream).end()
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        self.calls["cudaStreamSynchronize"] += 1
        self._stream(stream).drain()
        return (0,)

    def cudaDeviceSynchronize(self) -> tuple[int]:
        failed = self._fails("cudaDeviceSynchronize")
        self.drain()
        return (ILLEGAL_ADDRESS,) if failed else (0,)

    def cudaGetLastError(self) -> tuple[int]:
        return (0,)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> tuple[int]:
        self.calls["cudaMemcpyAsync"] += not self.replaying
        if kind == self.cudaMemcpyKind.cudaMemcpyHostToDevice and not self._one_piece(source, size):
            return (INVALID,)
        if not (to and source):
            return (0,)  # a tensor of torch's device meta, which has no numbers
        if not stream:
            self.torch_stream.drain()
            ctypes.memmove(to, source, size)
            return (0,)
        step = -(-size // PIECES) or 1
        starts = list(range(0, size, step))
        self._chance.shuffle(starts)

        def copy() -> None:
            ctypes.memset(to, POISON, size)
            assert self._copies.wait(self.limit)
            for start in starts:
                if self._chance.random() < 0.1:
                    time.sleep(2e-4)
                ctypes.memmove(to + start, source + start, min(step, size - start))

        self._stream(stream).put(copy)
        return (0,)

    def _one_piece(self, source: int, size: int) -> bool:
        with self._lock:
            touched = [(a, b) for a, b in self.registered.items() if a < source + size and source < b]
        return not touched or (touched[0][0] <= source and source + size <= touched[0][1])

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[int]:
        """What the stream does from now on waits for what the event was recorded behind so far."""
        self.calls["cudaStreamWaitEvent"] += 1
        done = self.events[event].done

        def wait() -> None:
            if not done.wait(self.limit):
                raise Stuck("a stream that waits for an event")

        self._stream(stream).put(wait)
        return (0,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[int, int]:
        self.calls["cudaEventCreateWithFlags"] += 1
        self._made += 1
        self.events[self._made] = Event(timed=not flags & self.cudaEventDisableTiming)
        return 0, self._made

    def cudaEventRecord(self, event: int, stream: int) -> tuple[int]:
        self.calls["cudaEventRecord"] += 1
        recorded = self.events[event]
        done = recorded.done = threading.Event()
        self._stream(stream).put(lambda: recorded.pass_(done))
        return (0,)

    def cudaEventElapsedTime(self, first: int, last: int) -> tuple[int, float]:
        events = self.events[first], self.events[last]
        if not all(event.timed for event in events):
            return INVALID, 0.0
        if not all(event.done.is_set() for event in events):
            return NOT_READY, 0.0
        return 0, (events[1].passed - events[0].passed) * 1e3

    def cudaEventSynchronize(self, event: int) -> tuple[int]:
        self.calls["cudaEventSynchronize"] += 1
        if not self.events[event].done.wait(LIMIT):
            raise Stuck("an event")
        return (0,)

    def cudaEventQuery(self, event: int) -> tuple[int]:
        return (0,) if self.events[event].done.is_set() else (NOT_READY,)

    def cudaEventDestroy(self, event: int) -> tuple[int]:
        del self.events[event]
        return (0,)

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, f"error {status}".encode()
