"""The time hidden by DAOP's early dispatch: the same decisions with the host's Work sent a layer early, and
at its layer.

    python benchmarks/overlap.py --slowdown 8
    python benchmarks/overlap.py --model DIR --cache 0.25 --placement popular

One engine, the two in turns on the same text, token by token, so that both compute the same steps. "waited"
is the part of the host's computing time in a decode step during which the coordinator waits; the rest is
"hidden" behind attention and the device's own work. If the overlap is real, the late step is longer by the
additional hidden time of the early one: both differences of medians are printed.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.processes.supervisor import Supervisor
from pipeline.config import EngineConfig
from pipeline.counters import difference
from protocol.client import Client

PROMPT = 64  # tokens that are prefilled
ROWS = ("step", "host busy", "waited", "hidden")


async def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """For early=1 and early=0 the milliseconds a decode step of each round."""
    config = EngineConfig(
        model=arguments.model,
        name="overlap",
        policy="all-host",
        workers=arguments.workers,
        expert_cache=arguments.cache,
        format=arguments.format,
        host_slowdown=arguments.slowdown,
        link_gbps=arguments.link,
    )
    tokens = tuple(3 + 7 * i % 997 for i in range(PROMPT + arguments.tokens))
    runs: dict[str, list[dict[str, float]]] = {"1": [], "0": []}
    async with (
        Supervisor(config, log_level="WARNING") as engine,
        Client.connect(engine.endpoint, name="overlap") as client,
    ):
        for turn in range(arguments.rounds + 1):
            for early in ("1", "0") if turn % 2 else ("0", "1"):
                options = {"early": early, "first_layer": "1", "placement": arguments.placement}
                await client.set_policy("daop", options)
                before = await client.stats()
                async for _ in client.score(token_ids=tokens, stepwise=True, prefill=PROMPT):
                    pass
                after = await client.stats()
                if turn:  # the first one warms up
                    runs[early].append(_step(difference(after["engine"], before["engine"])["decode"]))
    return runs


def _step(decode: dict[str, Any]) -> dict[str, float]:
    per_step = 1e3 / decode["steps"]
    waited = decode["seconds"]["wait"] * per_step
    busy = decode["host_busy_s"] * per_step
    return {
        "step": sum(decode["seconds"].values()) * per_step,
        "host busy": busy,
        "waited": waited,
        "hidden": busy - waited,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cache", type=float, default=0.25)
    parser.add_argument("--format", default=None)
    parser.add_argument("--slowdown", type=float, default=8.0)
    parser.add_argument("--link", type=float, default=None, help="GB/s of the emulated link")
    parser.add_argument("--placement", default="popular")
    parser.add_argument("--tokens", type=int, default=64, help="decoded in each round")
    parser.add_argument("--rounds", type=int, default=7)
    runs = asyncio.run(measure(parser.parse_args()))
    table = Table("ms a decode step", "early", "late", "difference")
    for row in ROWS:
        early, late = ([run[row] for run in runs[key]] for key in ("1", "0"))
        change = median(b - a for a, b in zip(early, late, strict=True))
        table.add_row(row, f"{median(early):.2f}", f"{median(late):.2f}", f"{change:+.2f}")
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
