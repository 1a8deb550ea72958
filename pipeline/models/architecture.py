"""What a model family's checkpoints are like: tensor names and shapes, and how its config.json reads.

Two layouts of tensors are in use. transformers up to version 4 wrote a tensor for each matrix of an expert;
version 5 can also write all experts of a layer as two tensors, `gate_up_proj` [E, 2 I, H] (of each expert
first the rows of gate, then those of up) and `down_proj` [E, H, I], and calls some modules by other names.
The second is called fused here.

A family is a subclass in a file of its own, which says what differs from the names that most families share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import ClassVar, Literal, NamedTuple

from pipeline.models.config_keys import Config
from pipeline.models.spec import GroupedQuery, Latent, ModelSpec

Kind = Literal["matrix", "table", "dense", "float32"]


class Want(NamedTuple):
    """A tensor of the backbone. `kind` says how it is kept: a matrix in the backbone's dtype, the table of
    embeddings and what is dense in it unless that is a quantized one (then in bf16), the rest in float32."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "float32"


class Part(NamedTuple):
    """Consecutive rows of a tensor, a row being its last axis: `rows` of them from row `first`."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    first: int
    rows: int


class Architecture(ABC):
    """One model family."""

    model_type: ClassVar[str]
    moe: ClassVar[str] = "mlp"  # what a layer calls its experts and their router
    router: ClassVar[str] = "gate"
    fused_router: ClassVar[str] = "gate"  # in the fused layout, where everything is in `mlp`
    matrices: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    shared: ClassVar[str] = "shared_expert"

    @abstractmethod
    def spec(self, config: Config) -> ModelSpec:
        """Raises ModelError for a variant that is not supported."""

    def outer(self, spec: ModelSpec) -> dict[str, Want]:
        """The tensors outside the layers, by role. `head` is missing where it is the embedding."""
        table = (spec.vocabulary, spec.hidden)
        wants = {"embedding": Want("model.embed_tokens.weight", table, "table")}
        wants |= norm("norm", "model.norm", spec)
        if not spec.tied_embeddings:
            wants["head"] = Want("lm_head.weight", table, "matrix")
        if spec.head_bias:
            wants["head_bias"] = Want("lm_head.bias", (spec.vocabulary,))
        return wants

    def layer(self, spec: ModelSpec, layer: int, fused: bool) -> dict[str, Want]:
        """The tensors of a decoder layer but for its routed experts, by role."""
        at = f"model.layers.{layer}"
        attention = spec.attention
        wants = norm("attention_norm", f"{at}.input_layernorm", spec)
        wants |= norm("mlp_norm", f"{at}.post_attention_layernorm", spec)
        if isinstance(attention, GroupedQuery):
            wants |= grouped_query(f"{at}.self_attn", spec.hidden, attention)
        else:
            wants |= latent(f"{at}.self_attn", spec.hidden, attention)
        if layer not in spec.moe_layers:
            return wants | swiglu("dense", f"{at}.mlp", spec.hidden, spec.dense_intermediate)
        moe, router = ("mlp", self.fused_router) if fused else (self.moe, self.router)
        wants["router"] = Want(f"{at}.{moe}.{router}.weight", (spec.experts, spec.hidden))
        if spec.shared_intermediate:
            wants |= swiglu("shared", f"{at}.{moe}.{self.shared}", spec.hidden, spec.shared_intermediate)
        if spec.shared_gate:
            wants["shared_gate"] = Want(f"{at}.{moe}.{self.shared}_gate.weight", (1, spec.hidden))
        return wants

    def expert(self, spec: ModelSpec, layer: int, expert: int, fused: bool) -> tuple[Part, Part, Part]:
        """Where gate [I, H], up [I, H] and down [H, I] of a decoder layer's expert lie."""
        wide, high = spec.intermediate, spec.hidden
        if fused:
            gate_up, down = self._fused(layer)
            both = (spec.experts, 2 * wide, high)
            first = 2 * wide * expert
            return (
                Part(gate_up, both, first, wide),
                Part(gate_up, both, first + wide, wide),
                Part(down, (spec.experts, high, wide), high * expert, high),
            )
        at = f"model.layers.{layer}.{self.moe}.experts.{expert}"
        gate, up, down = (f"{at}.{name}.weight" for name in self.matrices)
        return (
            Part(gate, (wide, high), 0, wide),
            Part(up, (wide, high), 0, wide),
            Part(down, (high, wide), 0, high),
        )

    def is_fused(self, names: Container[str], spec: ModelSpec) -> bool:
        """Which of the two layouts a checkpoint with these tensors has."""
        return self._fused(spec.moe_layers[0])[0] in names

    def tensors(self, spec: ModelSpec, fused: bool) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that a checkpoint must have, by name."""
        wants = [*self.outer(spec).values()]
        for layer in range(spec.layers):
            wants += self.layer(spec, layer, fused).values()
        found = {want.name: want.shape for want in wants}
        for layer in spec.moe_layers:
            for expert in range(spec.experts):
                found |= {part.name: part.shape for part in self.expert(spec, layer, expert, fused)}
        return found

    def optional(self, name: str, spec: ModelSpec) -> bool:
        """Whether a tensor that is not read may be there: what older versions of transformers saved beside
        the weights, and a head that is the embedding's copy."""
        return name.endswith(".rotary_emb.inv_freq") or (spec.tied_embeddings and name == "lm_head.weight")

    def _fused(self, layer: int) -> tuple[str, str]:
        at = f"model.layers.{layer}.mlp.experts"
        return f"{at}.gate_up_proj", f"{at}.down_proj"


