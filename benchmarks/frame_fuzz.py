"""Hostile messages on all sockets of an engine while a client is served: exits, memory, latency.

python benchmarks/frame_fuzz.py --frames 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from served import served

from launch.chaos.hostile_client import SOCKETS, HostileClient
from launch.chaos.processes import usage
from launch.stress.requests import End, Outcome, Request, ask
from protocol.client import Client
from protocol.messages import Sampling

BURSTS = (20, 200, 1000)  # messages of one connection
REQUEST = Request("asked", "The harbour was quiet when the last ferry came in, and", None, 32, Sampling())
IDLE_LIMIT = 60.0  # seconds
PAUSE = 0.1  # seconds between two answers of the client
MOMENTS = ("start", "middle", "end", "idle")
MB = 1e6


@dataclass(frozen=True)
class Plan:
    """So many messages on these sockets, at most `rate` a second."""

    frames: int
    seed: int
    sockets: list[str]
    rate: float


async def fuzz(plan: Plan, options: list[str]) -> dict[str, Any]:
    async with (
        served(f"fuzz-{os.getpid()}", options) as engine,
        Client.connect(engine.endpoint, name="fuzz") as client,
    ):
        hostile = HostileClient(Path(engine.endpoint.removeprefix("ipc://")).parent, plan.seed)
        alone = await ask(client, REQUEST)
        quiet = [await ask(client, REQUEST) for _ in range(10)]
        memory = {"start": memory_of(engine.pid)}
        attack = asyncio.create_task(_attack(hostile, plan, memory, engine.pid))
        outcomes: list[Outcome] = []
        while not attack.done():
            outcomes.append(await ask(client, REQUEST))
            await asyncio.sleep(PAUSE)
        seconds = await attack
        await hostile.close()
        last = await ask(client, REQUEST)
        memory["end"] = memory_of(engine.pid)
        idle_after = await wait_idle(client, engine.pid)
        memory["idle"] = memory_of(engine.pid)
        stats = await client.stats()
        sent = sum(hostile.sent.values())
        tokens = [token.token for token in alone.tokens]
        return {
            "frames": sent,
            "by_socket": dict(hostile.sent),
            "by_kind": dict(hostile.kinds),
            "seconds": seconds,
            "idle_after_s": idle_after,
            "frames_s": sent / seconds,
            "answers_to_them": hostile.answered,
            "bursts_cut_short": hostile.stalled,
            "pids_unchanged": len({tuple(sorted(pids)) for pids in memory.values()}) == 1,
            "memory_mb": memory,
            "served": sum(outcome.end is End.LENGTH for outcome in outcomes),
            "not_served": sum(outcome.end is not End.LENGTH for outcome in [*outcomes, last]),
            "other_tokens": sum([t.token for t in o.tokens] != tokens for o in [*outcomes, last]),
            "latency_s": quantiles(outcomes),
            "latency_without_s": quantiles(quiet),
            "malformed": stats["malformed"],
            "clients": stats["clients"],
        }


async def _attack(hostile: HostileClient, plan: Plan, memory: dict[str, Any], supervisor: int) -> float:
    """Send messages until so many were accepted. Returns the seconds."""
    random = Random(plan.seed)
    began = time.perf_counter()
    while (sent := sum(hostile.sent.values())) < plan.frames:
        if sent > plan.frames / 2 and "middle" not in memory:
            memory["middle"] = memory_of(supervisor)
        for socket in plan.sockets:
            await hostile.burst(socket, random.choice(BURSTS))
        await asyncio.sleep(max(0.0, began + sum(hostile.sent.values()) / plan.rate - time.perf_counter()))
    return time.perf_counter() - began


async def wait_idle(client: Client, supervisor: int) -> float:
    """Wait until all messages were processed: until neither the counters nor the number of connections change
    any more. Returns the seconds."""
    began = time.perf_counter()
    counted = None
    while time.perf_counter() - began < IDLE_LIMIT:
        stats = await client.stats()
        connections = [one.descriptors for one in usage(supervisor)]
        before, counted = counted, (stats["malformed"], stats["clients"], connections)
        if counted == before:
            break
        await asyncio.sleep(1.0)
    return time.perf_counter() - began


def memory_of(supervisor: int) -> dict[int, dict[str, Any]]:
    """Of each process, in MB."""
    return {
        one.pid: {
            "role": one.role,
            "rss": round(one.rss / MB, 1),
            "private": round(one.private / MB, 1),
            "descriptors": one.descriptors,
        }
        for one in usage(supervisor)
    }


def quantiles(outcomes: list[Outcome]) -> dict[str, float]:
    seconds = [outcome.ended - outcome.sent for outcome in outcomes]
    return {name: float(np.quantile(seconds, q)) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def show(found: dict[str, Any]) -> None:
    print(f"{found['frames']} frames in {found['seconds']:.0f} s: {found['frames_s']:.0f} a second")
    print(f"  by socket: {found['by_socket']}; answered: {found['answers_to_them']}")
    print(f"  malformed, as the engine counted: {found['malformed']}; clients: {found['clients']}")
    print(f"processes: {'the same' if found['pids_unchanged'] else 'NOT the same'} as before")
    print(f"the last message was processed {found['idle_after_s']:.0f} s after the end")
    for pid, first in found["memory_mb"]["start"].items():
        moments = [found["memory_mb"].get(moment, {}).get(pid) for moment in MOMENTS]
        text = ", ".join(f"{m['private']:.1f} MB {m['descriptors']} fds" if m else "gone" for m in moments)
        print(f"  {first['role']:12} private memory at {', '.join(MOMENTS)}: {text}")
    latency, without = found["latency_s"], found["latency_without_s"]
    print(
        f"served meanwhile: {found['served']}, not served: {found['not_served']}, with other tokens:"
        f" {found['other_tokens']}; p50 {latency['p50']:.2f} s, p99 {latency['p99']:.2f} s"
        f" (undisturbed p50 {without['p50']:.2f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sockets", nargs="+", choices=SOCKETS, default=list(SOCKETS))
    parser.add_argument("--rate", type=float, default=math.inf, help="messages a second at most")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "options",
        nargs="*",
        default=["--policy", "on-demand", "--device", "cpu"],
        help="of the engine, behind --; a policy with a prefetcher has all four sockets",
    )
    arguments = parser.parse_args()
    plan = Plan(arguments.frames, arguments.seed, arguments.sockets, arguments.rate)
    found = asyncio.run(fuzz(plan, arguments.options))
    if arguments.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
