"""Process entry: the doctor's measurements, by `what` in the configuration.

rates   bytes a second of reading a buffer, and of computing one row with an expert of each format, as a
        worker does; each time with other bytes, so that no cache holds them. All take turns, so that
        other programs slow all of them alike.
gpu     two lines of JSON: torch's view {"version", "cuda", "devices"}; the bytes a second of each copy
        from page-locked memory. One that fails writes {"failure": why} instead.
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
from shm.layout import Bytes, ExpertShape, StoreLayout, format_named, shape_of
from shm.mask import DENSE, Mask
from workers.kernels.native import WorkKernel, best
from workers.lifetime import pin

BLOCK = 1 << 25  # bytes of one read
FEWEST = 3  # samples, for a median
ALIGNMENT = 4096  # of what is computed with
SAMPLE = 0.02  # seconds; the same for all kinds, because other programs interrupt longer ones more often
MOVED = 1 << 28  # bytes of one measured copy
COPIES = 7


class Work(NamedTuple):
    """A computation with `size` bytes of the buffer, of which it counts `read`."""

    compute: Callable[[Bytes], object]
    size: int
    read: int


def main(config: dict[str, Any]) -> None:
    """Measure what `what` names, as above. For rates: `fd` and `size` of the buffer; `lo`, `hi`: the part to
    use; `cores` to run on; `seconds` of measurement, of each kind; `experts`: (format,
    `ExpertShape.plain`) of each kind; `left_out`: the share of an expert's channels that formats with heads
    leave out. Rates begin when "ready" was answered by a line."""
    if config["what"] == "gpu":
        _report(_torch)
        _report(_link)
        return
    pin(config["cores"])
    shared = np.frombuffer(mmap.mmap(config["fd"], config["size"], mmap.MAP_SHARED), np.uint8)
    part = shared[config["lo"] : config["hi"]]
    part.view(np.uint64).max()  # maps every page
    size = min(BLOCK, len(part)) // 64 * 64
    works = [Work(best().read, size, size)]
    for name, shape in config["experts"]:
        works.append(_expert(name, shape_of(shape), len(part), 1 - config["left_out"]))
    for work in works:
        work.compute(part[: work.size])  # allocates scratch, and imports what it needs
    _write("ready")
    if sys.stdin.readline():
        _write(_rates(works, part, config["seconds"]))


def _write(value: Any) -> None:
    print(json.dumps(value), flush=True)


# --- rates --------------------------------------------------------------------------------------------------


def _expert(name: str, shape: ExpertShape, most: int, share: float) -> Work:
    """One expert's Work; fewer of its tiles where it exceeds `most` bytes. `share`: of the channels of a
    format with heads that are kept. The buffer's weights are alike, so that these are the first ones of each
    tile."""
    whole = StoreLayout(replace(shape, layers=1, experts=1), format_named(name))
    tiles = max(1, min(shape.tiles, most * shape.tiles // whole.total_bytes))
    layout = StoreLayout(replace(whole.shape, intermediate=tiles * shape.tile), whole.format)
    x = np.full((1, shape.hidden), 0.5, np.float32)
    y, mask, read = np.empty_like(x), DENSE, layout.total_bytes
    if isinstance(layout.format, FloeFormat):
        mask = Mask(share=share)
        kept = mask.number(shape.tile) if share < 1 else shape.tile
        read = tiles * (layout.head_bytes + kept * layout.format.channel_bytes(shape.hidden, shape.math))
    order = describe(0, [(0, 0, tiles)], [0, 1], [0], [1.0], 1, mask)
    return Work(lambda data: WorkKernel(best(), layout, data).compute(order, x, y), layout.total_bytes, read)


def _rates(works: list[Work], buffer: Bytes, seconds: float) -> list[list[float]]:
    """Returns for each kind the bytes a second of each sample."""
    rates: list[list[float]] = [[] for _ in works]
    offset, rounds = 0, 0
    began = time.perf_counter()
    while rounds < FEWEST or time.perf_counter() - began < seconds * len(works):
        rounds += 1
        for (compute, size, read), of_kind in zip(works, rates, strict=True):
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
    except RuntimeError as e:
        _write({"failure": " ".join(str(e).split())[:200]})


def _torch() -> dict[str, Any]:
    import torch

    devices = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            devices.append({"name": torch.cuda.get_device_name(i), "bytes": total, "free": free})
    return {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}


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
