"""Whether a GPU's tiles are better copied by a thread of the coordinator or by another process: what each
copies a second, alone and while the coordinator's kernels run, and how much these are slowed. That copies of
one process overlap kernels of another is promised nowhere.

Both kinds copy tiles from the same page-locked memory into the same device memory. The process is this module
(`python -m workers.copy_trial`): its first line of input is its configuration, each further one the seconds
of a measurement, which it answers with bytes a second. It ends with its input. Nothing of a trial has a name
that could stay behind: the memory is passed as a descriptor.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from workers.cuda import (
    CudaError,
    blocking_event,
    call,
    constant,
    ipc_handle,
    open_ipc_handle,
    page_lock,
    page_unlock,
    registered_parts,
)
from workers.emulation import TICK_SECONDS

ROOT = Path(__file__).parents[1]
SLOTS, DEPTH = 8, 4  # of device memory, and copies under way
TILE = 4 << 20  # bytes: int4 tiles have 1.3 to 11 MB
SOURCE = 64 << 20  # bytes of host memory that are copied in turn
SECONDS = 0.3  # of one measurement
LIMIT = 60.0  # seconds for the process's answer: importing and a first CUDA call on a busy machine
SLOWER, LESS = 1.05, 0.95  # kernels beside copies, and copies beside kernels, that are as good as alone

Copying = Literal["process", "thread"]
Kind = Literal["process", "thread", "mps"]  # the last: a process, which shares the GPU through MPS
Tick = Callable[[], None]
Kernels = Callable[[float], float]  # compute for so many seconds; returns those of one round


@dataclass(frozen=True)
class Pace:
    """Of one kind: bytes a second alone and beside kernels, and how many times as long these take then."""

    alone: float
    beside: float
    slowdown: float


def better(process: Pace, thread: Pace) -> Copying:
    """The process, which a failing driver call cannot take the coordinator along with, unless it copies less
    beside kernels than either kind does alone, or slows them, and a thread does better."""
    best = max(process.alone, thread.alone)
    if process.beside >= LESS * best and process.slowdown <= SLOWER:
        return "process"
    return "process" if process.beside / process.slowdown >= thread.beside / thread.slowdown else "thread"


class Copies:
    """Copies tiles from page-locked memory to device memory, several under way. Used by one thread."""

    def __init__(self, device: int, address: int, memory: NDArray[np.uint8], tile: int) -> None:
        """`address`: of SLOTS tiles on the device. Raises CudaError where the memory cannot be locked."""
        call("cudaSetDevice", device)
        self._address, self._memory, self._tile = address, memory, tile
        self._locked, reason = page_lock(memory)
        if reason:
            page_unlock(memory, self._locked)
            raise CudaError(reason)
        self._stream = call("cudaStreamCreateWithFlags", constant("cudaStreamNonBlocking"))
        self._events = [blocking_event() for _ in range(DEPTH)]

    def pace(self, seconds: float) -> float:
        """Bytes a second."""
        tiles, kind = self._memory.nbytes // self._tile, constant("cudaMemcpyKind").cudaMemcpyHostToDevice
        began, number = time.perf_counter(), 0
        while number < DEPTH or time.perf_counter() - began < seconds:
            event = self._events[number % DEPTH]
            if number >= DEPTH:
                call("cudaEventSynchronize", event)
            target = self._address + number % SLOTS * self._tile
            source = self._memory.ctypes.data + number % tiles * self._tile
            for lo, hi in registered_parts(self._memory, source, self._tile):
                call("cudaMemcpyAsync", target + lo, source + lo, hi - lo, kind, self._stream)
            call("cudaEventRecord", event, self._stream)
            number += 1
        call("cudaStreamSynchronize", self._stream)
        return number * self._tile / (time.perf_counter() - began)

    def close(self) -> None:
        for event in self._events:
            call("cudaEventDestroy", event)
        call("cudaStreamDestroy", self._stream)
        page_unlock(self._memory, self._locked)


class _Process:
    """Another process that copies. Its answers have a limit."""

    def __init__(self, config: dict[str, Any], descriptor: int, tick: Tick) -> None:
        self._tick = tick
        self._child = subprocess.Popen(
            [sys.executable, "-m", "workers.copy_trial"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            pass_fds=(descriptor,), bufsize=0,
        )  # fmt: skip
        self._buffer = b""
        try:
            self._write(json.dumps(config))
            self._read()
        except BaseException:
            self.close()
            raise

    def _write(self, line: str) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            raise CudaError("the copying process has exited") from None

    def _read(self) -> float:
        assert self._child.stdout is not None
        pipe, until = self._child.stdout.fileno(), time.monotonic() + LIMIT
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], min(TICK_SECONDS, max(0.0, until - time.monotonic())))
            self._tick()
            if not ready and time.monotonic() < until:
                continue
            part = os.read(pipe, 4096) if ready else b""
            if not part:
                raise CudaError("the copying process " + ("has exited" if ready else "does not answer"))
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if isinstance(answer, str):
            raise CudaError(answer)
        return float(answer)

    def pace(self, seconds: float) -> float:
        """As of Copies."""
        self._write(str(seconds))
        return self._read()

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def shared_memory(size: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """A descriptor that another process can map, and the memory here."""
    descriptor = os.memfd_create("tandem-copy-trial")
    try:
        os.ftruncate(descriptor, size)
        memory = mapped(descriptor, size)
        memory[:] = 1  # pages exist before they are locked
        yield descriptor, memory
    finally:
        os.close(descriptor)


def mapped(descriptor: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


def measure(
    device: int,
    kernels: Kernels,
    tick: Tick = lambda: None,
    *,
    tile: int = TILE,
    source: int = SOURCE,
    seconds: float = SECONDS,
) -> dict[Copying, Pace]:
    """The paces of both kinds, one after the other. `tick` is called while it waits for the process. Raises
    CudaError, also where another process cannot map this one's device memory."""
    call("cudaSetDevice", device)
    alone = kernels(seconds)
    found: dict[Copying, Pace] = {}
    with ExitStack() as closing:
        descriptor, memory = closing.enter_context(shared_memory(source))
        address = int(call("cudaMalloc", SLOTS * tile))
        closing.callback(call, "cudaFree", address)
        config = {"device": device, "handle": ipc_handle(address).hex(), "tile": tile}
        config |= {"descriptor": descriptor, "size": source}
        with ExitStack() as process:
            other = _Process(config, descriptor, tick)
            process.callback(other.close)  # before the memory that it maps is freed
            found["process"] = _pace(other.pace, kernels, alone, seconds)
        with ThreadPoolExecutor(1) as thread:
            copies = thread.submit(Copies, device, address, memory, tile).result()
            try:
                found["thread"] = _pace(copies.pace, kernels, alone, seconds)
            finally:
                thread.submit(copies.close).result()
    return found


def _pace(pace: Callable[[float], float], kernels: Kernels, alone: float, seconds: float) -> Pace:
    pace(seconds / 2)  # the link leaves its power-saving state
    by_itself = pace(seconds)
    with ThreadPoolExecutor(1) as beside:
        copying = beside.submit(pace, 2 * seconds)
        round_ = kernels(seconds)
        return Pace(by_itself, copying.result(), round_ / alone if alone > 0 else 1.0)


def main() -> None:
    config = json.loads(sys.stdin.readline())
    try:
        address = open_ipc_handle(config["device"], bytes.fromhex(config["handle"]))
        memory = mapped(config["descriptor"], config["size"])
        copies = Copies(config["device"], address, memory, config["tile"])
        print(0, flush=True)
        for line in sys.stdin:
            print(copies.pace(float(line)), flush=True)
    except CudaError as e:
        print(json.dumps(str(e)), flush=True)


if __name__ == "__main__":
    main()
