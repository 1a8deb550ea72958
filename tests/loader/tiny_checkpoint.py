"""Writes a tiny random Mixtral checkpoint: experts only, which is all that the loader reads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 3, 64, 100


def config() -> dict:
    return {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }


def expert_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            at = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            for name, shape in (
                ("w1", (INTERMEDIATE, HIDDEN)),
                ("w2", (HIDDEN, INTERMEDIATE)),
                ("w3", (INTERMEDIATE, HIDDEN)),
            ):
                tensors[f"{at}.{name}.weight"] = torch.randn(*shape, generator=generator).to(dtype)
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, shards: int = 1) -> Path:
    """A Hugging Face directory; with an index and several files where `shards` > 1."""
    tensors = expert_tensors() if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config()))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    names = sorted(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
