"""Measures what a second rounding costs: perplexity of the embedded model in files of several GGML types.

    python -m benchmarks.rounding [--types Q6_K,...] [--formats int8,int4] [--others Q6_K,...] [--tokens N]

Each file has the experts in one type and all else in float32 (`--types`), or the reverse (`--others`);
`launch.py score` reads it with its numbers as they are (f32), and in each other format, on the first N tokens
of each held-out text. Q6_K and Q4_K are rounded to the nearest here, other types by the gguf package, where
llama.cpp searches for better scales: of a type itself this measures more than it costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.llama_cpp import HERE, tensors, write_settings
from pipeline.assets import heldout, model_dir
from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.reader import TensorReader
from pipeline.models.registry import model_spec
from pipeline.models.spec import GroupedQuery, ModelSpec

TYPES = "Q6_K,Q4_K,Q5_1,Q4_1,Q8_0"
OTHERS = "Q6_K,F16"
LIMIT = 600.0  # seconds of a run
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "ffn_gate_inp": "block_sparse_moe.gate",
}
W123 = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}
Numbers = NDArray[np.float32]
Bytes = NDArray[np.uint8]


# --- numbers to blocks ------------------------------------------------------------------------------------


def _divided(w: Numbers, steps: Numbers) -> Numbers:
    return np.divide(w, steps, out=np.zeros_like(w), where=steps != 0)


def _half(scales: Numbers) -> tuple[Numbers, Bytes]:
    """Scales [n] as binary16: their values [n, 1], and bytes [n, 2]."""
    half = scales.astype(np.float16)
    return half.astype(np.float32)[:, None], half[:, None].view(np.uint8)


def q6_k(w: Numbers) -> Bytes:
    """Blocks of 256 numbers w [n, 256]: groups of 16 with scales of 8 bits, codes of 6."""
    groups = w.reshape(-1, 16, 16)
    steps = np.abs(groups).max(-1) / 31
    of_all, half = _half(steps.max(-1) / 127)
    scales = np.rint(_divided(steps, np.broadcast_to(of_all, steps.shape))).astype(np.int8)
    each = np.repeat((of_all * scales)[..., None], 16, -1)
    q = (np.rint(_divided(groups, each)).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q & 15).reshape(-1, 2, 2, 64)  # of four rows of 32, two share their bytes with the other two
    high = (q >> 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    lows, highs = low[:, :, 0] | low[:, :, 1] << 4, np.bitwise_or.reduce(high, axis=2)
    n = len(w)
    return np.concatenate([lows.reshape(n, -1), highs.reshape(n, -1), scales.view(np.uint8), half], 1)


def q4_k(w: Numbers) -> Bytes:
    """Blocks of 256 numbers w [n, 256]: groups of 32 with scales and minima of 6 bits, codes of 4."""
    groups = w.reshape(-1, 8, 32)
    least = -np.minimum(groups.min(-1), 0)
    steps = (groups.max(-1) + least).clip(min=0) / 15
    parts = []
    for numbers in (steps, least):
        of_all, half = _half(numbers.max(-1) / 63)
        codes = np.rint(_divided(numbers, np.broadcast_to(of_all, numbers.shape))).astype(np.uint8)
        parts.append((codes, of_all * codes, half))
    (scales, each, half), (minima, each_least, half_least) = parts
    q = np.rint(_divided(groups + each_least[..., None], np.repeat(each[..., None], 32, -1))).clip(0, 15)
    pairs = q.astype(np.uint8).reshape(-1, 4, 2, 32)
    first = [codes[:, :4] | (codes[:, 4:] >> 4) << 6 for codes in (scales, minima)]
    packed = [*first, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4]
    both = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([half, half_least, *packed, both], 1)


OWN = {Type.Q6_K: q6_k, Type.Q4_K: q4_k}


def encoded(numbers: Numbers, kind: Type) -> Bytes:
    """A tensor's bytes in this type, whose rows are whole blocks."""
    if kind not in OWN:
        data: Bytes = gguf.quants.quantize(numbers, kind)
        return data
    return OWN[kind](numbers.reshape(-1, 256)).reshape(*numbers.shape[:-1], -1)


