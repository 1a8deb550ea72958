"""The configurations that the suite compares with transformers: of each family four, which together have
every option that the family has, in both layouts, in one file and several, in all three dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import Case, Options


def spread(pairs: int) -> tuple[list[float], list[float]]:
    """Short and long factors of longrope."""
    return [1 + 0.1 * i for i in range(pairs)], [1.5 + 0.7 * i for i in range(pairs)]


def longrope(pairs: int, **more: float) -> Options:
    short, long = spread(pairs)
    named = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 40}
    return {"rope_parameters": {**named, "short_factor": short, "long_factor": long, **more}}


def yarn(**more: float) -> Options:
    named = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 3.0, "original_max_position_embeddings": 42}
    return {"rope_parameters": named | more}


def partly(factor: float) -> Options:
    """A part of each head's numbers is rotated."""
    named = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": factor}
    return {"rope_parameters": named}


def scaled(kind: str, **more: float) -> Options:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 200.0, "factor": 2.5} | more}


def llama3() -> Options:
    return scaled(
        "llama3",
        rope_theta=30.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )


ODD: Options = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 6}  # heads of 6 numbers
TIED: Options = {"tie_word_embeddings": True}
RAMP = {"beta_fast": 3.0, "beta_slow": 0.4, "truncate": False}  # a tiny head has few turns to tell apart
MSCALES = {"short_mscale": 1.2, "long_mscale": 0.8}

