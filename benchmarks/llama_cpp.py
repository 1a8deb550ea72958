"""Compares the engine with llama.cpp on the same shapes: decode at batch 1 and 4, and a prompt of 512 tokens.

    python -m benchmarks.llama_cpp [--model shape:mixtral-8x7b/4] [--threads 2] [--quick] [--json]

Both have random weights of 4.5 bits: ours int4 (groups of 64) for experts and backbone, llama.cpp's Q4_0 for
all matrices and the head. Ours runs twice, with --workers 0 and with the default of workers, which share the
experts' memory. All stay loaded and are measured in turns, one at a time, on the same cores with the same
number of threads. Our engine is served, and timed at its client: only our figures include scheduling and
transport.

llama.cpp is the PyPI package, built for this CPU, in a process of its own, where its calls are timed. Each
task first tries its settings, and keeps those that are fastest; the choice is kept beside the build. A build
with AMX that crashes is replaced by one without. Since llama.cpp repacks the weights for the CPU while
loading, a mapped file would only hold them twice, so it runs without mmap.

Tokens are random; the prompts are the same for all engines and new in every round. GB/s are the weights that
a decode step reads, divided by its time; the limit is what the same cores read in plain reads just before and
after. A ratio is the median of the rounds' ratios. Options of our engine may follow --.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.llama_engines import BATCH, PREFILL, TANDEM, Engine, Task, tandem
from benchmarks.llama_environment import NATIVE, WITHOUT_AMX, Build, ready
from benchmarks.llama_process import LLAMA, Llama, Settings, llama
from benchmarks.reading import Reading
from pipeline.models.registry import model_spec
from pipeline.models.shapes import shape_config
from pipeline.models.spec import GroupedQuery, ModelSpec
from shm.kernel_files import contents, parse_cpuinfo

HERE = Path(__file__).parent
# model_type -> llama.cpp's name of the architecture, and whether it normalises queries and keys by head.
ARCHITECTURES = {"mixtral": ("llama", False), "qwen3_moe": ("qwen3moe", True)}
SIZES = ("layers", "hidden", "intermediate", "experts", "top_k", "vocabulary", "max_positions", "norm_eps")
BITS = 4.5  # a weight, with its share of the group's scale and zero or the block's scale
PROMPT = 32  # tokens before the decoded ones
IDLE_CORES = 0.05  # that an idle engine may use
WIDTH = 110  # columns, in a file


def write_gguf(python: Path, folder: Path, model: str, spec: ModelSpec, architecture: str) -> Path:
    """Write llama.cpp's model with random weights, unless the file exists."""
    path = folder / f"{model.removeprefix('shape:').replace('/', '-')}.gguf"
    if not path.exists():
        name, head_norms = ARCHITECTURES[architecture]
        attention = _grouped(spec)
        shape = vars(attention) | {key: getattr(spec, key) for key in SIZES}
        shape |= {"architecture": name, "head_norms": head_norms, "rope_theta": spec.rope.theta}
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            writer = [python, "-P", HERE / "llama_model.py", json.dumps(shape), part]
            subprocess.run(writer, check=True, stdout=sys.stderr)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def _grouped(spec: ModelSpec) -> GroupedQuery:
    assert isinstance(spec.attention, GroupedQuery)  # of all ARCHITECTURES
    return spec.attention


def read_bytes(spec: ModelSpec, experts: float) -> float:
    """Bytes of weights that a decode step reads: all but the embedding, with `experts` experts a layer."""
    heads = _grouped(spec)
    attention = 2 * spec.hidden * heads.head_dim * (heads.heads + heads.kv_heads)
    expert = 3 * spec.hidden * spec.intermediate
    quantized = spec.layers * (attention + experts * expert) + spec.vocabulary * spec.hidden
    return quantized * BITS / 8 + 4 * spec.layers * spec.experts * spec.hidden


