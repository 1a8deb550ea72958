"""Where a GGUF file has the tensors of a checkpoint of Hugging Face.

llama.cpp's converter renames tensors and merges a layer's experts; for some architectures it also permutes
rows, for its own rotary embedding and recurrent layers, adds 1 to norms, or splits a matrix. Here each is
undone as it is read. The gguf package's map says what a tensor of a checkpoint is called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH_NAMES
from numpy.typing import NDArray

from pipeline.checkpoint.gguf_config import Header, Shape
from pipeline.errors import ModelError
from pipeline.models.architecture import ExpertRows, TensorRows, TensorSpec
from pipeline.models.spec import GatedDelta, GroupedQuery, Latent, ModelSpec
from shm.layout import Float32

Order = NDArray[np.int64]
Changes = dict[str, Any]  # of a Source

# Endings of tensors' names, as the gguf package's map knows them.
RENAMED = {
    "_correction_bias": "_correction.bias",
    ".dt_bias": ".dt_proj.bias",
    ".down_proj_bias": ".down_proj.bias",
}
ARCHITECTURES = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}


class Source(NamedTuple):
    """How a tensor of the checkpoint is made of the file's `parts`, each with its name and shape: stacked by
    rows, whose order becomes `rows`, and that of columns `columns`; or by `made` of their numbers."""

    parts: tuple[tuple[str, Shape], ...]
    rows: Order | None = None
    columns: Order | None = None
    made: Callable[..., Float32] | None = None


def swapped(outer: int, inner: int, width: int) -> Order:
    """Returns places of numbers [outer, inner, width] in a file that has them as [inner, outer, width]."""
    return np.arange(outer * inner * width).reshape(inner, outer, width).swapaxes(0, 1).reshape(-1)


def _rotated_pairs(spec: ModelSpec, role: str, name: str) -> Changes:
    """llama.cpp rotates numbers 2i and 2i + 1 of a head, transformers i and i + half."""
    attention = spec.attention
    if role not in ("query", "key") or not isinstance(attention, GroupedQuery):
        return {}
    heads = attention.heads if role == "query" else attention.kv_heads
    of_one = swapped(2, attention.head_dim // 2, 1)
    return {"rows": (np.arange(heads)[:, None] * attention.head_dim + of_one).reshape(-1)}


def _tiled_values(spec: ModelSpec, role: str, name: str) -> Changes:
    """llama.cpp has the value heads of a recurrent layer by their number at a key head, transformers by key
    head."""
    d = spec.recurrent
    if d is None or ".linear_attn." not in name:
        return {}
    keys, each = d.key_heads, d.value_heads // d.key_heads
    if role in ("a", "b", "decay_log", "decay_bias"):
        return {"rows": swapped(keys, each, 1)}
    values, before = swapped(keys, each, d.value_dim), d.channels - d.value_heads * d.value_dim
    if role in ("qkv", "taps"):
        return {"rows": np.concatenate([np.arange(before), before + values])}
    return {"z": {"rows": values}, "output": {"columns": values}}.get(role, {})


def _joined_rows(d: GatedDelta) -> Order:
    """Qwen3-Next's projections by key head, of a file that has all queries, then keys, values, and gates."""
    values = d.value_heads // d.key_heads * d.value_dim
    widths = [d.key_dim, d.key_dim, values, values]
    begins = np.cumsum([0, *widths[:-1]]) * d.key_heads
    parts = [
        begin + np.arange(d.key_heads * width).reshape(d.key_heads, width)
        for begin, width in zip(begins, widths, strict=True)
    ]
    return np.concatenate(parts, axis=1).reshape(-1)


