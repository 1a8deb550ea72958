"""The time of a decode step by part, and the share of it that is not computing.

    python benchmarks/decode_breakdown.py                                        # the embedded model
    python benchmarks/decode_breakdown.py --model DIR --policy all-host on-demand --cache 0.25

One engine, its policies in turn, each after a warm-up; medians over the repeats. "wait" is the time in which
the coordinator waits for the workers. "host busy" is the slowest worker's computing time within it; the rest
is the round trip. Not computing: everything but attention, head, the device's kernels and host busy."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.processes.supervisor import Supervisor
from pipeline.config import EngineConfig
from protocol.client import Client

COMPUTING = ("attention", "head", "shared", "device")


async def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """For each policy the median milliseconds a decode step of each part."""
    config = EngineConfig(
        model=arguments.model,
        name="breakdown",
        workers=arguments.workers,
        expert_cache=arguments.cache,
        tile=arguments.tile,
        format=arguments.format,
        backbone_dtype=arguments.backbone_dtype or arguments.format,
        context=arguments.context,
    )
    prompt = tuple(range(3, 3 + arguments.prompt))
    results: dict[str, dict[str, Any]] = {}
    async with (
        Supervisor(config, log_level="WARNING") as engine,
        Client.connect(engine.endpoint, name="breakdown") as client,
    ):
        for policy in arguments.policy:
            await client.set_policy(policy, {})
            runs = []
            for repeat in range(arguments.repeats + 1):
                answer = client.generate(token_ids=prompt, max_tokens=arguments.tokens, ignore_eos=True)
                done = (await answer.result()).done
                if repeat:  # the first run warms up
                    runs.append(done.stats["engine"]["decode"])
            results[policy] = summary(runs)
    return results


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs, in milliseconds a step."""
    parts = runs[0]["seconds"]
    rows: dict[str, Any] = {
        part: statistics.median(1e3 * run["seconds"][part] / run["steps"] for run in runs) for part in parts
    }
    totals = [1e3 * sum(run["seconds"].values()) / run["steps"] for run in runs]
    rows["total"] = statistics.median(totals)
    rows["host busy"] = statistics.median(1e3 * run["host_busy_s"] / run["steps"] for run in runs)
    computing = sum(rows[part] for part in COMPUTING) + rows["host busy"]
    rows["not computing"] = 1 - computing / rows["total"]
    rows["spread"] = (max(totals) - min(totals)) / rows["total"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--policy", nargs="+", default=["all-host", "on-demand"])
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cache", type=float, default=0.25)
    parser.add_argument("--tile", type=int)
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--backbone-dtype", help="default: the experts' format")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    results = asyncio.run(measure(parser.parse_args()))
    table = Table("ms a decode step", *results)
    for row in next(iter(results.values())):
        cells = [r[row] for r in results.values()]
        share = row in ("not computing", "spread")
        table.add_row(row, *(f"{c:.1%}" if share else f"{c:.3f}" for c in cells))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
