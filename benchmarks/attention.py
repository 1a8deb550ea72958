"""`python -m benchmarks.attention [--json] [--quick] [NAME ...]`: attention over a KV cache of many tokens,
compared with memory bandwidth and with torch's scaled_dot_product_attention in bf16.

Decode is one token that attends to a cache in blocks in random order, another layer's each time so that no
cache of the processor holds it. `ratio` is the bytes of keys and values per second over those of plain reads
with as many cores, timed in turns with it; torch comes after both. Prefill is the last of some tokens, by
whose number its time grows: GFLOP/s count what causality leaves of both products. torch has its keys in one
piece, and neither sinks nor int8. One core's time is the processor's, which other programs change least.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shm.formats import Bytes
from shm.huge import private
from shm.kernel_files import contents, parse_cpuinfo
from workers.kernels.c_types import Kept
from workers.kernels.layer import KV_BLOCK, Grouped, Heads, SpanKernel, TokenAttention
from workers.kernels.native import Team, best
from workers.lifetime import environment

MEMORY = 3 << 27  # bytes of caches: far more than the processor's caches hold
SECONDS = {False: 1.5, True: 0.3}  # for one case, by --quick
MIN_CALLS, TORCH_CALLS = 7, 3  # of one case; torch takes long, and leaves other data in the caches
TOKENS = (128, 4096, 16384)
SPAN = 512  # most tokens of a prefill's last call
RUN = 128  # numbers of int8 that share a scale
BITS = {"bf16": 16, "int8": 8, "f32": 32}


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    latent: bool = False
    window: int = 0
    sinks: bool = False

    def sizes(self, bits: int, tokens: int) -> list[int]:
        """Bytes of a layer's streams; in int8 of each one's scales, too."""
        widths = [self.key_width] if self.latent else [self.key_width, self.value_width]
        each = [(width * bits // 8, 4 * -(-width // RUN)) for width in widths]
        return [tokens * self.kv_heads * n for both in each for n in (both if bits == 8 else both[:1])]


SHAPES = {
    "Qwen3-30B-A3B": Shape(32, 4, 128, 128),
    "gpt-oss": Shape(64, 8, 64, 64, sinks=True),
    "gpt-oss, window": Shape(64, 8, 64, 64, window=128, sinks=True),
    "DeepSeek-V2-Lite": Shape(16, 1, 576, 512, latent=True),
}


class Bench:
    """The memory of caches, and what computes with so many cores."""

    def __init__(self, cores: int, seconds: float) -> None:
        self.cores, self._seconds = cores, seconds
        self._clock = time.thread_time if cores == 1 else time.perf_counter
        self._team = best().team(cores)
        self._memory, self._torch_memory = private(MEMORY), private(MEMORY)
        self._rng = np.random.default_rng(0)
        self._fill(self._torch_memory, 16)
        self._filled = 0  # bits of the numbers in `_memory`
        torch.set_num_threads(cores)

    def close(self) -> None:
        if isinstance(self._team, Team):
            self._team.close()

    def decode(self, shape: Shape, bits: int, tokens: int) -> dict[str, float]:
        """One token with `tokens` in the cache, its own included."""
        layers = self._layers(shape, bits, tokens)
        q = self._numbers(shape.heads, shape.key_width)
        out = np.empty((shape.heads, shape.value_width), np.float32)
        sinks = self._numbers(shape.heads)
        facts = Heads(
            bits, shape.heads, shape.kv_heads, shape.key_width, shape.value_width, shape.latent, shape.window,
            sinks.ctypes.data if shape.sinks else None, shape.key_width**-0.5,
        )  # fmt: skip
        kernel = TokenAttention(best(), self._team, facts, Kept())
        each = sum(shape.sizes(bits, tokens))
        torch_layers = self._torch_layers(shape, tokens, shape.window)
        query = torch.from_numpy(q)[None, :, None].bfloat16()
        at = iter(range(1 << 62))

        def ours() -> None:
            streams, table = layers[next(at) % len(layers)]
            kernel(q.ctypes.data, streams.ctypes.data, table.ctypes.data, tokens, tokens - 1, out.ctypes.data)

        def read() -> None:
            start = next(at) % (MEMORY // each) * each // 64 * 64
            best().read(self._memory[start : start + each // 64 * 64], team=self._team)

        def torchs() -> None:
            keys, values = torch_layers[next(at) % len(torch_layers)]
            scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        took, reading = self._in_turns(MIN_CALLS, ours, read)
        (theirs,) = self._in_turns(TORCH_CALLS, torchs)
        useful = each * min(1, shape.window / tokens) if shape.window else each
        speed = {"gb_s": useful / took / 1e9, "ratio": useful / took / (each / reading)}
        return {"us": took * 1e6, "torch_us": theirs * 1e6, "read_gb_s": each / reading / 1e9} | speed

    def prefill(self, shape: Shape, bits: int, tokens: int) -> dict[str, float]:
        """The last `SPAN` tokens, or fewer, of `tokens`."""
        count = min(SPAN, tokens)
        layers, width = self._layers(shape, bits, tokens), shape.key_width
        given = self._numbers(count, (shape.heads + 2 * shape.kv_heads) * width)
        qkv, out = given.copy(), np.empty((count, shape.heads * width), np.float32)
        turns, sinks = np.ones((2, count, width), np.float32), self._numbers(shape.heads)
        turns[1] = 0
        facts = Grouped(
            bits=bits, heads=shape.heads, kv_heads=shape.kv_heads, width=width, rope=width, eps=1e-6,
            window=shape.window, sinks=sinks.ctypes.data if shape.sinks else None, scale=width**-0.5,
        )  # fmt: skip
        kernel = SpanKernel(best(), self._team, facts, Kept())
        cos_sin = turns[0].ctypes.data, turns[1].ctypes.data
        torch_layers, at = self._torch_layers(shape, tokens, 0), iter(range(1 << 62))
        queries = torch.from_numpy(self._numbers(1, shape.heads, count, width)).bfloat16()
        mask = torch.ones(count, tokens, dtype=torch.bool).tril(tokens - count)
        if shape.window:
            mask = mask.triu(tokens - count - shape.window + 1)

        def ours() -> None:
            streams, table = layers[next(at) % len(layers)]
            places = streams.ctypes.data, table.ctypes.data, tokens, tokens - count, count
            kernel(qkv.ctypes.data, cos_sin, *places, out.ctypes.data)

        def torchs() -> None:
            keys, values = torch_layers[next(at) % len(torch_layers)]
            scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

        (took,), (theirs,) = self._in_turns(MIN_CALLS, ours), self._in_turns(TORCH_CALLS, torchs)
        seen = np.arange(tokens - count, tokens) + 1
        pairs = int(np.minimum(seen, shape.window or tokens).sum())
        flops = 2 * shape.heads * (width + shape.value_width) * pairs
        return {"us": took * 1e6, "torch_us": theirs * 1e6, "gflop_s": flops / took / 1e9}

    def _layers(self, shape: Shape, bits: int, tokens: int) -> list[tuple[NDArray[Any], NDArray[np.int32]]]:
        """Addresses of streams and block tables, of random numbers."""
        if bits != self._filled:
            self._fill(self._memory, bits)
            self._filled = 0 if bits == 8 else bits  # of int8, scales lie elsewhere the next time
        sizes, layers, start = shape.sizes(bits, tokens), [], 0
        while start + sum(sizes) <= MEMORY:
            places = start + np.concatenate(([0], np.cumsum(sizes)[:-1]))
            for place, size in zip(places[1::2], sizes[1::2], strict=True) if bits == 8 else ():
                self._memory[place : place + size].view(np.float32)[:] = 0.01
            table = self._rng.permutation(tokens // KV_BLOCK).astype(np.int32)
            layers.append(((self._memory.ctypes.data + places).astype(np.uint64), table))
            start += sum(sizes)
        return layers

    def _fill(self, memory: Bytes, bits: int) -> None:
        numbers = self._numbers(1 << 20)
        if bits == 8:
            pattern = (40 * numbers).clip(-127, 127).astype(np.int8).view(np.uint8)
        else:
            pattern = numbers.view(np.uint8).reshape(-1, 4)[:, 4 - bits // 8 :].reshape(-1)
        for start in range(0, len(memory), len(pattern)):
            part = memory[start : start + len(pattern)]
            part[:] = pattern[: len(part)]

    def _torch_layers(self, shape: Shape, tokens: int, window: int) -> list[tuple[Tensor, Tensor]]:
        seen = min(tokens, window or tokens)
        bytes_each = sum(shape.sizes(16, seen))
        memory = torch.from_numpy(self._torch_memory).view(torch.bfloat16)
        layers = []
        for n in range(min(MEMORY // bytes_each, 64)):
            part = memory[n * bytes_each // 2 :]
            keys = part[: shape.kv_heads * seen * shape.key_width].view(1, shape.kv_heads, seen, -1)
            if shape.latent:
                layers.append((keys, keys[..., : shape.value_width]))
                continue
            rest = part[keys.numel() :]
            values = rest[: shape.kv_heads * seen * shape.value_width].view(1, shape.kv_heads, seen, -1)
            layers.append((keys, values))
        return layers

    def _numbers(self, *shape: int) -> NDArray[np.float32]:
        return self._rng.standard_normal(shape, np.float32)

    def _in_turns(self, least: int, *calls: Callable[[], None]) -> list[float]:
        """The median seconds of each call, of at least so many."""
        seconds: list[list[float]] = [[] for _ in calls]
        for call in calls:
            call()  # the first allocates scratch
        until = time.perf_counter() + self._seconds
        while len(seconds[0]) < least or time.perf_counter() < until:
            for call, of_call in zip(calls, seconds, strict=True):
                started = self._clock()
                call()
                of_call.append(self._clock() - started)
        return [median(each) for each in seconds]


def measure(quick: bool, names: list[str], show: Callable[[str], None]) -> dict[str, Any]:
    """All cases of these shapes, as the JSON object that `--json` prints."""
    all_cores = len(os.sched_getaffinity(0))
    cases: list[dict[str, Any]] = []
    with torch.inference_mode():
        for cores in sorted({all_cores} if quick else {1, all_cores}):
            bench = Bench(cores, SECONDS[quick])
            for kind, bits in list(BITS.items())[: 1 if quick else None]:
                for name in names:
                    shape = SHAPES[name]
                    for tokens in TOKENS[: 2 if quick else None]:
                        case = {"shape": name, "kind": kind, "tokens": tokens, "cores": cores}
                        show(f"{name} {kind} {tokens} on {cores}")
                        cases.append(case | {"what": "decode"} | bench.decode(shape, bits, tokens))
                        if not shape.latent:
                            cases.append(case | {"what": "prefill"} | bench.prefill(shape, bits, tokens))
            bench.close()
    cpu = parse_cpuinfo(contents(Path("/proc/cpuinfo")))
    return {"cpu": cpu, "variant": best().variant, "results": cases}


def _tables(results: list[dict[str, Any]]) -> list[Table]:
    tables = []
    speeds = {"decode": ("GB/s", "of reading"), "prefill": ("GFLOP/s",)}
    for what, columns in speeds.items():
        table = Table(title=what)
        for column in ("shape", "cache", "tokens", "cores", "us", *columns, "times torch"):
            table.add_column(column, justify="left" if column in ("shape", "cache") else "right")
        for r in results:
            if r["what"] != what:
                continue
            speed = (
                [f"{r['gflop_s']:,.0f}"] if what == "prefill" else [f"{r['gb_s']:.1f}", f"{r['ratio']:.2f}"]
            )
            size = str(r["tokens"]), str(r["cores"]), f"{r['us']:,.0f}"
            table.add_row(r["shape"], r["kind"], *size, *speed, f"{r['torch_us'] / r['us']:.2f}")
        tables.append(table)
    return tables


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help=f"shapes: {', '.join(SHAPES)}; all by default"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="less than a minute")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SHAPES):
        parser.error(f"no shape {', '.join(sorted(unknown))}: {', '.join(SHAPES)}")
    quiet = environment(len(os.sched_getaffinity(0)))
    if os.environ.get("OMP_WAIT_POLICY") != quiet["OMP_WAIT_POLICY"]:
        # As in an engine: idle threads of torch would spin, on the cores that the kernels compute on.
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.attention", *sys.argv[1:]], quiet)
    console = Console(stderr=True)
    with console.status("filling memory ...") as status:
        found = measure(options.quick, options.names or list(SHAPES), status.update)
    if options.json:
        print(json.dumps(found))
        return 0
    out = Console()
    for table in _tables(found["results"]):
        out.print(table)
    out.print(f"{found['cpu']}; {found['variant']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
