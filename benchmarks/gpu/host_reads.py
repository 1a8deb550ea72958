"""Kernels that read the host's page-locked memory: tiles of a layer, and the workers' partial sums.

python -m benchmarks.gpu.primitives zero-copy partials
"""

from __future__ import annotations

import mmap

import numpy as np
import torch

from benchmarks.gpu.kernels import SHAPES, Layers
from benchmarks.gpu.timing import Row, median, pages
from pipeline.device import open_device
from workers.cuda import page_lock, page_unlock


def zero_copy() -> list[Row]:
    """Microseconds of a layer's missing tiles at one row: read by the kernels from page-locked host memory,
    and copied to the slab first."""
    device, rows = open_device("cuda"), []
    with torch.inference_mode():
        for shape in SHAPES:
            layers = Layers(device, shape, "int4", 0)
            memory = pages(-(-layers.layer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            memory[: layers.layer_bytes].reshape(-1, len(layers.data))[:] = layers.data
            locked, reason = page_lock(memory)
            there = torch.from_numpy(memory[: layers.layer_bytes]).view(-1, len(layers.data))
            kernel, (x, arguments) = device.expert_kernel(layers.layout), layers.share(1)
            tiles = layers.next_tiles()

            def computed(wanted, kernel=kernel, x=x, arguments=arguments) -> None:  # type: ignore[no-untyped-def]
                layer = kernel.begin(x, *arguments)
                layer.add(wanted)
                layer.result()
                device.wait(device.fence())

            def copied(tiles=tiles, there=there) -> None:  # type: ignore[no-untyped-def]
                for (_, _, slot), tile in zip(tiles, there, strict=True):
                    slot.copy_(tile, non_blocking=True)
                computed(tiles)

            read = [(item, tile, data) for (item, tile, _), data in zip(tiles, there, strict=True)]
            row: Row = {"shape": shape, "bytes": layers.layer_bytes, "reason": reason}
            row["resident us"] = median(lambda: computed(tiles)) * 1e6  # noqa: B023
            row["zero copy us"] = median(lambda: computed(read)) * 1e6  # noqa: B023
            row["copied us"] = median(copied) * 1e6
            rows.append(row)
            page_unlock(memory, locked)
            layers.slab.close()
    device.close()
    return rows


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
