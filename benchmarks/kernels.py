"""`python -m benchmarks.kernels [--json] [--quick]`: expert kernels compared with memory bandwidth.

Every case computes one whole expert in shared memory mapped as in a worker, another expert each time so that
no cache holds it. `ratio` is a case's bytes per second over those of plain reads with as many cores, timed
in turns with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from shm.formats import Bytes
from shm.kernel_files import contents, parse_cpuinfo
from shm.layout import FORMATS, ExpertShape, StoreLayout, TileFormat, suitable_tile
from shm.segment import Segment, unlink
from workers.kernels.c_types import Geometry
from workers.kernels.native import VARIANTS, Library, Team, best, load
from workers.kernels.reference import ReferenceKernel
from workers.lifetime import environment

SAMPLE = 1 << 25  # bytes of one reading: it takes much longer than a call
MEMORY = 1 << 30  # bytes of weights: far more than any cache
SHAPES = {  # I, H
    "Mixtral-8x7B": (14336, 4096),
    "Qwen3-30B-A3B": (768, 2048),
    "DeepSeek-V2-Lite": (1408, 2048),
    "gpt-oss": (2880, 2880),
}
ROWS = (1, 4, 16, 64, 512)
FORMATS_TIMED = ("bf16", "int8", "int4", "int4-g128", "q4_0", "q8_0", "mxfp4", "nvfp4", "int4-f16-g128")
SELDOM = FORMATS_TIMED[3:]  # with --quick one row of them, by the best variant
TORCH = "torch"  # the reference kernel as a variant
SECONDS = {False: 0.6, True: 0.15}  # for one case, by --quick
MIN_CALLS = {False: 7, True: 3}  # of one case, by --quick
SLOW_ROWS = 16  # most rows at which variants other than the best are timed


class Bench:
    """The memory of the weights, the timings of plain reads, and the cases timed so far."""

    def __init__(self, memory: Bytes, quick: bool) -> None:
        self.quick = quick
        self.cases: list[dict[str, Any]] = []
        self._memory = memory
        self._at = 0
        self._teams: dict[tuple[str, int], Team | None] = {}
        self._readings: dict[int, list[float]] = {}
        self._rng = np.random.default_rng(0)

    def time(self, format: TileFormat, variant: str, shape: tuple[int, int], rows: int, cores: int) -> None:
        """Time one case and record it: experts and plain reads in turns."""
        channels, hidden = shape
        layout = _layout(format, shape)
        compute = self._kernel_call(layout, variant, rows, cores)
        expert = layout.tile_bytes * layout.shape.tiles
        number = max(1, SAMPLE // expert) if rows == 1 else 1  # experts of one sample
        read = self._reader(cores)
        seconds: list[float] = []
        reads: list[float] = []
        until = time.perf_counter() + SECONDS[self.quick]
        compute(self._next(expert))  # the first call allocates scratch
        while len(seconds) < MIN_CALLS[self.quick] or time.perf_counter() < until:
            parts = [self._next(expert) for _ in range(number)]
            started = time.perf_counter()
            for data in parts:
                compute(data)
            seconds.append((time.perf_counter() - started) / number)
            part, started = self._next(SAMPLE), time.perf_counter()
            read(part)
            reads.append(SAMPLE / (time.perf_counter() - started))
        self._readings.setdefault(cores, []).extend(reads)
        took, useful = median(seconds), expert * channels / layout.shape.padded
        case = {"format": format.name, "variant": variant, "shape": shape, "rows": rows, "cores": cores}
        speed = {"gb_s": useful / took / 1e9, "gflop_s": 6 * channels * hidden * rows / took / 1e9}
        self.cases.append(case | {"us": took * 1e6, "ratio": useful / took / median(reads)} | speed)

    def _reader(self, cores: int) -> Callable[[Bytes], object]:
        return partial(best().read, team=self._team(best(), cores))

    @property
    def read(self) -> dict[int, float]:
        """Returns for each number of cores the median of all readings, bytes a second."""
        return {cores: median(rates) for cores, rates in self._readings.items()}

    def fill(self, format: TileFormat, shape: tuple[int, int]) -> None:
        """Fill the memory with experts of this format and shape."""
        layout = _layout(format, shape)
        tiles, hidden = layout.shape.tiles, layout.shape.hidden
        size = layout.tile_bytes * tiles
        expert = self._memory[:size]
        for part in np.split(expert, tiles):
            format.fill_random(self._rng, hidden, layout.shape.tile, hidden**-0.5, part)
        for lo in range(size, len(self._memory) - size + 1, size):
            self._memory[lo : lo + size] = expert
        self._at = 0

    def close(self) -> None:
        for team in self._teams.values():
            if team is not None:
                team.close()

    def _kernel_call(
        self, layout: StoreLayout, variant: str, rows: int, cores: int
    ) -> Callable[[Bytes], object]:
        hidden = layout.shape.hidden
        x = self._rng.standard_normal((rows, hidden)).astype(np.float32)
        every = np.arange(rows, dtype=np.int32)
        library = TORCH if variant == TORCH else load(variant)
        if isinstance(library, Library):
            geometry = Geometry(layout.format, hidden, hidden, layout.shape.tile)
            kernel = library.kernel(geometry, self._team(library, cores))
            quantized = kernel.quantize(x)  # once per Work, not once per expert
            return lambda data: kernel.tiles(data, quantized, every)
        torch.set_num_threads(cores)
        reference = ReferenceKernel(layout)
        indices, inputs = torch.from_numpy(every.astype(np.int64)), reference.activations(torch.from_numpy(x))
        return lambda data: reference.compute(torch.from_numpy(data), inputs, indices)

    def _team(self, library: Library, cores: int) -> Team | None:
        key = library.variant, cores
        if key not in self._teams:
            self._teams[key] = library.team(cores)
        return self._teams[key]

    def _next(self, size: int) -> Bytes:
        """The next `size` bytes, least recently used; they start at an expert."""
        self._at = -(-self._at // size) * size
        if self._at + size > len(self._memory):
            self._at = 0
        part = self._memory[self._at : self._at + size]
        self._at += size
        return part


def _layout(format: TileFormat, shape: tuple[int, int]) -> StoreLayout:
    """One expert in the engine's default tiles."""
    channels, hidden = shape
    return StoreLayout(ExpertShape(1, 1, hidden, channels, suitable_tile(hidden, channels, format)), format)


