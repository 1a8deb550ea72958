"""Tiny models of every family, with random weights, saved by transformers in each of its forms.

Weights are drawn so that routing and logits are lively, and no norm is one and no bias zero: a tensor or an
option that the engine does not read must show in the log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

Options = dict[str, Any]

EVERYWHERE: Options = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
RECURRENT: Options = {
    "num_experts": 6,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 44,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
LATENT: Options = {"q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8}
GROUPS: Options = {"n_group": 2, "topk_group": 1}
PLAIN: dict[str, Options] = {
    "mixtral": {"num_local_experts": 5},
    "phimoe": {"num_local_experts": 5, "router_jitter_noise": 0.01},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 44},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 40},
    "deepseek_v2": {
        "num_key_value_heads": 6,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 40,
        "v_head_dim": 14,
        **LATENT,
        **GROUPS,
    },
    "olmoe": {"num_experts": 6},
    "gpt_oss": {"num_local_experts": 6, "head_dim": 8, "sliding_window": 16},
    "glm4_moe": {"n_routed_experts": 6, "moe_intermediate_size": 40, "head_dim": 8, **GROUPS},
    "minimax_m2": {"num_local_experts": 6, "head_dim": 8},
    "glm4_moe_lite": {
        "num_key_value_heads": 6,
        "n_routed_experts": 6,
        "moe_intermediate_size": 40,
        "v_head_dim": 14,
        **LATENT,
        **GROUPS,
    },
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "n_routed_experts": 6,
        "moe_intermediate_size": 40,
        "v_head_dim": 14,
        "first_k_dense_replace": 1,
        **LATENT,
        **GROUPS,
    },
    "qwen3_next": RECURRENT,
    "qwen3_5_moe_text": RECURRENT,
}
ALWAYS_FUSED = {"gpt_oss"}  # the experts, in every version of transformers
ATTENDING = [family for family, options in PLAIN.items() if options is not RECURRENT]  # in every layer

# Options that say how large something is. A reader that gets one wrong finds tensors of another shape.
SIZES = {
    *EVERYWHERE,
    *LATENT,
    *(RECURRENT.keys() | {"linear_conv_kernel_dim"}),
    *("head_dim", "num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts", "v_head_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "first_k_dense_replace"),
    *("decoder_sparse_step", "mlp_only_layers", "mlp_layer_types"),
} - {"num_experts_per_tok"}


@dataclass(frozen=True)
class Case:
    """One configuration and the form in which it is saved."""

    family: str
    name: str
    options: Options = field(default_factory=dict)  # beside those of PLAIN
    fused: bool = False  # transformers 5's own layout, otherwise that of version 4
    shards: bool = True
    dtype: torch.dtype = torch.float32
    seed: int = 1
    written: Options = field(default_factory=dict)  # in config.json, beside what transformers writes
    silent: frozenset[str] = frozenset()  # alternatives that transformers does not tell from this one

    @property
    def config(self) -> Options:
        return EVERYWHERE | PLAIN[self.family] | self.options

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


def build(case: Case) -> nn.Module:
    """The model in float32, with the same weights every time: numbers that the case's dtype has."""
    model = empty(case.family, case.config)
    draw(model, case.seed, case.dtype)
    return model


def empty(family: str, config: Options) -> nn.Module:
    """A model as transformers makes it."""
    made = AutoConfig.for_model(family, **deepcopy(config))
    return AutoModelForCausalLM.from_config(made, experts_implementation="eager").eval()


