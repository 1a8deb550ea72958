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
from gguf_settings import Config, global_part, with_rope, write_settings
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
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "dots1": MODEL_ARCH.DOTS1,
    "ernie4_5_moe": MODEL_ARCH.ERNIE4_5_MOE,
    "hunyuan_v1_moe": MODEL_ARCH.HUNYUAN_MOE,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
}
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


def rewritten(path: Path, changes: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...] | None]) -> Path:
    """The file with other settings, and tensors of zeros; None: without it."""
    reader, copy = gguf.GGUFReader(path), path.with_name("other.gguf")
    settings = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    kinds = {key: field.types[0] for key, field in reader.fields.items()}
    settings, number = settings | dict(changes), gguf.GGUFValueType.UINT32
    writer = gguf.GGUFWriter(copy, settings.pop("general.architecture"))
    for key, value in settings.items():
        if value is not None:
            kind = gguf.GGUFValueType.STRING if isinstance(value, str) else kinds.get(key, number)
            writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, shape in tensors.items():
        if shape is not None:
            writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


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


# --- tensors -----------------------------------------------------------------------------------------------


def converted(config: Config, tensors: Tensors, architecture: MODEL_ARCH) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors by name."""
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in renamed(config["model_type"], changed(config, merged(tensors))).items():
        found = name if name.endswith(".scale") else names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        yield found, tensor
    if config["model_type"] == "gemma4_text":
        half = global_part(config)["head_dim"] // 2
        part = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        rotated = int(half * part)
        yield "rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (half - rotated))


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
    if model_type == "lfm2_moe":
        changes[r"model\.(layers\.\d+\.feed_forward\.experts)"] = r"\1"
        changes[r"expert_bias$"] = "expert_bias.bias"
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
            case "gemma4_text":
                made |= of_gemma4(name, tensor)
            case "lfm2_moe":
                made[name] = tensor.squeeze(1) if "conv.conv" in name else tensor
            case "ernie4_5_moe":
                made[name] = tensor.squeeze(0) if "e_score_correction_bias" in name else tensor
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


def of_gemma4(name: str, tensor: Tensor) -> Tensors:
    at = re.sub(r"model\.layers\.(\d+)\..*", r"blk.\1", name)
    if name.endswith("router.scale"):
        return {f"{at}.ffn_gate_inp.scale": tensor}
    if name.endswith("per_expert_scale"):
        return {f"{at}.ffn_down_exps.scale": tensor}
    weight = name.endswith("layer_scalar") or ".experts." in name
    return {f"{name}.weight" if weight else name: tensor}


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
