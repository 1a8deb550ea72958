"""Random configurations of every family, for `sweep.py`: every option that a family has, of every size."""

from __future__ import annotations

from random import Random

import torch
from families import PLAIN, Case, Options

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def drawn(random: Random, number: int) -> Case:
    """A configuration of a random family."""
    family = random.choice(sorted(PLAIN))
    heads = random.choice((2, 3, 4, 6))
    width = random.choice((4, 6, 8, 10, 12, 16))
    options: Options = {
        "hidden_size": heads * width,
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "num_hidden_layers": random.randint(2, 5),
        "intermediate_size": random.randint(24, 80),
        "vocab_size": random.randint(200, 400),
        "max_position_embeddings": 128,
        "rms_norm_eps": random.choice((1e-6, 1e-5, 0.01)),
        "tie_word_embeddings": random.random() < 0.4,
    }
    if family in ("mixtral", "qwen2_moe", "qwen3_moe") and (family == "mixtral" or random.random() < 0.5):
        width = options["head_dim"] = random.choice((4, 8, 10, 16, 20))
    experts = random.choice((4, 6, 8, 12))
    options["num_experts_per_tok"] = 2 if family == "phimoe" else random.randint(1, min(experts, 5))
    options |= OWN[family](random, options, experts)
    rotated = options.get("qk_rope_head_dim", width)
    return Case(
        family,
        str(number),
        options | {"rope_parameters": rope(random, family, rotated)},
        fused=random.random() < 0.5,
        shards=random.random() < 0.5,
        dtype=random.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
        seed=random.randrange(1 << 30),
    )


def rope(random: Random, family: str, rotated: int) -> Options:
    kind = random.choice(KINDS)
    parameters: Options = {"rope_type": kind, "rope_theta": random.choice((50.0, 500.0, 1e4, 1e6))}
    trained = random.choice((32, 48, 64))
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        parameters["factor"] = random.choice((1.5, 2.0, 4.0))
    if kind in ("yarn", "longrope", "llama3"):
        parameters["original_max_position_embeddings"] = trained
    if kind == "yarn":
        more = {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "mscale": 0.8, "mscale_all_dim": 1.4}
        parameters |= {key: value for key, value in more.items() if random.random() < 0.5}
    if kind == "longrope":
        for name in ("short", "long"):
            parameters[f"{name}_factor"] = [round(random.uniform(1, 4), 2) for _ in range(rotated // 2)]
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": random.choice((2.0, 4.0))}
    if kind in ("yarn", "longrope") and random.random() < 0.5:
        parameters["attention_factor"] = random.choice((0.8, 1.2))
    elif kind == "longrope" and random.random() < 0.5:
        parameters["factor"] = random.choice((2.0, 4.0))
    if family == "phimoe" and kind != "default":
        parameters |= {"short_mscale": 1.1, "long_mscale": 0.9, "original_max_position_embeddings": trained}
    return parameters


def mixtral(random: Random, options: Options, experts: int) -> Options:
    return {"num_local_experts": experts, "sliding_window": random.choice((None, None, 7, 30))}


def phimoe(random: Random, options: Options, experts: int) -> Options:
    return {
        "num_local_experts": experts,
        "router_jitter_noise": random.choice((0.0, 0.01, 0.1, 0.5)),
        "sliding_window": random.choice((None, None, 7, 30)),
        "attention_bias": random.random() < 0.5,
        "lm_head_bias": random.random() < 0.5,
    }


def sparse(random: Random, options: Options) -> Options:
    """Which layers are dense, and the size of the others' experts."""
    layers = options["num_hidden_layers"]
    some = {"decoder_sparse_step": 2} if random.random() < 0.4 else {}
    if not some and random.random() < 0.5:
        some = {"mlp_only_layers": sorted(random.sample(range(layers), random.randint(1, layers - 1)))}
    windows = {"use_sliding_window": random.random() < 0.4, "sliding_window": random.choice((7, 30))}
    sizes = {"moe_intermediate_size": random.randint(20, 60), "norm_topk_prob": random.random() < 0.5}
    return some | windows | sizes


def qwen2_moe(random: Random, options: Options, experts: int) -> Options:
    return sparse(random, options) | {
        "num_experts": experts,
        "shared_expert_intermediate_size": random.randint(20, 60),
        "qkv_bias": random.random() < 0.5,
        "max_window_layers": random.randint(0, 5),
    }


def qwen3_moe(random: Random, options: Options, experts: int) -> Options:
    return sparse(random, options) | {"num_experts": experts, "attention_bias": random.random() < 0.5}


def deepseek_v2(random: Random, options: Options, experts: int) -> Options:
    groups = random.choice((2, experts // 2))
    limited = {
        "topk_method": "group_limited_greedy",
        "n_group": groups,
        "topk_group": random.randint(1, groups),
    }
    return (limited if random.random() < 0.5 else {}) | {
        "n_routed_experts": experts,
        "n_shared_experts": random.choice((1, 2)),
        "num_key_value_heads": options["num_attention_heads"],
        "first_k_dense_replace": random.randint(0, options["num_hidden_layers"] - 1),
        "moe_intermediate_size": random.randint(20, 60),
        "routed_scaling_factor": random.choice((1.0, 0.6, 2.5)),
        "q_lora_rank": random.choice((None, 12, 25)),
        "kv_lora_rank": random.choice((8, 14, 24)),
        "qk_nope_head_dim": random.choice((6, 8, 12)),  # transformers views numbers as pairs
        "qk_rope_head_dim": random.choice((4, 6, 8)),
        "v_head_dim": random.choice((6, 9, 12)),
        "attention_bias": random.random() < 0.5,
    }


def olmoe(random: Random, options: Options, experts: int) -> Options:
    return {
        "num_experts": experts,
        "norm_topk_prob": random.random() < 0.5,
        "clip_qkv": random.choice((None, 0.5, 1.5)),
        "attention_bias": random.random() < 0.5,
    }


OWN = {f.__name__: f for f in (mixtral, phimoe, qwen2_moe, qwen3_moe, deepseek_v2, olmoe)}
