"""A model family: the tensor names and shapes of its checkpoints, and how its config.json is read.

Checkpoints come in two layouts. transformers up to version 4 wrote one tensor for each matrix of an expert.
Version 5 can also write the *fused* layout: all experts of a layer in two tensors, `gate_up_proj` [E, 2 I, H]
(each expert's gate rows, then its up rows) and `down_proj` [E, H, I], with other names for some modules. A
family whose experts are *interleaved* has only this one, with transposed matrices: `gate_up_proj` [E, H, 2
I], in which gate's and up's columns alternate, and `down_proj` [E, I, H].

A family is an object (`registry.py`) with only its differences from the names that most families share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pipeline.models.config_keys import Config, common
from pipeline.models.spec import GatedDelta, GroupedQuery, Latent, ModelSpec

Kind = Literal["matrix", "dense", "float32"]


class TensorSpec(NamedTuple):
    """A tensor of the backbone. `kind` decides how it is kept: a matrix in the backbone's format; a dense
    tensor in the backbone's dtype, or bf16 where the format is quantized; the rest in float32, `plus` a
    number."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "float32"
    plus: float = 0.0


class TensorRows(NamedTuple):
    """`rows` rows of a tensor from row `first` on; a row is its last axis. Of an interleaved tensor every
    `step`-th column from `start` on, and of a transposed one the columns are the rows that are meant."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    first: int
    rows: int
    start: int = 0
    step: int = 1
    transposed: bool = False

    @property
    def height(self) -> int:
        """The rows that are meant."""
        return len(range(self.start, self.shape[-1], self.step)) if self.transposed else self.rows

    @property
    def stored(self) -> TensorRows:
        """All of the stored rows, as they are."""
        return TensorRows(*self[:4])


# gate [I, H] unless ungated, up [I, H], down [H, I]; then the biases that tiles have, gate's and up's [1, I]
ExpertRows = tuple[TensorRows, ...]


Tensors = dict[str, TensorSpec]  # by role


@dataclass(frozen=True)
class Architecture:
    """One model family. `read` gives the fields of its ModelSpec that differ from `common`, and raises
    ModelError for an unsupported variant. The others are names in the checkpoint; the fused layout always
    has the module `mlp`."""

    model_type: str
    read: Callable[[Config], dict[str, Any]]
    moe_name: str = "mlp"  # the module of a layer's experts and router
    fused_router_name: str = "gate"
    matrix_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    shared_name: str = "shared_expert"
    interleaved: bool = False  # the experts
    choice_bias: str = ""  # within that module; "": the router has none
    known_as: str = ""  # the model_type of its config in transformers, where that is another
    prefix: str = "model"  # of all names but the head's
    unread: tuple[str, ...] = ()  # prefixes of what a checkpoint may have beside the decoder
    norms_plus: float = 0.0  # what norms add to their weights
    joined: bool = False  # a recurrent layer's projections lie together, by head of keys

    def spec(self, config: Config) -> ModelSpec:
        """The model that a config.json describes. Raises ModelError for an unsupported variant."""
        return ModelSpec(**common(config) | self.read(config))

    def outer(self, spec: ModelSpec) -> Tensors:
        """The tensors outside the layers, by role. Tied models have no `head`."""
        shape = (spec.vocabulary, spec.hidden)
        tensors = {"embedding": TensorSpec(f"{self.prefix}.embed_tokens.weight", shape, "dense")}
        tensors |= norm("norm", f"{self.prefix}.norm", spec, self.norms_plus)
        if not spec.tied_embeddings:
            tensors["head"] = TensorSpec("lm_head.weight", shape, "matrix")
        if spec.head_bias:
            tensors["head_bias"] = TensorSpec("lm_head.bias", (spec.vocabulary,))
        return tensors

    def layer(self, spec: ModelSpec, layer: int, fused: bool) -> Tensors:
        """The tensors of a decoder layer except its routed experts, by role."""
        at = f"{self.prefix}.layers.{layer}"
        attention, plus = spec.attention, self.norms_plus
        tensors = norm("attention_norm", f"{at}.input_layernorm", spec, plus)
        tensors |= norm("mlp_norm", f"{at}.post_attention_layernorm", spec, plus)
        if spec.recurrent is not None and layer in spec.recurrent_layers:
            tensors |= gated_delta(f"{at}.linear_attn", spec.hidden, spec.recurrent, self.joined)
        elif isinstance(attention, GroupedQuery):
            tensors |= grouped_query(f"{at}.self_attn", spec.hidden, attention, plus)
        else:
            tensors |= latent(f"{at}.self_attn", spec.hidden, attention)
        if layer not in spec.moe_layers:
            return tensors | swiglu("dense", f"{at}.mlp", spec.hidden, spec.dense_intermediate)
        whole = fused or self.interleaved
        moe, router = ("mlp", self.fused_router_name) if whole else (self.moe_name, "gate")
        shared = f"{at}.{moe}.{self.shared_name}"
        tensors["router"] = TensorSpec(f"{at}.{moe}.{router}.weight", (spec.experts, spec.hidden))
        if spec.router_bias:
            tensors["router_bias"] = TensorSpec(f"{at}.{moe}.{router}.bias", (spec.experts,))
        if spec.math.bias:  # those of gate and up lie in the experts' tiles
            name = f"{self._fused(layer)[1]}_bias"
            tensors["expert_biases"] = TensorSpec(name, (spec.experts, spec.hidden))
        if self.choice_bias:
            tensors["choice_bias"] = TensorSpec(f"{at}.{moe}.{self.choice_bias}", (spec.experts,))
        if spec.shared_intermediate:
            tensors |= swiglu("shared", shared, spec.hidden, spec.shared_intermediate)
        if spec.shared_gate:
            tensors["shared_gate"] = TensorSpec(f"{shared}_gate.weight", (1, spec.hidden))
        return tensors

    def draft(self, spec: ModelSpec, layer: int) -> Tensors:
        """What a layer that drafts has beside those of a decoder layer with experts, by role. Embedding and
        head are the model's own, whatever copies a checkpoint has."""
        at = f"{self.prefix}.layers.{layer}"
        tensors = norm("token_norm", f"{at}.enorm", spec) | norm("hidden_norm", f"{at}.hnorm", spec)
        tensors |= matrix("joined", f"{at}.eh_proj", spec.hidden, 2 * spec.hidden)
        return tensors | norm("norm", f"{at}.shared_head.norm", spec)

    def expert(self, spec: ModelSpec, layer: int, expert: int, fused: bool) -> ExpertRows:
        """The location of a decoder layer's expert in the checkpoint."""
        wide, hidden = spec.intermediate, spec.hidden
        if self.interleaved:
            return interleaved(*self._fused(layer), spec, expert)
        if fused:
            gate_up, down = self._fused(layer)
            gate_up_shape = (spec.experts, 2 * wide, hidden)
            first = 2 * wide * expert
            return (
                TensorRows(gate_up, gate_up_shape, first, wide),
                TensorRows(gate_up, gate_up_shape, first + wide, wide),
                TensorRows(down, (spec.experts, hidden, wide), hidden * expert, hidden),
            )
        at = f"{self.prefix}.layers.{layer}.{self.moe_name}.experts.{expert}"
        gate, up, down = (f"{at}.{name}.weight" for name in self.matrix_names)
        return (
            TensorRows(gate, (wide, hidden), 0, wide),
            TensorRows(up, (wide, hidden), 0, wide),
            TensorRows(down, (hidden, wide), 0, hidden),
        )

    def is_fused(self, names: Container[str], spec: ModelSpec) -> bool:
        """Returns whether a checkpoint with these tensors has the fused layout."""
        return self.interleaved or self._fused(spec.moe_layers[0])[0] in names

    def backbone(self, spec: ModelSpec, fused: bool) -> Iterator[TensorSpec]:
        """Every tensor but those of routed experts."""
        yield from self.outer(spec).values()
        for layer in self.layers(spec, fused):
            yield from layer.values()

    def layers(self, spec: ModelSpec, fused: bool) -> Iterator[Tensors]:
        """The tensors of each decoder layer, and of one that drafts, without routed experts."""
        for layer in range(spec.layers):
            yield self.layer(spec, layer, fused)
        if spec.drafts:
            yield self.layer(spec.deeper, spec.layers, fused) | self.draft(spec, spec.layers)

    def fewest_tensors(self, spec: ModelSpec, fused: bool) -> int:
        """Fewer than `tensors` has, without making them: a config.json can describe any number."""
        return spec.layers + len(spec.moe_layers) * (2 if fused else 3 * spec.experts)

    def tensors(self, spec: ModelSpec, fused: bool) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors that a checkpoint must have, by name."""
        shapes = {tensor.name: tensor.shape for tensor in self.backbone(spec, fused)}
        for layer in spec.deeper.moe_layers:
            for expert in range(1 if fused else spec.experts):  # fused, all have the same tensors
                shapes |= {part.name: part.shape for part in self.expert(spec, layer, expert, fused)}
        return shapes

    def optional(self, name: str, spec: ModelSpec) -> bool:
        """Returns whether a checkpoint may have this unread tensor: old buffers, a tied model's copied head,
        one of its extra layers, or a part of the model that is no part of the decoder."""
        if name.endswith(".rotary_emb.inv_freq") or (spec.tied_embeddings and name == "lm_head.weight"):
            return True
        if name.startswith(self.unread):
            return True
        extra = re.match(rf"{re.escape(self.prefix)}\.layers\.(\d{{1,9}})\.", name)
        return extra is not None and 0 <= int(extra[1]) - spec.layers < spec.extra_layers

    def _fused(self, layer: int) -> tuple[str, str]:
        at = f"{self.prefix}.layers.{layer}.mlp.experts"
        return f"{at}.gate_up_proj", f"{at}.down_proj"


def interleaved(gate_up: str, down: str, spec: ModelSpec, expert: int) -> ExpertRows:
    """The location of an expert in tensors of these names, with the biases of its gate and up."""
    number, wide, hidden = spec.experts, spec.intermediate, spec.hidden
    both, biases = (number, hidden, 2 * wide), (number, 2 * wide)
    return (
        TensorRows(gate_up, both, hidden * expert, hidden, 0, 2, transposed=True),
        TensorRows(gate_up, both, hidden * expert, hidden, 1, 2, transposed=True),
        TensorRows(down, (number, wide, hidden), wide * expert, wide, transposed=True),
        TensorRows(f"{gate_up}_bias", biases, expert, 1, 0, 2),
        TensorRows(f"{gate_up}_bias", biases, expert, 1, 1, 2),
    )


# Roles of a layer whose matrices a backbone stacks by rows.
STACKED = (
    ("query", "key", "value"),
    ("query_down", "latent"),
    ("query", "latent"),
    ("qkvz", "ba"),
    ("qkv", "z", "b", "a"),
    ("dense_gate_proj", "dense_up_proj"),
    ("shared_gate_proj", "shared_up_proj"),
)


def stacks(layer: Tensors) -> Iterator[tuple[str, ...]]:
    """The roles of a layer whose matrices are stacked; each is in one stack at most."""
    used: set[str] = set()
    for roles in STACKED:
        if layer.keys() >= set(roles) and used.isdisjoint(roles):
            used |= {*roles}
            yield roles


def norm(role: str, name: str, spec: ModelSpec, plus: float = 0.0) -> Tensors:
    """A norm of hidden states, with its bias where it is a LayerNorm."""
    tensors = {role: TensorSpec(f"{name}.weight", (spec.hidden,), plus=plus)}
    return tensors | ({f"{role}_bias": TensorSpec(f"{name}.bias", (spec.hidden,))} if spec.layer_norm else {})


def matrix(role: str, name: str, outputs: int, inputs: int, bias: bool = False) -> Tensors:
    """A matrix [outputs, inputs], perhaps with a bias."""
    tensors = {role: TensorSpec(f"{name}.weight", (outputs, inputs), "matrix")}
    return tensors | ({f"{role}_bias": TensorSpec(f"{name}.bias", (outputs,))} if bias else {})


def swiglu(role: str, name: str, hidden: int, intermediate: int) -> Tensors:
    """A dense or shared feed-forward block."""
    return (
        matrix(f"{role}_gate_proj", f"{name}.gate_proj", intermediate, hidden)
        | matrix(f"{role}_up_proj", f"{name}.up_proj", intermediate, hidden)
        | matrix(f"{role}_down_proj", f"{name}.down_proj", hidden, intermediate)
    )


def grouped_query(name: str, hidden: int, a: GroupedQuery, plus: float = 0.0) -> Tensors:
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    tensors = matrix("query", f"{name}.q_proj", queries * (1 + a.gated), hidden, a.bias)
    tensors |= matrix("key", f"{name}.k_proj", keys, hidden, a.bias)
    tensors |= matrix("value", f"{name}.v_proj", keys, hidden, a.bias)
    tensors |= matrix("output", f"{name}.o_proj", hidden, queries, a.output_bias)
    if a.sinks:
        tensors["sinks"] = TensorSpec(f"{name}.sinks", (a.heads,))
    if a.qk_norm:
        widths = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (queries, keys)
        tensors["query_norm"] = TensorSpec(f"{name}.q_norm.weight", widths[:1], plus=plus)
        tensors["key_norm"] = TensorSpec(f"{name}.k_norm.weight", widths[1:], plus=plus)
    return tensors


def gated_delta(name: str, hidden: int, d: GatedDelta, joined: bool) -> Tensors:
    values = d.value_heads * d.value_dim
    tensors = matrix("output", f"{name}.out_proj", hidden, values)
    if joined:
        tensors |= matrix("qkvz", f"{name}.in_proj_qkvz", d.channels + values, hidden)
        tensors |= matrix("ba", f"{name}.in_proj_ba", 2 * d.value_heads, hidden)
    else:
        tensors |= matrix("qkv", f"{name}.in_proj_qkv", d.channels, hidden)
        tensors |= matrix("z", f"{name}.in_proj_z", values, hidden)
        tensors |= matrix("b", f"{name}.in_proj_b", d.value_heads, hidden)
        tensors |= matrix("a", f"{name}.in_proj_a", d.value_heads, hidden)
    tensors["taps"] = TensorSpec(f"{name}.conv1d.weight", (d.channels, 1, d.taps))
    tensors["decay_log"] = TensorSpec(f"{name}.A_log", (d.value_heads,))
    tensors["decay_bias"] = TensorSpec(f"{name}.dt_bias", (d.value_heads,))
    tensors["value_norm"] = TensorSpec(f"{name}.norm.weight", (d.value_dim,))
    return tensors


def latent(name: str, hidden: int, a: Latent) -> Tensors:
    queries = a.heads * a.qk_dim
    expanded = a.heads * (a.nope_dim + a.value_dim)
    tensors = matrix("latent", f"{name}.kv_a_proj_with_mqa", a.rank + a.rope_dim, hidden, a.bias)
    tensors |= matrix("output", f"{name}.o_proj", hidden, a.heads * a.value_dim, a.bias)
    tensors["latent_norm"] = TensorSpec(f"{name}.kv_a_layernorm.weight", (a.rank,))
    tensors["expansion"] = TensorSpec(f"{name}.kv_b_proj.weight", (expanded, a.rank), "dense")
    if a.query_rank is None:
        return tensors | matrix("query", f"{name}.q_proj", queries, hidden)
    tensors |= matrix("query_down", f"{name}.q_a_proj", a.query_rank, hidden, a.bias)
    tensors["query_norm"] = TensorSpec(f"{name}.q_a_layernorm.weight", (a.query_rank,))
    return tensors | matrix("query", f"{name}.q_b_proj", queries, a.query_rank)
