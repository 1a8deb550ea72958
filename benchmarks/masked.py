"""Experts of which channels are left out (the floe formats), beside dense int4 and memory bandwidth:

    python -m benchmarks.masked [--json] [--shape NAME] [--formats A,B] [--rows 1,4] [--seconds S]

Every case computes the Work of one whole expert as a worker does, another expert each time so that no cache
holds it. The largest |u| of each tile are kept, so that random weights leave out the wished share. `gb_s` and
`ratio` count the bytes that are read: up, and gate and down of the channels that some row keeps. `ratio` is
over plain reads with as many cores; `faster` is the time of the same rows through a dense int4 expert of this
shape over the case's. Both are timed in turns with the case. All kernels prefetch as is measured to be the
fastest here. Threads wait for the next computation awake, as with `--workers 0`: plain reads, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.kernels import SHAPES, weights_memory
from pipeline.serving.engine_parts import LINGER_NS
from shm.descriptor import describe, parts_of
from shm.formats import Bytes
from shm.kernel_files import contents, parse_cpuinfo
from shm.layout import FORMATS, ExpertShape, FloeFormat, StoreLayout, suitable_tile
from shm.mask import Mask, Tally
from workers.interpreter import environment
from workers.kernels import reading
from workers.kernels.choice import DEFAULT, Choice
from workers.kernels.geometry import Geometry
from workers.kernels.native import Library, Team, chosen
from workers.kernels.tuning import tune

DENSE = "int4"
SPARSITIES = (0.0, 0.5, 0.7, 0.8, 0.9)
FORMATS_TIMED = ("floe-int4", "floe-int8", "floe", "floe-u4-int4")
SECONDS = 1.0  # for one case
MIN_CALLS = 5  # of one case


class Experts:
    """As many experts of one format and shape as the memory holds, each equal to the first, in the engine's
    tiles; computed by one kernel."""

    def __init__(self, name: str, shape: tuple[int, int], memory: Bytes, library: Library) -> None:
        channels, hidden = shape
        format = FORMATS[name]
        tile = suitable_tile(hidden, channels, format)
        one = StoreLayout(ExpertShape(1, 1, hidden, channels, tile), format)
        number = len(memory) // one.total_bytes
        self.layout = layout = StoreLayout(ExpertShape(1, number, hidden, channels, tile), format)
        self.data = memory[: layout.total_bytes]
        self._library = library
        self._next = 0
        random = np.random.default_rng(0)
        for tile_number in range(layout.shape.tiles):
            at = layout.offset(0, 0, tile_number), layout.head_offset(0, 0, tile_number)
            parts = self.data[at[0] :][: layout.tile_bytes], self.data[at[1] :][: layout.head_bytes]
            format.fill_random(random, hidden, tile, hidden**-0.5, *parts)
        for size, offset in (
            (layout.expert_stride, layout.offset(0, 0)),
            (layout.head_stride, layout.head_offset(0, 0)),
        ):
            every = self.data[offset : offset + number * size].reshape(number, -1)
            every[1:] = every[:1]

    def calls(self, rows: int, mask: Mask, team: Team | None) -> Iterator[Tally]:
        """Each `next` computes another expert's Work, and gives what its mask left out."""
        shape = self.layout.shape
        kernel = self._library.kernel(
            Geometry(self.layout.format, shape.hidden, shape.hidden, shape.tile), team
        ).works(self.data, self.layout)
        x = np.random.default_rng(1).standard_normal((rows, shape.hidden)).astype(np.float32)
        every, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.float32)
        items, offsets = np.array([[0, 0, shape.tiles]], np.int32), np.array([0, rows], np.int32)
        work, y = describe(0, items, offsets, every, ones, rows, mask), np.empty_like(x)
        while True:
            self._next = (self._next + 1) % shape.experts
            parts_of(work).items[0, 0] = self._next
            yield kernel.compute(work, x, y)

    def bytes_read(self, tally: Tally) -> int:
        """Of one Work."""
        shape, format = self.layout.shape, self.layout.format
        if not isinstance(format, FloeFormat):
            return self.layout.expert_bytes
        return self.layout.head_bytes * shape.tiles + tally.kept * format.channel_bytes(shape.hidden)


