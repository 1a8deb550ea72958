"""Experts on disk: the rate of an engine that holds a part of them in memory, beside the disk's own.

    python -m benchmarks.disk [--model shape:NAME] [--share 0.5] [--tokens 64] [--turns 3]

A turn is one answer, between two measurements of the disk: the store's file, read by as many threads and in
as large pieces as the reader does, past the page cache. Printed are the seconds that the disk alone would
take for the bytes that the answer's tokens read, as a share of those that they took, and the reader's seconds
on a processor.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import psutil

from launch.errors import LaunchError
from launch.processes.supervisor import Supervisor
from launch.terminal.format import percent
from pipeline.checkpoint.open import open_model
from pipeline.config import EngineConfig
from pipeline.errors import UsageError
from pipeline.memory.needs import needs
from protocol.client import Client
from protocol.messages import Sampling, Token
from shm.segment import byte_size
from workers.reader import read_rate

PROMPT = list(range(1, 17))


def reader_seconds(engine: Supervisor) -> float:
    """Seconds that the engine's reader has had on a processor."""
    (reader,) = (pid for child, pid in engine.pids.items() if child.role == "reader")
    times = psutil.Process(reader).cpu_times()
    return float(times.user + times.system)


async def turn(
    engine: Supervisor, client: Client, path: Path, tokens: int
) -> tuple[list[int], float, dict[str, Any], float]:
    """One answer: its tokens, the seconds of all after the first, what the disk did then, and its rate."""
    before = read_rate(path)
    ids: list[int] = []
    first, began, busy = await client.stats(), time.perf_counter(), 0.0
    asked: dict[str, Any] = {"token_ids": PROMPT, "max_tokens": tokens, "ignore_eos": True}
    # Sampled: a greedy answer of random weights repeats itself, and soon needs no other experts.
    answer = client.generate(**asked, sampling=Sampling(temperature=1.0, seed=tokens), reuse=False)
    async for token in answer:
        assert isinstance(token, Token)
        ids.append(token.token)
        if len(ids) == 1:
            first, began = await client.stats(), time.perf_counter()
            busy = reader_seconds(engine)
    seconds = time.perf_counter() - began
    last = (await client.stats())["disk"] | {"processor": reader_seconds(engine)}
    first["disk"]["processor"] = busy
    counted = {name: last[name] - value for name, value in first["disk"].items() if name != "file"}
    return ids, seconds, counted, (before + read_rate(path)) / 2


async def measure(model: Path, share: float, tokens: int, turns: int) -> None:
    plain = EngineConfig(model=model, device="cpu", format="int4", workers=2, context=1024)
    whole = needs(open_model(model), plain, "int4").whole
    config = EngineConfig(**vars(plain) | {"host_memory": int(share * whole)})
    async with Supervisor(config, log_level="WARNING") as engine, Client.connect(engine.endpoint) as client:
        path = Path((await client.stats())["disk"]["file"])
        for number in range(turns):
            ids, seconds, disk, rate = await turn(engine, client, path, tokens)
            alone, count = disk["bytes"] / rate, len(ids) - 1
            print(
                f"turn {number}: {count / seconds:.2f} tok/s; {byte_size(disk['bytes'] / count)} a token,"
                f" {percent(disk['hits'] / max(1, disk['hits'] + disk['misses']))} hits,"
                f" {disk['useful']} of {disk['predicted']} ahead used; waited {disk['waited']:.2f} of"
                f" {seconds:.2f} s; disk {byte_size(rate)}/s; {alone / seconds:.2f} of its rate;"
                f" {disk['processor'] / max(1, disk['bytes']) * 1e9:.2f} s of the reader a GB"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Experts on disk, beside the disk's own rate.")
    parser.add_argument("--model", type=Path, default=Path("shape:olmoe-1b-7b/4"))
    parser.add_argument("--share", type=float, default=0.5, help="of the experts' bytes, in memory")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    try:
        asyncio.run(measure(asked.model, asked.share, asked.tokens, asked.turns))
    except (UsageError, LaunchError) as e:  # such as a share that is too small
        raise SystemExit(f"benchmarks.disk: {e}") from None


if __name__ == "__main__":
    main()
