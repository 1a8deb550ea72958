"""Measures what the engine's model of a GPU stands on: copies by size and direction, page-locking,
contexts, waits, reads of the host beside copies, and kernels that read the host's memory.

    python -m benchmarks.gpu.primitives [copies locking latencies host ...] [--out FILE.json]

Times are the host's around work that was waited for; each is the median of several. What fails is reported,
and the next goes on.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.timing import Memory, Row, median, pages
from pipeline.device import open_device
from workers.cuda import (
    CudaError,
    PinnedBuffer,
    blocking_event,
    call,
    constant,
    page_lock,
    page_unlock,
    registered_parts,
)
from workers.kernels.native import best

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes of a copy
LARGEST = 1 << 30  # bytes that are locked, and that a killed process has locked
SOURCE, TILE = 64 << 20, 4 << 20  # bytes that are copied in turn beside reads of the host
CHILD_LIMIT = 60.0  # seconds
ROOT = Path(__file__).parents[2]
# A process that makes a context, locks memory, says so and waits.
CHILD = """
import mmap, sys, numpy as np
from workers.cuda import call, page_lock
call("cudaSetDevice", 0); call("cudaFree", 0)
memory = np.frombuffer(mmap.mmap(-1, max(4096, int(sys.argv[1]))), np.uint8)
memory[:] = 1
print(page_lock(memory)[0] if int(sys.argv[1]) else 0, flush=True)
sys.stdin.readline()
"""


@contextmanager
def device_memory(size: int) -> Iterator[int]:
    address = int(call("cudaMalloc", size))
    try:
        yield address
    finally:
        call("cudaFree", address)


@contextmanager
def stream() -> Iterator[Any]:
    made = call("cudaStreamCreateWithFlags", constant("cudaStreamNonBlocking"))
    try:
        yield made
    finally:
        call("cudaStreamDestroy", made)


def copies() -> list[Row]:
    """GB/s of copies by size: to the device from page-locked and from other memory, and back."""
    rows = []
    kinds = constant("cudaMemcpyKind")
    size, other = max(SIZES), pages(max(SIZES))
    pinned, memory = PinnedBuffer(), pages(max(SIZES))
    pinned.array(size)[:] = 1
    locked, reason = page_lock(memory)
    with device_memory(size) as there, stream() as on:

        def copied(host: Memory, number: int, back: bool) -> Callable[[], None]:
            def once() -> None:
                kind = kinds.cudaMemcpyDeviceToHost if back else kinds.cudaMemcpyHostToDevice
                parts = [(0, number)]
                if host is memory:
                    parts = list(registered_parts(memory, host.ctypes.data, number))
                for lo, hi in parts:
                    ends = (there + lo, host.ctypes.data + lo)
                    call("cudaMemcpyAsync", *(ends[::-1] if back else ends), hi - lo, kind, on)
                call("cudaStreamSynchronize", on)

            return once

        for number in SIZES:
            row: Row = {"bytes": number}
            for name, host, back in (
                ("page-locked", pinned.array(size), False),
                ("registered", memory, False),
                ("pageable", other, False),
                ("back", pinned.array(size), True),
            ):
                row[name] = number / median(copied(host, number, back)) / 1e9
            rows.append(row)
    page_unlock(memory, locked)
    pinned.close()
    return rows if not reason else [*rows, {"registered, reason": reason}]


def locking(size: int = LARGEST) -> list[Row]:
    """GB/s of page-locking and of unlocking; bytes of a second context; seconds until a killed process with
    so much locked memory has ended, and until the device's memory is back."""
    memory, (free, _) = pages(size), call("cudaMemGetInfo")
    began = time.perf_counter()
    locked, reason = page_lock(memory)
    middle = time.perf_counter()
    page_unlock(memory, locked)
    ended = time.perf_counter()
    rows: list[Row] = [{
        "locked": locked, "reason": reason,
        "lock GB/s": locked / (middle - began) / 1e9, "unlock GB/s": locked / (ended - middle) / 1e9,
    }]  # fmt: skip
    for bytes_locked in (0, size):
        with child(bytes_locked) as process:
            context = free - call("cudaMemGetInfo")[0]
            began = time.perf_counter()
            process.send_signal(signal.SIGKILL)
            process.wait(CHILD_LIMIT)
            gone = time.perf_counter() - began
            until = time.monotonic() + CHILD_LIMIT
            while call("cudaMemGetInfo")[0] < free - context // 2 and time.monotonic() < until:
                time.sleep(0.01)
            rows.append({
                "killed with": bytes_locked, "context bytes": context,
                "ended s": gone, "memory back s": time.perf_counter() - began,
            })  # fmt: skip
    return rows


