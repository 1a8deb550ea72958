"""Grouped-query and multi-head latent attention of one layer, on the device: x -> attention(x).

Rotary embeddings are applied in float32; products of queries, keys and values are computed in the KV cache's
dtype, with int8 in bfloat16. On the host C does it: of single tokens for a whole layer (`decoder_layer.py`),
of longer spans here, but for latent attention. Elsewhere torch does: where it has flash attention for the
numbers at hand, no mask and no scores are in memory. With a mask of its own it would compute all scores of a
grouped query in memory, a gigabyte for 1024 tokens of 8192: on a GPU, rows are then taken a few at a time.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.batch import Batch, DecodeRows
from pipeline.backbone.linear import Linear, Precision
from pipeline.backbone.rope import rotate
from pipeline.backbone.weights import Weights
from pipeline.config import EXPANDED_KV_BYTES, SCORE_BYTES
from pipeline.models.spec import GroupedQuery
from pipeline.models.spec import Latent as LatentSpec
from workers.kernels.c_types import Kept
from workers.kernels.layer import QK_NORMS, Delta, Grouped, Latent, Projection, SpanKernel
from workers.kernels.native import Library, Team

FLASH_WIDTHS = range(8, 257, 8)  # of heads
LATENT_EPS = 1e-6  # of the norms of latents; the config's rms_norm_eps does not apply to them


class HostAttention(NamedTuple):
    """A layer's attention as the host's kernels read it: see LayerParts."""

    attention: Grouped | Latent | Delta
    first: Projection
    query: Projection | None
    output: Projection


class Attention(Protocol):
    """The attention block of one layer."""

    def __call__(self, layer: int, x: Tensor, batch: Batch) -> Tensor:
        """x float32 [R, H] normalised: float32 [R, H]. Appends to the sequences' KV."""

    def on_host(self) -> HostAttention:
        """Facts for a device with a library of kernels; valid as long as this object."""


