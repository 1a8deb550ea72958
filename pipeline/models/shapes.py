"""Shapes of well-known models, for `--model shape:NAME[/LAYERS]`: a config.json without weights, so that a
model's speed can be measured before it is downloaded (`pipeline/checkpoint/random_model.py`). To add one, add
its entry to SHAPES, with the keys that its family reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError
from pipeline.models.config_keys import Config

PREFIX = "shape:"
LAYERS = "num_hidden_layers"

# Keys that all shapes share, and those of a family.
_COMMON: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False}
_MIXTRAL = _COMMON | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN = _COMMON | {"vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN2 = _QWEN | {"model_type": "qwen2_moe", "norm_topk_prob": False}
_QWEN3 = _QWEN | {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}
_DEEPSEEK_V2 = _COMMON | {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}


def _sizes(*, layers: int, heads: int, kv_heads: int, hidden: int, intermediate: int) -> dict[str, Any]:
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {LAYERS: layers, "hidden_size": hidden, "intermediate_size": intermediate} | attention


SHAPES = {
    "mixtral-8x7b": _MIXTRAL
    | _sizes(layers=32, heads=32, kv_heads=8, hidden=4096, intermediate=14336)
    | {"max_position_embeddings": 32768},
    "mixtral-8x22b": _MIXTRAL
    | _sizes(layers=56, heads=48, kv_heads=8, hidden=6144, intermediate=16384)
    | {"max_position_embeddings": 65536},
    # Without the factors of its rotary embedding, which do not change its speed.
    "phi-3.5-moe": _COMMON
    | _sizes(layers=32, heads=32, kv_heads=8, hidden=4096, intermediate=6400)
    | {
        "model_type": "phimoe",
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "attention_bias": True,
        "lm_head_bias": True,
        "vocab_size": 32064,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    },
    "qwen1.5-moe-a2.7b": _QWEN2
    | _sizes(layers=24, heads=16, kv_heads=16, hidden=2048, intermediate=5632)
    | {
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 8192,
    },
    "qwen2-57b-a14b": _QWEN2
    | _sizes(layers=28, heads=28, kv_heads=4, hidden=3584, intermediate=18944)
    | {
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 32768,
    },
    "qwen3-30b-a3b": _QWEN3
    | _sizes(layers=48, heads=32, kv_heads=4, hidden=2048, intermediate=6144)
    | {"moe_intermediate_size": 768},
    "qwen3-235b-a22b": _QWEN3
    | _sizes(layers=94, heads=64, kv_heads=4, hidden=4096, intermediate=12288)
    | {"moe_intermediate_size": 1536},
    "deepseek-v2-lite": _DEEPSEEK_V2
    | _sizes(layers=27, heads=16, kv_heads=16, hidden=2048, intermediate=10944)
    | {
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "deepseek-v2": _DEEPSEEK_V2
    | _sizes(layers=60, heads=128, kv_heads=128, hidden=5120, intermediate=12288)
    | {
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "q_lora_rank": 1536,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
    },
    "olmoe-1b-7b": _COMMON
    | _sizes(layers=16, heads=16, kv_heads=16, hidden=2048, intermediate=1024)
    | {
        "model_type": "olmoe",
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    },
}


def is_shape(model: str | Path) -> bool:
    """Returns whether `--model` names a shape instead of a folder."""
    return str(model).startswith(PREFIX)


def short_name(model: str | Path) -> str:
    """A model's name in lists: of a folder its last component, of a shape the whole name, and of a folder in
    the Hugging Face cache (models--ORG--NAME/snapshots/COMMIT) ORG/NAME."""
    if is_shape(model):
        return str(model)
    path = Path(model)
    kind, *name = path.parent.parent.name.split("--")
    if kind == "models" and name and path.parent.name == "snapshots":
        return "/".join(name)
    return path.name


def shape_config(model: str) -> tuple[str, Config]:
    """Name and config, from shape:NAME or shape:NAME/N (its first N layers). Raises ModelError, one line."""
    name, slash, layers = model.removeprefix(PREFIX).partition("/")
    if name not in SHAPES:
        raise ModelError(f"{model}: unknown shape {name!r} (supported: {', '.join(SHAPES)})")
    config = SHAPES[name]
    if not slash:
        return name, config
    most = config[LAYERS]
    if not re.fullmatch("[1-9][0-9]{0,8}", layers) or int(layers) > most:
        raise ModelError(f"{model}: write it as {PREFIX}{name}/N, with N layers from 1 to {most}")
    return name, config | {LAYERS: int(layers)}
