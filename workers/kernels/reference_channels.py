"""The reference kernel of the formats whose gate and down lie by channel (`shm/floe.py`), on the CPU and on
CUDA.

Activations are rounded to int8 steps in groups of 64; for gate rows in bf16 to bf16 instead. Of each row
u = up @ x, and of the channels that its mask keeps y = sum of silu(gate . x) * u * down, all in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shm.floe import FloeFormat
from shm.layout import StoreLayout
from shm.mask import Mask, Tally
from workers.kernels.unpack import dequantize, int8_steps, row_numbers

TOGETHER = 1 << 23  # numbers of up that are float32 at a time, a few times over


class ChannelInputs(NamedTuple):
    """Rows of x as up and as gate take them: float32 [R, H padded to whole groups], and [R, H]."""

    up: Tensor
    gate: Tensor


class ReferenceChannels:
    """Computes in uint8 tensors, on their device."""

    def __init__(self, layout: StoreLayout) -> None:
        format = layout.format
        assert isinstance(format, FloeFormat)
        self._format = format
        self._hidden = layout.shape.hidden
        self._tile = layout.shape.tile

    def activations(self, x: Tensor) -> ChannelInputs:
        """x float32 [R, H]."""
        steps = int8_steps(x, self._format.up.group)
        if self._format.rows.bits == 16:
            return ChannelInputs(steps, x.bfloat16().float())
        return ChannelInputs(steps, steps[:, : self._hidden])

    def up(self, heads: Tensor, x: ChannelInputs, rows: Tensor) -> Tensor:
        """u of all channels of consecutive heads, float32 [n, channels]. rows: int64 [n]."""
        block, inputs, parts = self._format.head_bytes(self._hidden, 16), x.up[rows], []
        for part in torch.split(heads, max(1, TOGETHER // (16 * self._hidden)) * block):
            matrix = dequantize(self._format.up, part, len(part) // block * 16, self._hidden)
            parts.append(functional.linear(inputs, matrix))
        return torch.cat(parts, dim=1)

    def keeps(self, u: Tensor, mask: Mask) -> Tensor:
        """bool [n, channels]: `Mask.keeps` of each tile."""
        size = u.abs().view(torch.int32).view(len(u), -1, self._tile)
        if mask.share == 1:
            least = torch.tensor(mask.threshold, dtype=torch.float32).view(torch.int32).item()
            return (size >= least).view(u.shape)
        order = size.sort(dim=-1, descending=True, stable=True).indices[..., : mask.number(self._tile)]
        return torch.zeros_like(size, dtype=torch.bool).scatter_(-1, order, True).view(u.shape)

    def channels(self, records: Tensor, u: Tensor, x: ChannelInputs, rows: Tensor) -> Tensor:
        """The sum over channels of silu(gate . x) * u * down: float32 [n, H]. records: uint8 [channels *
        channel_bytes]; u: float32 [n, channels], 0 where a row leaves a channel out; rows: int64 [n]."""
        parts = records.view(u.shape[1], 2, -1)
        if u.device.type == "cpu":  # to know them, the host would wait for another device
            read = u.ne(0).any(dim=0)
            parts, u = parts[read], u[:, read]
        if not len(parts):
            return torch.zeros(len(u), self._hidden, device=u.device)
        gate, down = (row_numbers(self._format.rows, parts[:, i], self._hidden) for i in range(2))
        return (functional.silu(functional.linear(x.gate[rows], gate)) * u) @ down

    def compute(
        self, heads: Tensor, tiles: Tensor, x: ChannelInputs, rows: Tensor, mask: Mask
    ) -> tuple[Tensor, Tally]:
        """Consecutive tiles with this mask: their sum float32 [n, H], and what it left out."""
        u = self.up(heads, x, rows)
        kept = self.keeps(u, mask)
        size = u.abs().double()
        mass, left = size.sum().item(), size.masked_fill(kept, 0).sum().item()
        if not mass < float("inf"):
            mass = left = 0.0
        y = self.channels(tiles, u.masked_fill(~kept, 0), x, rows)
        return y, Tally(mass, left, int(kept.any(dim=0).sum()), u.shape[1])
