"""Tiny models with random weights of every family of transformers whose experts can be computed outside it.

A family is a folder of transformers/models with a class that is decorated with `use_experts_implementation`.
Its default config is shrunk: known sizes get small values, and of lists with one entry a layer those layers
are kept with which each combination of entries (full attention and experts, linear attention and dense, ...)
occurs.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import models as all_models
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from pipeline.generic.describe import _answer
from pipeline.models.facts import pack

SIZES: dict[str, Any] = {
    **{
        "vocab_size": 128,
        "unpadded_vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 16,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"model_max_length": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    # experts
    **{"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 8},
    **{"moe_intermediate_size": 48, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2},
    **{"moe_k": 2, "top_k_experts": 2, "n_group": 2, "topk_group": 1, "num_expert_group": 2},
    **{"moe_latent_size": 32, "moe_hidden_size": 32, "shared_expert_intermediate_size": 40},
    **{"shared_intermediate_size": 40, "shared_experts_intermediate_size": 40, "router_hidden_size": 16},
    **{"moe_shared_expert_intermediate_size": 40, "dense_intermediate_size": 96},
    # latent attention, indexers
    **{
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    **{"qk_head_dim": 24, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 8, "o_lora_rank": 16},
    **{"o_groups": 2, "index_block_size": 4, "index_topk_blocks": 2, "index_kpool": 4, "rotary_dim": 8},
    # windows
    **{"sliding_window": 8, "sliding_window_size": 8, "swa_num_attention_heads": 4, "swa_head_dim": 16},
    **{"swa_num_key_value_heads": 2, "attention_chunk_size": 8},
    # recurrent layers
    **{
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_head_dim": 16,
    },
    **{"linear_num_value_heads": 4, "linear_num_heads": 4, "mamba_d_state": 16, "mamba_n_heads": 8},
    **{"mamba_d_head": 16, "mamba_chunk_size": 8, "mamba_dt_rank": 8, "ssm_state_size": 16},
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8, "block_size": 8},
    # others
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "hc_lowrank": 16, "d_rel": 8},
    **{"ple_embed_dim": 32, "ngram_vocab_size_base": 512, "split_ngram_parts": 4, "rel_extent": 16},
    **{"log_scaling_n_floor": 128, "n_layers_per_attn_res_block": 2, "gated_norm_rank": 8},
    **{"use_cache": True, "attention_dropout": 0.0},
}
OPTIONAL = ("head_dim", "num_experts_per_tok", "num_key_value_heads")  # whose defaults no model can have
# Of the encoders of images and sounds that a decoder of text may stand beside.
OTHER_SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "embed_dim": 32, "d_model": 32, "dim": 32, "intermediate_size": 48, "depth": 2},
    **{
        "num_hidden_layers": 2,
        "num_layers": 2,
        "encoder_layers": 2,
        "num_heads": 2,
        "num_attention_heads": 2,
    },
    **{"num_key_value_heads": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "head_dim": 16},
    **{"out_hidden_size": 64, "output_dim": 64, "vocab_size": 128, "codebook_size": 32, "n_positions": 64},
    **{"downsample_hidden_size": 32, "mlp_dim": 48, "window_layers": [0], "fullatt_block_indexes": [1]},
    **{
        "deepstack_visual_indexes": [0],
        "num_quantizers": 2,
        "upsample_rates": [2],
        "projector_hidden_size": 32,
    },
}
LAYERS = 6  # at most, unless more are needed for every combination of entries
SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
DOTS3_WINDOWED = {
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 40},
    **{"head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {"mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1)},
    "diffusion_gemma": {"num_experts": 8, "top_k_experts": 2, "per_layer_config": None},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "dots3_note": {"per_layer_config": {layer: DOTS3_WINDOWED for layer in ("2", "3", "4")}},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [48, 32],
        "rope_parameters": ROPE | {"mrope_section": [3, 3, 2]},
    },
    "glm4v_moe": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm5_next": {"qk_rope_head_dim": 0, "qk_head_dim": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    "hy_v4_vl": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "gemma4": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48},
    "mistral4": {
        "head_dim": 24,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 1 / 3, "factor": 4.0},
            **{"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
            "original_max_position_embeddings": 16,
        },
    },
    "laguna": {"layer_types": SLIDING},
    "mellum": {"layer_types": SLIDING},
    "minimax_m3_vl": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * (LAYERS // 2),
        "index_n_heads": 2,
    },
    "mistral_large4": {"kv_source_layers": None},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"]},
    "qwen4_exp": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * (LAYERS // 3),
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "ple_layer_ids": [1, 4], "ple_embed_dim": 32, "heads_per_ngram": 2},
        "eos_token_id": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def _family_names() -> list[str]:
    """Returns the families of the installed transformers, by folder."""
    folder = Path(all_models.__path__[0])
    names = [module.name for module in pkgutil.iter_modules([str(folder)])]
    files = {name: folder / name / f"modeling_{name}.py" for name in names}
    return [n for n, f in files.items() if f.exists() and "\n@use_experts_implementation" in f.read_text()]


# Families that are refused, and what the line says of them.
REFUSED = {
    "deepseek_v4": "keeps the cache in a way of its own",  # compressed parts of what a sequence had
    "diffusion_gemma": "is no decoder of text that generates token by token",
    "muse_spark": "expert's output is normalised",  # which is no sum of tiles
    "openai_privacy_filter": "is no decoder of text that generates token by token",
    "unlimited_ocr": "keeps the cache in a way of its own",  # windows that depend on the prompt's length
}
NOT_MADE = {"qwen3_omni_moe"}  # here: the part that speaks has no small sizes
FAMILIES = [family for family in _family_names() if family not in REFUSED.keys() | NOT_MADE]


def described(question: bytes) -> bytes:
    """Returns what the process answers that describes a model (`pipeline/generic/describe.py`)."""
    asked = msgspec.json.decode(question)
    return pack(_answer(asked["config"], asked.get("headers")))


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Returns the family's default config with small sizes: of its decoder of text where transformers has
    a model of that alone, else with an encoder of images or sounds. `changes`: of the decoder's."""
    text, whole = _config_classes(family)
    config = text(**{**_small(text), **CHANGES.get(family, {}), **changes})
    if text is whole or MODEL_FOR_CAUSAL_LM_MAPPING.get(text, None) is not None:
        return config
    return _composite(whole, config)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns the class that transformers has for a model of text with this config."""
    mappings = (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )
    for mapping in mappings:
        if (found := mapping.get(type(config), None)) is not None:
            return found[0] if isinstance(found, tuple) else found
    raise LookupError(f"no model of text for {type(config).__name__}")


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Returns a model in float32, with weights large enough that routers and experts matter."""
    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    model = model_class(config)._from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() >= 2:
                nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)
            elif "bias" in name or "sink" in name:
                nn.init.normal_(tensor, std=0.1)
            elif name.endswith("A_log"):  # else states forget at once, and norms enlarge rounding errors
                nn.init.normal_(tensor, mean=-1, std=0.5)
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                nn.init.normal_(tensor, std=0.05)
    return model.eval()


