"""What the settings of a GGUF file mean as the config.json of a checkpoint of Hugging Face.

llama.cpp names a setting alike for every architecture (`{arch}.block_count`), and knows by architecture what
no setting says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeline.errors import ModelError
from pipeline.models.config_keys import MAX_COUNT, shown

Shape = tuple[int, ...]

SIGMOID = 2  # of expert_gating_func; 1 is softmax
# Architectures that may rotate a part of a head only.
PARTLY_ROTATED = ("qwen3next", "qwen35moe", "glm4moe", "minimax-m2", "deepseek2", "gemma4")
# Groups of experts, and best ones, of DeepSeek-V3 and V2 by their number of experts: older files lack them.
UNSAID_GROUPS = {256: (8, 4), 160: (8, 3)}


class Header:
    """The settings of a file, without its architecture's prefix, and the shapes of its tensors by name."""

    def __init__(self, settings: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes
        said = settings.get("general.architecture")
        self.architecture = said if isinstance(said, str) else ""
        self._settings = settings

    def get(self, key: str, default: Any = None) -> Any:
        return self._settings.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int | float | None = None) -> Any:
        """Raises ModelError where it is missing, and has no default, or is no number."""
        value = self.get(key, default)
        if isinstance(value, list) and len({*map(str, value)}) == 1:  # one for each layer
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.architecture}.{key} must be a number, it is {shown(value)}")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A number of things, from 0 on."""
        value = self.number(key, default)
        if not isinstance(value, int) or value < 0:
            raise ModelError(f"{self.architecture}.{key} must be a whole number, it is {shown(value)}")
        return value

    def each(self, key: str, default: int | float | None = None) -> list[Any]:
        """A number by layer, which a file may say once for all."""
        value = self.get(key, default)
        if not isinstance(value, list):
            return [self.number(key, default)] * self.layers
        if len(value) < self.layers or not all(isinstance(one, int | float) for one in value):
            raise ModelError(f"{self.architecture}.{key} must be a number for each of {self.layers} layers")
        return value[: self.layers]

    def has(self, name: str) -> bool:
        """Returns whether some layer has this tensor."""
        return any(f"blk.{layer}.{name}" in self.shapes for layer in range(self.layers))

    @property
    def layers(self) -> int:
        """The number of layers of the decoder; a file may have more, which predict further tokens."""
        every = self.whole("block_count")
        if every > min(len(self.shapes), MAX_COUNT):
            raise ModelError(f"it has {len(self.shapes)} tensors, and claims {every} layers")
        further = self.whole("nextn_predict_layers", 0)
        if further >= every:
            raise ModelError(f"it claims {every} layers, and {further} of them predict further tokens")
        return every - further

    def with_tensor(self, name: str) -> list[int]:
        """The layers with this tensor."""
        return [layer for layer in range(self.layers) if f"blk.{layer}.{name}" in self.shapes]


