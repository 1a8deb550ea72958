"""The two kinds of attention, on the device: x -> attention(x), with the sequences' KV.

Positions are turned in float32; products of queries, keys and values are done in the KV cache's dtype.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.batch import Batch
from pipeline.backbone.decode_attention import OneTokenGrouped, OneTokenLatent
from pipeline.backbone.linear import Precision
from pipeline.backbone.rope import rotate
from pipeline.backbone.weights import Weights
from pipeline.models.spec import GroupedQuery, Latent

LATENT_EPS = 1e-6  # of the norms between a latent's projections, whatever the config says of others
EXPANDED_BYTES = 1 << 27  # of keys and values of latent attention at a time


class Attention(Protocol):
    """Of one layer."""

    def __call__(self, layer: int, x: Tensor, batch: Batch) -> Tensor:
        """x float32 [R, H], normalised: float32 [R, H]; appends to the KV that sequences have of `layer`."""


class GroupedQueryAttention:
    """Query heads in groups that share a head of keys and values."""

    def __init__(
        self, spec: GroupedQuery, weights: Weights, window: int | None, eps: float, precision: Precision
    ) -> None:
        """`eps`: of the norms."""
        self._spec, self._window, self._eps = spec, window, eps
        self._dtype = precision.dtype
        self._qkv = weights.linear("query", "key", "value", followed=True)
        self._output = weights.linear("output")
        self._norms = None
        if spec.qk_norm:
            self._norms = weights.vector("query_norm"), weights.vector("key_norm")
        self._one = None
        if precision.device.library is not None:
            self._one = OneTokenGrouped(
                spec, self._norms, window, self._dtype, eps, precision.device, precision.quantized
            )

    def __call__(self, layer: int, x: Tensor, batch: Batch) -> Tensor:
        qkv = self._qkv(x)
        if self._one is not None and batch.single:
            return self._output(self._one(layer, qkv, batch))
        s = self._spec
        heads = self._heads(qkv)
        turned = s.heads + s.kv_heads  # queries and keys
        qk = rotate(heads[:, :turned], batch.turn).to(self._dtype)
        q, k, v = qk[:, : s.heads], qk[:, s.heads :], heads[:, turned:].to(self._dtype)
        parts, start = [], 0
        for piece, mask in zip(batch.slices, batch.masks[self._window], strict=True):
            rows = slice(start, start + len(piece.tokens))
            start = rows.stop
            keys, values = piece.kv.write(layer, k[rows].transpose(0, 1), v[rows].transpose(0, 1))
            parts.append(self._attend(q[rows].transpose(0, 1), keys, values, mask))
        return self._output((parts[0] if len(parts) == 1 else torch.cat(parts)).float())

    def _heads(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values by heads, [R, heads + 2 kv_heads, width], normalised and clipped."""
        s = self._spec
        width = s.head_dim
        if s.qk_norm == "all":
            q, k, v = torch.split(qkv, [s.heads * width, s.kv_heads * width, s.kv_heads * width], dim=1)
            qkv = torch.cat((self._normed(0, q), self._normed(1, k), v), dim=1)
        if s.clip is not None:
            qkv = qkv.clamp(-s.clip, s.clip)
        heads = qkv.view(len(qkv), -1, width)
        if s.qk_norm == "head":
            q, k, v = torch.split(heads, [s.heads, s.kv_heads, s.kv_heads], dim=1)
            heads = torch.cat((self._normed(0, q), self._normed(1, k), v), dim=1)
        return heads

    def _normed(self, which: int, x: Tensor) -> Tensor:
        assert self._norms is not None
        weight = self._norms[which]
        return functional.rms_norm(x, weight.shape, weight, self._eps)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q [heads, T, width], the last T of the N tokens of keys and values [kv_heads, N, width]; returns
        [T, heads * width]."""
        new = q.shape[1]
        if new == 1:
            # Heads that share keys are rows of one product: repeating the keys takes ten times as long.
            q = q.view(self._spec.kv_heads, -1, self._spec.head_dim)
        out = functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, enable_gqa=new > 1
        )
        return out[0].view(1, -1) if new == 1 else out[0].transpose(0, 1).reshape(new, -1)


class LatentAttention:
    """Keys and values expanded from cached latents. For one new token they are never made: expanding is
    linear, so its query goes down to the latents instead, and what attention gathers of them is expanded."""

    def __init__(self, spec: Latent, weights: Weights, precision: Precision) -> None:
        self._spec, self._dtype = spec, precision.dtype
        # Families with latents turn number 2i with 2i + 1; with the rows in another order it is `rotate`.
        halves = np.r_[: spec.rotated : 2, 1 : spec.rotated : 2]
        latent = np.r_[: spec.rank, spec.rank + halves]
        head = np.r_[: spec.plain, spec.plain + halves]
        query = (np.arange(spec.heads)[:, None] * len(head) + head).ravel()
        first = "query" if spec.query_rank is None else "query_down"
        rows = {"latent": latent}
        self._query = None
        if spec.query_rank is None:
            rows["query"] = query
        else:
            self._query = weights.linear("query", rows={"query": query}, followed=True)
            self._query_norm = weights.vector("query_norm")
        self._down = weights.linear(first, "latent", rows=rows, followed=True)
        self._split = [spec.query_rank or spec.heads * spec.width, spec.rank + spec.rotated]
        self._latent_norm = weights.vector("latent_norm")
        self._expansion = weights.dense("expansion").view(spec.heads, spec.plain + spec.value, spec.rank)
        self._output = weights.linear("output")
        self._one = None
        if precision.device.library is not None:
            norm, expansion = self._latent_norm, self._expansion
            device, watched = precision.device, precision.quantized
            self._one = OneTokenLatent(spec, norm, expansion, self._dtype, LATENT_EPS, device, watched)

    def __call__(self, layer: int, x: Tensor, batch: Batch) -> Tensor:
        s = self._spec
        q, together = torch.split(self._down(x), self._split, dim=1)
        if self._query is not None:
            q = self._query(functional.rms_norm(q, (q.shape[1],), self._query_norm, LATENT_EPS))
        if self._one is not None and batch.single:
            return self._output(self._one(layer, q, together, batch))
        latent, turning = torch.split(together, [s.rank, s.rotated], dim=1)
        heads = q.reshape(batch.rows, s.heads, -1)
        plain, turned = heads[..., : s.plain].to(self._dtype), rotate(heads[..., s.plain :], batch.turn)
        latent = functional.rms_norm(latent, (s.rank,), self._latent_norm, LATENT_EPS)
        shared = rotate(turning[:, None], batch.turn)[:, 0]
        new, turned = torch.cat((latent, shared), dim=1).to(self._dtype), turned.to(self._dtype)
        parts, start = [], 0
        for piece, mask in zip(batch.slices, batch.masks[None], strict=True):
            rows = slice(start, start + len(piece.tokens))
            start = rows.stop
            (cached,) = piece.kv.write(layer, new[rows][None])
            attend = self._attend_one if len(piece.tokens) == 1 else self._attend
            parts.append(attend(plain[rows], turned[rows], cached[0], mask))
        return self._output((parts[0] if len(parts) == 1 else torch.cat(parts)).float())

    def _attend_one(self, plain: Tensor, turned: Tensor, cached: Tensor, mask: Tensor | None) -> Tensor:
        """The one row's plain [1, heads, plain] and turned [1, heads, rotated] queries, and the cached
        [N, rank + rotated]: [1, heads * value]."""
        s = self._spec
        down = torch.bmm(plain.transpose(0, 1), self._expansion[:, : s.plain])  # [heads, 1, rank]
        q = torch.cat((down[:, 0], turned[0]), dim=1)
        keys, values = cached[None, None], cached[None, None, :, : s.rank]
        out = functional.scaled_dot_product_attention(q[None, None], keys, values, scale=s.scale)
        gathered = out[0, 0][:, None]  # [heads, 1, rank]
        return torch.bmm(gathered, self._expansion[:, s.plain :].transpose(1, 2)).view(1, -1)

    def _attend(self, plain: Tensor, turned: Tensor, cached: Tensor, mask: Tensor | None) -> Tensor:
        """As `_attend_one`, for T rows, the last of the N cached: [T, heads * value]. Some heads at a time:
        what is expanded grows with N, and would be larger than the cache by far."""
        s = self._spec
        token = 2 * s.width * cached.element_size()  # bytes of a head's key and value, expanded
        some = max(1, EXPANDED_BYTES // (token * len(cached)))
        parts = [
            self._attend_heads(slice(lo, lo + some), plain, turned, cached, mask)
            for lo in range(0, s.heads, some)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1).reshape(len(plain), -1)

    def _attend_heads(
        self, heads: slice, plain: Tensor, turned: Tensor, cached: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Of these heads: [number, T, value]."""
        s = self._spec
        expansion = self._expansion[heads]
        expanded = functional.linear(cached[:, : s.rank], expansion.reshape(-1, s.rank))
        both = expanded.view(len(cached), len(expansion), -1).transpose(0, 1)  # [number, N, plain + value]
        shared = cached[None, :, s.rank :].expand(len(expansion), -1, -1)
        keys = torch.cat((both[..., : s.plain], shared), dim=2)
        q = torch.cat((plain[:, heads], turned[:, heads]), dim=2).transpose(0, 1)
        # Values as wide as keys: only then torch computes block by block and never has all scores at once.
        values = functional.pad(both[..., s.plain :], (0, max(0, s.width - s.value)))
        out = functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, scale=s.scale
        )
        return out[0, :, :, : s.value]
