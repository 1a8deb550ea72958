"""Compares the engine with llama.cpp on the same shapes: decode at batch 1 and 4, and a prompt of 512 tokens.

    python benchmarks/llama_cpp.py [--model shape:mixtral-8x7b/4] [--threads 2] [--quick] [--json]

Both have random weights of 4.5 bits: ours int4 (groups of 64) for experts and backbone, llama.cpp's Q4_0 for
all matrices and the head. Both stay loaded and are measured in turns, one at a time, on the same cores with
the same number of threads. llama.cpp is the PyPI package, built for this CPU, with its defaults; since it
repacks the weights for the CPU while loading, a mapped file would only hold them twice, so it runs without
mmap. It runs in its own process, where its calls are timed. Our engine is served, and timed at its client:
only our figures include scheduling and transport.

Tokens are random; the prompts are the same on both sides and new in every round. A ratio is the median of the
rounds' ratios. GB/s are the weights that a decode step reads, divided by its time. Options of our engine may
follow --.
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
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from llama_engines import BATCH, LLAMA, PREFILL, TANDEM, Engine, Task, llama, tandem
from llama_environment import ready
from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.models.registry import model_spec
from pipeline.models.shapes import shape_config
from pipeline.models.spec import GroupedQuery, ModelSpec

HERE = Path(__file__).parent
# model_type -> llama.cpp's name of the architecture, and whether it normalises queries and keys by head.
ARCHITECTURES = {"mixtral": ("llama", False), "qwen3_moe": ("qwen3moe", True)}
SIZES = ("layers", "hidden", "intermediate", "experts", "top_k", "vocabulary", "max_positions", "norm_eps")
BITS = 4.5  # a weight, with its share of the group's scale and zero or the block's scale
PROMPT = 32  # tokens before the decoded ones
IDLE_CORES = 0.05  # that the idle engine may use


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
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # both inherit it
    python, versions = ready(arguments.env, console)
    console.print(f"llama.cpp's model: random Q4_0 weights of {arguments.model}")
    gguf = write_gguf(python, arguments.env / "models", arguments.model, spec, config["model_type"])
    try:
        async with llama(python, gguf, threads, spec.vocabulary) as theirs:
            console.print("llama.cpp is loaded; our engine starts")
            async with tandem(arguments.model, spec.layers, arguments.options) as ours:
                found = await rounds(arguments, (ours, theirs), spec.vocabulary, console)
    finally:
        if not arguments.keep:
            gguf.unlink(missing_ok=True)
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    return {
        "model": arguments.model,
        "threads": threads,
        "versions": {TANDEM: project["version"], **versions},
        "rounds": arguments.rounds,
        "tokens": arguments.tokens,
        TANDEM: ours.facts | {"idle_cores": max(ours.idle)},
        LLAMA: theirs.facts | {"idle_cores": max(theirs.idle)},
        "results": [result(spec, task, runs) for task, runs in found],
    }


async def rounds(
    arguments: argparse.Namespace, engines: tuple[Engine, Engine], vocabulary: int, console: Console
) -> list[tuple[Task, dict[str, list[dict[str, float]]]]]:
    """The figures of each task by engine, for each round after a warm-up. The first engine alternates."""
    tasks = [
        Task("decode", 1, PROMPT, arguments.tokens),
        Task("decode", BATCH, PROMPT, arguments.tokens),
        Task("prefill", 1, PREFILL, 0),
    ]
    random = np.random.default_rng(arguments.seed)
    found = [(task, {engine.name: [] for engine in engines}) for task in tasks]
    for turn in range(arguments.rounds + 1):
        console.print(f"round {turn} of {arguments.rounds}" if turn else "warming up")
        for task, runs in found:
            prompts = task.ids(random, task.prompt, vocabulary)
            for busy, idle in (engines, engines[::-1])[:: 1 if turn % 2 else -1]:
                used, began = idle.cpu_seconds(), time.perf_counter()
                run = await busy.run(task, random, prompts)
                if turn:
                    runs[busy.name].append(run)
                    idle.idle.append((idle.cpu_seconds() - used) / (time.perf_counter() - began))
    for engine in engines:
        if max(engine.idle) > IDLE_CORES:
            console.print(f"warning: {engine.name} used up to {max(engine.idle):.2f} cores while it was idle")
    return found


def result(spec: ModelSpec, task: Task, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    # llama.cpp does not report its experts; random choices give this many on average.
    expected = spec.experts * (1 - (1 - spec.top_k / spec.experts) ** task.batch)
    found: dict[str, Any] = {"what": task.what, "batch": task.batch, "prompt": task.prompt}
    for name, its in runs.items():
        figures = [run["tok_s"] for run in its]
        one = {"tok_s": median(figures), "min": min(figures), "max": max(figures), "runs": figures}
        if "engine_tok_s" in its[0]:
            one["engine_tok_s"] = median(run["engine_tok_s"] for run in its)
        if task.new:
            one["rows"] = median(run.get("rows", task.batch) for run in its)
            one["experts"] = median(run.get("experts", expected) for run in its)
            one["gb_s"] = read_bytes(spec, one["experts"]) * one["tok_s"] / one["rows"] / 1e9
        found[name] = one
    pairs = zip(runs[TANDEM], runs[LLAMA], strict=True)
    return found | {"ratio": median(ours["tok_s"] / theirs["tok_s"] for ours, theirs in pairs)}


def show(found: dict[str, Any], console: Console) -> None:
    table = Table(
        "", box=box.SIMPLE_HEAD, title=f"{found['model']}, {found['threads']} threads: tokens a second"
    )
    for column in (TANDEM, LLAMA, "ratio", "GB/s", "GB/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found["results"]:
        figures = [
            f"{row[n]['tok_s']:.1f} ({row[n]['min']:.1f}-{row[n]['max']:.1f})" for n in (TANDEM, LLAMA)
        ]
        paces = [f"{row[n]['gb_s']:.1f}" if "gb_s" in row[n] else "" for n in (TANDEM, LLAMA)]
        what = f"decode x {row['batch']}" if row["what"] == "decode" else f"prefill {row['prompt']}"
        table.add_row(what, *figures, f"{row['ratio']:.2f}", *paces)
    console.print(table)
    console.print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="shape:mixtral-8x7b/4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=64, help="decoded for each sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two rounds of 16 tokens")
    parser.add_argument("--env", type=Path, default=Path.home() / ".cache/tandem/bench-llama")
    parser.add_argument("--keep", action="store_true", help="keep llama.cpp's model for the next run")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("options", nargs="*", help="of our engine, behind --")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens = 2, 16
    console = Console(stderr=True, highlight=False)
    found = asyncio.run(compare(arguments, console))
    show(found, console)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
