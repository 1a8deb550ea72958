"""Causal attention of several new tokens of a sequence to all of its tokens, by torch.

Where torch has flash attention for the numbers at hand, no mask and no scores are in memory: its causal mask
is aligned to the last token. With a mask of its own torch would compute all scores of a grouped query in
memory, a gigabyte for 1024 tokens of 8192: elsewhere on a GPU, rows are therefore taken a few at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.batch import Batch
from pipeline.config import SCORE_BYTES

FLASH_WIDTHS = range(8, 257, 8)  # of heads


def attend_span(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    number: int,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """q [heads, T, width], the last T of the N tokens of keys and values [kv_heads, N, width], of the batch's
    span of this number: [T, heads, width]. `window`: tokens that each token attends to, itself included."""
    if batch.flash and batch.stored and q.element_size() == 2 and q.shape[2] in FLASH_WIDTHS:
        return _flash(q, keys, values, window, scale)
    masks = batch.masks[window]
    mask = masks[number]
    new, total = q.shape[1], keys.shape[1]
    step = new if on_cpu(q) else max(1, SCORE_BYTES // (4 * len(q) * total))
    parts = [
        functional.scaled_dot_product_attention(
            q.narrow(1, lo, min(step, new - lo)).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=None if mask is None else mask.narrow(0, lo, min(step, new - lo)),
            scale=scale,
            enable_gqa=len(keys) < len(q),
        ).squeeze(0)
        for lo in range(0, new, step)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).transpose(0, 1)


def on_cpu(q: Tensor) -> bool:
    """There torch computes block by block, with a mask too."""
    return q.device.type == "cpu"


def _flash(q: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float | None) -> Tensor:
    """As `attend_span`. The last token attends to itself and to the window - 1 before it."""
    left = None if window is None or window >= keys.shape[1] else window - 1
    rows = (x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values))  # [1, tokens, heads, width]
    out: Tensor = torch.ops.aten._flash_attention_forward(
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
    )[0]
    return out.squeeze(0)
