"""Writes tiny random checkpoints, by default of Mixtral's architecture."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline.models.registry import architecture_of, model_spec

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 3, 64, 100


def config() -> dict[str, Any]:
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
    """The routed experts: all that the loader reads."""
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


def embedded(folder: Path) -> Path:
    """A model of the embedded model's size: 12.6 million expert weights, all zero."""
    settings = config() | {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_local_experts": 8,
    }
    zeros = torch.zeros(256, 256, dtype=torch.bfloat16)
    tensors = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{w}.weight": zeros.clone()
        for layer in range(8)
        for expert in range(8)
        for w in ("w1", "w2", "w3")
    }
    return write(folder, tensors, settings=settings)


def backbone_tensors(settings: Mapping[str, Any], fused: bool = False) -> dict[str, torch.Tensor]:
    """All other tensors, zero, because no test computes with them."""
    architecture, spec = architecture_of(settings), model_spec(settings)
    backbone = [*architecture.outer(spec).values()]
    for layer in range(spec.layers):
        backbone += architecture.layer(spec, layer, fused).values()
    return {tensor.name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for tensor in backbone}


def write(
    folder: Path,
    tensors: dict[str, torch.Tensor] | None = None,
    shards: int = 1,
    settings: Mapping[str, Any] | None = None,
    fused: bool = False,
) -> Path:
    """A Hugging Face directory with the experts `tensors` and a backbone. `settings`: its config.json."""
    settings = config() if settings is None else settings
    tensors = expert_tensors() if tensors is None else tensors
    return write_exactly(folder, backbone_tensors(settings, fused) | tensors, shards, settings)


def write_exactly(
    folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1, settings: Mapping[str, Any] | None = None
) -> Path:
    """A directory with these tensors only, in `shards` files, with an index where there are several."""
    settings = config() if settings is None else settings
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    files = {name: shard_name(n % shards, shards) for n, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    write_index(folder, files.items())
    return folder


def shard_name(shard: int, shards: int) -> str:
    return f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"


def write_index(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    index = {"metadata": {}, "weight_map": dict(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
