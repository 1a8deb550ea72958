"""Compares the engine with llama.cpp on one GGUF file: a prompt, then decode of one sequence behind it.

    python -m benchmarks.llama_cpp --write shape:mixtral-8x7b/4 FILE.gguf
    python -m benchmarks.llama_cpp FILE.gguf --python ENV/bin/python [--prompt 512] [--threads 2] [--rounds 3]

The first writes random weights in Q4_0 for a shape of the families Mixtral and Qwen3. The second loads the
very same file in both engines, in turns, one at a time, on the same cores with the same number of threads.
ENV is an environment with llama-cpp-python, compiled for this CPU. Ours runs as `launch.py bench` with
--workers 0: only our figures include scheduling and transport. A ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np

from pipeline.models.registry import model_spec
from pipeline.models.shapes import shape_config
from pipeline.models.spec import GroupedQuery, ModelSpec

HERE = Path(__file__).parent
NEW = 64  # tokens
LIMIT = 1200.0  # seconds of a run, with loading
NAMES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}  # model_type -> the architecture in a file
BLOCK, BLOCK_BYTES = 32, 18  # of Q4_0: a binary16 scale, then 16 bytes of two weights each
SPREAD = 4.61  # standard deviation of q - 8 for q uniform in 0..15
Shape = tuple[int, ...]


def tensors(spec: ModelSpec, attention: GroupedQuery) -> Iterator[tuple[str, Shape]]:
    """Names and shapes; the last axis is summed over."""
    hidden, inner, experts = spec.hidden, spec.intermediate, spec.experts
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    yield "token_embd.weight", (spec.vocabulary, hidden)
    for layer in range(spec.layers):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", (hidden,)
        yield f"{at}.ffn_norm.weight", (hidden,)
        yield f"{at}.attn_q.weight", (queries, hidden)
        yield f"{at}.attn_k.weight", (keys, hidden)
        yield f"{at}.attn_v.weight", (keys, hidden)
        yield f"{at}.attn_output.weight", (hidden, queries)
        yield f"{at}.ffn_gate_inp.weight", (experts, hidden)
        yield f"{at}.ffn_gate_exps.weight", (experts, inner, hidden)
        yield f"{at}.ffn_up_exps.weight", (experts, inner, hidden)
        yield f"{at}.ffn_down_exps.weight", (experts, hidden, inner)
        if attention.qk_norm == "head":
            yield f"{at}.attn_q_norm.weight", (attention.head_dim,)
            yield f"{at}.attn_k_norm.weight", (attention.head_dim,)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (spec.vocabulary, hidden)


def numbers(name: str, shape: Shape, random: np.random.Generator) -> np.ndarray:
    """Random numbers of standard deviation 1 / sqrt(inputs): Q4_0 blocks, float32 for a router; ones for a
    norm."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    scale = shape[-1] ** -0.5
    if "gate_inp" in name:
        return random.standard_normal(shape, np.float32) * np.float32(scale)
    blocks = random.integers(0, 256, (int(np.prod(shape)) // BLOCK, BLOCK_BYTES), np.uint8)
    # The mean of q - 8 is -0.5. With one sign everywhere, hidden states would become alike, and all tokens
    # would choose the same experts.
    signs = random.choice(np.array([-1, 1], np.float16), (len(blocks), 1))
    blocks[:, :2] = (signs * np.float16(scale / SPREAD)).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(model: str, path: Path) -> None:
    """A file with one tensor in memory at a time. It has no tokenizer."""
    _, config = shape_config(model)
    spec = model_spec(config)
    attention = spec.attention
    if config["model_type"] not in NAMES or not isinstance(attention, GroupedQuery):
        raise SystemExit(f"{model}: only {' and '.join(NAMES)} are written")
    writer = gguf.GGUFWriter(path, NAMES[config["model_type"]])
    write_settings(writer, spec, attention)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    found = list(tensors(spec, attention))
    for name, shape in found:
        plain = len(shape) == 1 or "gate_inp" in name
        size = int(np.prod(shape)) * 4 if plain else int(np.prod(shape)) // BLOCK * BLOCK_BYTES
        kind = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for name, shape in found:
        writer.write_tensor_data(numbers(name, shape, random))
    writer.close()


def write_settings(writer: gguf.GGUFWriter, spec: ModelSpec, attention: GroupedQuery) -> None:
    """Those of the model, without a tokenizer."""
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_expert_feed_forward_length(spec.intermediate)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_expert_count(spec.experts)
    writer.add_expert_used_count(spec.top_k)
    writer.add_vocab_size(spec.vocabulary)
    writer.add_tokenizer_model("no_vocab")


def ours(file: Path, prompt: int, threads: int) -> dict[str, float]:
    """Tokens a second of `launch.py bench`."""
    command = [sys.executable, HERE.parent / "launch.py", "bench", "--model", file, "--policy", "all-host"]
    command += ["--workers", "0", "--context", str(prompt + NEW), "--prompt-len", str(prompt)]
    command += ["--gen-len", str(NEW), "--rounds", "1"]
    found = json.loads(_output([*command, "--ppl-tokens", "0", "--json"], threads))["policies"][0]
    return {part: found[f"{part}_tok_s"]["median"] for part in ("prefill", "decode")}


def theirs(python: Path, file: Path, prompt: int, threads: int) -> dict[str, float]:
    """Tokens a second of llama.cpp."""
    settings = {"model": str(file), "threads": threads, "prompt": prompt, "new": NEW}
    found: dict[str, float] = json.loads(
        _output([python, "-P", HERE / "llama_driver.py", json.dumps(settings)], threads)
    )
    return found


def _output(command: list[Any], threads: int) -> str:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", metavar="SHAPE")
    parser.add_argument("--python", type=Path, help="of an environment with llama-cpp-python")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write, arguments.file)
        return
    if arguments.python is None:
        parser.error("--python is needed")
    rounds: list[dict[str, dict[str, float]]] = []
    what = arguments.file, arguments.prompt, arguments.threads
    for _ in range(arguments.rounds):
        rounds.append(
            {
                "llama.cpp": theirs(arguments.python, *what),
                "tandem": ours(*what),
            }
        )
        print(json.dumps(rounds[-1]), file=sys.stderr)
    result: dict[str, Any] = {
        "file": arguments.file.name,
        "prompt": arguments.prompt,
        "threads": arguments.threads,
    }
    for part in ("decode", "prefill"):
        result[part] = {name: median(r[name][part] for r in rounds) for name in rounds[0]}
        result[part]["ratio"] = median(r["tandem"][part] / r["llama.cpp"][part] for r in rounds)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for part in ("decode", "prefill"):
        found = result[part]
        print(
            f"{part}: tandem {found['tandem']:.1f} tok/s, llama.cpp {found['llama.cpp']:.1f},"
            f" ratio {found['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