# Of each family's four cases: layout of the experts, number of files, dtype.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"fused": True, "shards": False},
    {"fused": True, "dtype": torch.bfloat16},
    {"shards": False, "dtype": torch.float16},
)
LINEAR = ["linear_attention"]
OPTIONS: dict[str, dict[str, Options]] = {  # family -> name of a case -> its options, in the order of LAYOUTS
    "mixtral": {
        "longrope": {**longrope(6, factor=3.0), "head_dim": 12},
        "odd-tied-llama3": {
            **ODD,
            **TIED,
            **llama3(),
            "intermediate_size": 50,
            "head_dim": 10,
            "num_experts_per_tok": 3,
        },
        "wide-heads-yarn": {
            **yarn(**RAMP),
            "head_dim": 16,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
        },
        "window": {"sliding_window": 16, "rms_norm_eps": 0.02},
    },
    "phimoe": {
        "longrope": {
            **longrope(4, **MSCALES),
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.06,
            "rms_norm_eps": 0.02,
        },
        "odd-tied-window": {
            **ODD,
            **TIED,
            "intermediate_size": 50,
            "sliding_window": 20,
            "router_jitter_noise": 0.2,
        },
        "yarn": {
            **yarn(**RAMP, **MSCALES),
            "attention_bias": True,
            "router_jitter_noise": 0.5,
            "num_local_experts": 9,
        },
        "linear": {
            **scaled("linear", original_max_position_embeddings=40, **MSCALES),
            "lm_head_bias": True,
            "num_key_value_heads": 6,
        },
    },
    "qwen2_moe": {
        "windows": {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 3,
            "num_hidden_layers": 5,
            "norm_topk_prob": True,
            "rms_norm_eps": 0.02,
        },
        "odd-tied-interleaved-linear": {
            **ODD,
            **TIED,
            **scaled("linear"),
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "moe_intermediate_size": 50,
            "shared_expert_intermediate_size": 30,
            "qkv_bias": False,
            "num_experts_per_tok": 3,
        },
        "dense-where-listed-yarn": {
            **yarn(**RAMP),
            "num_hidden_layers": 4,
            "mlp_only_layers": [0, 3],
            "num_key_value_heads": 6,
        },
        "longrope": {**longrope(4, attention_factor=1.3), "norm_topk_prob": True, "num_experts_per_tok": 4},
    },
    "qwen3_moe": {
        "window": {
            "use_sliding_window": True,
            "sliding_window": 16,
            "head_dim": 16,
            "norm_topk_prob": True,
            "rms_norm_eps": 0.02,
        },
        "odd-tied-interleaved-dynamic": {
            **ODD,
            **TIED,
            **scaled("dynamic"),
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "moe_intermediate_size": 50,
            "attention_bias": True,
            "num_experts_per_tok": 3,
        },
        "dense-where-listed-yarn": {
            **yarn(attention_factor=0.7),
            "num_hidden_layers": 4,
            "mlp_only_layers": [0, 2],
            "head_dim": 20,
        },
        "longrope": {**longrope(4), "attention_bias": True, "norm_topk_prob": True},
    },
    "deepseek_v2": {
        "dense-first-yarn": {
            **yarn(**RAMP, mscale=0.7, mscale_all_dim=1.6),
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "rms_norm_eps": 0.02,
        },
        "odd-tied-groups": {
            **ODD,
            **TIED,
            "q_lora_rank": 18,
            "moe_intermediate_size": 50,
            "attention_bias": True,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        "two-dense-longrope": {
            **longrope(4, attention_factor=1.2),
            "first_k_dense_replace": 2,
            "num_hidden_layers": 5,
            "attention_bias": True,
            "v_head_dim": 8,
        },
        "few-in-groups-yarn": {  # two experts in the best group, three to be chosen
            **yarn(mscale=1.5, mscale_all_dim=0.4),
            "q_lora_rank": 12,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 1,
        },
    },
    "olmoe": {
        "clipped-linear": {**scaled("linear"), "clip_qkv": 0.8, "norm_topk_prob": True, "rms_norm_eps": 0.02},
        "odd-tied-llama3": {**ODD, **TIED, **llama3(), "intermediate_size": 50, "attention_bias": True},
        "many-experts-yarn": {
            **yarn(**RAMP),
            "num_experts": 12,
            "num_experts_per_tok": 5,
            "num_key_value_heads": 1,
            "clip_qkv": 1.5,
        },
        "longrope": {**longrope(4, factor=2.0), "norm_topk_prob": True, "num_key_value_heads": 6},
    },
    "gpt_oss": {
        "yarn": {**yarn(**RAMP), "swiglu_limit": 0.5},
        "odd-tied-linear": {
            **ODD,
            **TIED,
            **scaled("linear"),
            "intermediate_size": 50,
            "head_dim": 10,
            "attention_bias": False,
            "sliding_window": 9,
            "num_experts_per_tok": 3,
        },
        "named-windows-yarn": {
            **yarn(attention_factor=0.7),
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "swiglu_alpha": 0.6,
            "num_local_experts": 9,
            "num_experts_per_tok": 4,
        },
        "wide-heads-llama3": {
            **llama3(),
            "head_dim": 16,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rms_norm_eps": 0.02,
        },
    },
    "glm4_moe": {
        "norms-bias": {
            "use_qk_norm": True,
            "attention_bias": True,
            "rms_norm_eps": 0.02,
            "head_dim": 12,
            "n_group": 1,
        },
        "odd-tied-three-quarters": {
            **ODD,
            **TIED,
            **partly(0.75),
            "head_dim": 8,
            "num_hidden_layers": 5,
            "first_k_dense_replace": 2,
            "moe_intermediate_size": 50,
            "attention_bias": True,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
        },
        "groups-yarn": {
            **yarn(**RAMP, partial_rotary_factor=0.5),
            "head_dim": 16,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        "not-rescaled": {"norm_topk_prob": False, "use_qk_norm": True, "routed_scaling_factor": 1.3},
    },
    "minimax_m2": {
        "half": {**partly(0.5), "head_dim": 12, "rms_norm_eps": 0.02},
        "odd-tied-whole": {**ODD, **TIED, "head_dim": 6, "intermediate_size": 50, "num_experts_per_tok": 3},
        "many-experts-yarn": {
            **yarn(**RAMP, partial_rotary_factor=0.5),
            "head_dim": 16,
            "num_local_experts": 12,
            "num_experts_per_tok": 5,
            "num_key_value_heads": 1,
        },
        "linear": {**scaled("linear", partial_rotary_factor=0.25), "head_dim": 16},
    },
    "glm4_moe_lite": {
        "query-rank": {"q_lora_rank": 18, "rms_norm_eps": 0.02, "routed_scaling_factor": 1.7, "n_group": 1},
        "odd-tied-apart": {
            **ODD,
            **TIED,
            "rope_interleave": False,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "moe_intermediate_size": 50,
            "attention_bias": True,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
        },
        "groups-yarn": {
            **yarn(**RAMP, mscale=0.7, mscale_all_dim=1.6),
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
        },
        "not-rescaled": {"norm_topk_prob": False, "q_lora_rank": 12, "v_head_dim": 20},
    },
    "deepseek_v3": {
        "groups-yarn": {
            **yarn(**RAMP, mscale=0.7, mscale_all_dim=1.6),
            "q_lora_rank": 18,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rms_norm_eps": 0.02,
        },
        "odd-tied-apart": {
            **ODD,
            **TIED,
            "rope_interleave": False,
            "moe_intermediate_size": 50,
            "attention_bias": True,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
        },
        "two-dense": {
            **yarn(mscale=1.0, mscale_all_dim=1.0),
            "first_k_dense_replace": 2,
            "num_hidden_layers": 5,
            "v_head_dim": 8,
            "n_group": 1,
        },
        "not-rescaled": {"norm_topk_prob": False, "n_routed_experts": 8},
    },
    "qwen3_next": {
        "interval": {"rms_norm_eps": 0.02, "norm_topk_prob": False, "linear_num_key_heads": 4},
        "odd-tied-half": {
            **ODD,
            **TIED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
            "head_dim": 12,
            "moe_intermediate_size": 50,
            "shared_expert_intermediate_size": 30,
            "num_experts_per_tok": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 7,
            "linear_value_head_dim": 9,
        },
        "dense-where-listed-yarn": {
            **yarn(**RAMP, rope_theta=20.0, partial_rotary_factor=0.75),
            "num_hidden_layers": 4,
            "mlp_only_layers": [0, 3],
            "attention_bias": True,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 1,
            "layer_types": [*LINEAR, "full_attention", *LINEAR, "full_attention"],
        },
        "wide-values-linear": {
            **scaled("linear", partial_rotary_factor=1.0),
            "num_hidden_layers": 5,
            "linear_value_head_dim": 80,
            "linear_key_head_dim": 17,
            "layer_types": ["full_attention", *LINEAR, *LINEAR, "full_attention", *LINEAR],
        },
    },
    "qwen3_5_moe_text": {
        "interval": {"rms_norm_eps": 0.02, "num_experts_per_tok": 3},
        "odd-tied": {
            **ODD,
            **TIED,
            "moe_intermediate_size": 50,
            "num_experts_per_tok": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 9,
        },
        "most-linear-yarn": {
            **yarn(**RAMP, rope_theta=20.0, partial_rotary_factor=0.5),
            "num_hidden_layers": 4,
            "attention_bias": True,
            "layer_types": [*LINEAR, *LINEAR, *LINEAR, "full_attention"],
        },
        "attention-first": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.75},
            "linear_num_key_heads": 1,
            "linear_conv_kernel_dim": 2,
            "layer_types": ["full_attention", *LINEAR, *LINEAR],
        },
    },
}
# by name of a case
WRITTEN = {"interval": {"layer_types": None, "full_attention_interval": 2}}
SILENT = {  # numbers whose change transformers does not notice
    "phimoe longrope": {"rope long_factor"},  # transformers has the short ones for every length
    "qwen3_moe odd-tied-interleaved-dynamic": {"rope factor"},  # begins beyond max_position_embeddings
    "deepseek_v2 few-in-groups-yarn": {"num_experts_per_tok"},  # the third one's weight is 0
}

