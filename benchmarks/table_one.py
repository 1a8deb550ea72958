"""All presets with the ratios of DAOP's table I, in the engine and replayed.

    python benchmarks/table_one.py --cache 0.25 0.5

Table I (Mixtral-8x7B on an A100 and a Xeon 6326): moving an expert takes 32 times as long as a block on the
device, a block on the host 6.5 times as long. The embedded model's block (attention and two experts) is
measured here with all experts resident, the link and the workers are then slowed to those ratios, and
`bench` runs every preset; after that the routing of some text is recorded and replayed with table I's own
costs. Needs a calibration (launch.py calibrate --text FILE).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.processes.supervisor import Supervisor
from pipeline.assets import heldout
from pipeline.config import EngineConfig
from pipeline.counters import difference
from protocol.client import Client

LINK, HOST = 32.0, 6.5  # of a block on the device
LAUNCH = str(Path(__file__).parent.parent / "launch.py")
TILE = "128"  # two an expert: two workers share one, as the cores of a CPU do
MOVED = ("demanded", "predicted", "placed")
TOKENS = 160  # of the texts that blocks are timed on, half of them decoded


async def block(policy: str, **options: Any) -> tuple[float, float, int]:
    """Seconds of a decode step's layer, seconds of it that the host computes, bytes of an expert."""
    config = EngineConfig(name="table-one", policy=policy, tile=int(TILE), **options)
    tokens = tuple(3 + 7 * i % 997 for i in range(TOKENS))
    async with (
        Supervisor(config, log_level="ERROR") as engine,
        Client.connect(engine.endpoint, name="table-one") as client,
    ):
        steps = []
        for _ in range(5):
            before = await client.stats()
            async for _ in client.score(token_ids=tokens, stepwise=True, prefill=TOKENS // 2):
                pass
            after = await client.stats()
            steps.append(difference(after["engine"], before["engine"])["decode"])
    best = min(steps, key=lambda decode: sum(decode["seconds"].values()))
    layers = best["layers"]["active"]
    seconds = sum(sum(times) for times in best["layers"]["seconds"].values())
    count = best["steps"] * len(layers)
    return seconds / count, best["host_busy_s"] / count, after["tile_bytes"] * after["tiles_per_expert"]


async def pace() -> tuple[float, float]:
    """GB/s of the link and slowdown of the host that make table I's ratios here."""
    device, _, expert = await block("on-demand", expert_cache=1.0)
    host, busy, _ = await block("all-host")
    slowdown = 1 + (HOST * device - host) / busy
    print(f"a block on the device: {1e3 * device:.3f} ms, on the host {1e3 * host:.3f} ms", file=sys.stderr)
    return expert / (LINK * device) / 1e9, max(1.0, slowdown)


def launch(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, LAUNCH, *words, "--json"], stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cache", nargs="+", default=["0.25", "0.5"])
    parser.add_argument("--rounds", default="3")
    parser.add_argument("--gen-len", default="48")
    parser.add_argument("--ppl-tokens", default="256")
    parser.add_argument("--out", type=Path, help="the reports, as one JSON object")
    arguments = parser.parse_args()
    link, slowdown = asyncio.run(pace())
    emulated = ("--link-gbps", f"{link:.5f}", "--host-slowdown", f"{slowdown:.3f}")
    print(" ".join(emulated), file=sys.stderr)
    reports: dict[str, Any] = {"emulation": emulated}
    with tempfile.TemporaryDirectory() as folder:
        text, trace = Path(folder, "text"), Path(folder, "trace")
        text.write_text(heldout()["python"].read_text()[:2000])
        launch("score", "--text", str(text), "--stepwise", "--prefill", "64", "--record", str(trace))
        for cache in arguments.cache:
            size = ("--expert-cache", cache)
            sizes = ("--rounds", arguments.rounds, "--gen-len", arguments.gen_len, "--prompt-len", "64")
            run = ("--ppl-tokens", arguments.ppl_tokens, *sizes)
            reports[f"engine {cache}"] = launch("bench", "--tile", TILE, *size, *emulated, *run)
            costs = ("--costs", "daop-table-1")
            reports[f"replay {cache}"] = launch("bench", "--replay", str(trace), *costs, *size)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(reports))
    for name, report in reports.items():
        if name != "emulation":
            print(f"\n{name}")
            Console(width=100).print(_table(report))


def _table(report: dict[str, Any]) -> Table:
    table = Table("preset", "tok/s", "x", "hits", "MB/token", "perplexity")
    for policy in report["policies"]:
        table.add_row(policy["name"], *_figures(policy))
    return table


def _figures(policy: dict[str, Any]) -> list[str]:
    decode = policy["decode"]
    speed = policy.get("decode_tok_s", decode.get("tok_s"))
    speed = speed["median"] if isinstance(speed, dict) else speed
    moved = sum(decode["bytes_per_token"].get(kind) or 0.0 for kind in MOVED) / 1e6
    perplexity = decode.get("perplexity")
    change = f"{perplexity['difference_percent']:+.2f}%" if perplexity else ""
    ratio = policy.get("decode_ratio", decode.get("ratio"))
    return [f"{speed:.2f}", f"{ratio:.2f}", f"{decode['hit_rate']:.0%}", f"{moved:.2f}", change]


if __name__ == "__main__":
    main()
