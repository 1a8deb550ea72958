"""Process entry: the doctor's measurements and checks, by `what` in the configuration.

    memory, read, kernels
            rates of computing with the weights in a buffer, each time others so that no cache holds them:
            reading and, for `memory`, copying tile by tile and reading huge pages; or
            computing an expert's tiles at one row, as a worker does. All take turns, so that other programs
            slow all of them alike.
    gpu     four lines of JSON: torch's view {"version", "cuda", "devices"}; whether a CUDA graph works; the
            bytes a second of copies from page-locked memory; an IPC handle of device memory, which stays
            until stdin has a line
    open    whether the memory of the IPC `handle` has the numbers that `gpu` wrote there

A check that fails writes {"failure": why} instead.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shm.descriptor import describe
from shm.floe import FloeFormat
from shm.layout import Bytes, ExpertShape, StoreLayout, format_named
from shm.mask import DENSE, Mask
from shm.store import Store
from workers.cuda import CudaError, call, constant, ipc_handle, open_ipc_handle
from workers.kernels.host import HostKernel
from workers.kernels.native import best
from workers.lifetime import pin

BLOCK = 1 << 25  # bytes of one read, and of one copy
TILE = 1 << 20  # bytes of a part of a copy, about a tile of a large model
FEWEST = 3  # samples, for a median
ALIGNMENT = 4096  # of what is computed with
SAMPLE = 0.02  # seconds; the same for all kinds, because other programs interrupt longer ones more often
SHARED = 1 << 21  # bytes; cudaMalloc puts smaller allocations into one block, and IPC exports whole blocks
MOVED = 1 << 28  # bytes of one measured copy
COPIES = 7


class Work(NamedTuple):
    """A computation with `size` bytes of a buffer, of which it counts `read`."""

    compute: Callable[[Bytes], object]
    size: int
    read: int


Kind = tuple[Bytes, Work]  # a buffer, and what computes with it


def main(config: dict[str, Any]) -> None:
    """See above. For rates: `fd` and `size` of the buffer; `lo`, `hi`: the part to use; `cores` to run on;
    `seconds` of measurement, of each kind. For kernels: `experts`: (format, fields of its ExpertShape) of
    each kind; `left_out`: the share of an expert's channels that formats with heads leave out.
    Rates begin when "ready" was answered by a line."""
    match config["what"]:
        case "gpu":
            for check in (_torch, _graph, _link, _export):
                _report(check)
            sys.stdin.readline()
        case "open":
            _report(lambda: _open(bytes.fromhex(config["handle"])))
        case _:
            _measure(config)


def _write(value: Any) -> None:
    print(json.dumps(value), flush=True)


# --- rates --------------------------------------------------------------------------------------------------


def _measure(config: dict[str, Any]) -> None:
    pin(config["cores"])
    shared = np.frombuffer(mmap.mmap(config["fd"], config["size"], mmap.MAP_SHARED), np.uint8)
    part = shared[config["lo"] : config["hi"]]
    part.view(np.uint64).max()  # maps every page
    if config["what"] == "kernels":
        kinds: list[Kind] = [(part, work) for work in _kernels(config, part)]
    else:
        kinds = [(part, _read(part))]
    if config["what"] == "memory":
        kinds.append((part, Work(_copy, min(2 * BLOCK, len(part)), min(BLOCK, len(part) // 2))))
        kinds += [(memory, _read(memory)) for memory in _huge_pages(len(part))]
    for memory, work in kinds:
        work.compute(memory[: work.size])  # allocates scratch, and imports what it needs
    _write("ready")
    if sys.stdin.readline():
        _write(_rates(kinds, config["seconds"]))


def _huge_pages(size: int) -> list[Bytes]:
    """Returns private memory in huge pages; nothing where the kernel has none."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return []
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1  # pages that were never written would all be the one page of zeros
    return [array]


def _read(buffer: Bytes) -> Work:
    size = min(BLOCK, len(buffer)) // 64 * 64
    return Work(best().read, size, size)


def _copy(block: Bytes) -> None:
    half = len(block) // 2
    for begin in range(0, half, TILE):
        end = min(begin + TILE, half)
        block[half + begin : half + end] = block[begin:end]