# --- a file -----------------------------------------------------------------------------------------------


def numbers_of(reader: TensorReader, spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Numbers:
    """A tensor by its name in the file, where a head of queries or keys has a pair's numbers side by side."""
    at, layer = "", name.removesuffix(".weight")
    if layer.startswith("blk."):
        number, layer = layer.removeprefix("blk.").split(".", 1)
        at = f"model.layers.{number}."
    if layer in W123:
        names = [f"{at}block_sparse_moe.experts.{e}.{W123[layer]}.weight" for e in range(spec.experts)]
        return np.stack([reader.float32(one, shape[1:]) for one in names])
    found = reader.float32(f"{at}{NAMES[layer]}.weight", shape)
    if layer in ("attn_q", "attn_k"):
        assert isinstance(spec.attention, GroupedQuery)
        halves = found.reshape(-1, 2, spec.attention.head_dim // 2, shape[1])
        found = halves.swapaxes(1, 2).reshape(shape)
    return found


def write(path: Path, experts: Type, others: Type) -> None:
    """The embedded model with matrices of these types, without a tokenizer."""
    index = CheckpointIndex.open(model_dir())
    spec = model_spec(index.config)
    assert isinstance(spec.attention, GroupedQuery)
    writer = gguf.GGUFWriter(path, "llama")
    write_settings(writer, spec, spec.attention)
    with TensorReader(index) as reader:
        for name, shape in tensors(spec, spec.attention):
            if name != "output.weight":  # tied to the embedding
                plain = len(shape) == 1 or "gate_inp" in name
                kind = Type.F32 if plain else experts if "_exps" in name else others
                data = encoded(numbers_of(reader, spec, name, shape), kind)
                writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- its perplexity ---------------------------------------------------------------------------------------


def perplexity(file: Path, tokens: Path, format: str, backbone: str) -> float:
    """Of these tokens, by a process of its own."""
    command: list[str | Path] = [
        sys.executable,
        HERE.parent / "launch.py",
        "score",
        "--model",
        file,
        "--tokens",
        tokens,
    ]
    command += ["--format", format, "--backbone-dtype", backbone, "--json"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=LIMIT).stdout
    found: float = json.loads(answer)["perplexity"]
    return found


def measure(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """A line for each file."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    tokens, file, ids = folder / "tokens.json", folder / "model.gguf", []
    for path in heldout().values():
        of_text = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        ids += of_text[: options.tokens]
    tokens.write_text(json.dumps(ids))
    cases: list[tuple[str, str, str, list[tuple[str, str]]]] = []
    for kind in filter(None, options.types.split(",")):
        cases.append(("experts", kind, "F32", [(name, "f32") for name in options.formats.split(",")]))
    for kind in filter(None, options.others.split(",")):
        cases.append(("others", "F32", kind, [("f32", "own"), ("f32", "bf16")]))
    for what, experts, others, formats in cases:
        write(file, Type[experts], Type[others])
        exact = perplexity(file, tokens, "f32", "f32")
        cells = [f"{what} {experts if what == 'experts' else others:5} {exact:8.3f}"]
        for format, backbone in formats:
            found = perplexity(file, tokens, format, backbone)
            name = format if what == "experts" else backbone
            cells.append(f"{name} {found:8.3f} {100 * (found / exact - 1):+6.2f} %")
        yield " | ".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default=TYPES, help="of experts")
    parser.add_argument("--others", default=OTHERS, help="of all other matrices")
    parser.add_argument("--formats", default="int8,int4", help="in which experts are kept")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # its stores are of no use later
        for line in measure(Path(folder), options):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
