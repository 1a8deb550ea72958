"""How a GPU learns of a tile that was copied for it: by a flag that its stream waits for, or by an event that
the copying thread sleeps on and a message to the thread that launches kernels. Tiles are copied by the
prefetcher's copier, in a thread or in another process; the consumer reads each tile within the device's
memory.

    python -m benchmarks.gpu.primitives landings

In the other process this module is the program: its first line of input is its configuration, each further
one an order, and it writes one byte for each tile that has landed.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

from shm.landing_flags import LandingFlags, next_number
from shm.segment import unlink
from shm.store import Store
from workers import copy_trial
from workers.cuda import CudaError, call, constant, ipc_handle, open_ipc_handle, passed
from workers.cuda_copier import CudaCopier
from workers.device_flags import DeviceFlags

TILE = 1_300_000  # bytes, of Qwen3-30B-A3B's int4 experts: small ones, for which landings cost most
SLOTS = 16
TILES = 64  # of a measured order
REPEATS = 20
LIMIT = 30.0  # seconds for an order

Row = dict[str, Any]
Numbers = list[int]
Order = Callable[[Numbers], None]  # copy a tile for each number to the slots in turn; 0: without a flag


def copied(copier: CudaCopier, memory: Any, numbers: Numbers, landed: Callable[[], object]) -> None:
    """Carry an order out; `landed` is called behind each tile."""
    tiles, started, finished = len(memory) // TILE, 0, 0
    while finished < len(numbers):
        while started < len(numbers) and started - finished < copier.depth:
            tile = started % tiles * TILE
            copier.start(memory[tile : tile + TILE], started % SLOTS, numbers[started])
            started += 1
        for _ in range(copier.finish()):
            finished += 1
            landed()


def copier_of(memory: Any, address: int, flags: DeviceFlags | None, owned: bool) -> CudaCopier:
    store = cast(Store, SimpleNamespace(segment=SimpleNamespace(array=memory)))
    copier = CudaCopier(store, 0, address, TILE, owned, flags)
    copier.locks.wait()
    return copier


@contextmanager
def in_thread(memory: Any, address: int, flags: DeviceFlags, write: int) -> Iterator[Order]:
    """`write`: the pipe that each landing is written to."""
    copier = copier_of(memory, address, flags, owned=False)
    threads: list[threading.Thread] = []

    def order(numbers: Numbers) -> None:
        for thread in threads:
            thread.join()
        work = (copier, memory, numbers, lambda: os.write(write, b"."))
        threads[:] = [threading.Thread(target=copied, args=work)]
        threads[0].start()

    try:
        yield order
    finally:
        for thread in threads:
            thread.join()
        copier.close()
        copier.locks.undo()


@contextmanager
def in_process(descriptor: int, size: int, address: int, flags: LandingFlags, write: int) -> Iterator[Order]:
    config = {"handle": ipc_handle(address).hex(), "descriptor": descriptor, "size": size}
    config["flags"] = flags.segment.name
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.landings"],
        cwd=copy_trial.ROOT, stdin=subprocess.PIPE, stdout=write, stderr=subprocess.DEVNULL,
        pass_fds=(descriptor,), bufsize=0,
    )  # fmt: skip
    assert child.stdin is not None
    stdin = child.stdin

    def order(numbers: Numbers) -> None:
        try:
            stdin.write(f"{json.dumps(numbers)}\n".encode())
        except BrokenPipeError:
            raise CudaError("the copying process has exited") from None

    try:
        stdin.write(f"{json.dumps(config)}\n".encode())
        yield order
    finally:
        child.kill()
        child.communicate()


class Consumer:
    """Reads tiles on a stream of its own, once they have landed."""

    def __init__(self, address: int, flags: DeviceFlags, order: Order, read: int) -> None:
        self._address, self._flags, self._order, self._read = address, flags, order, read
        self._numbers = flags.flags.array[:SLOTS].tolist()
        self._stream = call("cudaStreamCreateWithFlags", constant("cudaStreamNonBlocking"))
        self._done = call("cudaEventCreateWithFlags", constant("cudaEventDisableTiming"))
        self._target = int(call("cudaMalloc", TILE))
        self._unread = 0  # messages of the latest order

    def by_flags(self, tiles: int) -> None:
        awaited = []
        for tile in range(tiles):
            self._numbers[tile % SLOTS] = next_number(self._numbers[tile % SLOTS])
            awaited.append(self._numbers[tile % SLOTS])
        self._order(awaited)
        self._unread = tiles
        try:
            for tile, number in enumerate(awaited):
                self._flags.wait(self._stream, tile % SLOTS, number)
                self._consume(tile)
            self._finish()
        finally:
            self._flags.flags.array[:SLOTS] = self._numbers  # a copy that has failed must not hold the stream

    def by_messages(self, tiles: int) -> None:
        self._order([0] * tiles)
        self._unread = tiles
        self.read_messages(self._consume)
        self._finish()

    def _finish(self) -> None:
        """Wait until all has been read; a wait for a flag may last for ever."""
        call("cudaEventRecord", self._done, self._stream)
        until = time.monotonic() + LIMIT
        while not passed(self._done):
            if time.monotonic() > until:
                raise CudaError(f"a stream has waited for a flag for {LIMIT:.0f} s")

    def read_messages(self, each: Callable[[int], None] = lambda tile: None) -> None:
        """Until all of the latest order have come; `each` is called with each tile."""
        tile = 0
        while self._unread:
            if not select.select([self._read], [], [], LIMIT)[0]:
                raise CudaError(f"{self._unread} tiles have not landed in {LIMIT:.0f} s")
            for _ in os.read(self._read, self._unread):
                each(tile)
                tile += 1
                self._unread -= 1

    def median(self, way: str, tiles: int, repeats: int) -> float:
        """Seconds of an order of so many tiles, until they were read."""
        consume, seconds = {"flags": self.by_flags, "messages": self.by_messages}[way], []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            consume(tiles)
            seconds.append(time.perf_counter() - began)
            self.read_messages()
        return statistics.median(seconds[1:])

    def _consume(self, tile: int) -> None:
        kind = constant("cudaMemcpyKind").cudaMemcpyDeviceToDevice
        source = self._address + tile % SLOTS * TILE
        call("cudaMemcpyAsync", self._target, source, TILE, kind, self._stream)

    def close(self) -> None:
        call("cudaStreamSynchronize", self._stream)
        call("cudaEventDestroy", self._done)
        call("cudaStreamDestroy", self._stream)
        call("cudaFree", self._target)


def landings(repeats: int = REPEATS, tiles: int = TILES) -> list[Row]:
    """Microseconds from an order of one tile until it was read, and GB/s of small tiles in a row, by place of
    the copier and by how a landing is known."""
    rows: list[Row] = []
    name = f"/tandem-check-landings-{os.getpid()}"
    with ExitStack() as closing:
        descriptor, memory = closing.enter_context(copy_trial.shared_memory(SLOTS * TILE))
        address = int(call("cudaMalloc", SLOTS * TILE))
        closing.callback(call, "cudaFree", address)
        flags = LandingFlags.create(name, SLOTS)
        closing.callback(unlink, name)
        closing.callback(flags.close)
        device_flags = DeviceFlags(flags, 0, spare=0)
        closing.callback(device_flags.close)
        for place in ("thread", "process"):
            with ExitStack() as copying:
                read, write = os.pipe()
                copying.callback(os.close, read)
                copying.callback(os.close, write)
                if place == "thread":
                    order = copying.enter_context(in_thread(memory, address, device_flags, write))
                else:
                    size = SLOTS * TILE
                    order = copying.enter_context(in_process(descriptor, size, address, flags, write))
                consumer = Consumer(address, device_flags, order, read)
                copying.callback(consumer.close)
                for way in ("flags", "messages"):
                    one, many = (consumer.median(way, number, repeats) for number in (1, tiles))
                    row = {"copies by": place, "landings by": way}
                    rows.append(row | {"one tile us": one * 1e6, "GB/s": tiles * TILE / many / 1e9})
    return rows


def main() -> None:
    config = json.loads(sys.stdin.readline())
    address = open_ipc_handle(0, bytes.fromhex(config["handle"]))
    memory = copy_trial.mapped(config["descriptor"], config["size"])
    flags = DeviceFlags(LandingFlags.attach(config["flags"], SLOTS), 0, spare=1)
    copier = copier_of(memory, address, flags, owned=True)
    out = sys.stdout.fileno()
    for line in sys.stdin:
        copied(copier, memory, json.loads(line), lambda: os.write(out, b"."))


if __name__ == "__main__":
    main()
