"""The CUDA expert kernels on this GPU: their pace in bytes of weights a second, beside that of device memory.

    python -m benchmarks.gpu.kernels [--quick] [--out FILE.json]

A layer's experts with 1 to 512 rows each, from tiles that no cache holds, by our kernels and by torch, after
a check that their bits are the host's. Times are those of CUDA events around several layers that were queued
while the GPU was busy, the median of several; "host" is what queueing a layer takes. The pace of memory is
that of large copies or reads by torch, whichever is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import FloatArray, IntArray
from pipeline.device import Device, open_device
from pipeline.device.base import DeviceKernel
from pipeline.errors import UsageError
from shm.layout import ExpertShape, StoreLayout, format_named
from workers.kernels.c_types import Geometry
from workers.kernels.native import best
from workers.kernels.tile_sums import TorchKernel

Arrays = tuple[IntArray, IntArray, IntArray, FloatArray]

SHAPES = {"mixtral-8x7b": (4096, 14336, 1792, 2), "qwen3-30b-a3b": (2048, 768, 768, 8)}  # H, I, tile, experts
FORMATS = ("int4", "int4-g128", "int8", "bf16")
ROWS = (1, 2, 4, 8, 32, 128, 512)
FRESH_BYTES = 1 << 30  # of tiles: more than the caches of any GPU
MEMORY_BYTES = 1 << 30  # of the arrays by which the pace of memory is measured
REPEATS, CALLS = 5, 8
HEAD_START = 16  # copies during which calls are queued


@dataclass(frozen=True)
class Pace:
    """One measurement; `share` of the pace of memory, of weights read once."""

    shape: str
    format: str
    rows: int
    kernels: str
    microseconds: float  # of the GPU, a layer
    host_microseconds: float
    gigabytes: float  # a second
    share: float
    tflops: float


class Layers:
    """Enough layers of a shape's experts, each expert in tiles in slots of one slab."""

    def __init__(self, device: Device, name: str, format: str, size: int) -> None:
        hidden, intermediate, tile, self.experts = SHAPES[name]
        self.device = device
        self.layout = StoreLayout(
            ExpertShape(1, self.experts, hidden, intermediate, tile), format_named(format)
        )
        self.tiles, self.hidden = self.layout.shape.tiles, hidden
        self.layer_bytes = self.experts * self.tiles * self.layout.tile_bytes
        self.number = max(1, size // self.layer_bytes)
        random = np.random.default_rng(1)
        data = np.empty(self.layout.tile_bytes, np.uint8)
        self.layout.format.fill_random(random, hidden, tile, 0.02, data)
        self.data = data
        self.slab = device.open_slab(
            "/tandem-benchmark", self.number * self.experts * self.tiles, self.layout.tile_bytes
        )
        there = torch.from_numpy(data).to(device.torch_device)
        for slot in range(self.slab.slots):
            self.slab.slot(slot).copy_(there)
        self._next = 0

    def share(self, rows: int) -> tuple[Tensor, Arrays]:
        """x, and the arguments of `begin`: every expert has all rows."""
        x = torch.randn(rows, self.hidden, device=self.device.torch_device)
        cuts = np.full(self.experts, self.tiles, np.int32)
        offsets = np.arange(self.experts + 1, dtype=np.int32) * rows
        numbers = np.tile(np.arange(rows, dtype=np.int32), self.experts)
        return x, (cuts, offsets, numbers, np.full(len(numbers), 0.5, np.float32))

    def next_tiles(self) -> list[tuple[int, int, Tensor]]:
        """Returns the next layer's tiles, in slots of no order."""
        first, number = self._next * self.experts * self.tiles, self.experts * self.tiles
        self._next = (self._next + 1) % self.number
        slots = first + np.random.default_rng(first).permutation(number)
        wanted = [(expert, tile) for expert in range(self.experts) for tile in range(self.tiles)]
        return [(*which, self.slab.slot(int(slot))) for which, slot in zip(wanted, slots, strict=True)]


class Clock:
    """Times calls by the device's clock, without the host's time: the calls are queued while the device still
    copies memory."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._one = torch.zeros(MEMORY_BYTES // 4, device=device.torch_device)
        self._two = torch.empty_like(self._one)

    def seconds(self, call: Callable[[], object]) -> tuple[float, float]:
        """The median of one call, of the device and of the host that queues it."""
        device = self.device
        call()
        found, queued = [], []
        for _ in range(REPEATS):
            for _ in range(HEAD_START):
                self._two.copy_(self._one)
            began, started = device.time_mark(), time.perf_counter()
            for _ in range(CALLS):
                call()
            queued.append((time.perf_counter() - started) / CALLS)
            ended = device.time_mark()
            device.wait(device.fence())
            found.append(device.seconds_between(began, ended) / CALLS)
        return statistics.median(found), statistics.median(queued)

    def memory_pace(self) -> float:
        """Bytes a second that device memory gives at best."""
        copied = 2 * self._one.nbytes / self.seconds(lambda: self._two.copy_(self._one))[0]
        read = self._one.nbytes / self.seconds(self._one.sum)[0]
        return max(copied, read)


def equals_the_host(device: Device, layers: Layers, rows: int) -> bool | None:
    """Returns whether one expert's output has the host's bits; None where no C library was compiled."""
    library, shape = best(), layers.layout.shape
    x = torch.randn(rows, layers.hidden)
    every, weights = np.arange(rows, dtype=np.int32), np.ones(rows, np.float32)
    offsets, cuts = np.array([0, rows], np.int32), np.ones(1, np.int32)
    there = x.to(device.torch_device)
    share = device.expert_kernel(layers.layout).begin(there, cuts, offsets, every, weights)
    share.add([(0, 0, layers.slab.slot(0))])
    kernel = library.kernel(Geometry(layers.layout.format, shape.hidden, shape.hidden, shape.tile))
    expected = kernel.tiles(layers.data, kernel.quantize(x.numpy()), every)
    return bool(np.array_equal(device.total([share.result()], (), x.shape).cpu().numpy(), expected))


def _once(device: Device, kernel: DeviceKernel, layers: Layers, x: Tensor, arguments: Arrays) -> None:
    """Compute one layer."""
    share = kernel.begin(x, *arguments)
    share.add(layers.next_tiles())
    device.total([share.result()], (), x.shape)


def measure(
    device: Device,
    shapes: Sequence[str],
    formats: Sequence[str],
    rows: Sequence[int],
    size: int,
) -> dict[str, object]:
    clock = Clock(device)
    pace = clock.memory_pace()
    found: list[Pace] = []
    equal: dict[str, bool | None] = {}
    for shape in shapes:
        for format in formats:
            layers = Layers(device, shape, format, size)
            if format != "bf16":
                equal[f"{shape} {format}"] = all(
                    equals_the_host(device, layers, number) in (True, None) for number in rows if number <= 64
                )
            in_torch = TorchKernel(layers.layout, device.from_host)
            for kernels, kernel in (("own", device.expert_kernel(layers.layout)), ("torch", in_torch)):
                for number in rows:
                    if kernels == "torch" and number not in (1, 512):
                        continue
                    x, arguments = layers.share(number)

                    seconds, host = clock.seconds(partial(_once, device, kernel, layers, x, arguments))
                    read = layers.layer_bytes / seconds
                    weights = layers.experts * 3 * layers.hidden * layers.layout.shape.intermediate
                    found.append(
                        Pace(
                            shape, format, number, kernels, seconds * 1e6, host * 1e6,
                            read / 1e9, read / pace, 2 * weights * number / seconds / 1e12,
                        )
                    )  # fmt: skip
            layers.slab.close()
    return {
        "device": device.describe(),
        "memory_gigabytes": pace / 1e9,
        "equals_the_host": equal,
        "paces": [asdict(one) for one in found],
    }


def show(found: dict[str, object]) -> None:
    print(f"{found['device']}; device memory {found['memory_gigabytes']:.0f} GB/s at best")
    for name, same in found["equals_the_host"].items():  # type: ignore[attr-defined]
        print(f"{name}: bits {'as the host' if same else 'DIFFER from the host'}")
    columns = "shape format rows by us host GB/s share TFLOP/s".split()
    print(f"{columns[0]:14} {columns[1]:10}" + "".join(f"{name:>9}" for name in columns[2:]))
    for one in found["paces"]:  # type: ignore[attr-defined]
        shape, format, rows, by, *numbers = one.values()
        print(f"{shape:14} {format:10}{rows:9}{by:>9}" + "".join(f"{number:9.2f}" for number in numbers))


def main() -> int:
    parser = argparse.ArgumentParser(description="The CUDA expert kernels on this GPU.")
    parser.add_argument("--quick", action="store_true", help="int4, 1 and 32 rows")
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON, beside the table")
    arguments = parser.parse_args()
    try:
        device = open_device("cuda")
    except UsageError as e:
        print(e, file=sys.stderr)
        return 2
    formats, rows = (("int4",), (1, 32)) if arguments.quick else (FORMATS, ROWS)
    with torch.inference_mode():
        found = measure(device, list(SHAPES), formats, rows, FRESH_BYTES)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
