"""Decode of a whole model whose experts leave channels out, beside dense experts of our own:

    python -m benchmarks.sparse_decode [--model shape:mixtral-8x7b/4] [--workers 0] [--rounds N] [--json]

Two engines stay loaded, one with the dense format and one with the floe format, backbones in int4, and decode
one sequence of random tokens in turns: dense, then the floe one under each sparsity. Without a calibration
the largest |u| of each tile are kept, so that random weights leave out the wished share. `x` is the median
over the rounds of the speed over the dense one's of the same round, `experts_x` the same of the seconds a
token in which the host computed experts; `ms`, `experts_ms`: milliseconds a token of the least disturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.llama_engines import CONTEXT, Tandem, Task, tandem
from pipeline.models.registry import model_spec
from pipeline.models.shapes import shape_config
from shm.kernel_files import contents, parse_cpuinfo
from shm.layout import FORMATS, FloeFormat

PROMPT = 16  # tokens before the decoded ones
DENSE = "dense"


class Case:
    """An engine under a policy, and its runs."""

    def __init__(self, name: str, engine: Tandem, policy: str, options: dict[str, str]) -> None:
        self.name, self._engine = name, engine
        self._policy = policy, options
        self.tok_s: list[float] = []
        self.experts_s: list[float] = []  # a token
        self.left: list[float] = []  # share of the channels that was not read

    async def run(self, task: Task, random: np.random.Generator, counts: bool) -> None:
        client = self._engine.client
        await client.set_policy(*self._policy, counted=False)
        before = (await client.stats())["engine"]["decode"]
        prompts = task.ids(random, task.prompt, 1000)
        speed = (await self._engine.run(task, random, prompts))["tok_s"]
        after = (await client.stats())["engine"]["decode"]
        if counts:
            steps = after["steps"] - before["steps"]
            masked = after["masked_channels"] - before["masked_channels"]
            self.tok_s.append(speed)
            self.experts_s.append((after["host_busy_s"] - before["host_busy_s"]) / steps)
            kept = after["kept_channels"] - before["kept_channels"]
            self.left.append(1 - kept / masked if masked else 0.0)

    def row(self, dense: Case) -> dict[str, Any]:
        pairs = zip(self.tok_s, dense.tok_s, strict=True)
        experts = zip(dense.experts_s, self.experts_s, strict=True)
        return {
            "case": self.name,
            "left_out": median(self.left),
            "tok_s": median(self.tok_s),
            "x": median(own / other for own, other in pairs),
            "experts_x": median(other / own for other, own in experts),
            "ms": 1e3 / max(self.tok_s),
            "experts_ms": 1e3 * min(self.experts_s),
            "best_x": max(self.tok_s) / max(dense.tok_s),
            "best_experts_x": min(dense.experts_s) / min(self.experts_s),
            "runs": self.tok_s,
        }


async def measure(given: argparse.Namespace, sparsities: list[str]) -> list[dict[str, Any]]:
    layers = model_spec(shape_config(given.model)[1]).layers
    task = Task("decode", 1, PROMPT, given.tokens)
    random = np.random.default_rng(0)
    workers = [] if given.workers is None else ["--workers", str(given.workers)]
    async with AsyncExitStack() as stack:
        # engines are named by the number of their options
        options = {given.dense: workers, given.format: [*workers, "--seed", "0"]}
        dense, floe = [
            await stack.enter_async_context(tandem(name, given.model, layers, ["--format", name, *more]))
            for name, more in options.items()
        ]
        cases = [Case(DENSE, dense, "all-host", {})]
        cases += [Case(sparsity, floe, "floe-host", {"sparsity": sparsity}) for sparsity in sparsities]
        for turn in range(given.rounds + 1):
            for case in cases:
                await case.run(task, random, counts=turn > 0)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [case.row(cases[0]) for case in cases]


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="shape:mixtral-8x7b/4")
    parser.add_argument("--dense", default="int4", help="format")
    parser.add_argument("--format", default="floe-int4")
    parser.add_argument("--sparsities", default="0,0.5,0.8,0.9")
    parser.add_argument("--workers", type=int, help="of both engines (default: one for each core)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--tokens", type=int, default=32, help=f"of an answer, at most {CONTEXT - PROMPT - 1}"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not isinstance(FORMATS.get(given.format), FloeFormat) or given.dense not in FORMATS:
        parser.error(f"--format is a floe format and --dense a format, not {given.format}, {given.dense}")
    if given.rounds < 1 or not 1 <= given.tokens < CONTEXT - PROMPT:
        parser.error("--rounds and --tokens are at least 1")
    rows = asyncio.run(measure(given, given.sparsities.split(",")))
    cpu = parse_cpuinfo(contents(Path("/proc/cpuinfo")))[0]
    if given.json:
        print(json.dumps({"cpu": cpu, "model": given.model, "format": given.format, "cases": rows}))
        return 0
    print(f"{given.model}, {given.format} beside {given.dense}, {cpu}")
    line = (
        "{case:>6}: {left_out:4.0%} left out, {tok_s:5.1f} tok/s, {x:.2f} x, experts {experts_x:.2f} x;"
        " fastest {ms:5.1f} ms ({best_x:.2f} x), experts {experts_ms:5.1f} ms ({best_experts_x:.2f} x)"
    )
    for row in rows:
        print(line.format(**row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
