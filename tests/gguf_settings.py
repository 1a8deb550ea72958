"""The settings of a GGUF file by the config.json of its checkpoint, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf

Config = Mapping[str, Any]


def with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """With the rotary embedding's numbers as of version 4 of transformers."""
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:  # they differ by layer
        return config
    kind = rope.get("rope_type", "default")
    old = {"rope_theta": rope["rope_theta"]} if rope else {}
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope and kind != "default":
        old["rope_scaling"] = {"type": kind, **rope}
    return config | old


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
WIDTH_SAID = ("qwen3_moe", "glm4_moe", "minimax_m2")  # of a head, also where config.json does not
USED = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


def write_settings(w: gguf.GGUFWriter, c: Config) -> None:
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    latent = c["model_type"] in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    if c["model_type"] not in ("gemma4_text", "lfm2_moe"):  # which have them by layer
        w.add_head_count_kv(1 if latent else c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["norm_eps"] if "norm_eps" in c else c["rms_norm_eps"])
    if "rope_theta" in c:
        w.add_rope_freq_base(c["rope_theta"])
    w.add_expert_used_count(next(c[k] for k in USED if k in c))
    w.add_expert_count(next(c[k] for k in EXPERTS if k in c))
    for key, write in (("n_group", w.add_expert_group_count), ("topk_group", w.add_expert_group_used_count)):
        if key in c:
            write(c[key])
    rope = c.get("rope_scaling")
    if rope and rope["type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(getattr(gguf.RopeScalingType, rope["type"].upper()))
        w.add_rope_scaling_factor(rope["factor"])
        if rope["type"] == "yarn":
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            w.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if "beta_slow" in rope:
            w.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if rope.get("attention_factor") is not None:
            w.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if latent and rope.get("mscale_all_dim") is not None:
            w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "moe_intermediate_size" in c:
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in c:
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    width = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    match c["model_type"]:
        case "mixtral":
            w.add_rope_dimension_count(width)
        case "olmoe":
            if c.get("clip_qkv"):
                w.add_clamp_kqv(c["clip_qkv"])
        case "qwen3_next" | "qwen3_5_moe_text":
            w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
            w.add_ssm_state_size(c["linear_key_head_dim"])
            w.add_ssm_group_count(c["linear_num_key_heads"])
            w.add_ssm_time_step_rank(c["linear_num_value_heads"])
            w.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
            w.add_full_attention_interval(c.get("full_attention_interval", 4))
            w.add_rope_dimension_count(int(width * c.get("partial_rotary_factor", 0.25)))
        case "gpt_oss":
            w.add_sliding_window(c["sliding_window"])
            w.add_expert_feed_forward_length(c["intermediate_size"])
        case "minimax_m2":
            w.add_expert_feed_forward_length(c["intermediate_size"])
            w.add_rope_dimension_count(int(c.get("rotary_dim") or width * c.get("partial_rotary_factor", 1)))
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        case "glm4_moe":
            w.add_rope_dimension_count(int(width * c.get("partial_rotary_factor", 0.5)))
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            write_shared_experts(w, c)
        case "gemma4_text":
            write_gemma4(w, c)
        case "dots1":
            write_shared_experts(w, c)
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        case "ernie4_5_moe":
            w.add_interleave_moe_layer_step(c["moe_layer_interval"])
            w.add_leading_dense_block_count(c["moe_layer_start_index"])
            w.add_expert_shared_count(c["moe_num_shared_experts"])
        case "hunyuan_v1_moe":
            w.add_expert_feed_forward_length(c["intermediate_size"])
            w.add_expert_shared_feed_forward_length(c["intermediate_size"])
        case "lfm2_moe":
            kinds = c["layer_types"]
            w.add_head_count_kv([0 if kind == "conv" else c["num_key_value_heads"] for kind in kinds])
            w.add_leading_dense_block_count(c["num_dense_layers"])
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            w.add_shortconv_l_cache(c["conv_L_cache"])
    if latent:
        w.add_vocab_size(c["vocab_size"])
        if c.get("q_lora_rank"):
            w.add_q_lora_rank(c["q_lora_rank"])
        w.add_kv_lora_rank(c["kv_lora_rank"])
        w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
        w.add_value_length(c["kv_lora_rank"])
        w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        w.add_value_length_mla(c["v_head_dim"])
        w.add_rope_dimension_count(c["qk_rope_head_dim"])
        write_shared_experts(w, c)
    elif (c["model_type"] != "gemma4_text" and "head_dim" in c) or c["model_type"] in (
        "qwen3_moe",
        "glm4_moe",
        "minimax_m2",
    ):
        w.add_key_length(width)
        w.add_value_length(width)


def write_gemma4(w: gguf.GGUFWriter, c: Config) -> None:
    """Layers differ: the key that others have for all is that of layers without a window."""
    windowed = [kind == "sliding_attention" for kind in c["layer_types"]]
    full = global_part(c)
    heads = {True: c["num_key_value_heads"], False: full["num_key_value_heads"]}
    w.add_head_count_kv([heads[one] for one in windowed])
    w.add_sliding_window(c["sliding_window"])
    w.add_sliding_window_pattern(windowed)
    w.add_shared_kv_layers(c["num_kv_shared_layers"])
    w.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"] or 0)
    w.add_key_length(full["head_dim"])
    w.add_value_length(full["head_dim"])
    w.add_key_length_swa(c["head_dim"])
    w.add_value_length_swa(c["head_dim"])
    w.add_rope_dimension_count(full["head_dim"])
    w.add_rope_dimension_count_swa(c["head_dim"])
    w.add_rope_freq_base(c["rope_parameters"]["full_attention"]["rope_theta"])
    w.add_rope_freq_base_swa(c["rope_parameters"]["sliding_attention"]["rope_theta"])
    if c["final_logit_softcapping"]:
        w.add_final_logit_softcapping(c["final_logit_softcapping"])


def global_part(c: Config) -> Config:
    """What Gemma's layers without a window have of their own."""
    return {**c, **c["per_layer_config"][str(c["layer_types"].index("full_attention"))]}


def write_shared_experts(w: gguf.GGUFWriter, c: Config) -> None:
    w.add_leading_dense_block_count(c.get("first_k_dense_replace", 1))
    w.add_expert_shared_count(c.get("n_shared_experts") or 0)
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    if c.get("norm_topk_prob"):
        w.add_expert_weights_norm(True)