CASES = [
    Case(
        family,
        name,
        options,
        silent=frozenset(SILENT.get(f"{family} {name}", ())),
        written=WRITTEN.get(name, {}),
        **layout,
    )
    for family, cases in OPTIONS.items()
    for (name, options), layout in zip(cases.items(), LAYOUTS, strict=True)
]

# The sizes of CASES are no whole numbers of a quantized format's groups; here every matrix has several.
WHOLE_GROUPS = Case(
    "mixtral",
    "whole-groups",
    {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_local_experts": 4,
    },
)

EDGES = [  # compared in the tests' process only, but for the first
    Case("mixtral", "one-expert", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    Case("phimoe", "no-jitter", {"router_jitter_noise": 0.0}),
    # PhiMoE goes by the length among the rotary embedding's numbers, other families by the one beside them.
    Case("phimoe", "two-lengths", longrope(4, **MSCALES), written={"original_max_position_embeddings": 100}),
    Case("olmoe", "two-lengths", longrope(4), written={"original_max_position_embeddings": 100}),
    Case("deepseek_v2", "half-a-stretch", yarn(mscale=0.7, mscale_all_dim=0.0)),
    Case("deepseek_v2", "no-stretch", yarn()),
    Case("qwen3_moe", "all-experts", {"num_experts_per_tok": 6, "norm_topk_prob": True}),
    Case("qwen2_moe", "one-of-six", {"num_experts_per_tok": 1}),
    Case("gpt_oss", "rope-of-the-family", written={"rope_scaling": None}),
    Case(
        "qwen2_moe",
        "named-windows",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
        fused=True,
    ),
]


# The places of which the default suite starts engines. In float32 (0, 1) one case of each family: with a
# sharded checkpoint of transformers 4, or with one file of transformers 5 and sizes that are no multiple of
# anything. Quantized (3) those that have between them every kind of tensor. All are compared in one process.
ENGINES = {
    "mixtral": (1,),
    "phimoe": (0, 3),
    "qwen2_moe": (1, 3),
    "qwen3_moe": (1,),
    "deepseek_v2": (0, 3),
    "olmoe": (0,),
    "gpt_oss": (1, 3),
    "glm4_moe": (1,),
    "minimax_m2": (0,),
    "glm4_moe_lite": (1,),
    "deepseek_v3": (0,),
    "qwen3_next": (0,),
    "qwen3_5_moe_text": (1, 3),
}


def as_sampled(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a test that starts engines of this case."""
    return () if place(case) in ENGINES[case.family] else (pytest.mark.slow,)


def place(case: Case) -> int:
    """The index of a configuration among its family's four."""
    return [other for other in CASES if other.family == case.family].index(case)