def _expanded(keys: Float32, values: Float32) -> Float32:
    """DeepSeek's expansion of latents, of that to keys [heads, rank, n] and to values [heads, m, rank]."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[-1])


def _log_of_decay(decay: Float32) -> Float32:
    with np.errstate(invalid="ignore", divide="ignore"):  # who reads it refuses what is not finite
        return np.log(-decay)


def _as_it_is(spec: ModelSpec, role: str, name: str) -> Changes:
    return {}


CHANGED = {"llama": _rotated_pairs, "qwen35moe": _tiled_values}  # by architecture


class Names:
    """The places in a file of the tensors of its checkpoint."""

    def __init__(self, header: Header, spec: ModelSpec) -> None:
        self._shapes, self._spec = header.shapes, spec
        self._changes = CHANGED.get(header.architecture, _as_it_is)
        self._map = gguf.get_tensor_name_map(ARCHITECTURES[header.architecture], spec.layers)
        alone = sum(map(self._alone, spec.moe_layers))
        if 3 * spec.experts * alone > len(self._shapes):
            raise ModelError(f"it has {len(self._shapes)} tensors, fewer than its experts: download it again")
        # Of the tensors that have a layer's experts, by the file's names.
        self.expert_shapes = {layer: self._shapes_of_experts(layer) for layer in spec.moe_layers}

    def source(self, role: str, tensor: TensorSpec) -> Source:
        """Raises ModelError for a tensor that the file lacks."""
        spec, base = self._spec, tensor.name.rpartition(".")[0].rpartition(".")[0]
        if role == "qkvz" and spec.recurrent is not None and not self._name(tensor.name, ""):
            values = spec.recurrent.value_heads * spec.recurrent.value_dim
            both = (("in_proj_qkv", spec.recurrent.channels), ("in_proj_z", values))
            parts = [(self._name(f"{base}.{name}.weight"), (rows, spec.hidden)) for name, rows in both]
            fit = all(self._shapes[name] == shape for name, shape in parts)
            return Source(tuple(parts), _joined_rows(spec.recurrent) if fit else None)
        if role == "expansion" and isinstance(a := spec.attention, Latent):
            keys, values_name = (self._name(f"{base}.{name}_b_proj.weight", "") for name in "kv")
            if keys:
                shapes = (a.heads, a.rank, a.nope_dim), (a.heads, a.value_dim, a.rank)
                return Source(((keys, shapes[0]), (values_name, shapes[1])), made=_expanded)
        name = self._name(tensor.name)
        source = Source(((name, tensor.shape),))
        if math.prod(self._shapes[name]) != math.prod(tensor.shape):
            return source  # which is refused; the settings may claim any size
        source = source._replace(**self._changes(spec, role, tensor.name))
        if role == "decay_log":
            return source._replace(made=_log_of_decay)
        plus = np.float32(tensor.plus)  # norms have it added in the file
        return source._replace(made=lambda numbers: numbers - plus) if plus else source

    def expert(self, layer: int, expert: int) -> ExpertRows:
        """The location of a decoder layer's expert in the file."""
        spec, at = self._spec, f"blk.{layer}.ffn"
        shapes, wide, hidden = self.expert_shapes[layer], spec.intermediate, spec.hidden
        if self._alone(layer):
            names = [f"{at}_{name}.{expert}.weight" for name in ("gate", "up", "down")]
            return tuple(TensorRows(name, shapes[name], 0, shapes[name][0]) for name in names)
        joined, down = f"{at}_gate_up_exps.weight", f"{at}_down_exps.weight"
        if joined in shapes:
            wides = [TensorRows(joined, shapes[joined], (2 * expert + i) * wide, wide) for i in (0, 1)]
        else:
            both = [f"{at}_{name}_exps.weight" for name in ("gate", "up")]
            wides = [TensorRows(name, shapes[name], expert * wide, wide) for name in both]
        biases = [f"{at}_{name}_exps.bias" for name in ("gate", "up")] if spec.math.bias else []
        return (
            *wides,
            TensorRows(down, shapes[down], expert * hidden, hidden),
            *(TensorRows(name, shapes[name], expert, 1) for name in biases),
        )

    def _shapes_of_experts(self, layer: int) -> dict[str, Shape]:
        spec, at = self._spec, f"blk.{layer}.ffn"
        up, down = (spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate)
        if self._alone(layer):
            shapes = {"gate": up, "up": up, "down": down}
            experts = range(spec.experts)
            return {f"{at}_{name}.{e}.weight": shape for e in experts for name, shape in shapes.items()}
        number = (spec.experts,)
        joined = f"{at}_gate_up_exps.weight"
        if joined in self._shapes:
            wides = {joined: (*number, 2 * up[0], up[1])}
        else:
            wides = {f"{at}_{name}_exps.weight": number + up for name in ("gate", "up")}
        biases = ("gate", "up") if spec.math.bias else ()
        return {
            **wides,
            f"{at}_down_exps.weight": number + down,
            **{f"{at}_{name}_exps.bias": number + up[:1] for name in biases},
        }

    def _alone(self, layer: int) -> bool:
        """Returns whether each expert has tensors of its own, as in the oldest files."""
        return f"blk.{layer}.ffn_gate.0.weight" in self._shapes

    def unread(self, name: str) -> bool:
        """Returns whether a file may have this tensor beside those of the checkpoint: one of a layer that
        predicts further tokens, or what quantized activations would be scaled by."""
        layer = re.match(r"blk\.(\d{1,9})\.", name)
        return name.endswith(".input_scale") or (layer is not None and int(layer[1]) >= self._spec.layers)

    def _name(self, name: str, missing: str | None = None) -> str:
        """The file's name of a tensor of the checkpoint; `missing`, or a ModelError, where it has none."""
        for ending, other in RENAMED.items():
            name = name.removesuffix(ending) + other if name.endswith(ending) else name
        found = self._map.get_name(name, (".weight", ".bias")) or ""
        for known in (found, f"{found}.weight"):
            if known in self._shapes:
                return known
        if missing is None:
            raise ModelError(f"it lacks the tensor {found or name}: download it again, or another file of it")
        return missing
