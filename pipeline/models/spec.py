"""The checked description of a model that the rest of the engine uses; `architecture.py` has the locations of
weights. Without torch, so that a command line is checked before a process is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from pipeline.policies.view import Router
from shm.expert_math import SWIGLU, ExpertMath


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    kind: str  # of transformers' initialisers: default | linear | dynamic | yarn | longrope | llama3
    theta: float
    switch: int | None = None  # longrope: sequences of more tokens than this use the long factors
    # Factors of cosines and sines for short and for long sequences, instead of the initialiser's. Both then
    # use the short frequencies.
    scales: tuple[float, float] | None = None


@dataclass(frozen=True)
class GroupedQuery:
    """Grouped-query attention: query heads share fewer key and value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False  # of queries, keys and values
    output_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""  # RMS norm of queries and keys: of each head, or of all together
    clip: float | None = None  # queries, keys and values are clamped to [-clip, clip]
    sinks: bool = False  # each head has a score of its own beside its tokens', whose value is 0
    rotated: int | None = None  # leading numbers of a head that are rotated by position; None: all
    gated: bool = False  # a head's output is scaled by the sigmoid of gates, which lie behind its queries

    @property
    def kv_streams(self) -> tuple[tuple[int, int], ...]:
        """The streams that a layer caches, (heads, numbers a token) of each: keys and values."""
        return ((self.kv_heads, self.head_dim),) * 2

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that are rotated by position."""
        return self.head_dim if self.rotated is None else self.rotated

    @property
    def qk_dim(self) -> int:
        """Numbers of a head's query and of its key."""
        return self.head_dim


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values are expanded from a latent vector, the only stream that is
    cached, with the part of the key that is rotated by position."""

    heads: int
    query_rank: int | None  # of the queries' own latent; None: queries are projected in one step
    rank: int  # numbers of the keys' and values' latent
    nope_dim: int  # numbers of a head's query and key that are not rotated
    rope_dim: int  # those that are; all heads share these of the key
    value_dim: int  # numbers of a head's value
    bias: bool  # of the down-projections and of the output
    scale: float  # factor of the scores
    interleaved: bool = True  # in checkpoints number 2i rotates with 2i + 1; else i with i + rope_dim / 2

    @property
    def kv_streams(self) -> tuple[tuple[int, int], ...]:
        return ((1, self.rank + self.rope_dim),)

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta rule (GatedDeltaNet, arXiv:2412.06464): instead of keys and values a layer keeps a matrix
    for each value head, which each token multiplies by a decay and corrects towards its value at its key.
    Queries, keys and values go through a short causal convolution before."""

    key_heads: int  # of queries and keys; each serves value_heads / key_heads heads
    value_heads: int
    key_dim: int  # numbers of a head's query and key
    value_dim: int
    taps: int  # of the convolution

    @property
    def channels(self) -> int:
        """The channels of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a state: the convolution's last inputs, and the matrices."""
        return (self.taps - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of pre-normalised attention and feed-forward blocks, dense or of experts."""

    layers: int  # of the decoder
    moe_layers: tuple[int, ...]  # those with routed experts; store, engine and policies count these only
    hidden: int  # H
    intermediate: int  # I of one routed expert
    experts: int  # E a layer
    top_k: int  # k
    attention: GroupedQuery | Latent
    windows: tuple[int | None, ...]  # by layer: tokens that a token attends to, itself included; None: all
    rope: Rope
    router: Router
    vocabulary: int
    max_positions: int
    norm_eps: float
    tied_embeddings: bool
    layer_norm: bool = False  # LayerNorm with biases instead of RMS norm
    head_bias: bool = False
    dense_intermediate: int = 0  # I of the layers without experts
    shared_intermediate: int = 0  # I of all shared experts of a layer together; 0: none
    router_bias: bool = False  # of the router's logits
    extra_layers: int = 0  # behind the last, in checkpoints: they predict further tokens
    drafts: bool = False  # the first of these is read: it guesses the token behind the next one
    shared_gate: bool = False  # a sigmoid gate scales the shared experts' output for each token
    math: ExpertMath = SWIGLU  # of the routed experts
    recurrent: GatedDelta | None = None  # takes the place of attention in `recurrent_layers`
    recurrent_layers: tuple[int, ...] = ()

    @property
    def deeper(self) -> Self:
        """The same decoder with the layer that drafts as its last one, where it has that."""
        if not self.drafts:
            return self
        layers, windows = (*self.moe_layers, self.layers), (*self.windows, None)
        return replace(self, layers=self.layers + 1, moe_layers=layers, windows=windows, drafts=False)

    @property
    def kv_streams(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By decoder layer, the streams that it caches: (heads, numbers a token) of each."""
        layers = range(self.layers)
        return tuple(() if i in self.recurrent_layers else self.attention.kv_streams for i in layers)

    @property
    def state_shapes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By decoder layer, the shapes of its recurrent states."""
        shapes = () if self.recurrent is None else self.recurrent.state_shapes
        return tuple(shapes if i in self.recurrent_layers else () for i in range(self.layers))

    @property
    def rope_switch(self) -> int | None:
        """As of `rope`."""
        return self.rope.switch