def measure(shapes: list[str], formats: list[str], rows: list[int], seconds: float) -> dict[str, Any]:
    """All cases, as the JSON object that `--json` prints; a case's shape is an expert's [I, H]."""
    tuned = tune()
    choice = DEFAULT if tuned is None else tuned.choice
    library = chosen(choice)
    assert library is not None
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        memories = [stack.enter_context(weights_memory()) for _ in range(2)]
        teams = {cores: library.team(cores) for cores in sorted({1, len(os.sched_getaffinity(0))})}
        for team in teams.values():
            if team is not None:
                stack.callback(team.close)
                team.linger(LINGER_NS)
        for shape in shapes:
            dense = Experts(DENSE, SHAPES[shape], memories[0], library)
            for name in formats:
                floe = Experts(name, SHAPES[shape], memories[1], library)
                for cores, team in teams.items():
                    read = reading.fastest_way(memories[0], library, team)
                    for count in rows:
                        for sparsity in SPARSITIES:
                            found = _case(dense, floe, count, Mask(share=1 - sparsity), team, read, seconds)
                            case = {"shape": shape, "format": name, "rows": count, "cores": cores}
                            results.append(case | {"sparsity": sparsity} | found)
                            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    cpu = parse_cpuinfo(contents(Path("/proc/cpuinfo")))[0]
    return {"cpu": cpu, "choice": choice.to_map(), "results": results}


def _case(
    dense: Experts,
    floe: Experts,
    rows: int,
    mask: Mask,
    team: Team | None,
    read: reading.Read,
    seconds: float,
) -> dict[str, Any]:
    masked, plain = floe.calls(rows, mask, team), dense.calls(rows, Mask(), team)
    parts = reading.walk(dense.data)
    tally = next(masked)  # the first call allocates scratch
    next(plain)
    took: dict[str, list[float]] = {"masked": [], "dense": [], "read": []}
    until = time.perf_counter() + seconds
    while len(took["masked"]) < MIN_CALLS or time.perf_counter() < until:
        began = time.perf_counter()
        next(masked)
        middle = time.perf_counter()
        next(plain)
        took["dense"].append(time.perf_counter() - middle)
        took["masked"].append(middle - began)
        took["read"].append(1 / reading.timed(read, next(parts)))
    masked_s, dense_s, byte_s = (median(took[name]) for name in ("masked", "dense", "read"))
    size = floe.bytes_read(tally)
    return {
        "kept": tally.kept / tally.channels,
        "mb": size / 1e6,
        "us": masked_s * 1e6,
        "gb_s": size / masked_s / 1e9,
        "ratio": size * byte_s / masked_s,
        "dense_us": dense_s * 1e6,
        "faster": dense_s / masked_s,
        "fewer_bytes": dense.bytes_read(Tally()) / size,
    }


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(title=f"one expert, weights out of cache, beside dense {DENSE}")
    names = ("expert", "format", "rows", "cores", "left out", "kept by any", "us", "GB/s", "of reading")
    for column in (*names, "fewer bytes", "faster"):
        table.add_column(column, justify="left" if column in ("expert", "format") else "right")
    for r in results:
        table.add_row(
            r["shape"], r["format"], str(r["rows"]), str(r["cores"]), f"{r['sparsity']:.0%}",
            f"{r['kept']:.0%}", f"{r['us']:,.0f}", f"{r['gb_s']:.1f}", f"{r['ratio']:.2f}",
            f"{r['fewer_bytes']:.2f} x", f"{r['faster']:.2f} x",
        )  # fmt: skip
    return table


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masked", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--shape", choices=SHAPES, default="Mixtral-8x7B")
    parser.add_argument("--formats", default=",".join(FORMATS_TIMED))
    parser.add_argument("--rows", default="1,4", help="of one expert")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each case")
    options = parser.parse_args()
    formats, rows = options.formats.split(","), options.rows.split(",")
    unknown = [name for name in formats if not isinstance(FORMATS.get(name), FloeFormat)]
    if unknown or not all(count.isdigit() and int(count) for count in rows):
        print(f"no floe format: {unknown[0]}" if unknown else f"rows: {options.rows}", file=sys.stderr)
        return 2
    quiet = environment(len(os.sched_getaffinity(0)))
    if os.environ.get("OMP_WAIT_POLICY") != quiet["OMP_WAIT_POLICY"]:
        # As in an engine: idle threads of torch would spin, on the cores that the kernels compute on.
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.masked", *sys.argv[1:]], quiet)
    if chosen(DEFAULT) is None:
        print("no C kernel was compiled, and torch is not timed here", file=sys.stderr)
        return 1
    found = measure([options.shape], formats, [int(count) for count in rows], options.seconds)
    if options.json:
        print(json.dumps(found))
        return 0
    out = Console()
    out.print(_table(found["results"]))
    choice = Choice.from_map(found["choice"])
    out.print(f"{found['cpu']}; {choice.variant}, {choice.prefetch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
