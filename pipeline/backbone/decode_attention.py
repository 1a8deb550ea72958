"""Attention of sequences that have one new token each, and norms, by the host's kernels: on a device that
computes on the host, torch's many small operations take longer than what they compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.backbone.batch import Batch
from pipeline.device.base import Device
from pipeline.models.spec import GroupedQuery, Latent
from workers.kernels.attention import GroupedHeads, LatentHeads, RMSNorm, Turn
from workers.kernels.matrix import WATCH, WATCHED_ROWS


class OneTokenGrouped:
    """Of one layer."""

    def __init__(
        self,
        spec: GroupedQuery,
        norms: tuple[Tensor, Tensor] | None,
        window: int | None,
        dtype: torch.dtype,
        eps: float,
        device: Device,
        watched: bool,
    ) -> None:
        """`norms`: weights of queries' and keys' norms; `dtype`: of the KV cache; `watched`: the device's
        team computes the products before and after."""
        assert device.library is not None
        self._norms = norms  # their memory is read
        self._numbers = spec.heads * spec.head_dim
        self._watched = watched
        query_norm, key_norm = (None, None) if norms is None else (n.data_ptr() for n in norms)
        self._heads = GroupedHeads(
            device.library,
            device.team,
            bits=8 * dtype.itemsize,
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
        """qkv float32 [R, heads + 2 kv_heads times width]: [R, heads * width]."""
        out = torch.empty(batch.rows, self._numbers)
        watch = _watch(self._watched, batch)
        for row, piece in enumerate(batch.slices):
            keys, values = piece.kv.layers[layer]
            self._heads.one(
                _row(qkv, row),
                _turn(batch, row),
                (keys.data_ptr(), values.data_ptr()),
                keys.shape[1],
                piece.kv.length,
                _row(out, row),
                watch,
            )
        return out


class OneTokenLatent:
    """Of one layer."""

    def __init__(
        self,
        spec: Latent,
        norm: Tensor,
        expansion: Tensor,
        dtype: torch.dtype,
        eps: float,
        device: Device,
        watched: bool,
    ) -> None:
        """`norm` [rank] of the latent, `expansion` [heads, plain + value, rank]; the rest as above."""
        assert device.library is not None
        self._norm, self._expansion = norm, expansion.contiguous()
        self._numbers = spec.heads * spec.value
        self._watched = watched
        self._heads = LatentHeads(
            device.library,
            device.team,
            bits=8 * dtype.itemsize,
            heads=spec.heads,
            rank=spec.rank,
            plain=spec.plain,
            rotated=spec.rotated,
            value=spec.value,
            norm=norm.data_ptr(),
            expansion=self._expansion.data_ptr(),
            eps=eps,
            scale=spec.scale,
        )

    def __call__(self, layer: int, q: Tensor, latent: Tensor, batch: Batch) -> Tensor:
        """q float32 [R, heads * (plain + rotated)] and latent [R, rank + rotated], in whatever rows:
        [R, heads * value]."""
        out = torch.empty(batch.rows, self._numbers)
        watch = _watch(self._watched, batch)
        for row, piece in enumerate(batch.slices):
            (cache,) = piece.kv.layers[layer]
            self._heads.one(
                _row(q, row),
                _row(latent, row),
                _turn(batch, row),
                cache.data_ptr(),
                piece.kv.length,
                _row(out, row),
                watch,
            )
        return out


class HostNorm:
    """RMS norm of rows."""

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
    return x.data_ptr() + x.element_size() * row * x.stride(0)


def _turn(batch: Batch, row: int) -> Turn:
    cos, sin = batch.turn
    return Turn(_row(cos, row), _row(sin, row))


def _watch(watched: bool, batch: Batch) -> int:
    return WATCH if watched and batch.rows <= WATCHED_ROWS else 0