@contextmanager
def child(locked: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a context and so much locked memory."""
    command = [sys.executable, "-c", CHILD, str(locked)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise CudaError("a second process could not use the device")
        yield process
    finally:
        process.kill()
        process.communicate()


def latencies() -> list[Row]:
    """Microseconds of what a layer waits for: a recorded event, by a sleeping and by a spinning wait; a small
    copy each way; a Work to a worker and back."""
    kinds, small = constant("cudaMemcpyKind"), PinnedBuffer()
    host = small.array(4096)
    sleeping, spinning = (
        blocking_event(),
        call("cudaEventCreateWithFlags", constant("cudaEventDisableTiming")),
    )
    found: Row = {}
    with device_memory(4096) as there, stream() as on:

        def event(which: Any) -> Callable[[], None]:
            def once() -> None:
                call("cudaEventRecord", which, on)
                call("cudaEventSynchronize", which)

            return once

        def copy(to: int, source: int, kind: Any) -> Callable[[], None]:
            def once() -> None:
                call("cudaMemcpyAsync", to, source, 4096, kind, on)
                call("cudaStreamSynchronize", on)

            return once

        def enqueued() -> None:
            call("cudaMemcpyAsync", there, host.ctypes.data, 4096, kinds.cudaMemcpyHostToDevice, on)

        found["event, sleeping"] = median(event(sleeping), 200)
        found["event, spinning"] = median(event(spinning), 200)
        found["4 KB to the device"] = median(copy(there, host.ctypes.data, kinds.cudaMemcpyHostToDevice), 200)
        found["4 KB to the host"] = median(copy(host.ctypes.data, there, kinds.cudaMemcpyDeviceToHost), 200)
        found["the call of a copy"] = median(enqueued, 200)
        call("cudaStreamSynchronize", on)
    for one in (sleeping, spinning):
        call("cudaEventDestroy", one)
    small.close()
    return [{name: seconds * 1e6 for name, seconds in found.items()}]


def host(size: int = LARGEST, seconds: float = 1.0) -> list[Row]:
    """GB/s that all cores read from memory, alone and while it is copied to the device; and that copy."""
    library = best()
    memory, team = pages(size), library.team(len(os.sched_getaffinity(0)))

    def reads(until: float) -> float:
        began, number = time.perf_counter(), 0
        while number == 0 or time.perf_counter() < until:
            library.read(memory, team)
            number += 1
        return number * size / (time.perf_counter() - began) / 1e9

    alone = reads(time.perf_counter() + seconds)
    source = pages(SOURCE)
    locked, _ = page_lock(source)
    with device_memory(SOURCE) as there, ThreadPoolExecutor(1) as pool:
        copying = pool.submit(copy_pace, source, there, seconds)
        beside = reads(time.perf_counter() + seconds)
        pace = copying.result() / 1e9
    page_unlock(source, locked)
    return [{"reading alone": alone, "reading beside copies": beside, "copies beside reading": pace}]


def copy_pace(source: Memory, there: int, seconds: float) -> float:
    """Bytes a second of copies to the device, one tile after the other, two under way."""
    call("cudaSetDevice", 0)
    kind, events = constant("cudaMemcpyKind").cudaMemcpyHostToDevice, [blocking_event(), blocking_event()]
    began, number = time.perf_counter(), 0
    with stream() as on:
        while number < len(events) or time.perf_counter() - began < seconds:
            event, start = events[number % len(events)], number * TILE % (SOURCE - TILE + 1)
            call("cudaEventSynchronize", event)
            for lo, hi in registered_parts(source, source.ctypes.data + start, TILE):
                host = source.ctypes.data + start + lo
                call("cudaMemcpyAsync", there + start + lo, host, hi - lo, kind, on)
            call("cudaEventRecord", event, on)
            number += 1
        call("cudaStreamSynchronize", on)
    pace = number * TILE / (time.perf_counter() - began)
    for event in events:
        call("cudaEventDestroy", event)
    return pace


def partials(shards: int = 15, hidden: int = 4096) -> list[Row]:
    """Microseconds from the workers' partial sums of one row to their sum on the device: read there by a
    kernel, and added on the host and copied."""
    device = open_device("cuda")
    memory = [pages(-(-4 * hidden // mmap.PAGESIZE) * mmap.PAGESIZE) for _ in range(shards)]
    parts = [each[: 4 * hidden].view(np.float32)[None] for each in memory]
    row: Row = {"shards": shards, "hidden": hidden}

    def added(name: str) -> None:
        def once() -> None:
            device.total([], parts, (1, hidden))
            device.wait(device.fence())

        row[name] = median(once, 200) * 1e6

    added("added on the host us")
    row["reason"] = next(filter(None, map(device.share_memory, memory)), "")
    added("read by the device us")
    for each in memory:
        device.unshare_memory(each)
    device.close()
    return [row]


PARTS: dict[str, Callable[[], list[Row]]] = {
    "copies": copies,
    "locking": locking,
    "latencies": latencies,
    "host": host,
    "partials": partials,
}


def show(rows: list[Row]) -> None:
    for row in rows:
        cells = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items()
        ]
        print("  " + "; ".join(cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    arguments = parser.parse_args()
    found: dict[str, object] = {}
    failed = False
    try:
        call("cudaSetDevice", 0)
    except (CudaError, RuntimeError) as e:  # the bindings find no driver
        print(f"no CUDA device: {e}", file=sys.stderr)
        return 2
    for name in arguments.part or PARTS:
        print(name, flush=True)
        try:
            rows = PARTS[name]()
        except (CudaError, OSError, subprocess.SubprocessError) as e:
            failed, rows = True, [{"failed": str(e)}]
        show(rows)
        found[name] = rows
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