def _common(h: Header) -> dict[str, Any]:
    """The keys of config.json that most families have, by the names of most."""
    embedding = h.shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise ModelError("it lacks the tensor token_embd.weight")
    config = {
        "vocab_size": embedding[0],
        "hidden_size": h.number("embedding_length"),
        "intermediate_size": h.number("feed_forward_length", 0) or h.number("expert_feed_forward_length", 0),
        "num_hidden_layers": h.layers,
        "num_attention_heads": h.number("attention.head_count"),
        "num_key_value_heads": max(h.each("attention.head_count_kv", h.number("attention.head_count"))),
        "max_position_embeddings": h.number("context_length"),
        "rms_norm_eps": h.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": h.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(h),
        "num_experts_per_tok": h.number("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in h.shapes,
        "hidden_act": "silu",
    }
    if (width := h.get("attention.key_length")) is not None:
        config["head_dim"] = width
    return config


def _rope_scaling(h: Header) -> dict[str, Any] | None:
    factor = h.number("rope.scaling.factor", h.number("rope.scale_linear", 1.0))  # the second in older files
    kind = h.get("rope.scaling.type", "linear" if factor not in (0, 1) else "none")
    if kind == "none":
        return None
    if h.number("rope.scaling.attn_factor", 1.0) != 1:
        raise ModelError(f"{h.architecture}.rope.scaling.attn_factor is not supported")
    if kind not in ("linear", "yarn"):
        raise ModelError(f"RoPE of type {shown(kind)} is not supported in GGUF (only linear, yarn)")
    scaling = {"rope_type": kind, "factor": factor}
    names = {
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
    }
    for key, name in names.items():
        if h.get(f"rope.scaling.{name}") is not None:
            scaling[key] = h.number(f"rope.scaling.{name}")
    return scaling


def _mixtral(h: Header) -> dict[str, Any]:
    return {"num_local_experts": h.number("expert_count"), "sliding_window": None}


def _qwen_moe(h: Header, normed: bool) -> dict[str, Any]:
    return {
        "num_experts": h.number("expert_count"),
        "moe_intermediate_size": h.number("expert_feed_forward_length"),
        "norm_topk_prob": normed,  # no file says it, and llama.cpp knows it by architecture
        "attention_bias": h.has("attn_output.bias"),
    }


def _qwen2_moe(h: Header) -> dict[str, Any]:
    return _qwen_moe(h, normed=False) | {
        "qkv_bias": h.has("attn_q.bias"),
        "shared_expert_intermediate_size": h.number("expert_shared_feed_forward_length"),
    }


def _qwen3_moe(h: Header) -> dict[str, Any]:
    return _qwen_moe(h, normed=True)


def _olmoe(h: Header) -> dict[str, Any]:
    clip = h.get("attention.clamp_kqv")
    return {"num_experts": h.number("expert_count"), "norm_topk_prob": False, "clip_qkv": clip}


def _qwen3_next(h: Header) -> dict[str, Any]:
    recurrent = set(h.with_tensor("ssm_a"))
    values = h.whole("ssm.time_step_rank")
    width = h.whole("ssm.inner_size") // max(values, 1)
    return _qwen_moe(h, normed=True) | {
        "shared_expert_intermediate_size": h.number("expert_shared_feed_forward_length"),
        "linear_num_key_heads": h.number("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": h.number("ssm.state_size"),
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": h.number("ssm.conv_kernel"),
        "layer_types": [
            "linear_attention" if layer in recurrent else "full_attention" for layer in range(h.layers)
        ],
        "partial_rotary_factor": h.number("rope.dimension_count") / h.number("attention.key_length"),
    }


def _gpt_oss(h: Header) -> dict[str, Any]:
    scaling = _rope_scaling(h)
    # A config that says nothing means the family's own YaRN, whose `truncate` no file says.
    rope = {"rope_type": "default"} if scaling is None else scaling | {"truncate": False}
    return {
        "intermediate_size": h.number("expert_feed_forward_length"),
        "num_local_experts": h.number("expert_count"),
        "sliding_window": h.number("attention.sliding_window"),
        "attention_bias": h.has("attn_q.bias"),
        "rope_scaling": rope,
    }


def _shared_experts(h: Header) -> dict[str, Any]:
    """The keys of DeepSeek's experts, which other families have too."""
    routed = h.number("expert_count")
    groups, best = UNSAID_GROUPS.get(routed, (1, 1)) if h.architecture == "deepseek2" else (1, 1)
    return {
        "n_routed_experts": routed,
        "n_shared_experts": h.number("expert_shared_count", 0),
        "moe_intermediate_size": h.number("expert_feed_forward_length"),
        "first_k_dense_replace": h.number("leading_dense_block_count", 0),
        "routed_scaling_factor": h.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(h.get("expert_weights_norm", False)),
        "n_group": h.number("expert_group_count", groups),
        "topk_group": h.number("expert_group_used_count", best),
    }


def _glm4_moe(h: Header) -> dict[str, Any]:
    return _shared_experts(h) | {
        "attention_bias": h.has("attn_q.bias"),
        "use_qk_norm": h.has("attn_q_norm.weight"),
        "partial_rotary_factor": h.number("rope.dimension_count") / h.number("attention.key_length"),
    }


def _minimax_m2(h: Header) -> dict[str, Any]:
    return {
        "intermediate_size": h.number("expert_feed_forward_length"),
        "num_local_experts": h.number("expert_count"),
        "rotary_dim": h.number("rope.dimension_count"),
        "scoring_func": "sigmoid",
    }


def _deepseek(h: Header) -> dict[str, Any]:
    """V2, or V3 and its like, whose routers score by sigmoid and have a bias for the choice."""
    config = _shared_experts(h)
    sigmoid = h.get("expert_gating_func") == SIGMOID or h.has("exp_probs_b.bias")
    groups = "group_limited_greedy" if config["n_group"] != 1 else "greedy"
    rotated = h.whole("rope.dimension_count")
    # Where attention is absorbed into latents, sizes of keys and values are those of latents.
    width = h.whole("attention.key_length_mla", h.whole("attention.key_length"))
    scaling, strength = _rope_scaling(h), h.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    if scaling is not None and strength:
        strength = float(str(np.float32(strength)))
        scaling |= {"mscale": strength, "mscale_all_dim": strength}
    return config | {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": "noaux_tc" if sigmoid else groups,
        "num_key_value_heads": h.number("attention.head_count"),
        "q_lora_rank": h.get("attention.q_lora_rank") or None,
        "kv_lora_rank": h.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": h.number("attention.value_length_mla", h.number("attention.value_length")),
        "head_dim": rotated,
        "rope_scaling": scaling,
    }


def _gemma4(h: Header) -> dict[str, Any]:
    """Keys of layers with a window are those of config.json, of others those with `global`; how much of a
    head these rotate says a tensor (`gguf_generic.py`)."""
    windowed = [bool(one) for one in h.each("attention.sliding_window_pattern")]
    heads = dict(zip(windowed, h.each("attention.head_count_kv"), strict=True))
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": h.number("rope.freq_base_swa", 10000.0)},
        "full_attention": {"rope_type": "proportional", "rope_theta": h.number("rope.freq_base")},
    }
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "sliding_window": h.number("attention.sliding_window"),
        "head_dim": h.number("attention.key_length_swa"),
        "global_head_dim": h.number("attention.key_length"),
        "num_key_value_heads": heads.get(True, heads.get(False)),
        "num_global_key_value_heads": heads.get(False),
        # Where keys are the values too, only layers with a window have a matrix of values.
        "attention_k_eq_v": h.with_tensor("attn_v.weight") != h.with_tensor("attn_k.weight"),
        "rope_parameters": rope,
        "final_logit_softcapping": h.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": h.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": h.shapes.get("per_layer_token_embd.weight", (0,))[0],
        "num_kv_shared_layers": h.number("attention.shared_kv_layers", 0),
        "enable_moe_block": True,
        "num_experts": h.number("expert_count"),
        "top_k_experts": h.number("expert_used_count"),
        "moe_intermediate_size": h.number("expert_feed_forward_length"),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _dots1(h: Header) -> dict[str, Any]:
    return _shared_experts(h) | {"sliding_window": None}


def _ernie4_5(h: Header) -> dict[str, Any]:
    return {
        "moe_num_experts": h.number("expert_count"),
        "moe_k": h.number("expert_used_count"),
        "moe_intermediate_size": h.number("expert_feed_forward_length"),
        "moe_num_shared_experts": h.number("expert_shared_count", 0),
        "moe_layer_start_index": h.number("leading_dense_block_count", 0),
        "moe_layer_interval": h.number("interleave_moe_layer_step", 1),
    }


def _hunyuan(h: Header) -> dict[str, Any]:
    return {
        "intermediate_size": h.number("expert_feed_forward_length"),
        "num_experts": h.number("expert_count"),
        "moe_topk": h.number("expert_used_count"),
    }


def _lfm2(h: Header) -> dict[str, Any]:
    convolved = set(h.with_tensor("shortconv.conv.weight"))
    return {
        "norm_eps": h.number("attention.layer_norm_rms_epsilon"),
        "num_experts": h.number("expert_count"),
        "moe_intermediate_size": h.number("expert_feed_forward_length"),
        "num_dense_layers": h.number("leading_dense_block_count"),
        "conv_L_cache": h.number("shortconv.l_cache"),
        "use_expert_bias": h.has("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": h.number("expert_weights_scale", 1.0) or 1.0,
        "layer_types": ["conv" if layer in convolved else "full_attention" for layer in range(h.layers)],
    }


READ: dict[str, tuple[str, Callable[[Header], dict[str, Any]]]] = {
    "llama": ("mixtral", _mixtral),
    "qwen2moe": ("qwen2_moe", _qwen2_moe),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "olmoe": ("olmoe", _olmoe),
    "qwen3next": ("qwen3_next", _qwen3_next),
    "qwen35moe": ("qwen3_5_moe_text", _qwen3_next),
    "gpt-oss": ("gpt_oss", _gpt_oss),
    "glm4moe": ("glm4_moe", _glm4_moe),
    "minimax-m2": ("minimax_m2", _minimax_m2),
    "deepseek2": ("deepseek_v3", _deepseek),  # or V2, which `_deepseek` says
    # Families without a backbone of our own (`gguf_generic.py`).
    "gemma4": ("gemma4_text", _gemma4),
    "dots1": ("dots1", _dots1),
    "ernie4_5-moe": ("ernie4_5_moe", _ernie4_5),
    "hunyuan-moe": ("hunyuan_v1_moe", _hunyuan),
    "lfm2moe": ("lfm2_moe", _lfm2),
}


def config_of(header: Header) -> dict[str, Any]:
    """The config.json of the checkpoint. Raises ModelError for a model that is not supported."""
    name = header.architecture
    if name not in READ:
        known = ", ".join(READ)
        raise ModelError(f"the GGUF architecture {shown(name)} is not supported (only {known})")
    if not header.whole("expert_count", 0):
        raise ModelError("no layer has experts; Tandem is for mixture-of-experts models")
    model_type, read = READ[name]
    config = {"model_type": model_type, **_common(header), **read(header)}
    if name not in PARTLY_ROTATED:
        heads = max(config["num_attention_heads"], 1)
        width = header.number("attention.key_length", config["hidden_size"] // heads)
        if (rotated := header.number("rope.dimension_count", width)) != width:
            raise ModelError(f"{name}.rope.dimension_count is {rotated} of heads of {width}: not supported")
    if "rope_parameters" in config:  # in place of older keys
        del config["rope_theta"], config["rope_scaling"]
    return config
