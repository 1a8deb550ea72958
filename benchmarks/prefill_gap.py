"""Measures the gap between a client's tokens while another client's long prompt is prefilled.

    python benchmarks/prefill_gap.py [--tokens 2000] [--runs 5]

Uses the embedded model with its config changed to 4096 positions, so that a prompt of 2000 tokens fits. For
each run: the longest gap between two tokens of the decoding client during the prefill, the decode step alone
(the median gap before it), and the mean round (a chunk and a step) during it. The scheduler guarantees at
most one chunk between two steps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from launch.processes.supervisor import Supervisor
from pipeline.assets import model_dir
from pipeline.config import EngineConfig
from protocol.client import Client

CONTEXT = 4096


def long_model(folder: Path) -> Path:
    """The embedded model with a longer context, in `folder`."""
    for file in model_dir().iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((model_dir() / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


async def gaps_during(client: Client, other: Client, tokens: int) -> tuple[float, float, float, int]:
    """The longest gap during the prefill, the median gap before it and the mean round, in seconds; and the
    number of chunks."""
    answer = client.generate(token_ids=range(5, 20), max_tokens=1500, ignore_eos=True)
    arrivals: list[float] = []
    started, ended = 0.0, 0.0

    async def ask() -> None:
        nonlocal started, ended
        started = time.perf_counter()
        long = other.generate(token_ids=[5 + i % 4000 for i in range(tokens)], max_tokens=1)
        await long.result()
        ended = time.perf_counter()

    asking = None
    async for _ in answer:
        arrivals.append(time.perf_counter())
        if len(arrivals) == 50:
            asking = asyncio.create_task(ask())
        if ended and arrivals[-2] > ended:
            break
    assert asking is not None
    await asking
    pairs = list(itertools.pairwise(arrivals))
    before = [b - a for a, b in pairs[:49]]
    during = [b - a for a, b in pairs if b > started and a < ended]
    chunk = (await client.stats())["scheduler"]["prefill_chunk"]
    chunks = -(-tokens // chunk)
    return max(during), statistics.median(before), (ended - started) / chunks, chunks


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(model=long_model(Path(folder)), device="cpu", context=CONTEXT)
        async with (
            Supervisor(config, log_level="WARNING") as engine,
            Client.connect(engine.endpoint) as one,
            Client.connect(engine.endpoint) as two,
        ):
            print(f"{'longest gap':>12} {'step alone':>12} {'mean round':>12} {'chunks':>7}   ms")
            for _ in range(arguments.runs):
                gap, step, chunk, chunks = await gaps_during(one, two, arguments.tokens)
                print(f"{gap * 1e3:12.1f} {step * 1e3:12.1f} {chunk * 1e3:12.1f} {chunks:7}")


if __name__ == "__main__":
    asyncio.run(main())
