"""Writes a Mixtral checkpoint with random weights and any shape, sharded by layer, in bfloat16.

    python benchmarks/random_checkpoint.py DIR --layers 2          # Mixtral-8x7B's layers, 2 of its 32

For measuring: speed depends on shapes, not on what the weights say. It has no tokenizer; give token ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.models.shapes import SHAPES

MIXTRAL_8X7B = SHAPES["mixtral-8x7b"] | {"architectures": ["MixtralForCausalLM"], "eos_token_id": 2}


def write(folder: Path, layers: int, seed: int) -> int:
    """Write the checkpoint; returns its bytes."""
    config = MIXTRAL_8X7B | {"num_hidden_layers": layers}
    hidden, inner = MIXTRAL_8X7B["hidden_size"], MIXTRAL_8X7B["intermediate_size"]
    keys = hidden // 4  # 8 of 32 heads
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        scale = columns**-0.5
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, scale, generator=generator)

    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    total = 0

    def shard(number: int, tensors: dict[str, Tensor]) -> None:
        nonlocal total
        file = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, file))
        total += sum(t.nbytes for t in tensors.values())

    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors = {
            f"{at}.input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{at}.post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{at}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{at}.self_attn.k_proj.weight": matrix(keys, hidden),
            f"{at}.self_attn.v_proj.weight": matrix(keys, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{at}.block_sparse_moe.gate.weight": matrix(8, hidden),
        }
        for expert in range(8):
            moe = f"{at}.block_sparse_moe.experts.{expert}"
            tensors[f"{moe}.w1.weight"] = matrix(inner, hidden)
            tensors[f"{moe}.w2.weight"] = matrix(hidden, inner)
            tensors[f"{moe}.w3.weight"] = matrix(inner, hidden)
        shard(layer, tensors)
    shard(
        layers,
        {
            "model.embed_tokens.weight": matrix(32000, hidden),
            "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            "lm_head.weight": matrix(32000, hidden),
        },
    )
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    total = write(arguments.folder, arguments.layers, arguments.seed)
    print(f"{total / 1e9:.2f} GB in {arguments.folder}")


if __name__ == "__main__":
    main()
