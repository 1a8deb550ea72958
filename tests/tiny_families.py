"""Tiny models with random weights of every family of transformers whose experts can be computed outside it.

Such a family is a folder of transformers/models with a class that `use_experts_implementation` decorates. Its
default config is shrunk: known sizes become small, and of the lists with one entry a layer, layers are kept
so that every combination of entries (full attention and experts, linear attention and dense, ...) occurs.
Where a family's text has a head only in the model of text and images, that model is made without its other
parts.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import models as all_models

LAYERS = 6  # at most, unless more are needed for every combination of entries
SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"], 128),
    **{"hidden_size": 64, "intermediate_size": 96, "dense_intermediate_size": 96, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    **dict.fromkeys(["max_position_embeddings", "model_max_length"], 256),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    # experts
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"], 8),
    **dict.fromkeys(
        ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"], 2
    ),
    **{"n_group": 2, "topk_group": 1, "num_expert_group": 2, "router_hidden_size": 16},
    **{"moe_intermediate_size": 48, "moe_latent_size": 32, "moe_hidden_size": 32},
    **dict.fromkeys(["shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"], 40),
    **dict.fromkeys(["shared_intermediate_size", "shared_experts_intermediate_size"], 40),
    # latent attention, indexers
    **{
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    **{"qk_head_dim": 24, "o_lora_rank": 16, "o_groups": 2, "rotary_dim": 8, "gated_norm_rank": 8},
    **{"index_head_dim": 16, "index_n_heads": 4, "index_topk": 8, "index_kpool": 4, "d_rel": 8},
    **{"index_block_size": 4, "index_topk_blocks": 2},
    # windows
    **dict.fromkeys(["sliding_window", "sliding_window_size", "attention_chunk_size"], 8),
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16},
    # recurrent layers
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 16),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4},
    **{
        "mamba_d_state": 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_chunk_size": 8,
        "mamba_dt_rank": 8,
    },
    **{"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
    **{"chunk_size": 8, "block_size": 8},
    # others
    **{"hidden_size_per_layer_input": 16, "hc_lowrank": 16, "ple_embed_dim": 32, "rel_extent": 16},
    **{"ngram_vocab_size_base": 512, "split_ngram_parts": 4, "log_scaling_n_floor": 128},
    **{"n_layers_per_attn_res_block": 2, "use_cache": True, "attention_dropout": 0.0},
}
NEVER_NONE = (
    "head_dim",
    "num_experts_per_tok",
    "num_key_value_heads",
)  # in a model, unlike in the default config
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {"mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1)},
    "diffusion_gemma": {
        **{"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48, "per_layer_config": None}
    },
    "dots3_note": {
        **{
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 16,
            "swa_v_head_dim": 16,
        },
        **{"swa_q_lora_rank": 32, "swa_kv_lora_rank": 32, "swa_qk_nope_head_dim": 8},
    },
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [48, 32],
        "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
    },
    "glm4v_moe": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm5_next": {"qk_rope_head_dim": 0, "qk_head_dim": 16},
    "granitemoehybrid": {"layer_types": LINEAR},
    "hy_v4_vl": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
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
        **{"layer_types": ["full_attention", "minimax_m3_sparse"] * (LAYERS // 2), "index_n_heads": 2}
    },
    "mistral_large4": {"kv_source_layers": None},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"]},
    "qwen4_exp": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * (LAYERS // 3),
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "ple_layer_ids": [1, 4], "heads_per_ngram": 2},
        "eos_token_id": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}
# Parts of a model beside its text whose config must fit that of the text.
OTHER_PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 64}},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}, "vision_config": {"out_hidden_size": 64}},
}


def family_names() -> list[str]:
    """The families of the installed transformers, by folder."""
    root = Path(all_models.__path__[0])
    found = []
    for name in sorted(module.name for module in pkgutil.iter_modules(all_models.__path__)):
        modeling = root / name / f"modeling_{name}.py"
        if modeling.exists() and "\n@use_experts_implementation" in modeling.read_text():
            found.append(name)
    return found


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The config of the family's decoder of text: the default one with small sizes, and with these
    changes."""
    kind = _text_config_class(family)
    fields = kind().to_dict()
    sizes = {k: v for k, v in SIZES.items() if k in fields and (fields[k] is not None or k in NEVER_NONE)}
    if fields.get("head_dim") is not None and fields["head_dim"] == fields.get("qk_rope_head_dim"):
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    layers = fields.get("num_hidden_layers") or len(fields["layers_block_type"])
    by_layer = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == layers > LAYERS}
    by_layer = {k: v for k, v in by_layer.items() if len(set(v)) <= LAYERS}
    kept = _cover([tuple(map(str, entries)) for entries in zip(*by_layer.values(), strict=True)])
    for key, values in by_layer.items():
        sizes[key] = [values[i] for i in kept]
    if by_layer or "num_hidden_layers" in fields:
        sizes["num_hidden_layers"] = len(kept) or min(LAYERS, layers)
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if fields.get(key):
            sizes[key] = 1
    return kind(**{**sizes, **CHANGES.get(family, {}), **changes})


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The decoder with its head, in float32, with weights large enough that routers and experts matter, and
    with these changes of the text's config. Where only the model of text and images has a head it is that
    one, without any other part than `get_decoder()` and the head."""
    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    kind = _class_of(type(config), "ForCausalLM")
    model = _text_only(family, config) if kind is None else _made(kind, config)
    _draw(model)
    return model.eval()


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    for name, tensor in model.named_parameters():
        if tensor.dim() >= 2:
            nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)
        elif "bias" in name or "sink" in name:
            nn.init.normal_(tensor, std=0.1)
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(tensor, std=0.05)


def _text_only(family: str, text: PreTrainedConfig) -> PreTrainedModel:
    """The text and its head of the family's model of text and images. The other parts have no memory and are
    then dropped."""
    whole = _whole_config_class(family)
    kind = whole and _class_of(whole, "ForConditionalGeneration")
    if whole is None or kind is None:  # no decoder: there is no head
        return _made(_class_of(type(text), "Model"), text)
    config = whole(text_config=text.to_dict(), **OTHER_PARTS.get(family, {}))
    with torch.device("meta"):
        model = _made(kind, config)
    path = next(name for name, module in model.named_modules() if module is model.get_decoder())
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    decoder = _made(type(model.get_decoder()), config.get_text_config(decoder=True))
    model.set_submodule(path, decoder)
    model.set_output_embeddings(nn.Linear(head.in_features, head.out_features, bias=head.bias is not None))
    for parent in (model, model.get_submodule(path.rpartition(".")[0])):
        for name, child in parent.named_children():
            if decoder not in child.modules() and child is not model.get_output_embeddings():
                parent._modules[name] = None
        for name, parameter in parent.named_parameters(recurse=False):
            parent._parameters[name] = None if parameter.is_meta else parameter
    model.tie_weights()
    return model


def _made(kind: type[PreTrainedModel] | None, config: PreTrainedConfig) -> PreTrainedModel:
    assert kind is not None
    made: PreTrainedModel = kind._from_config(config, dtype=torch.float32, attn_implementation="eager")
    return made


def _config_classes(family: str) -> list[type[PreTrainedConfig]]:
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, PreTrainedConfig)]
    return [c for c in classes if c.__module__ == module.__name__]


def _text_config_class(family: str) -> type[PreTrainedConfig]:
    classes = _config_classes(family)
    text = [c for c in classes if c.__name__.endswith("TextConfig") and "Talker" not in c.__name__]
    return (text or [c for c in classes if c.model_type == family])[0]


def _whole_config_class(family: str) -> type[PreTrainedConfig] | None:
    """Of the model of text and images."""
    classes = [c for c in _config_classes(family) if "text_config" in c.sub_configs]
    return next((c for c in classes if "Talker" not in c.__name__), None)


def _class_of(config: type[PreTrainedConfig], ending: str) -> type[PreTrainedModel] | None:
    """The family's model with this config whose name ends so."""
    module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    models = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, PreTrainedModel)]
    for made in models:
        of = getattr(made, "__annotations__", {}).get("config", getattr(made, "config_class", None))
        if of is config and made.__name__.endswith(ending) and "PreTrained" not in made.__name__:
            return made
    return None


def _cover(entries: list[tuple[str, ...]]) -> list[int]:
    """Layers, in order, in which each combination occurs, and up to LAYERS of them."""
    first = [entries.index(entry) for entry in dict.fromkeys(entries)]
    more = [i for i in range(len(entries)) if i not in first]
    return sorted(first + more[: max(0, LAYERS - len(first))])
