"""A decoder layer up to its routed experts, for single tokens of several sequences, and attention of many new
tokens of one sequence, each in one call of C: `c/kernels.h` specifies them.

Arrays are passed by address, because the callers hold torch tensors; the callers check shapes and types when
they create those.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.kernels.c_types import POINTER, SIZE, Kept, Matrix, checked, typed
from workers.kernels.matrix import Address, HostMatrix
from workers.kernels.native import Library, Team, handle_of

QK_NORMS = ("", "head", "all")  # of queries and keys: none, of each head, of all heads together
TOKEN_STEP = 1024  # scratch for attention grows by so many tokens

KV_BLOCK = 64  # tokens of a block of the KV cache

TOKEN = np.dtype(
    [(name, "u8") for name in ("cosines", "sines", "streams", "blocks", "states")]
    + [("capacity", "i8"), ("position", "i8")]
)


class Tokens:
    """The rows of a step, each a token of another sequence; for all of its layers."""

    def __init__(self, rows: NDArray[Any]) -> None:
        """`rows`: TOKEN [R], as `struct token`."""
        self.rows = len(rows)
        self.longest = int(rows["position"].max(initial=0)) + 1
        self._kept = rows
        self.address: Address = rows.ctypes.data


class NormOf(ctypes.Structure):
    """RMS norm, with a bias LayerNorm."""

    _fields_ = (("weight", POINTER), ("bias", POINTER), ("eps", ctypes.c_float))


class Grouped(ctypes.Structure):
    """Attention with query heads in groups that share keys and values."""

    _fields_ = (
        *((name, SIZE) for name in ("bits", "heads", "kv_heads", "width", "rope", "gated")),
        *((name, SIZE) for name in ("window", "normed")),
        *((name, POINTER) for name in ("query_norm", "key_norm", "sinks")),
        *((name, ctypes.c_float) for name in ("eps", "clip", "scale")),
    )


class Heads(ctypes.Structure):
    """Attention of one token on given queries. `latent`: 1 where a value is the first numbers of its key."""

    _fields_ = (
        *((name, SIZE) for name in ("bits", "heads", "kv_heads", "key_width", "value_width")),
        *((name, SIZE) for name in ("latent", "window")),
        ("sinks", POINTER),
        ("scale", ctypes.c_float),
    )


class Latent(ctypes.Structure):
    """Attention with keys and values that are expanded from one cached vector a token."""

    _fields_ = (
        *((name, SIZE) for name in ("bits", "heads", "rank", "nope", "rope", "value", "query_rank")),
        *((name, POINTER) for name in ("query_norm", "norm", "expansion")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class Delta(ctypes.Structure):
    """The gated delta rule in the place of attention."""

    _fields_ = (
        *((name, SIZE) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps")),
        *((name, POINTER) for name in ("tap_weights", "decay", "decay_bias", "norm")),
        ("eps", ctypes.c_float),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, SIZE) for name in ("hidden", "experts")),
        *((name, NormOf) for name in ("attention_norm", "mlp_norm")),
        ("grouped", ctypes.POINTER(Grouped)),
        ("latent", ctypes.POINTER(Latent)),
        ("delta", ctypes.POINTER(Delta)),
        *((name, ctypes.POINTER(Matrix)) for name in ("first", "query", "output")),
        *((name, POINTER) for name in ("router", "router_bias")),
        *((name, ctypes.POINTER(Matrix)) for name in ("up", "down")),
        ("gate", POINTER),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", SIZE),
        *((name, POINTER) for name in ("tokens", "h", "out", "x", "logits", "shared", "scratch")),
        ("scratch_bytes", SIZE),
    )


@dataclass(frozen=True)
class Projection:
    """A matrix and the address of its bias float32 [outputs]."""

    matrix: HostMatrix
    bias: Address | None = None


@dataclass(frozen=True)
class LayerParts:
    """The parts that a layer computes with. A layer without a router is dense: `up` and `down` are then its
    own feed-forward block, and otherwise that of its shared experts."""

    hidden: int
    experts: int
    attention_norm: NormOf
    mlp_norm: NormOf
    attention: Grouped | Latent | Delta
    first: Projection  # see `struct layer`
    query: Projection | None  # from the queries' latent
    output: Projection
    router: Address | None  # float32 [experts, hidden]
    router_bias: Address | None  # float32 [experts]
    up: Projection | None  # gate over up [2 I, hidden]
    down: Projection | None  # [hidden, I]
    gate: Address | None  # float32 [hidden], of the shared experts' output


class LayerKernel:
    """Computes one layer. Used by one thread at a time, like the scratch, which layers share."""

    def __init__(
        self, library: Library, team: Team | None, index: int, parts: LayerParts, scratch: Kept
    ) -> None:
        """`index`: the layer's number among those of the KV cache."""
        self._team, self._threads = team, 1 if team is None else team.threads
        self._index = index
        self._parts = parts
        self._scratch = scratch
        self._call = typed(library.functions.tandem_layer, POINTER, POINTER, SIZE, POINTER, result=checked)
        sizes = (POINTER, SIZE, SIZE, SIZE)
        self._scratch_bytes = typed(library.functions.tandem_layer_scratch, *sizes, result=SIZE)
        given = {n: getattr(parts, n) for n in ("first", "query", "output", "up", "down")}
        structures = {
            name: Matrix(p.matrix.facts, p.matrix.address, p.bias)
            for name, p in given.items()
            if p is not None
        }
        kind = type(parts.attention).__name__.lower()
        self._layer = _Layer(
            hidden=parts.hidden,
            experts=parts.experts,
            attention_norm=parts.attention_norm,
            mlp_norm=parts.mlp_norm,
            router=parts.router,
            router_bias=parts.router_bias,
            gate=parts.gate,
            **{kind: ctypes.pointer(parts.attention)},
            **{name: ctypes.pointer(structure) for name, structure in structures.items()},
        )
        self._address = ctypes.addressof(self._layer)
        self._step = _Step()
        self._step_address = ctypes.addressof(self._step)
        self._sized = (0, 0)  # rows and tokens of `_step.scratch_bytes`

    def __call__(
        self,
        tokens: Tokens,
        h: Address,
        out: Address,
        x: Address,
        logits: Address | None,
        shared: Address | None,
    ) -> None:
        """`h` [rows, hidden]: the residual stream. Written, all float32: `out` [rows, hidden], h after the
        attention, and after the block of a dense layer; `x` [rows, hidden], the normalised input of router
        and experts; `logits` [rows, experts], unless None; `shared` [rows, hidden], the shared experts'
        output, where the layer has any. Raises IndexError for a position outside its capacity."""
        step, rows = self._step, tokens.rows
        if rows != self._sized[0] or tokens.longest > self._sized[1]:
            self._sized = rows, -(-tokens.longest // TOKEN_STEP) * TOKEN_STEP
            step.scratch_bytes = self._scratch_bytes(self._address, rows, self._threads, self._sized[1])
        step.rows, step.tokens, step.scratch = rows, tokens.address, self._scratch.reserve(step.scratch_bytes)
        step.h, step.out, step.x, step.logits, step.shared = h, out, x, logits, shared
        self._call(handle_of(self._team), self._address, self._index, self._step_address)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, row by row."""

    def __init__(self, library: Library, weight: Address, width: int, eps: float) -> None:
        types = (POINTER, POINTER, SIZE, SIZE, ctypes.c_float, POINTER)
        self._function = typed(library.functions.tandem_rms_norm, *types)
        self._weight, self._width, self._eps = weight, width, eps

    def __call__(self, x: Address, rows: int, out: Address) -> None:
        """x and out [rows, width], which may be the same."""
        self._function(x, self._weight, rows, self._width, self._eps, out)


class SpanKernel:
    """Attention with query heads in groups that share keys and values. Used by one thread at a time, like the
    scratch, which layers share."""

    def __init__(self, library: Library, team: Team | None, grouped: Grouped, scratch: Kept) -> None:
        types = (*[POINTER] * 7, SIZE, SIZE, SIZE, POINTER, POINTER)
        self._function = typed(library.functions.tandem_span, *types, result=checked)
        self._team, self._grouped, self._scratch = team, grouped, scratch
        each = typed(library.functions.tandem_span_scratch, POINTER, result=SIZE)
        self._size = (1 if team is None else team.threads) * each(ctypes.byref(grouped))

    def __call__(
        self,
        qkv: Address,
        cos_sin: tuple[Address, Address],
        streams: Address,
        blocks: Address,
        capacity: int,
        position: int,
        count: int,
        out: Address,
    ) -> None:
        """`count` tokens, the first after `position` others: qkv [count, (heads + 2 kv_heads) * width], after
        the gates if it is gated, changed in place; cosines and sines [count, rope]; `streams`: addresses of
        the layer's slabs; `blocks` int32 [capacity / KV_BLOCK]; out [count, heads * width]. Raises
        IndexError for positions outside the capacity."""
        self._function(
            handle_of(self._team), ctypes.byref(self._grouped), qkv, *cos_sin, streams, blocks, capacity,
            position, count, out, self._scratch.reserve(self._size),
        )  # fmt: skip


class TokenAttention:
    """Attention of one new token of a sequence on given queries, whose keys and values are all in the cache.
    Used by one thread at a time, like the scratch."""

    def __init__(self, library: Library, team: Team | None, heads: Heads, scratch: Kept) -> None:
        types = (*[POINTER] * 5, SIZE, SIZE, POINTER, POINTER)
        self._function = typed(library.functions.tandem_attend, *types, result=checked)
        self._size = typed(library.functions.tandem_attend_scratch, POINTER, SIZE, SIZE, result=SIZE)
        self._team, self._threads = team, 1 if team is None else team.threads
        self._heads, self._scratch = heads, scratch

    def __call__(
        self, q: Address, streams: Address, blocks: Address, capacity: int, position: int, out: Address
    ) -> None:
        """A token with `position` others before it: q float32 [heads, key_width]; streams and blocks as of a
        span; out float32 [heads, value_width]. Raises IndexError for a position outside the capacity."""
        heads = ctypes.byref(self._heads)
        scratch = self._scratch.reserve(self._size(heads, self._threads, position + 1))
        self._function(
            handle_of(self._team), heads, q, streams, blocks, capacity, position, out, scratch
        )  # fmt: skip