def measure(quick: bool, show: Callable[[str], None]) -> dict[str, Any]:
    """All cases, as the JSON object that `--json` prints; a case's shape is an expert's [I, H]."""
    all_cores = len(os.sched_getaffinity(0))
    with weights_memory() as memory, torch.inference_mode():
        bench = Bench(memory, quick)
        try:
            for name, shape in SHAPES.items():
                for format in (FORMATS[format] for format in FORMATS_TIMED):
                    show(f"{name} {format.name}")
                    bench.fill(format, shape)
                    for variant, rows in _plan(format, shape, quick):
                        for cores in sorted({1, all_cores}):
                            bench.time(format, variant, shape, rows, cores)
        finally:
            bench.close()
    sizes = {"1": 1, "all": all_cores}
    return {
        "cpu": parse_cpuinfo(contents(Path("/proc/cpuinfo"))),
        "variant": best().variant,
        "read_gb_s": {name: bench.read[cores] / 1e9 for name, cores in sizes.items()},
        "results": bench.cases,
    }


def _plan(format: TileFormat, shape: tuple[int, int], quick: bool) -> Iterator[tuple[str, int]]:
    """Variants and rows to time. torch's bf16 is the baseline of all formats. --quick leaves out slow cases
    of little interest."""
    available = [name for name in VARIANTS if isinstance(load(name), Library)]
    large = shape == SHAPES["Mixtral-8x7B"]
    for variant, rows in ((v, r) for v in available for r in ROWS):
        first = variant == available[0]
        if quick and format.name in SELDOM:
            if first and rows == 1:
                yield variant, rows
        elif quick and rows == 1:
            yield variant, rows  # how the variants compare
        elif quick and not (first and rows in ((1, 4, 512) if large else (1, 4))):
            continue
        elif first or rows <= SLOW_ROWS:
            yield variant, rows
    if format.name == "bf16":
        yield from ((TORCH, rows) for rows in ROWS if not quick or (large and rows == 512))


@contextmanager
def weights_memory() -> Iterator[Bytes]:
    """Shared memory mapped like a store."""
    name = f"/tandem-bench-{os.getpid()}"
    segment = Segment.create(name, MEMORY)
    unlink(name)  # released when this process exits, for whatever reason
    try:
        yield segment.array
    finally:
        segment.close()


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="one expert, weights out of cache")
    for column in ("format", "variant", "expert", "rows", "cores", "us", "GB/s", "of reading", "GFLOP/s"):
        table.add_column(column, justify="left" if column in ("format", "variant") else "right")
    for r in results:
        n, k = r["shape"]
        table.add_row(
            r["format"], r["variant"], f"{n}x{k}", str(r["rows"]), str(r["cores"]), f"{r['us']:,.0f}",
            f"{r['gb_s']:.1f}", f"{r['ratio']:.2f}", f"{r['gflop_s']:,.0f}",
        )  # fmt: skip
    return table


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="less than a minute")
    options = parser.parse_args()
    quiet = environment(len(os.sched_getaffinity(0)))
    if os.environ.get("OMP_WAIT_POLICY") != quiet["OMP_WAIT_POLICY"]:
        # As in an engine: idle threads of torch would spin, on the cores that the kernels compute on.
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]], quiet)
    console = Console(stderr=True)
    with console.status("filling memory ...") as status:
        found = measure(options.quick, status.update)
    if options.json:
        print(json.dumps(found))
    else:
        read = found["read_gb_s"]
        out = Console()
        out.print(_table(found["results"]))
        out.print(f"{found['cpu']}; {found['variant']}")
        out.print(f"reading: {read['1']:.1f} GB/s on one core, {read['all']:.1f} on all")
        for name in VARIANTS:
            if isinstance(why := load(name), str):
                out.print(f"{name}: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
