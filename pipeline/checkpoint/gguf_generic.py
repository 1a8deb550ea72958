"""GGUF files of families without a backbone of our own, as an index of the model's safetensors: tensors have
their names there, and from then on are read as those of any checkpoint, by transformers' conversion."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pipeline.checkpoint.gguf_config import Header, Shape, config_of
from pipeline.checkpoint.gguf_file import read_model
from pipeline.checkpoint.gguf_reader import TYPES, decode, format_of
from pipeline.checkpoint.headers import TensorEntry
from pipeline.checkpoint.index import BITS, CheckpointIndex
from pipeline.checkpoint.packed import Matrix, Packed, Read
from pipeline.checkpoint.quantized import MAX_NAME
from pipeline.checkpoint.reader import TensorReader
from pipeline.errors import ModelError
from pipeline.models.facts import is_own
from protocol.program import one_line

# Names without their endings, like .weight, or with them; those of a layer without what is before its own.
# A * is an expert's number: the file has all experts of a layer in one tensor.
LAYERS = re.compile(r"blk\.(\d{1,9})\.(.*)")
PLAIN = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
}
EXPERTS = {f"ffn_{name}_exps": f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")}
SHARED = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
NORMED = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA4 = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
HUNYUAN = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{name}_shexp": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}
LFM2 = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
    "ffn_norm": "ffn_norm",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    **{f"ffn_{name}": f"feed_forward.{w}" for name, w in W123.items()},
    **{f"ffn_{name}_exps": f"feed_forward.experts.*.{w}" for name, w in W123.items()},
}
BIAS = "mlp.gate.e_score_correction_bias"
ERNIE_BIAS = "mlp.moe_statics.e_score_correction_bias"
NAMES = {  # by architecture
    "gemma4": PLAIN | NORMED | GEMMA4,
    "dots1": PLAIN | EXPERTS | NORMED | SHARED | {"exp_probs_b.bias": BIAS},
    "ernie4_5-moe": PLAIN | EXPERTS | SHARED | {"exp_probs_b": ERNIE_BIAS, "exp_probs_b.bias": ERNIE_BIAS},
    "hunyuan-moe": PLAIN | EXPERTS | HUNYUAN,
    "lfm2moe": PLAIN | LFM2,
}
# Where llama.cpp drops a size of 1.
WITH_ONE = {"conv.conv.weight": 1, ERNIE_BIAS: 0}
ROTATED = "rope_freqs.weight"  # what frequencies of Gemma's rotary embedding are divided by
UNROTATED = 1e20  # a divisor from here on leaves a pair of numbers as it is


@dataclass(frozen=True)
class Blocks(Packed):
    """A matrix in blocks of one of GGML's types; `weight` has the bytes of its rows."""

    type: str

    @property
    def kind(self) -> str:
        return self.type

    @property
    def format(self) -> str | None:
        return format_of([self.type])

    def rows(self, read: Read, lo: int, hi: int, place: int | None = None) -> Matrix:
        first = (place or 0) * self.outputs
        return decode(lambda a, b: read(self.weight, a, b), self.type, self.inputs, first + lo, first + hi)


def generic_index(path: Path) -> CheckpointIndex | None:
    """The tensors of the model in this GGUF file, or in several of which it is the first; None where its
    family has a backbone of our own. Raises ModelError, one line."""
    settings, shards = read_model(path)
    entries = {name: entry for shard in shards for name, entry in shard.tensors.items()}
    try:
        header = Header(settings, {name: entry.shape for name, entry in entries.items()})
        config = config_of(header)
        if is_own(config):
            return None
        tensors: dict[str, TensorEntry] = {}
        packed: dict[str, Packed] = {}
        for name, entry in entries.items():
            for target, part in _placed(name, entry, header):
                if part.dtype in BITS:
                    tensors[target] = part
                else:
                    packed[target] = _blocks(target, part)
        index = CheckpointIndex(path.parent, config, shards, tensors, packed)
        if header.architecture == "gemma4":
            config["rope_parameters"]["full_attention"]["partial_rotary_factor"] = _rotated(index, entries)
    except ModelError as e:
        raise ModelError(f"{path}: {e}") from None
    return index


def _placed(name: str, entry: TensorEntry, header: Header) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors of the checkpoint that this one of the file is, by name: none where it is one of a layer
    that predicts further tokens."""
    names: Mapping[str, str] = NAMES[header.architecture]
    layer = LAYERS.fullmatch(name)
    own = name if layer is None else layer[2]
    if name == ROTATED or (layer is not None and int(layer[1]) >= header.layers):
        return
    base, _, ending = own.rpartition(".")
    found = names.get(own) or (f"{names[base]}.{ending}" if base in names else "")
    if not found:
        raise ModelError(
            f"the tensor {one_line(name[:MAX_NAME])} is not one of this architecture: the model is of a"
            " variant that is not supported"
        )
    if entry.dtype not in TYPES:
        raise ModelError(
            f"the tensor {name} has the type {entry.dtype}, which is not read: download the model in another "
            "one, like Q4_K_M or Q8_0"
        )
    if found in WITH_ONE and len(entry.shape) == 1 + WITH_ONE[found]:
        at = WITH_ONE[found]
        entry = replace(entry, shape=(*entry.shape[:at], 1, *entry.shape[at:]))
    target = found if layer is None else f"model.layers.{layer[1]}.{found}"
    if "*" not in target:
        yield target, entry
        return
    count, *shape = entry.shape
    nbytes = entry.nbytes // count
    for expert in range(count):
        part = replace(entry, shape=tuple(shape), offset=entry.offset + expert * nbytes, nbytes=nbytes)
        yield target.replace("*", str(expert)), part


def _blocks(name: str, entry: TensorEntry) -> Blocks:
    if len(entry.shape) < 2:
        raise ModelError(f"{name} has the type {entry.dtype}, and is no matrix: download another file")
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[entry.dtype]]
    rows: Shape = (math.prod(entry.shape[:-1]), entry.shape[-1] // block * size)
    data = replace(entry, dtype="U8", shape=rows)
    return Blocks(entry.shape, data, data, entry.dtype)


def _rotated(index: CheckpointIndex, entries: Mapping[str, TensorEntry]) -> float:
    """The part of a head that layers without a window rotate: llama.cpp divides the other frequencies by a
    huge number."""
    entry = entries.get(ROTATED)
    if entry is None:
        raise ModelError(f"it lacks the tensor {ROTATED}: download it again, or another file of this model")
    with TensorReader(replace(index, tensors={ROTATED: entry}, packed={})) as reader:
        divisors = reader.float32(ROTATED, entry.shape)
    count = int((divisors == 1).sum())
    if not ((divisors[:count] == 1).all() and (divisors[count:] > UNROTATED).all()):
        raise ModelError(f"the tensor {ROTATED} stretches the rotary embedding, which is not supported")
    return count / len(divisors)
