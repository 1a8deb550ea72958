"""Writes GGUF files from checkpoints of Hugging Face, as llama.cpp's converter does: its settings, names, and
changes of tensors, from its documentation and the gguf package, not from the program's reader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH
from safetensors.torch import load_file, save_file
from torch import Tensor

ARCHITECTURES = {
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "olmoe": MODEL_ARCH.OLMOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": MODEL_ARCH.DEEPSEEK2,
}
Config = Mapping[str, Any]
Tensors = dict[str, Tensor]
Kind = Callable[[str, tuple[int, ...]], Type]  # of a tensor by its name in the file, and shape


def plain(kind: Type) -> Kind:
    """Matrices of this type where their rows are whole blocks, else F16; in F32 vectors, and what llama.cpp
    wants so."""

    def of(name: str, shape: tuple[int, ...]) -> Type:
        if len([size for size in shape if size > 1]) < 2 or re.search(r"ffn_gate_inp|ssm_conv1d|bias$", name):
            return Type.F32
        return kind if shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else Type.F16

    return of


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json, and the tensors in float32."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
    return json.loads((folder / "config.json").read_bytes()), tensors


FLOATS = plain(Type.F32)


def write_gguf(
    folder: Path,
    path: Path,
    kind: Kind = FLOATS,
    split_tensors: int = 0,
    add_text: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write the checkpoint in `folder` as one file, or several of so many tensors each; the first's path.
    `add_text`: adds the tokenizer."""
    config, tensors = read_checkpoint(folder)
    config = with_rope(config)
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split_tensors)
    write_settings(writer, config)
    if add_text is not None:
        add_text(writer)
    for name, tensor in converted(config, tensors, architecture):
        add(writer, name, tensor.contiguous().numpy(), kind(name, tuple(tensor.shape)))
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"), path)


def add(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray, kind: Type) -> None:
    """Add a tensor in this type: random blocks where the package cannot quantize to it."""
    writer.add_tensor(name, encoded(name, numbers, kind), raw_dtype=kind)


def encoded(name: str, numbers: np.ndarray, kind: Type) -> np.ndarray:
    """A tensor's bytes in this type."""
    try:
        return gguf.quants.quantize(numbers, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        seed = np.frombuffer(name.encode().ljust(8), np.uint8)
        shape = *numbers.shape[:-1], numbers.shape[-1] // block * size
        data = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        return scaled_down(data.reshape(*numbers.shape[:-1], -1, size), kind).reshape(shape)


SCALES = {  # bytes of a block at which a binary16 begins
    **{Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)},
    **{Type.IQ4_NL: (0,), Type.IQ4_XS: (0,), Type.IQ1_S: (0,), Type.IQ2_XXS: (0,), Type.IQ2_XS: (0,)},
    **{Type.IQ2_S: (0,), Type.IQ3_XXS: (0,), Type.IQ3_S: (0,), Type.IQ1_M: ()},
}


def scaled_down(blocks: np.ndarray, kind: Type) -> np.ndarray:
    """Random blocks with scales that are numbers of a usual size."""
    scales = np.random.default_rng(1).uniform(0.001, 0.004, blocks.shape[:-1]).astype(np.float16)
    for at in SCALES[kind]:
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8).reshape(*blocks.shape[:-1], 2)
    return blocks


def rounded(folder: Path, target: Path, kind: Kind) -> None:
    """Write a checkpoint with the numbers that a file of these types has. Rows are quantized alone, so where
    they lie does not matter."""
    config, tensors = read_checkpoint(folder)
    architecture = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"] + 1)
    for name, tensor in tensors.items():
        across = bool(re.search(r"experts\.(gate_up|down)_proj$", name))  # rows are columns in the file
        merged = re.sub(r"experts\.\d+\.", "experts.", name).replace("gate_up_proj", "up_proj")
        of = names.get_name(merged, (".weight", ".bias")) or name
        rows = (tensor.transpose(-1, -2) if across else tensor).contiguous()
        type_ = kind(of, tuple(rows.shape))
        if type_ != Type.F32:
            data = encoded(of, rows.numpy(), type_)
            numbers = torch.from_numpy(gguf.quants.dequantize(data, type_).reshape(rows.shape))
            tensors[name] = (numbers.transpose(-1, -2) if across else numbers).contiguous()
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))


# --- settings ----------------------------------------------------------------------------------------------


def with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """With the rotary embedding's numbers as of version 4 of transformers."""
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    old = {"rope_theta": rope["rope_theta"]} if rope else {}
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope and kind != "default":
        old["rope_scaling"] = {"type": kind, **rope}
    return config | old


