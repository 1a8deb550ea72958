"""Three emulated machines beside one: the speed of a model whose experts none of the three has room for. A
program; needs root and the extra `cluster`:

    python tests/cluster/cluster_speed.py --rounds 5

The /dev/shm of each of the three has room for less than half of the experts, and a start on one of them alone
has to be refused. The one beside them has this machine's memory. Both engines are asked in turns, with the
same prompts, and share this machine's cores: the processor's seconds are of all processes that compute.
Prints a JSON line for each format, of medians. The exit code is 0 only if the start was refused, and all
answers are complete."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from cluster_drill import LIMIT, NAMES, Cluster
from emulated_machines import ROOT

from launch.runtime import find_engine
from pipeline.checkpoint.open import open_model
from pipeline.models.facts import expert_shape
from protocol.client import Client
from shm.layout import StoreLayout, format_named

SHARE, BESIDE = 0.45, 64 << 20  # of the experts that a machine has room for; bytes of /dev/shm for the rest
COMPUTES = ("pipeline.coordinator", "pipeline.cluster.host", "workers.expert_worker")
Figures = dict[str, float]


def experts_bytes(model: str, kind: str) -> int:
    """What all experts take in shared memory."""
    form = format_named(kind)
    return StoreLayout(expert_shape(open_model(Path(model)).config, None, form), form).total_bytes


@contextmanager
def one_machine(place: Path, options: list[str]) -> Iterator[None]:
    """An engine outside of the emulated machines."""
    runtime = place / "one"
    runtime.mkdir(mode=0o700)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime), "XDG_CACHE_HOME": str(place / "CACHE0")}
    words = sys.executable, str(ROOT / "launch.py"), "serve", "--name", "one", *options
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("one "), "the engine has not started"
            yield
        finally:
            process.terminate()
            process.wait(LIMIT)


def processor_seconds(runtimes: set[str]) -> float:
    """What the processes that compute have used, of the engines with these runtime directories."""
    used = 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get("XDG_RUNTIME_DIR") in runtimes:
                words = " ".join(process.cmdline())
                used += sum(process.cpu_times()[:2]) * any(word in words for word in COMPUTES)
        except psutil.Error:
            continue
    return used


async def ask(
    client: Client, runtimes: set[str], prompt: list[int], tokens: int
) -> tuple[Figures, list[int]]:
    """Returns an answer's tokens a second, and the processor's milliseconds for each."""
    before = processor_seconds(runtimes)
    first = client.generate(token_ids=prompt, max_tokens=1, ignore_eos=True, reuse=False)
    prefill = (await first.result()).done.stats
    between = processor_seconds(runtimes)
    answer = client.generate(token_ids=prompt[:8], max_tokens=tokens, ignore_eos=True, reuse=False)
    result = await answer.result()
    used = processor_seconds(runtimes) - between
    figures = {
        "decode": result.done.stats["decode_tok_s"],
        "prefill": prefill["prefill_tok_s"],
        "decode processor ms": 1e3 * used / tokens,
        "prefill processor ms": 1e3 * (between - before) / len(prompt),
    }
    return figures, list(result.tokens)


async def compare(cluster: Cluster, place: Path, rounds: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Ask both engines in turns. Returns the medians of each, and how many answers are the same."""
    several = {str(cluster.network.runtime(i)) for i in range(len(NAMES))}
    engines = {"one": {str(place / "one")}, "three": several}
    found: dict[str, list[Figures]] = {name: [] for name in engines}
    chosen, equal = random.Random(0), 0
    endpoints = []
    for name, folder in (("one", place / "one"), ("drill", cluster.network.runtime(0))):
        os.environ["XDG_RUNTIME_DIR"] = str(folder)
        endpoints.append(find_engine(name).endpoint)
    async with Client.connect(endpoints[0]) as one, Client.connect(endpoints[1]) as three:
        for turn in range(rounds + 1):
            ids = [chosen.randrange(1000) for _ in range(prompt)]
            answers = []
            for name, client in zip(engines, (one, three), strict=True):
                figures, answer = await ask(client, engines[name], ids, tokens)
                found[name] += [figures] * (turn > 0)  # the first warms up
                answers.append(answer)
            equal += answers[0] == answers[1]
    medians = {
        name: {key: round(median(each[key] for each in every), 2) for key in every[0]}
        for name, every in found.items()
    }
    return {"rounds": rounds, "equal answers": f"{equal} of {rounds + 1}"} | medians


def measure(model: str, kind: str, rounds: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Returns the figures of a format."""
    size = experts_bytes(model, kind)
    room = int(SHARE * size) + BESIDE
    options = ["--model", model, "--format", kind, "--policy", "all-host", "--context", "1024"]
    place = Path(tempfile.mkdtemp(prefix="td-", dir="/tmp"))
    before = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        with Cluster(place, options, 0, room) as cluster:
            alone = cluster.try_alone(0)
            assert "does not fit" in alone, alone
            with one_machine(place, [*options, "--workers", "2"]):
                figures = asyncio.run(compare(cluster, place, rounds, prompt, tokens))
            sizes = {"experts": size, "each /dev/shm": room, "alone": alone}
            return {"format": kind, "load": os.getloadavg()[1]} | sizes | figures
    finally:
        os.environ["XDG_RUNTIME_DIR"] = before
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-30b-a3b/3")
    parser.add_argument("--formats", default="int4,int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=32)
    asked = parser.parse_args()
    for kind in asked.formats.split(","):
        print(json.dumps(measure(asked.model, kind, asked.rounds, asked.prompt, asked.tokens)), flush=True)


if __name__ == "__main__":
    main()
