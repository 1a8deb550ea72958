"""What the engine must know of a model, read from its config.json once and checked there.

A spec says what is computed and how large it is; `architecture.py` says where the numbers lie in a
checkpoint. It is made without torch, so that a command line can be checked before anything is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.models.routing import Router


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: which of transformers' initialisers gives its frequencies."""

    kind: str  # default | linear | dynamic | yarn | longrope | llama3
    theta: float
    switch: int | None = None  # longrope: with more tokens than this, a sequence has the long factors
    # Of cosines and sines, in place of what the initialiser says: up to `switch` tokens and with more. The
    # frequencies are then those of short sequences in both cases.
    scales: tuple[float, float] | None = None


@dataclass(frozen=True)
class GroupedQuery:
    """Attention whose query heads share fewer key and value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False  # of queries, keys and values
    output_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""  # RMS norm of queries and keys: of each head, or of all together
    clip: float | None = None  # queries, keys and values are cut to [-clip, clip]

    @property
    def kv_streams(self) -> tuple[tuple[int, int], ...]:
        """What a layer caches of a token: (heads, numbers) of keys, and of values."""
        return ((self.kv_heads, self.head_dim),) * 2

    @property
    def rotated(self) -> int:
        """Numbers of a head that carry the position."""
        return self.head_dim

    @property
    def width(self) -> int:
        """Numbers of a head's query."""
        return self.head_dim


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values are expanded from one short vector a token, which is all
    that is cached."""

    heads: int
    query_rank: int | None  # None: queries are projected in one step
    rank: int  # numbers of the latent
    plain: int  # numbers of a head's query and key without position
    rotated: int  # and with it; all heads share these of the key
    value: int  # numbers of a head's value
    bias: bool  # of the down-projections and of the output
    scale: float  # of the products of queries and keys

    @property
    def kv_streams(self) -> tuple[tuple[int, int], ...]:
        return ((1, self.rank + self.rotated),)

    @property
    def width(self) -> int:
        return self.plain + self.rotated


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of pre-normalised attention and feed-forward blocks, most of them of experts."""

    layers: int  # of the decoder
    moe_layers: tuple[int, ...]  # those with routed experts: what the store, the engine and policies count
    hidden: int  # H
    intermediate: int  # I of one routed expert
    experts: int  # E a layer
    top_k: int  # k
    attention: GroupedQuery | Latent
    windows: tuple[int | None, ...]  # of each layer: how many tokens back, itself included, a token sees
    rope: Rope
    router: Router
    vocabulary: int
    max_positions: int
    norm_eps: float
    tied_embeddings: bool
    layer_norm: bool = False  # LayerNorm with biases instead of RMS norm
    head_bias: bool = False
    dense_intermediate: int = 0  # I of the layers without experts
    shared_intermediate: int = 0  # I of all shared experts of a layer together; 0: there are none
    shared_gate: bool = False  # the shared experts' output is weighted, token by token

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, over all layers."""
        return self.layers * sum(heads * width for heads, width in self.attention.kv_streams)