@torch.no_grad()
def draw(model: nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Random weights. A layer changes a hidden state by about its own size, and the logits of a token differ
    by a few nats; were they much livelier, float32 would differ from exact numbers by 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    tied = getattr(model, "config", None) is not None and model.config.tie_word_embeddings
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    for name, weight in (*model.named_parameters(), *biases):
        numbers = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            numbers *= 0.3
        elif name.endswith("A_log"):
            numbers = 0.5 * numbers - 1.5  # a state remembers some tokens
        elif name.endswith("sinks"):
            numbers = 1 + 0.3 * numbers
        elif weight.dim() == 1:
            numbers = weight + 0.3 * numbers  # a norm begins as 1, or as 0 where it adds 1
        elif name.endswith("embed_tokens.weight"):
            numbers *= 0.25 if tied else 1.0
        else:
            lively = name.endswith(("gate.weight", "router.weight", "lm_head.weight"))
            numbers *= (1.6 if lively else 0.8) * weight.shape[-1] ** -0.5
        weight.copy_(numbers.to(dtype))


def save(case: Case, folder: Path) -> None:
    """Write config.json and the weights. Beside tensors as of version 4 there is a config as of version 4."""
    build(case).to(case.dtype).save_pretrained(
        folder, max_shard_size="60KB" if case.shards else "5GB", save_original_format=not case.fused
    )
    if not case.fused:
        path = folder / "config.json"
        path.write_text(json.dumps(of_version_4(json.loads(path.read_bytes())) | case.written))


def save_with_draft_layer(case: Case, folder: Path) -> MtpModel:
    """`save`, and a layer that drafts, as checkpoints have it behind the last; returns that."""
    save(case, folder)
    mtp = draft_layer(case)
    add_draft_layer(mtp, case.config["num_hidden_layers"], folder)
    return mtp


def draft_layer(case: Case) -> MtpModel:
    """A layer that predicts one more token, made of transformers' own parts for such layers."""
    model = build(case)
    model.config.num_mtp_layers = 1
    if hasattr(model.config, "mlp_layer_types"):
        model.config.mtp_mlp_layer_types = ["sparse"]
    mtp = MtpModel(model, 1).eval()
    mtp.set_experts_implementation("eager")
    draw(mtp.layers, case.seed + 1, case.dtype)
    return mtp


def add_draft_layer(mtp: MtpModel, number: int, folder: Path) -> None:
    """Write the layer's tensors, by expert, into a checkpoint of so many other layers."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in mtp.layers[0].state_dict().items():
        name = name.replace("post_norm", "shared_head.norm", name.startswith("post_norm"))
        at = f"model.layers.{number}.{name.removeprefix('mtp_block.')}"
        if at.endswith(("experts.gate_up_proj", "experts.down_proj")):
            for expert, both in enumerate(tensor):
                each = zip(("gate_proj", "up_proj"), both.chunk(2), strict=True)
                parts = each if "gate_up" in at else [("down_proj", both)]
                start = at.rpartition(".")[0]
                tensors |= {f"{start}.{expert}.{part}.weight": one.contiguous() for part, one in parts}
        else:
            tensors[at] = tensor.contiguous()
    draft = folder / f"draft-{number}.safetensors"
    save_file(tensors, draft)
    path, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():
        file = single.rename(folder / "others.safetensors")
        path.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(file), file.name)}))
    index = json.loads(path.read_bytes())
    index["weight_map"] |= dict.fromkeys(tensors, draft.name)
    path.write_text(json.dumps(index))


def of_version_4(config: Options) -> Options:
    """A config with its rotary embedding's numbers where version 4 of transformers had them, and without what
    only later ones write."""
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "layer_types", "dtype")}
    if "linear_attention" in config.get("layer_types", ()):
        old["layer_types"] = config["layer_types"]
    rope = dict(config["rope_parameters"])
    old |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config["dtype"]}
    kind = rope.pop("rope_type")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if kind == "longrope":
        old["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return old | {"rope_scaling": None if kind == "default" else {"type": kind, **rope}}


def texts(case: Case) -> list[tuple[int, ...]]:
    """Token ids: a few, fewer than any `original_max_position_embeddings` here, and more than that."""
    return [tokens[:length] for tokens, length in zip(drawn_texts(case, 2, 75), (30, 60), strict=True)]


def drawn_texts(case: Case, count: int, length: int) -> list[tuple[int, ...]]:
    """Random token ids; the first texts are the same for every count."""
    generator = torch.Generator().manual_seed(case.seed + 1000)
    vocabulary = case.config["vocab_size"]
    return [tuple(torch.randint(vocabulary, (length,), generator=generator).tolist()) for _ in range(count)]


def alternatives(case: Case) -> Iterator[tuple[str, Options]]:
    """Configs as a wrong reader would see them: without one of the options that are not sizes, or with
    another value of one number of the rotary embedding."""
    plain = EVERYWHERE | PLAIN[case.family]
    for key in sorted(case.options.keys() - SIZES):
        left = {k: v for k, v in case.config.items() if k != key}
        left |= {key: plain[key]} if key in plain else {}
        if left != case.config:
            yield key, left
    rope = case.options.get("rope_parameters", {})
    for key in sorted(rope.keys() - {"rope_type"}):
        changed = other(rope[key])
        if key == "partial_rotary_factor":
            changed = 0.5 if rope[key] == 1 else 1.0
        yield f"rope {key}", case.config | {"rope_parameters": rope | {key: changed}}


def other(value: Any) -> Any:
    """Another value of this kind."""
    if isinstance(value, bool):
        return not value
    return [3 * v for v in value] if isinstance(value, list) else 3 * value


@torch.no_grad()
def logprobs(model: nn.Module, tokens: tuple[int, ...]) -> Tensor:
    """[len(tokens), vocabulary] of one forward pass over the whole text."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)
