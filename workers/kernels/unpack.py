"""The quantized formats in torch, on any device: dequantized weights, activations rounded to int8 steps.

This is the arithmetic of every kernel of those formats, written to be read and not for speed: matrices become
float32, and activations the float32 values of their int8 codes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shm.blocks import HEAD_BYTES, LANES, BlockFormat
from shm.quantize import ROW_GROUP, row_head_bytes
from shm.rows import RowFormat


def dequantize(format: BlockFormat, data: Tensor, n: int, k: int) -> Tensor:
    """A matrix's weights, float32 [n, k padded to whole groups]. Padding of the inputs is not 0 here: the
    activations are 0 there. data: uint8 [format.matrix_bytes(n, k)]."""
    records = data.view(-1, -(-k // format.group), format.record_bytes)  # [blocks, groups, bytes]
    head = records[..., :HEAD_BYTES].contiguous()
    codes = records[..., HEAD_BYTES:].reshape(*records.shape[:2], -1, 1, LANES, 4)  # j, 1, i, b
    if format.bits == 8:
        scale = head.view(torch.float32)
        zero = torch.full_like(scale, 128)
    else:
        scale, zero = head.view(torch.bfloat16).float().chunk(2, dim=-1)
        fields = range(0, 8, format.bits)
        codes = torch.cat([codes >> shift & ((1 << format.bits) - 1) for shift in fields], dim=3)
    q = codes.permute(0, 4, 1, 2, 3, 5).flatten(3).float()  # [blocks, 16, groups, inputs of a group]
    values = (q - zero.mT.unsqueeze(-1)) * scale.mT.unsqueeze(-1)
    return values.flatten(2).flatten(0, 1)[:n]


def row_numbers(format: RowFormat, rows: Tensor, k: int) -> Tensor:
    """Rows of k numbers, float32 [n, k]. rows: uint8 [n, format.row_bytes(k)]."""
    if format.bits == 16:
        return rows.contiguous().view(torch.bfloat16)[:, :k].float()
    groups, lines = -(-k // ROW_GROUP), row_head_bytes(k, format.bits)
    codes = rows[:, lines:].reshape(len(rows), -1, 1, LANES, 4)  # line, half, i, b
    head = rows[:, :lines].contiguous()
    if format.bits == 8:
        scale = head.view(torch.float32)[:, :groups]
        zero = torch.full_like(scale, 128)
    else:
        scale, zero = (part[:, :groups] for part in head.view(torch.bfloat16).float().chunk(2, dim=1))
        codes = torch.cat((codes & 15, codes >> 4), dim=2)
    q = codes.mT.reshape(len(rows), -1, ROW_GROUP)[:, :groups].float()
    return ((q - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(1)[:, :k]


def int8_steps(x: Tensor, group: int) -> Tensor:
    """Activations [R, K] rounded to int8 codes and back: float32 [R, K padded with 0 to whole groups], each
    group of a row in steps of its largest magnitude / 127."""
    groups = functional.pad(x.float(), (0, -x.shape[-1] % group)).view(len(x), -1, group)
    step = groups.abs().amax(dim=-1, keepdim=True) / 127
    codes = torch.where(step > 0, groups / step, 0).round().clamp(-127, 127)
    return (codes * step).flatten(1)