def _config_classes(family: str) -> tuple[type[PreTrainedConfig], type[PreTrainedConfig]]:
    """Returns the config classes of the family's decoder of text, and of the whole model."""
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, PreTrainedConfig)]
    classes = [c for c in classes if c.__module__ == module.__name__]
    text = [c for c in classes if c.__name__.endswith("TextConfig") and "Talker" not in c.__name__]
    whole = [c for c in classes if c.model_type == family]
    return (text or whole)[0], (whole or text)[0]


def _small(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    fields = kind().to_dict()
    known = {k: v for k, v in SIZES.items() if k in fields and (fields[k] is not None or k in OPTIONAL)}
    if fields.get("head_dim") is not None and fields["head_dim"] == fields.get("qk_rope_head_dim"):
        known["head_dim"] = known["qk_rope_head_dim"]
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        known["num_key_value_heads"] = known["num_attention_heads"]
    layers = fields.get("num_hidden_layers") or len(fields["layers_block_type"])
    lists = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == layers and layers > LAYERS}
    lists = {k: v for k, v in lists.items() if len(set(v)) <= LAYERS}
    kept = (
        _cover([tuple(map(str, entries)) for entries in zip(*lists.values(), strict=True)]) if lists else []
    )
    for key, values in lists.items():
        known[key] = [values[i] for i in kept]
    if lists or "num_hidden_layers" in fields:
        known["num_hidden_layers"] = len(kept) or min(LAYERS, layers)
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if fields.get(key):
            known[key] = 1
    return known


def _cover(entries: list[tuple[str, ...]]) -> list[int]:
    """Returns layers, in order, in which each combination occurs, and up to LAYERS of them."""
    first = [entries.index(entry) for entry in dict.fromkeys(entries)]
    more = [i for i in range(len(entries)) if i not in first]
    return sorted(first + more[: max(0, LAYERS - len(first))])


def _composite(kind: type[PreTrainedConfig], text: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of a model with this decoder of text; its other parts are small."""
    fields = kind().to_dict()
    parts: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict) and key.endswith("_config") and key != "text_config":
            parts[key] = _smaller(value)
        elif key == "text_config":
            parts[key] = text.to_dict()
    return kind(**parts)


def _smaller(fields: dict[str, Any]) -> dict[str, Any]:
    small = {
        k: _smaller(v) if isinstance(v, dict) and k.endswith("_config") else v for k, v in fields.items()
    }
    small |= {k: v for k, v in OTHER_SIZES.items() if k in fields and fields[k] is not None}
    if isinstance(kinds := small.get("layer_types"), list):
        small["layer_types"] = kinds[: small["num_hidden_layers"]]
    return small
