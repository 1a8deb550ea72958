"""Process entry: a single check of CUDA, selected by `what` in its configuration.

    torch    write torch's view: {"version", "cuda", "devices": [{"name", "bytes", "free"}]}
    export   allocate and fill device memory, write its IPC handle as hex, hold it until stdin has a line
    open     open the IPC handle `handle`, copy from it, compare; write true or false
    graph    capture a CUDA graph with torch and replay it on other numbers; write true or false
    link     copy page-locked host memory to the device; write the bytes a second of each copy

A call that fails ends the process with one line on stderr.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from shm.layout import Bytes
from workers.cuda import (
    CudaError,
    call,
    constant,
    ipc_handle,
    open_ipc_handle,
    page_lock,
    page_unlock,
    registered_parts,
)

SHARED = 1 << 21  # bytes; cudaMalloc puts smaller allocations into one block, and IPC exports whole blocks
MOVED = 1 << 28  # bytes of one measured copy
COPIES = 7
DEVICE = 0


def main(config: dict[str, Any]) -> None:
    try:
        match config["what"]:
            case "torch":
                _write(_torch())
            case "export":
                _export()
            case "open":
                _write(_open(bytes.fromhex(config["handle"])))
            case "graph":
                _write(_graph())
            case "link":
                _write(_link())
    except (CudaError, RuntimeError) as e:  # torch raises the second
        sys.exit(" ".join(str(e).split())[:200])


def _write(value: Any) -> None:
    print(json.dumps(value), flush=True)


def _torch() -> dict[str, Any]:
    import torch

    devices = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            devices.append({"name": torch.cuda.get_device_name(i), "bytes": total, "free": free})
    return {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}


def _pattern() -> Bytes:
    return (np.arange(SHARED) % 251).astype(np.uint8)


def _export() -> None:
    call("cudaSetDevice", DEVICE)
    address = int(call("cudaMalloc", SHARED))
    pattern = _pattern()
    kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
    call("cudaMemcpy", address, pattern.ctypes.data, SHARED, kind)
    call("cudaDeviceSynchronize")
    _write(ipc_handle(address).hex())
    sys.stdin.readline()


def _open(handle: bytes) -> bool:
    address = open_ipc_handle(DEVICE, handle)
    back = np.zeros(SHARED, np.uint8)
    kind = constant("cudaMemcpyKind").cudaMemcpyDeviceToHost
    call("cudaMemcpy", back.ctypes.data, address, SHARED, kind)
    call("cudaIpcCloseMemHandle", address)
    return bool(np.array_equal(back, _pattern()))


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
    call("cudaSetDevice", DEVICE)
    source = np.ones(MOVED, np.uint8)
    locked, reason = page_lock(source)
    if reason:
        raise CudaError(reason)
    address = int(call("cudaMalloc", MOVED))
    stream = call("cudaStreamCreateWithFlags", constant("cudaStreamNonBlocking"))
    kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
    rates = []
    for _ in range(COPIES):
        began = time.perf_counter()
        for lo, hi in registered_parts(source, source.ctypes.data, MOVED):
            call("cudaMemcpyAsync", address + lo, source.ctypes.data + lo, hi - lo, kind, stream)
        call("cudaStreamSynchronize", stream)
        rates.append(MOVED / (time.perf_counter() - began))
    page_unlock(source, locked)
    return rates[1:]  # during the first the link leaves its power-saving state
