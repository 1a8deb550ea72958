"""Grouped-query attention of spans of many tokens by the host's C kernel: torch computes also the scores that
causality discards, and each of its operations goes through memory once more."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.backbone.batch import Batch
from workers.kernels.c_types import Kept
from workers.kernels.layer import Grouped, SpanKernel
from workers.kernels.native import Library, Team


class SpanAttention:
    """One layer's, between its products."""

    def __init__(self, library: Library, team: Team | None, grouped: Grouped, scratch: Kept) -> None:
        self._kernel = SpanKernel(library, team, grouped, scratch)
        self._output_width = grouped.heads * grouped.width

    def __call__(self, layer: int, qkv: Tensor, batch: Batch) -> Tensor:
        """qkv float32 [R, (heads + 2 kv_heads) * head_dim]: [R, heads * head_dim]. Overwrites qkv; appends to
        the sequences' KV."""
        out = torch.empty(batch.rows, self._output_width)
        cosines, sines = batch.cos_sin
        row = 0
        for span in batch.spans:
            keys, values = span.kv.layers[layer]
            self._kernel(
                _row(qkv, row),
                (_row(cosines, row), _row(sines, row)),
                (keys.data_ptr(), values.data_ptr()),
                keys.shape[1],
                span.kv.length,
                len(span.tokens),
                _row(out, row),
            )
            row += len(span.tokens)
        return out


def _row(x: Tensor, row: int) -> int:
    """A row's address."""
    return x.data_ptr() + x.element_size() * row * x.stride(0)
