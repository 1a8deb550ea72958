"""The cache that a model's modules see, over the sequences' own memory (`SequenceKV`).

New keys are written behind the others, and modules get a copy of those that the new ones can attend to. A
step reads a sequence's recurrent states and writes its `pending` ones, so a step that fails leaves the
sequence as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.kv_cache import SequenceKV
from pipeline.device.base import Device
from pipeline.errors import ModelError
from workers.kernels.c_types import Kept
from workers.kernels.layer import Heads, TokenAttention

# ----------------------------------------------------------------------------------------------------------
# Attention of one new token on the host by our kernel, for modules whose attention is ours: in place of
# keys and values they get what stands for them in the cache, so that nothing is copied for a single token.


class OneToken:
    """The kernel for layers of any heads."""

    def __init__(self, device: Device) -> None:
        """`device`: one with a library of kernels."""
        assert device.library is not None
        self._library, self._team = device.library, device.team
        self._scratch = Kept()

    @functools.cache  # noqa: B019 - one for each kind of layer
    def kernel(self, *facts: float) -> TokenAttention:
        """For such `Heads`, without sinks: all but these and the scale, then that."""
        *sizes, scale = facts
        return TokenAttention(self._library, self._team, Heads(*sizes, None, scale), self._scratch)


class Stored:
    """One layer's keys or values [1, heads, N, width] of a sequence with one new token, which is stored
    too."""

    def __init__(
        self, one: OneToken, kv: SequenceKV, place: tuple[int, int], columns: slice, window: int | None
    ) -> None:
        """`place`: layer and stream; `columns`: of the stream's numbers; `window`: the last tokens that
        count."""
        self._one, self._kv, self._place, self._columns, self._window = one, kv, place, columns, window
        first = 0 if window is None else max(0, kv.length + 1 - window)
        self._seen = first, kv.length + 1
        layer, stream = place
        _, heads, _, width = kv.pool.slabs[layer][stream].numbers.shape
        self.shape = torch.Size((1, heads, kv.length + 1 - first, len(range(width)[columns])))

    def read(self) -> Tensor:
        """A copy of all."""
        return self._kv.read(*self._place, *self._seen, self._kv.pool.wide)[None, ..., self._columns]

    def attend(self, q: Tensor, value_width: int, scale: float, latent: bool = False) -> Tensor:
        """Attention of q [heads, width] to these keys: float32 [heads, value_width]. Values are those of the
        same layer; if `latent`, the first numbers of the keys."""
        kv, pool = self._kv, self._kv.pool
        heads, width = q.shape
        bits, window = 8 * pool.dtype.itemsize, self._window or 0
        kernel = self._one.kernel(bits, heads, self.shape[1], width, value_width, int(latent), window, scale)
        q, out = q.float().contiguous(), torch.empty(heads, value_width)
        streams = pool.addresses_of(self._place[0])
        kernel(q.data_ptr(), streams, kv.blocks.ctypes.data, kv.capacity, kv.length, out.data_ptr())
        return out


@dataclass(frozen=True)
class LayerKept:
    """One layer's part of a sequence's cache."""

    streams: tuple[tuple[int, int], ...]  # (heads, numbers a token): keys, values, and those of an indexer
    states: tuple[tuple[int, ...], ...]  # shapes: of convolutions, then recurrent ones
    convolutions: int = 0  # of the states
    rank: int = 0  # of latents, behind each of which its rotary key is cached in the first stream; 0: none


def kept_by(cache: Cache, tokens: int, decoder: nn.Module) -> list[LayerKept]:
    """What each layer of a transformers cache keeps, read from one that has seen a sequence's first `tokens`
    tokens: fewer than any window, and another number than heads or widths."""
    latent = {getattr(m, "layer_idx", None) for m in decoder.modules() if hasattr(m, "expand_kv")}
    linear = getattr(cache, "linear_cache", [])
    kept = []
    for number, layer in enumerate([*cache.layers, *[None] * (len(linear) - len(cache.layers))]):
        if number < len(linear) and isinstance(linear[number], Tensor):
            kept.append(LayerKept((), (tuple(linear[number].shape[1:]),)))
            continue
        found = {k: v for k, v in vars(layer).items() if isinstance(v, Tensor) and v.dim() in (3, 4)}
        names = sorted((n for n, v in found.items() if v.shape[-2] == tokens), key=_stream_order)
        streams = tuple(
            (v.shape[1] if v.dim() == 4 else 1, v.shape[-1]) for v in map(found.get, names) if v is not None
        )
        convolutions, recurrent = (_states(layer, n) for n in ("conv_states", "recurrent_states"))
        rank = 0
        if number in latent and [heads for heads, _ in streams[:2]] == [1, 1]:
            (_, rank), (_, rotated), *others = streams
            streams = ((1, rank + rotated), *others)
        kept.append(LayerKept(streams, (*convolutions, *recurrent), len(convolutions), rank))
    return kept


def check_layers(cache: Cache, kind: str) -> None:
    """Raise ModelError for a cache of a model of this kind whose layers keep tokens in a way of their own,
    which a few tokens would not show."""
    for layer in {type(layer) for layer in cache.layers}:
        own = (c for c in layer.__mro__ if c.__module__.startswith("transformers.models."))
        if any({"update", "get_mask_sizes", "lazy_initialization"} & vars(c).keys() for c in own):
            raise ModelError(
                f"config.json: {kind} keeps the cache in a way of its own ({layer.__name__}): it cannot be"
                " run, use a model of another family"
            )


def _stream_order(name: str) -> int:
    return {"keys": 0, "values": 1}.get(name, 2)


def _states(layer: object, name: str) -> list[tuple[int, ...]]:
    """Shapes without the batch."""
    states = getattr(layer, name, {}).values()
    return [tuple(s.shape[1:]) for s in states if isinstance(s, Tensor)]


@dataclass(frozen=True)
class Rows:
    """A sequence's rows in a step."""

    kv: SequenceKV
    first: int
    end: int
    start: int  # tokens of the sequence before them

    @property
    def count(self) -> int:
        return self.end - self.first