def _kernels(config: dict[str, Any], part: Bytes) -> list[Work]:
    works, share = [_read(part)], 1 - config["left_out"]
    for name, shape in config["experts"]:
        works.append(_expert(name, ExpertShape(*shape), len(part), share))
    return works


def _expert(name: str, shape: ExpertShape, most: int, share: float) -> Work:
    """One expert's Work; fewer of its tiles where it exceeds `most` bytes. `share`: of the channels of a
    format with heads that are kept. The buffer's weights are alike, so that these are the first ones of each
    tile."""
    whole = StoreLayout(replace(shape, layers=1, experts=1), format_named(name))
    tiles = max(1, min(shape.tiles, most * shape.tiles // whole.total_bytes))
    layout = StoreLayout(replace(whole.shape, intermediate=tiles * shape.tile), whole.format)
    kernel = HostKernel(layout)
    x = np.full((1, shape.hidden), 0.5, np.float32)
    y, mask, read = np.empty_like(x), DENSE, layout.total_bytes
    if isinstance(layout.format, FloeFormat):
        mask = Mask(share=share)
        kept = mask.number(shape.tile) if share < 1 else shape.tile
        read = tiles * (layout.head_bytes + kept * layout.format.channel_bytes(shape.hidden))
    order = describe(0, [(0, 0, tiles)], [0, 1], [0], [1.0], 1, mask)
    return Work(
        lambda data: kernel.compute_work(order, x, _Buffer(layout, data), y), layout.total_bytes, read
    )


class _Buffer(Store):
    """The bytes of a buffer as a store of one expert."""

    def __init__(self, layout: StoreLayout, data: Bytes) -> None:
        self.layout = layout
        self._data = data
        self._tile_bytes = layout.tile_bytes


def _rates(kinds: list[Kind], seconds: float) -> list[list[float]]:
    """Returns for each kind the bytes a second of each sample."""
    rates: list[list[float]] = [[] for _ in kinds]
    offset, rounds = 0, 0
    began = time.perf_counter()
    while rounds < FEWEST or time.perf_counter() - began < seconds * len(kinds):
        rounds += 1
        for (buffer, (compute, size, read)), of_kind in zip(kinds, rates, strict=True):
            started = now = time.perf_counter()
            done = 0
            while now - started < SAMPLE:
                offset = offset if offset + size <= len(buffer) else 0
                compute(buffer[offset : offset + size])
                offset += -(-size // ALIGNMENT) * ALIGNMENT
                done += read
                now = time.perf_counter()
            of_kind.append(done / (now - started))
    return rates


# --- the GPU ------------------------------------------------------------------------------------------------


def _report(check: Callable[[], Any]) -> None:
    try:
        _write(check())
    except (CudaError, RuntimeError) as e:  # torch raises the second
        _write({"failure": " ".join(str(e).split())[:200]})


def _torch() -> dict[str, Any]:
    import torch

    devices = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            devices.append({"name": torch.cuda.get_device_name(i), "bytes": total, "free": free})
    return {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}


def _graph() -> bool:
    import torch

    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    y = x + 1  # once without, which loads the kernel
    with torch.cuda.graph(graph):
        y = x + 1
    x.fill_(2)
    graph.replay()
    return bool((y == 3).all())


def _link() -> list[float]:
    import torch

    source = torch.ones(MOVED, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device="cuda")
    rates = []
    for _ in range(COPIES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(MOVED / (time.perf_counter() - began))
    return rates[1:]  # during the first the link leaves its power-saving state


def _pattern() -> Bytes:
    return (np.arange(SHARED) % 251).astype(np.uint8)


def _export() -> str:
    address = int(call("cudaMalloc", SHARED))
    pattern = _pattern()
    call(
        "cudaMemcpy", address, pattern.ctypes.data, SHARED, constant("cudaMemcpyKind").cudaMemcpyHostToDevice
    )
    call("cudaDeviceSynchronize")
    return ipc_handle(address).hex()


def _open(handle: bytes) -> bool:
    address = open_ipc_handle(0, handle)
    back = np.zeros(SHARED, np.uint8)
    call("cudaMemcpy", back.ctypes.data, address, SHARED, constant("cudaMemcpyKind").cudaMemcpyDeviceToHost)
    call("cudaIpcCloseMemHandle", address)
    return bool(np.array_equal(back, _pattern()))