def norm(role: str, name: str, spec: ModelSpec) -> dict[str, Want]:
    """A norm of hidden states."""
    wants = {role: Want(f"{name}.weight", (spec.hidden,))}
    return wants | ({f"{role}_bias": Want(f"{name}.bias", (spec.hidden,))} if spec.layer_norm else {})


def swiglu(role: str, name: str, hidden: int, intermediate: int) -> dict[str, Want]:
    """A feed-forward block that every token goes through."""
    return {
        f"{role}_gate_proj": Want(f"{name}.gate_proj.weight", (intermediate, hidden), "matrix"),
        f"{role}_up_proj": Want(f"{name}.up_proj.weight", (intermediate, hidden), "matrix"),
        f"{role}_down_proj": Want(f"{name}.down_proj.weight", (hidden, intermediate), "matrix"),
    }


def grouped_query(name: str, hidden: int, a: GroupedQuery) -> dict[str, Want]:
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    outputs = {"query": ("q", queries), "key": ("k", keys), "value": ("v", keys)}
    wants = {}
    for role, (letter, size) in outputs.items():
        wants[role] = Want(f"{name}.{letter}_proj.weight", (size, hidden), "matrix")
        if a.bias:
            wants[f"{role}_bias"] = Want(f"{name}.{letter}_proj.bias", (size,))
        if a.qk_norm and role != "value":
            width = a.head_dim if a.qk_norm == "head" else size
            wants[f"{role}_norm"] = Want(f"{name}.{letter}_norm.weight", (width,))
    wants["output"] = Want(f"{name}.o_proj.weight", (hidden, queries), "matrix")
    if a.output_bias:
        wants["output_bias"] = Want(f"{name}.o_proj.bias", (hidden,))
    return wants


def latent(name: str, hidden: int, a: Latent) -> dict[str, Want]:
    queries = a.heads * (a.plain + a.rotated)
    down = a.rank + a.rotated
    wants = {
        "latent": Want(f"{name}.kv_a_proj_with_mqa.weight", (down, hidden), "matrix"),
        "latent_norm": Want(f"{name}.kv_a_layernorm.weight", (a.rank,)),
        "expansion": Want(f"{name}.kv_b_proj.weight", (a.heads * (a.plain + a.value), a.rank), "dense"),
        "output": Want(f"{name}.o_proj.weight", (hidden, a.heads * a.value), "matrix"),
    }
    if a.query_rank is None:
        wants["query"] = Want(f"{name}.q_proj.weight", (queries, hidden), "matrix")
    else:
        wants["query_down"] = Want(f"{name}.q_a_proj.weight", (a.query_rank, hidden), "matrix")
        wants["query_norm"] = Want(f"{name}.q_a_layernorm.weight", (a.query_rank,))
        wants["query"] = Want(f"{name}.q_b_proj.weight", (queries, a.query_rank), "matrix")
    if a.bias:
        biased = {"latent": ("kv_a_proj_with_mqa", down), "output": ("o_proj", hidden)}
        if a.query_rank is not None:
            biased["query_down"] = ("q_a_proj", a.query_rank)
        for role, (module, size) in biased.items():
            wants[f"{role}_bias"] = Want(f"{name}.{module}.bias", (size,))
    return wants
