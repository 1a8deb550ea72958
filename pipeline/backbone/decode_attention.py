"""Attention and RMS norms by the host's C kernels. At decode the overhead of torch's small operations exceeds
their work; of long spans torch computes also the scores that causality discards, and each of its operations
goes through memory once more."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.backbone.batch import Batch
from pipeline.backbone.linear import Precision
from pipeline.device.base import Device
from pipeline.models.spec import GroupedQuery, Latent
from workers.kernels.attention import CosSin, GroupedHeads, LatentHeads, RMSNorm
from workers.kernels.matrix import SPIN_NS, SPIN_ROWS


class GroupedQueryDecode:
    """Grouped-query attention of one layer."""

    def __init__(
        self,
        spec: GroupedQuery,
        norms: tuple[Tensor, Tensor] | None,
        window: int | None,
        eps: float,
        precision: Precision,
    ) -> None:
        """`norms`: weights of queries' and keys' norms."""
        device = precision.device
        assert device.library is not None
        self._norms = norms  # keeps the tensors: the kernel reads their memory
        self._output_width = spec.heads * spec.head_dim
        self._spin = precision.quantized
        query_norm, key_norm = (None, None) if norms is None else (n.data_ptr() for n in norms)
        self._heads = GroupedHeads(
            device.library,
            device.team,
            bits=8 * precision.dtype.itemsize,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            width=spec.head_dim,
            window=window,
            norm=spec.qk_norm,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=eps,
            clip=spec.clip,
        )

    def __call__(self, layer: int, qkv: Tensor, batch: Batch) -> Tensor:
        """qkv float32 [R, (heads + 2 kv_heads) * head_dim]: [R, heads * head_dim]. Overwrites qkv."""
        out = torch.empty(batch.rows, self._output_width)
        spin, row = _spin_ns(self._spin, batch), 0
        for span in batch.spans:
            keys, values = span.kv.layers[layer]
            streams, count = (keys.data_ptr(), values.data_ptr()), len(span.tokens)
            where = _row(qkv, row), _cos_sin(batch, row), streams, keys.shape[1], span.kv.length
            if count == 1:
                self._heads.attend(*where, _row(out, row), spin)
            else:
                self._heads.attend_span(*where, count, _row(out, row))
            row += count
        return out


class LatentDecode:
    """Multi-head latent attention of one layer."""

    def __init__(
        self, spec: Latent, norm: Tensor, expansion: Tensor, eps: float, precision: Precision
    ) -> None:
        """`norm`: the weight of the latent's norm [rank]; `expansion` [heads, nope_dim + value_dim, rank]."""
        device = precision.device
        assert device.library is not None
        self._norm, self._expansion = norm, expansion.contiguous()
        self._output_width = spec.heads * spec.value_dim
        self._spin = precision.quantized
        self._heads = LatentHeads(
            device.library,
            device.team,
            bits=8 * precision.dtype.itemsize,
            heads=spec.heads,
            rank=spec.rank,
            nope=spec.nope_dim,
            rope=spec.rope_dim,
            value=spec.value_dim,
            norm=norm.data_ptr(),
            expansion=self._expansion.data_ptr(),
            eps=eps,
            scale=spec.scale,
        )

    def __call__(self, layer: int, q: Tensor, latent: Tensor, batch: Batch) -> Tensor:
        """q [R, heads * qk_dim], latent [R, rank + rope_dim]: [R, heads * value_dim]. Overwrites both."""
        out = torch.empty(batch.rows, self._output_width)
        spin = _spin_ns(self._spin, batch)
        for row, span in enumerate(batch.spans):
            (cache,) = span.kv.layers[layer]
            self._heads.attend(
                _row(q, row),
                _row(latent, row),
                _cos_sin(batch, row),
                cache.data_ptr(),
                cache.shape[1],
                span.kv.length,
                _row(out, row),
                spin,
            )
        return out


class HostNorm:
    """RMS norm of each row."""

    def __init__(self, weight: Tensor, eps: float, device: Device) -> None:
        assert device.library is not None
        self._weight = weight
        self._norm = RMSNorm(device.library, weight.data_ptr(), len(weight), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [R, width]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._norm(x.data_ptr(), len(x), out.data_ptr())
        return out


def _row(x: Tensor, row: int) -> int:
    """A row's address."""
    return x.data_ptr() + x.element_size() * row * x.stride(0)


def _cos_sin(batch: Batch, row: int) -> CosSin:
    cos, sin = batch.cos_sin
    return CosSin(_row(cos, row), _row(sin, row))


def _spin_ns(spin: bool, batch: Batch) -> int:
    """`spin`: the team also computes the products before and after, so its threads spin in between."""
    return SPIN_NS if spin and batch.rows <= SPIN_ROWS else 0