async def compare(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    _, config = shape_config(arguments.model)
    spec, threads = model_spec(config), arguments.threads
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # all inherit it
    cpu, flags = parse_cpuinfo(contents(Path("/proc/cpuinfo")))
    python, versions = ready(arguments.env, NATIVE, console)
    console.print(f"llama.cpp's model: random Q4_0 weights of {arguments.model}")
    gguf = write_gguf(python, arguments.env / "models", arguments.model, spec, config["model_type"])
    tasks = [
        Task("decode", 1, PROMPT, arguments.tokens),
        Task("decode", BATCH, PROMPT, arguments.tokens),
        Task("prefill", 1, PREFILL, 0),
    ]

    def start(build: Build) -> Llama:
        interpreter, found = ready(arguments.env, build, console)
        versions.update(found)
        return Llama(interpreter, gguf, spec.vocabulary, threads)

    async def setup(engine: Llama) -> None:
        key = f"{arguments.model}, {threads} threads of {cpu}, {engine.facts['build']}, {versions}"
        await choose(engine, key, tasks, arguments, console)

    try:
        async with AsyncExitStack() as stack:
            builds = (NATIVE, WITHOUT_AMX) if "amx_int8" in flags else (NATIVE,)
            theirs = await stack.enter_async_context(llama(builds, start, setup, console.print))
            if not arguments.rounds:
                raise SystemExit
            engines: list[Engine] = []
            for name, options in own_engines(arguments.options).items():
                console.print(f"{name} starts")
                engine = tandem(name, arguments.model, spec.layers, options)
                engines.append(await stack.enter_async_context(engine))
            engines.append(theirs)
            reading = stack.enter_context(closing(Reading(threads)))
            found = await rounds(arguments, tasks, engines, reading, spec, console)
            ways = reading.ways
    finally:
        if not arguments.keep:
            gguf.unlink(missing_ok=True)
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    return {
        "model": arguments.model,
        "cpu": cpu,
        "threads": threads,
        "versions": {TANDEM: project["version"], **versions},
        "rounds": arguments.rounds,
        "tokens": arguments.tokens,
        "read_gb_s": ways,
        "engines": {engine.name: engine.facts | {"idle_cores": max(engine.idle)} for engine in engines},
        "settings": {task: str(settings) for task, settings in theirs.settings.items()},
        "results": [result(spec, task, runs) for task, runs in found],
    }


def own_engines(options: list[str]) -> dict[str, list[str]]:
    """Our engines by name: one without workers and one with the default, unless the options say which."""
    if any(option.startswith("--workers") for option in options):
        return {TANDEM: options}
    return {f"{TANDEM} --workers 0": [*options, "--workers", "0"], TANDEM: options}


async def choose(
    engine: Llama, key: str, tasks: Sequence[Task], arguments: argparse.Namespace, console: Console
) -> None:
    """Load llama.cpp with the settings kept for this key, or with those that are fastest now."""
    path = arguments.env / "choices.json"
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if key in kept and not arguments.again:
        engine.settings = {task: Settings(**settings) for task, settings in kept[key].items()}
    else:
        cores = min(psutil.cpu_count(logical=False) or arguments.threads, arguments.threads)
        await engine.choose(tasks, cores, console.print)
        kept[key] = {task: asdict(settings) for task, settings in engine.settings.items()}
        path.write_text(json.dumps(kept, indent=1), "utf-8")
    await engine.load()


Runs = dict[str, list[dict[str, float]]]  # by engine, for each round


async def rounds(
    arguments: argparse.Namespace,
    tasks: Sequence[Task],
    engines: Sequence[Engine],
    reading: Reading,
    spec: ModelSpec,
    console: Console,
) -> list[tuple[Task, Runs]]:
    """The figures of each task, for each round after a warm-up. The first engine alternates."""
    random = np.random.default_rng(arguments.seed)
    found: list[tuple[Task, Runs]] = [(task, {engine.name: [] for engine in engines}) for task in tasks]
    for turn in range(arguments.rounds + 1):
        console.print(f"round {turn} of {arguments.rounds}" if turn else "warming up")
        first = turn % len(engines)
        for task, runs in found:
            prompts = task.ids(random, task.prompt, spec.vocabulary)
            before = reading.gb_s()
            for busy in (*engines[first:], *engines[:first]):
                idle = [(engine, engine.cpu_seconds()) for engine in engines if engine is not busy]
                began = time.perf_counter()
                run = await busy.run(task, random, prompts)
                took = time.perf_counter() - began
                after = reading.gb_s()
                if turn:
                    runs[busy.name].append(paced(spec, task, run) | {"read_gb_s": (before + after) / 2})
                    for engine, used in idle:
                        engine.idle.append((engine.cpu_seconds() - used) / took)
                before = after
    for engine in engines:
        if max(engine.idle) > IDLE_CORES:
            console.print(f"warning: {engine.name} used up to {max(engine.idle):.2f} cores while it was idle")
    return found


def paced(spec: ModelSpec, task: Task, run: dict[str, float]) -> dict[str, float]:
    """A run, for a decode with the rate at which it read weights."""
    if not task.new:
        return run
    # llama.cpp does not report its experts; random choices give this many on average.
    expected = spec.experts * (1 - (1 - spec.top_k / spec.experts) ** task.batch)
    run = {"rows": task.batch, "experts": expected} | run
    return run | {"gb_s": read_bytes(spec, run["experts"]) * run["tok_s"] / run["rows"] / 1e9}


def result(spec: ModelSpec, task: Task, runs: Runs) -> dict[str, Any]:
    found: dict[str, Any] = {"task": str(task), "batch": task.batch, "prompt": task.prompt, "engines": {}}
    for name, its in runs.items():
        one: dict[str, Any] = {key: median(run[key] for run in its) for key in its[0]}
        one["runs"] = [run["tok_s"] for run in its]
        one["ratio"] = median(
            run["tok_s"] / theirs["tok_s"] for run, theirs in zip(its, runs[LLAMA], strict=True)
        )
        if task.new:
            one["of_limit"] = median(run["gb_s"] / run["read_gb_s"] for run in its)
        found["engines"][name] = one
    return found


def show(found: dict[str, Any], console: Console) -> None:
    console.print(f"\n{found['model']}, {found['threads']} threads of {found['cpu']}")
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "engine"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens a second", f"/ {LLAMA}", "GB/s", "/ limit"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found["results"]:
        for name, one in row["engines"].items():
            speed = f"{one['tok_s']:.1f} ({min(one['runs']):.1f}-{max(one['runs']):.1f})"
            pace = [f"{one['gb_s']:.1f}", f"{one['of_limit']:.2f}"] if "gb_s" in one else []
            table.add_row(row["task"], name, speed, f"{one['ratio']:.2f}", *pace)
        table.add_section()
    console.print(table)
    ways: dict[str, float] = found["read_gb_s"]
    fastest, slowest = max(ways, key=lambda way: ways[way]), min(ways, key=lambda way: ways[way])
    console.print(
        f"the limit, reading in turns: {ways[fastest]:.1f} GB/s ({fastest}), "
        f"the slowest way {ways[slowest]:.1f} ({slowest})"
    )
    theirs = found["engines"][LLAMA]
    why = f", because {theirs['fallback']}" if theirs["fallback"] else ""
    console.print(f"{LLAMA} built {theirs['build']}{why}")
    for task, settings in found["settings"].items():
        console.print(f"  {task}: {settings}")
    console.print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="shape:mixtral-8x7b/4")
    parser.add_argument("--rounds", type=int, default=5, help="0: only choose llama.cpp's settings")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=64, help="decoded for each sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two rounds of 16 tokens")
    parser.add_argument("--env", type=Path, default=Path.home() / ".cache/tandem/bench-llama")
    parser.add_argument("--keep", action="store_true", help="keep llama.cpp's model for the next run")
    parser.add_argument("--again", action="store_true", help="try llama.cpp's settings again")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("options", nargs="*", help="of our engine, behind --")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens = 2, 16
    width = None if sys.stderr.isatty() else WIDTH
    console = Console(stderr=True, highlight=False, soft_wrap=True, width=width)
    found = asyncio.run(compare(arguments, console))
    show(found, console)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