def rows_of(spans: Sequence[TokenSpan]) -> list[Rows]:
    rows, first = [], 0
    for span in spans:
        end = first + len(span.tokens)
        rows.append(Rows(span.kv, first, end, span.kv.length))
        first = end
    return rows


class PerSequence(list[Any]):
    """A value for each sequence of a step, in place of a mask or of cached keys."""

    def __init__(self, values: Iterable[Any], rows: Sequence[Rows]) -> None:
        super().__init__(values)
        self.rows = rows


class _Steps:
    """What modules ask a layer of the cache about its length."""

    def __init__(self, cache: StepCache, index: int, window: int | None, kept: LayerKept) -> None:
        super().__init__()
        self._cache, self._index, self._kept = cache, index, kept
        self.window = window
        self.is_sliding = window is not None
        self.updated = 0  # the cache's `turn` of the latest update
        self.keys: Any = None  # what the latest update gave
        self._axes: torch.Size | None = None  # of positions, before that of tokens

    def get_seq_length(self) -> int:
        """Tokens of the sequence, with the new ones once they are written."""
        (rows,) = self._cache.visible
        return rows.start + (rows.count if self.updated == self._cache.turn else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that an update gives, and how many of the sequence precede them."""
        (rows,) = self._cache.visible
        offset = self.first_key(rows)
        return rows.start + query_length - offset, offset

    def first_key(self, rows: Rows) -> int:
        """The first key that the rows can attend to."""
        return 0 if self.window is None else max(0, rows.start - self.window + 1)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions [..., N] of the tokens that an indexer has seen."""
        (rows,) = self._cache.visible
        if rows.start == 0 or self._axes is None:
            return None
        return torch.arange(rows.start, device=rows.kv.pool.devices[0]).expand(*self._axes, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        self._axes = positions.shape[:-1]

    def update_index(self, keys: Tensor) -> Tensor:
        """Append to an indexer's keys, [1, T, numbers] or [1, heads, T, numbers]; returns all of them."""
        return self._cache.update_indexer(keys, self._index)


class StreamLayer(_Steps, DynamicLayer):  # type: ignore[misc]
    """Keys and values."""


class StateLayer(_Steps, LinearAttentionLayer):  # type: ignore[misc]
    """Recurrent states."""


class StreamAndStateLayer(_Steps, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """Both."""


class StepCache(Cache):  # type: ignore[misc]
    """All sequences' caches in a step. Modules see those that are `visible`: all, or one at a time."""

    def __init__(self, like: Cache, kept: Sequence[LayerKept], raw: frozenset[int] = frozenset()) -> None:
        """`like`: a cache of the model that has been used; `raw`: layers whose attention takes keys and
        values in the dtype in which they are cached, the others get float32."""
        own = type(like)
        if (
            not issubclass(own, StepCache) and own is not DynamicCache
        ):  # a family asks for its own kind of cache
            self.__class__ = type(f"Step{own.__name__}", (StepCache, own), {})
        layers = [self._layer(n, layer, kept[n]) for n, layer in enumerate(like.layers)]
        Cache.__init__(self, layers=layers)
        self.raw = raw
        self.copies = True  # whether modules change recurrent states in place
        self.one: OneToken | None = None  # the kernel for attention of one token, if there is one
        self.in_place: frozenset[int] = frozenset()  # layers that use it
        self.visible: Sequence[Rows] = ()
        self.turn = 0
        self._kept = kept
        self._dtypes = {  # of convolutions' states, by layer and state
            (n, i): state.dtype
            for n, layer in enumerate(like.layers)
            for i, state in getattr(layer, "conv_states", {}).items()
            if isinstance(state, Tensor)
        }

    def _layer(self, index: int, like: Any, kept: LayerKept) -> Any:
        streams = isinstance(like, CacheLayerMixin)
        states = isinstance(like, LinearAttentionCacheLayerMixin)
        if not streams and not states:
            return like  # keeps nothing
        kind = StreamAndStateLayer if streams and states else StreamLayer if streams else StateLayer
        return kind(self, index, getattr(like, "sliding_window", None), kept)

    def show(self, rows: Sequence[Rows]) -> None:
        """Let modules see these sequences."""
        self.visible = rows
        self.turn += 1

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Append keys and values [1, heads, R, numbers]; returns those of all tokens that the new ones can
        attend to, of several visible sequences for each."""
        layer = self.layers[layer_idx]
        layer.updated = self.turn
        if len(self.visible) == 1:
            (rows,) = self.visible
            found = self._append(rows, layer_idx, keys, values)
            layer.keys = found[0]
            return found
        each = [
            self._append(rows, layer_idx, *(x.narrow(2, rows.first, rows.count) for x in (keys, values)))
            for rows in self.visible
        ]
        return tuple(PerSequence(part, self.visible) for part in zip(*each, strict=True))

    def _append(self, rows: Rows, index: int, keys: Tensor, values: Tensor) -> tuple[Any, Any]:
        """One sequence's, as `update`."""
        kv, layer, rank = rows.kv, self.layers[index], self._kept[index].rank
        # keys and values, or both in one stream: by stream and columns
        places = ((0, slice(rank)), (0, slice(rank, None))) if rank else ((0, slice(None)), (1, slice(None)))
        if rank:
            kv.store(index, 0, torch.cat((keys, values), -1)[0])
        else:
            kv.store(index, 0, keys[0])
            kv.store(index, 1, values[0])
        if rows.count == 1 and self.one is not None and index in self.in_place:
            of = (Stored(self.one, kv, (index, n), columns, layer.window) for n, columns in places)
            return next(of), next(of)
        first, end = layer.first_key(rows), rows.start + rows.count
        dtype = kv.pool.wide if index in self.raw else keys.dtype
        read = {n: kv.read(index, n, first, end, dtype)[None] for n, _ in places}
        found = (read[n][..., columns] for n, columns in places)
        return next(found), next(found)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        new = indexer_key_states
        (rows,) = self.visible
        kv, stream = rows.kv, 1 if self._kept[layer_idx].rank else 2
        kv.store(layer_idx, stream, new[0] if new.dim() == 4 else new)
        first, end = self.layers[layer_idx].first_key(rows), rows.start + rows.count
        found = kv.read(layer_idx, stream, first, end, new.dtype)
        return found[None] if new.dim() == 4 else found

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A copy, since kernels change it in place. What a family keeps so may also be token ids."""
        state = self._state(layer_idx, state_idx, copied=True)
        return None if state is None else state.to(self._dtypes[layer_idx, state_idx])

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state(layer_idx, self._kept[layer_idx].convolutions + state_idx, self.copies)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self._state(layer_idx, 0, self.copies)

    def _state(self, layer: int, state: int, copied: bool) -> Tensor | None:
        (rows,) = self.visible
        if rows.start == 0:
            return None
        now = rows.kv.states[layer][state]
        return rows.kv.pending[layer][state].copy_(now)[None] if copied else now[None]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Append inputs [1, channels, T] of a convolution; returns them behind those that it still needs."""
        (rows,) = self.visible
        pending = rows.kv.pending[layer_idx][state_idx]
        width = pending.shape[-1]
        if rows.start:
            full = torch.cat((rows.kv.states[layer_idx][state_idx][None], conv_states), dim=-1)
        else:
            full = functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        pending.copy_(full[0, ..., -width:])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        (rows,) = self.visible
        pending = rows.kv.pending[layer_idx][self._kept[layer_idx].convolutions + state_idx]
        if recurrent_states.data_ptr() != pending.data_ptr():
            pending.copy_(recurrent_states[0])
        return pending[None]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        (rows,) = self.visible
        rows.kv.pending[layer_idx][0].copy_(linear_cache[0])

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        (rows,) = self.visible
        return rows.start > 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if len(self.visible) > 1:  # a module to which this matters is called for each sequence
            return max(rows.start for rows in self.visible)
        (rows,) = self.visible
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer.get_seq_length() if isinstance(layer, _Steps) else rows.start

    def __len__(self) -> int:
        return len(self.layers)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False
