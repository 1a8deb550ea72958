"""Compares the prefill of 512 tokens with transformers' bf16 on the same shape, threads and token ids.

    python -m benchmarks.prefill_transformers [--model shape:mixtral-8x7b/4] [--threads 2] [--json]

Both have random weights; ours are int4 unless options of our engine, behind --, say otherwise. transformers
holds the whole model in bf16, so the two run one after the other, each in its own processes: ours is served
and timed at its client, transformers around one call of the model that gives the last token's logits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import numpy as np

from benchmarks.llama_engines import PREFILL, Task, tandem
from pipeline.models.registry import model_spec
from pipeline.models.shapes import shape_config

WARM_UPS = 1


def prompts(seed: int, rounds: int, vocabulary: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return random.integers(5, vocabulary, (rounds + WARM_UPS, PREFILL)).tolist()


async def ours(model: str, ids: list[list[int]], layers: int, options: list[str]) -> list[float]:
    """Tokens a second of each prompt after the warm-up."""
    random = np.random.default_rng(0)
    async with tandem("tandem", model, layers, options) as engine:
        runs = [await engine.run(Task("prefill", 1, PREFILL, 0), random, [prompt]) for prompt in ids]
    return [run["tok_s"] for run in runs[WARM_UPS:]]


def theirs(model: str, ids: list[list[int]], threads: int) -> list[float]:
    """As `ours`, by transformers in this process."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.set_num_threads(threads)
    _, config = shape_config(model)
    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(parsed, dtype=torch.bfloat16)
    network.to_empty(device="cpu").eval()
    random = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
    rates = []
    with torch.inference_mode():
        for weight in network.parameters():
            flat = weight.view(-1)
            for part in flat.split(len(random)):
                part.copy_(random[: len(part)])
        for module in network.modules():  # what is no parameter was empty as well
            if hasattr(module, "rope_init_fn") or "RotaryEmbedding" in type(module).__name__:
                fresh = type(module)(parsed)
                module.inv_freq = fresh.inv_freq
                module.original_inv_freq = fresh.inv_freq
        for prompt in ids:
            started = time.perf_counter()
            network(torch.tensor([prompt]), logits_to_keep=1, use_cache=True)
            rates.append(len(prompt) / (time.perf_counter() - started))
    return rates[WARM_UPS:]


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    _, config = shape_config(arguments.model)
    spec = model_spec(config)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])  # all processes inherit it
    command = [
        sys.executable,
        "-m",
        "benchmarks.prefill_transformers",
        "--theirs",
        "--model",
        arguments.model,
    ]
    command += ["--threads", str(arguments.threads), "--rounds", str(arguments.rounds)]
    command += ["--seed", str(arguments.seed)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    ids = prompts(arguments.seed, arguments.rounds, spec.vocabulary)
    mine = asyncio.run(ours(arguments.model, ids, spec.layers, arguments.options))
    return {
        "model": arguments.model,
        "threads": arguments.threads,
        "options": arguments.options,
        "tandem": {"tok_s": median(mine), "runs": mine},
        "transformers": {"tok_s": median(found), "runs": found},
        "ratio": median(mine) / median(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="shape:mixtral-8x7b/4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--theirs", action="store_true", help="transformers alone: its figures as JSON")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("options", nargs="*", help="of our engine, behind --")
    arguments = parser.parse_args()
    if arguments.theirs:
        spec = model_spec(shape_config(arguments.model)[1])
        ids = prompts(arguments.seed, arguments.rounds, spec.vocabulary)
        print(json.dumps(theirs(arguments.model, ids, arguments.threads)))
        return
    found = compare(arguments)
    if arguments.json:
        print(json.dumps(found))
        return
    for name in ("tandem", "transformers"):
        runs = found[name]["runs"]
        print(f"{name:12s} {found[name]['tok_s']:.0f} tok/s ({min(runs):.0f}-{max(runs):.0f})")
    print(f"{'ratio':12s} {found['ratio']:.2f}")


if __name__ == "__main__":
    main()