def write_settings(w: gguf.GGUFWriter, c: Config) -> None:
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    latent = c["model_type"] in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    w.add_head_count_kv(1 if latent else c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if "rope_theta" in c:
        w.add_rope_freq_base(c["rope_theta"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    experts = next(c[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if k in c)
    w.add_expert_count(experts)
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
    elif "head_dim" in c or c["model_type"] in ("qwen3_moe", "glm4_moe", "minimax_m2"):
        w.add_key_length(width)
        w.add_value_length(width)


def write_shared_experts(w: gguf.GGUFWriter, c: Config) -> None:
    w.add_leading_dense_block_count(c.get("first_k_dense_replace", 1))
    w.add_expert_shared_count(c.get("n_shared_experts") or 0)
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    if c.get("norm_topk_prob"):
        w.add_expert_weights_norm(True)


# --- tensors -----------------------------------------------------------------------------------------------


def converted(config: Config, tensors: Tensors, architecture: MODEL_ARCH) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors by name."""
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in renamed(config["model_type"], changed(config, merged(tensors))).items():
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        yield found, tensor


def merged(tensors: Tensors) -> Tensors:
    """With all experts of a layer in one tensor each of gate, up and down."""
    experts: dict[str, list[Tensor]] = {}
    rest: Tensors = {}
    for name in sorted(tensors, key=lambda n: [int(x) if x.isdigit() else x for x in n.split(".")]):
        if match := re.fullmatch(r"(.*\.experts\.)\d+\.(.*)", name):
            experts.setdefault(match[1] + match[2], []).append(tensors[name])
        else:
            rest[name] = tensors[name]
    return rest | {name: torch.stack(each) for name, each in experts.items()}


def renamed(model_type: str, tensors: Tensors) -> Tensors:
    changes = {
        r"e_score_correction_bias$": "e_score_correction.bias",
        r"\.dt_bias$": ".dt_proj.bias",
        r"self_attn\.sinks$": "self_attn.sinks.weight",
    }
    if model_type == "mixtral":
        changes[r"model\.(layers\.\d+)\.block_sparse_moe\.experts"] = r"\1.feed_forward.experts"
    for old, new in changes.items():
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    return tensors


def changed(c: Config, tensors: Tensors) -> Tensors:
    """As the converter of the family changes them."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        match c["model_type"]:
            case "mixtral":
                made |= of_mixtral(c, name, tensor)
            case "gpt_oss":
                made |= of_gpt_oss(name, tensor)
            case "qwen3_next":
                made |= of_qwen3_next(c, name, tensor)
            case "qwen3_5_moe_text":
                made |= of_qwen3_next(c, name, tiled(c, name, tensor))
            case "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite":
                made |= of_deepseek(c, name, tensor)
            case _:
                made[name] = tensor
    return made


def permuted(weights: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of a head's rows, so that it rotates neighbours."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def of_mixtral(c: Config, name: str, tensor: Tensor) -> Tensors:
    if name.endswith("q_proj.weight"):
        tensor = permuted(tensor, c["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        tensor = permuted(tensor, c["num_key_value_heads"])
    return {name: tensor}


def of_gpt_oss(name: str, tensor: Tensor) -> Tensors:
    base = name.rpartition(".experts.")[0] + ".experts"
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": tensor.transpose(-1, -2)}
    if name.endswith("experts.down_proj_bias"):
        return {f"{base}.down_proj.bias": tensor}
    if name.endswith("experts.gate_up_proj"):
        rows = tensor.transpose(-1, -2)
        return {f"{base}.gate_proj.weight": rows[:, ::2], f"{base}.up_proj.weight": rows[:, 1::2]}
    if name.endswith("experts.gate_up_proj_bias"):
        return {f"{base}.gate_proj.bias": tensor[:, ::2], f"{base}.up_proj.bias": tensor[:, 1::2]}
    return {name: tensor}


def of_qwen3_next(c: Config, name: str, tensor: Tensor) -> Tensors:
    if name.endswith(".A_log"):
        return {name: -torch.exp(tensor)}
    if "conv1d" in name:
        return {name: tensor.squeeze()}
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: tensor + 1}
    if "shared_expert_gate" in name:
        return {name: tensor.squeeze(0)}
    if "in_proj_qkvz.weight" in name:
        keys, each = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]
        widths = [c["linear_key_head_dim"]] * 2 + [each * c["linear_value_head_dim"]] * 2
        by_head = tensor.reshape(keys, sum(widths), -1)
        q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in by_head.split(widths, dim=1))
        qkv = torch.cat([q, k, v])
        return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): z}
    return {name: tensor}


def tiled(c: Config, name: str, tensor: Tensor) -> Tensor:
    """Value heads by their number at a key head."""
    keys, values, width = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_value_head_dim"]
    before = 2 * keys * c["linear_key_head_dim"]

    def ordered(rows: Tensor, each: int) -> Tensor:
        heads = rows.reshape(keys, values // keys, each, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if "linear_attn" not in name:
        return tensor
    if ".in_proj_qkv." in name or "conv1d" in name:
        return torch.cat([tensor[:before], ordered(tensor[before:], width)])
    if ".in_proj_z." in name:
        return ordered(tensor, width)
    if ".out_proj." in name:
        return ordered(tensor.T, width).T
    one_each = (".in_proj_a.", ".in_proj_b.", ".A_log", ".dt_bias")
    return ordered(tensor, 1) if any(part in name for part in one_each) else tensor


def of_deepseek(c: Config, name: str, tensor: Tensor) -> Tensors:
    if not name.endswith("kv_b_proj.weight"):
        return {name: tensor}
    heads, keys, values = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
    k, v = tensor.reshape(heads, keys + values, -1).split([keys, values], dim=1)
    return {name.replace("kv_b", "k_b"): k.transpose(1, 2), name.replace("kv_b", "v_b"): v}
