"""Writes a GGUF file with random weights of a model's shapes, all matrices and the head in Q4_0.

    ENV/bin/python -P benchmarks/llama_model.py '{"architecture": "llama", "layers": 4, ...}' FILE

Runs in the environment of llama.cpp (`llama_environment.py`). The map has a ModelSpec's fields, llama.cpp's
name of the architecture, and "head_norms". Memory holds one tensor at a time. The file has no tokenizer; use
token ids.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BLOCK = 32  # weights of a Q4_0 block: a float16 scale, then 16 bytes of two weights each
SPREAD = 4.61  # standard deviation of q - 8 for q uniform in 0..15


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]  # the last axis is summed over
    quantized: bool = True

    @property
    def nbytes(self) -> int:
        weights = int(np.prod(self.shape))
        return weights // BLOCK * 18 if self.quantized else weights * 4

    def random(self, random: np.random.Generator) -> np.ndarray:
        """Random bytes of standard deviation 1 / sqrt(columns); ones for a vector, which is a norm."""
        scale = self.shape[-1] ** -0.5
        if self.quantized:
            blocks = random.integers(0, 256, (self.nbytes // 18, 18), np.uint8)
            # The mean of q - 8 is -0.5. With the same sign everywhere, hidden states would become alike, and
            # all tokens would choose the same experts.
            signs = random.choice(np.array([-1, 1], np.float16), (len(blocks), 1))
            blocks[:, :2] = (signs * np.float16(scale / SPREAD)).view(np.uint8)
            return blocks
        if len(self.shape) == 1:
            return np.ones(self.shape, np.float32)
        return random.standard_normal(self.shape, np.float32) * np.float32(scale)


def tensors(shape: dict[str, Any]) -> list[Tensor]:
    """All tensors, with llama.cpp's names."""
    hidden, inner, experts = shape["hidden"], shape["intermediate"], shape["experts"]
    queries, keys = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    found = [Tensor("token_embd.weight", (shape["vocabulary"], hidden))]
    for layer in range(shape["layers"]):
        at = f"blk.{layer}"
        found += [
            Tensor(f"{at}.attn_norm.weight", (hidden,), False),
            Tensor(f"{at}.attn_q.weight", (queries, hidden)),
            Tensor(f"{at}.attn_k.weight", (keys, hidden)),
            Tensor(f"{at}.attn_v.weight", (keys, hidden)),
            Tensor(f"{at}.attn_output.weight", (hidden, queries)),
            Tensor(f"{at}.ffn_norm.weight", (hidden,), False),
            Tensor(f"{at}.ffn_gate_inp.weight", (experts, hidden), False),
            Tensor(f"{at}.ffn_gate_exps.weight", (experts, inner, hidden)),
            Tensor(f"{at}.ffn_up_exps.weight", (experts, inner, hidden)),
            Tensor(f"{at}.ffn_down_exps.weight", (experts, hidden, inner)),
        ]
        if shape["head_norms"]:
            found += [
                Tensor(f"{at}.attn_{one}_norm.weight", (shape["head_dim"],), False) for one in ("q", "k")
            ]
    return [
        *found,
        Tensor("output_norm.weight", (hidden,), False),
        Tensor("output.weight", (shape["vocabulary"], hidden)),
    ]


def write(shape: dict[str, Any], path: Path) -> None:
    writer = gguf.GGUFWriter(path, shape["architecture"])
    writer.add_block_count(shape["layers"])
    writer.add_context_length(shape["max_positions"])
    writer.add_embedding_length(shape["hidden"])
    writer.add_feed_forward_length(shape["intermediate"])
    writer.add_expert_feed_forward_length(shape["intermediate"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["norm_eps"])
    writer.add_expert_count(shape["experts"])
    writer.add_expert_used_count(shape["top_k"])
    writer.add_vocab_size(shape["vocabulary"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    found = tensors(shape)
    for tensor in found:
        kind = gguf.GGMLQuantizationType.Q4_0 if tensor.quantized else gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for tensor in found:
        writer.write_tensor_data(tensor.random(random))
    writer.close()


if __name__ == "__main__":
    write(json.loads(sys.argv[1]), Path(sys.argv[2]))
