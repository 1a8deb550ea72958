"""Kernels that read the host's page-locked memory: the workers' partial sums.

python -m benchmarks.gpu.primitives partials
"""

from __future__ import annotations

import mmap

import numpy as np

from benchmarks.gpu.timing import Row, median, pages
from pipeline.device import open_device


def partials(shards: int = 15, hidden: int = 4096) -> list[Row]:
    """Microseconds from the workers' partial sums of one row to their sum on the device: read there by a
    kernel, and added on the host and copied."""
    device = open_device("cuda")
    memory = [pages(-(-4 * hidden // mmap.PAGESIZE) * mmap.PAGESIZE) for _ in range(shards)]
    parts = [each[: 4 * hidden].view(np.float32)[None] for each in memory]
    row: Row = {"shards": shards, "hidden": hidden}

    def added(name: str) -> None:
        def once() -> None:
            device.add_parts(parts, (1, hidden))
            device.wait(device.fence())

        row[name] = median(once, 200) * 1e6

    added("added on the host us")
    row["reason"] = next(filter(None, map(device.share_memory, memory)), "")
    added("read by the device us")
    for each in memory:
        device.unshare_memory(each)
    device.close()
    return [row]