class GroupedQueryAttention:
    """Groups of query heads share a head of keys and values."""

    def __init__(
        self,
        spec: GroupedQuery,
        weights: Weights,
        window: int | None,
        eps: float,
        precision: Precision,
        scratch: Kept,
    ) -> None:
        """`window`: tokens that each token attends to, itself included; `eps`: of the norms; `scratch`: of
        all layers' kernels on the host."""
        self._spec, self._window, self._eps = spec, window, eps
        self._dtype = precision.attention_dtype
        self._bits = 8 * precision.kv_dtype.itemsize
        # Gates before queries: queries, keys and values then lie together.
        order = {"query": _gates_first(spec)} if spec.gated else {}
        self._gates = spec.heads * spec.head_dim if spec.gated else 0
        self._qkv = weights.linear("query", "key", "value", order=order)
        self._output = weights.linear("output")
        self._sinks = weights.vector("sinks") if spec.sinks else None  # [heads]
        self._norms = None
        if spec.qk_norm:
            self._norms = weights.vector("query_norm"), weights.vector("key_norm")
        device = precision.device
        self._spans = (
            None
            if device.library is None
            else SpanAttention(device.library, device.team, self._grouped(), scratch)
        )

    def __call__(self, layer: int, x: Tensor, batch: Batch) -> Tensor:
        qkv = self._qkv(x)
        if self._spans is not None and batch.stored:
            return self._output(self._spans(layer, qkv, batch))
        s = self._spec
        gates, qkv = qkv[:, : self._gates], qkv[:, self._gates :]
        heads = self._heads(qkv)
        qk_heads = s.heads + s.kv_heads
        qk = rotate(heads[:, :qk_heads], batch.cos_sin).to(self._dtype)
        q, k, v = qk[:, : s.heads], qk[:, s.heads :], heads[:, qk_heads:].to(self._dtype)
        if batch.decode is not None:
            batch.decode.append(layer, k, v)
            scale, sinks = s.head_dim**-0.5, self._sinks
            attended = batch.decode.attend(layer, q, s.kv_heads, s.head_dim, self._window, scale, sinks)
            return self._output(_gated(attended, gates))
        outputs, start = [], 0
        for number, span in enumerate(batch.spans):
            rows = slice(start, start + len(span.tokens))
            start = rows.stop
            keys, values = span.kv.write(layer, k[rows].transpose(0, 1), v[rows].transpose(0, 1))
            outputs.append(self._attend(q[rows].transpose(0, 1), keys, values, batch, number))
        return self._output(_gated(_joined(outputs).float(), gates))

    def on_host(self) -> HostAttention:
        return HostAttention(self._grouped(), host_projection(self._qkv), None, host_projection(self._output))

    def _grouped(self) -> Grouped:
        """Structure for C; valid as long as this object."""
        s = self._spec
        norms = (None, None) if self._norms is None else (n.data_ptr() for n in self._norms)
        sinks = None if self._sinks is None else self._sinks.data_ptr()
        return Grouped(
            self._bits, s.heads, s.kv_heads, s.head_dim, s.rope_dim, s.gated,
            self._window or 0, QK_NORMS.index(s.qk_norm), *norms, sinks, self._eps, s.clip or 0,
            s.head_dim**-0.5,
        )  # fmt: skip

    def _heads(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values by head, [R, heads + 2 kv_heads, head_dim], normalised and clipped."""
        s = self._spec
        if s.qk_norm == "all":
            qkv = self._normalised(qkv, s.head_dim)
        if s.clip is not None:
            qkv = qkv.clamp(-s.clip, s.clip)
        heads = qkv.view(len(qkv), -1, s.head_dim)
        return self._normalised(heads, 1) if s.qk_norm == "head" else heads

    def _normalised(self, qkv: Tensor, width: int) -> Tensor:
        """Queries and keys normalised. `width`: of a head, on axis 1."""
        s = self._spec
        assert self._norms is not None
        q, k, v = torch.split(qkv, [n * width for n in (s.heads, s.kv_heads, s.kv_heads)], dim=1)
        pairs = zip((q, k), self._norms, strict=True)
        return torch.cat((*(functional.rms_norm(x, w.shape, w, self._eps) for x, w in pairs), v), dim=1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, number: int) -> Tensor:
        """q [heads, T, head_dim], the last T of the N tokens of keys and values [kv_heads, N, head_dim], of
        the batch's span of this number: [T, heads * head_dim]."""
        new = q.shape[1]
        if new > 1:
            attended = attend_span(q, keys, values, batch, number, self._window, sinks=self._sinks)
            return attended.reshape(new, -1)
        if self._window is not None:
            keys, values = keys[:, -self._window :], values[:, -self._window :]
        if self._sinks is not None:
            return _by_scores(q, keys, values, None, None, self._sinks).view(1, -1)
        # Query heads of a group become rows of one product: repeating the keys takes ten times as long.
        q = q.view(self._spec.kv_heads, -1, self._spec.head_dim)
        return functional.scaled_dot_product_attention(q[None], keys[None], values[None])[0].view(1, -1)


def _gates_first(spec: GroupedQuery) -> NDArray[np.int64]:
    """The rows of a query matrix, in which each head has queries and then gates, all gates first."""
    rows = np.arange(2 * spec.heads * spec.head_dim).reshape(spec.heads, 2, spec.head_dim)
    return rows[:, ::-1].swapaxes(0, 1).ravel()


def _gated(attended: Tensor, gates: Tensor) -> Tensor:
    """The heads' outputs [R, heads * head_dim] by their gates; [R, 0] where there are none."""
    return attended * torch.sigmoid(gates) if gates.shape[1] else attended


class LatentAttention:
    """Multi-head latent attention. The cache holds a latent and the shared rotary key of each token.

    For several new tokens, keys and values are expanded from the latents. For one token they are not: since
    expansion is linear, the query is projected to the latent space, and the attended latent is expanded.
    """

    def __init__(self, spec: LatentSpec, weights: Weights, precision: Precision) -> None:
        self._spec, self._dtype = spec, precision.attention_dtype
        self._bits = 8 * precision.kv_dtype.itemsize
        halves = np.arange(spec.rope_dim)
        if spec.interleaved:  # `rotate` wants the even ones before the odd ones
            halves = np.r_[: spec.rope_dim : 2, 1 : spec.rope_dim : 2]
        latent = np.r_[: spec.rank, spec.rank + halves]
        head = np.r_[: spec.nope_dim, spec.nope_dim + halves]
        query = (np.arange(spec.heads)[:, None] * len(head) + head).ravel()
        first = "query" if spec.query_rank is None else "query_down"
        order = {"latent": latent}
        self._query = None
        if spec.query_rank is None:
            order["query"] = query
        else:
            self._query = weights.linear("query", order={"query": query})
            self._query_norm = weights.vector("query_norm")
        self._down = weights.linear(first, "latent", order=order)
        self._split = [spec.query_rank or spec.heads * spec.qk_dim, spec.rank + spec.rope_dim]
        self._latent_norm = weights.vector("latent_norm")
        expansion = weights.dense("expansion", dtype=self._dtype)
        self._expansion = expansion.view(spec.heads, -1, spec.rank).contiguous()
        self._output = weights.linear("output")

    def __call__(self, layer: int, x: Tensor, batch: Batch) -> Tensor:
        s = self._spec
        q, latent_and_key = torch.split(self._down(x), self._split, dim=1)
        if self._query is not None:
            q = self._query(functional.rms_norm(q, (q.shape[1],), self._query_norm, LATENT_EPS))
        latent, key_rope = torch.split(latent_and_key, [s.rank, s.rope_dim], dim=1)
        heads = q.reshape(batch.rows, s.heads, -1)
        q_nope = heads[..., : s.nope_dim].to(self._dtype)
        q_rope = rotate(heads[..., s.nope_dim :], batch.cos_sin).to(self._dtype)
        latent = functional.rms_norm(latent, (s.rank,), self._latent_norm, LATENT_EPS)
        key_rope = rotate(key_rope[:, None], batch.cos_sin)[:, 0]
        new = torch.cat((latent, key_rope), dim=1).to(self._dtype)
        if batch.decode is not None:
            batch.decode.append(layer, new[:, None])
            return self._output(self._attend_rows(layer, q_nope, q_rope, batch.decode))
        outputs, start = [], 0
        for number, span in enumerate(batch.spans):
            rows = slice(start, start + len(span.tokens))
            start = rows.stop
            (cached,) = span.kv.write(layer, new[rows][None])
            if len(span.tokens) == 1:
                outputs.append(self._attend_one(q_nope[rows], q_rope[rows], cached[0]))
            else:
                outputs.append(self._attend(q_nope[rows], q_rope[rows], cached[0], batch, number))
        return self._output(_joined(outputs).float())

    def on_host(self) -> HostAttention:
        s = self._spec
        query_norm = None if self._query is None else self._query_norm.data_ptr()
        latent = Latent(
            self._bits, s.heads, s.rank, s.nope_dim, s.rope_dim, s.value_dim,
            s.query_rank or 0, query_norm, self._latent_norm.data_ptr(), self._expansion.data_ptr(),
            LATENT_EPS, s.scale,
        )  # fmt: skip
        query = None if self._query is None else host_projection(self._query)
        return HostAttention(latent, host_projection(self._down), query, host_projection(self._output))

    def _attend_rows(self, layer: int, q_nope: Tensor, q_rope: Tensor, rows: DecodeRows) -> Tensor:
        """Does what `_attend_one` does, for rows of one token each: [R, heads * value_dim]."""
        s = self._spec
        down = torch.bmm(q_nope.transpose(0, 1), self._expansion[:, : s.nope_dim])  # [heads, R, rank]
        q = torch.cat((down.transpose(0, 1), q_rope), dim=2)
        attended = rows.attend(layer, q, 1, s.rank, None, s.scale).view(len(q), s.heads, s.rank)
        attended = attended.to(self._dtype).transpose(0, 1)
        out = torch.bmm(attended, self._expansion[:, s.nope_dim :].transpose(1, 2))
        return out.transpose(0, 1).reshape(len(q), -1).float()

    def _attend_one(self, q_nope: Tensor, q_rope: Tensor, cached: Tensor) -> Tensor:
        """q_nope [1, heads, nope_dim], q_rope [1, heads, rope_dim], cached [N, rank + rope_dim]:
        [1, heads * value_dim]."""
        s = self._spec
        down = torch.bmm(q_nope.transpose(0, 1), self._expansion[:, : s.nope_dim])  # [heads, 1, rank]
        q = torch.cat((down[:, 0], q_rope[0]), dim=1)
        keys, values = cached[None, None], cached[None, None, :, : s.rank]
        out = functional.scaled_dot_product_attention(q[None, None], keys, values, scale=s.scale)
        attended = out[0, 0][:, None]  # [heads, 1, rank]
        return torch.bmm(attended, self._expansion[:, s.nope_dim :].transpose(1, 2)).view(1, -1)

    def _attend(self, q_nope: Tensor, q_rope: Tensor, cached: Tensor, batch: Batch, number: int) -> Tensor:
        """Does what `_attend_one` does, for T rows, the last of the N cached: [T, heads * value_dim]. Heads
        are expanded a few at a time: all of them together would take far more memory than the cache."""
        s = self._spec
        bytes_per_token = 2 * s.qk_dim * cached.element_size()  # of one head's key and value, expanded
        step = max(1, EXPANDED_KV_BYTES // (bytes_per_token * len(cached)))
        outputs = [
            self._attend_heads(slice(lo, lo + step), q_nope, q_rope, cached, batch, number)
            for lo in range(0, s.heads, step)
        ]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).reshape(len(q_nope), -1)

    def _attend_heads(
        self, heads: slice, q_nope: Tensor, q_rope: Tensor, cached: Tensor, batch: Batch, number: int
    ) -> Tensor:
        """The output of n heads, [T, n, value_dim]."""
        s = self._spec
        expansion = self._expansion[heads]
        expanded = functional.linear(cached[:, : s.rank], expansion.reshape(-1, s.rank))
        expanded = expanded.view(len(cached), len(expansion), -1).transpose(0, 1)  # [n, N, nope + value]
        key_rope = cached[None, :, s.rank :].expand(len(expansion), -1, -1)
        keys = torch.cat((expanded[..., : s.nope_dim], key_rope), dim=2)
        q = torch.cat((q_nope[:, heads], q_rope[:, heads]), dim=2).transpose(0, 1)
        # Values padded to the width of keys: only then torch computes block by block, without all scores.
        values = functional.pad(expanded[..., s.nope_dim :], (0, max(0, s.qk_dim - s.value_dim)))
        return attend_span(q, keys, values, batch, number, None, s.scale)[..., : s.value_dim]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def host_projection(linear: Linear) -> Projection:
    projection = linear.on_host()
    assert projection is not None
    return projection


class SpanAttention:
    """One layer's attention of spans of many tokens by the host's C kernel, between its products: torch
    computes also the scores that causality discards, and each of its operations goes through memory once
    more."""

    def __init__(self, library: Library, team: Team | None, grouped: Grouped, scratch: Kept) -> None:
        self._kernel = SpanKernel(library, team, grouped, scratch)
        self._output_width = grouped.heads * grouped.width

    def __call__(self, layer: int, qkv: Tensor, batch: Batch) -> Tensor:
        """qkv float32 [R, (heads + 2 kv_heads) * head_dim], after as many gates as queries where it has any:
        [R, heads * head_dim]. Overwrites qkv; appends to the sequences' KV."""
        out = torch.empty(batch.rows, self._output_width)
        cosines, sines = batch.cos_sin
        row = 0
        for span in batch.spans:
            kv = span.kv
            self._kernel(
                _row(qkv, row),
                (_row(cosines, row), _row(sines, row)),
                kv.pool.addresses_of(layer),
                kv.blocks.ctypes.data,
                kv.capacity,
                kv.length,
                len(span.tokens),
                _row(out, row),
            )
            row += len(span.tokens)
        return out


def _row(x: Tensor, row: int) -> int:
    """Returns the address of a row."""
    return x.data_ptr() + x.element_size() * row * x.stride(0)


def attend_span(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    number: int,
    window: int | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [heads, T, width], the last T of the N tokens of keys and values [kv_heads, N, width], of the batch's
    span of this number: [T, heads, width]. `window`: tokens that each token attends to, itself included;
    `sinks` float32 [heads]: each joins its head's softmax as the score of a value of 0."""
    if batch.flash and batch.stored and q.element_size() == 2 and q.shape[2] in FLASH_WIDTHS:
        return _flash(q, keys, values, window, scale, sinks)
    masks = batch.masks[window]
    mask = masks[number]
    new, total = q.shape[1], keys.shape[1]
    whole = on_cpu(q) and sinks is None
    step = new if whole else max(1, SCORE_BYTES // (4 * len(q) * total))
    parts = []
    for lo in range(0, new, step):
        count = min(step, new - lo)
        rows, seen = q.narrow(1, lo, count), None if mask is None else mask.narrow(0, lo, count)
        if sinks is None:
            parts.append(_by_torch(rows, keys, values, seen, scale))
        else:
            parts.append(_by_scores(rows, keys, values, seen, scale, sinks))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).transpose(0, 1)


def _by_torch(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention of q [heads, T, width] by torch's own function: [heads, T, width]."""
    return functional.scaled_dot_product_attention(
        q.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        scale=scale,
        enable_gqa=len(keys) < len(q),
    ).squeeze(0)


def _by_scores(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor
) -> Tensor:
    """The same with sinks, which torch's function does not have: all scores are in memory."""
    heads, new, width = q.shape
    shared = len(keys), -1, width  # query heads of a group become rows of one product
    scores = torch.bmm(q.reshape(shared), keys.transpose(1, 2)).view(heads, new, -1).float()
    scores = scores * (width**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks.view(-1, 1, 1))
    weights = (scores - total).exp().to(values.dtype)
    return torch.bmm(weights.view(len(keys), -1, keys.shape[1]), values).view(heads, new, -1)


def on_cpu(q: Tensor) -> bool:
    """There torch computes block by block, with a mask too."""
    return q.device.type == "cpu"


def _flash(
    q: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Does what `attend_span` does, by flash attention. The last token attends to itself and to the window
    - 1 before it."""
    left = None if window is None or window >= keys.shape[1] else window - 1
    rows = (x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values))  # [1, tokens, heads, width]
    out: Tensor  # [1, T, heads, width]
    logsumexp: Tensor  # of the scores, [1, heads, T]
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *rows,
        None,
        None,
        q.shape[1],
        keys.shape[1],
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=None if left is None else 0,
    )
    if sinks is None:
        return out.squeeze(0)
    # What a sink takes of a softmax is known from the sum of the others.
    left_over = torch.sigmoid(logsumexp.squeeze(0) - sinks.view(-1, 1))
    return out.squeeze(0) * left_over.transpose(0, 1).unsqueeze(-1)
