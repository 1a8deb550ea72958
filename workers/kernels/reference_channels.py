"""The reference kernel of the formats whose gate and down lie by channel (`shm/floe.py`), on the CPU and on
CUDA.

Activations are rounded to int8 steps in groups of 64; for gate rows in bf16 to bf16 instead. Of each row
u = up @ x, and of the channels that its mask keeps y = sum of silu(gate . x) * u * down, all in float32. Of
down in int4 and int8, silu(gate . x) * u times the scale of each group of outputs is rounded to int8 steps,
which STEPPED consecutive channels of a tile have in common.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shm.floe import FloeFormat
from shm.layout import StoreLayout
from shm.mask import Mask, Tally
from workers.kernels.unpack import dequantize, int8_steps, row_groups, row_numbers

TOGETHER = 1 << 23  # numbers of up, or products with scales, that are float32 at a time, a few times over
STEPPED = 128  # channels whose products with a group's scales share a step
LEAST_LARGEST = 1e-36  # products that are all smaller count as 0


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
        parts, number = records.view(u.shape[1], 2, -1), torch.arange(u.shape[1], device=u.device)
        if u.device.type == "cpu":  # to know them, the host would wait for another device
            read = u.ne(0).any(dim=0)
            parts, u, number = parts[read], u[:, read], number[read]
        if not len(parts):
            return torch.zeros(len(u), self._hidden, device=u.device)
        gate = row_numbers(self._format.rows, parts[:, 0], self._hidden)
        inner = functional.silu(functional.linear(x.gate[rows], gate)) * u
        if self._format.rows.bits == 16:
            return inner @ row_numbers(self._format.rows, parts[:, 1], self._hidden)
        scale, down = row_groups(self._format.rows, parts[:, 1], self._hidden)
        block, down, outputs = number // STEPPED, down.transpose(0, 1).contiguous(), []
        for some in torch.split(inner, max(1, TOGETHER // scale.numel())):
            stepped = self._stepped(some.unsqueeze(-1) * scale, block)
            outputs.append((stepped.permute(2, 0, 1) @ down).transpose(0, 1).flatten(1)[:, : self._hidden])
        return torch.cat(outputs)

    @staticmethod
    def _stepped(products: Tensor, block: Tensor) -> Tensor:
        """products float32 [n, channels, groups] rounded to steps of 1/127 of the largest one of a row, a
        block and a group; block: int64 [channels], ascending."""
        blocks = -(-products.shape[1] // STEPPED) if products.device.type != "cpu" else int(block[-1]) + 1
        sizes = products.new_zeros(len(products), blocks, products.shape[2])
        index = block[None, :, None].expand_as(products)
        largest = sizes.scatter_reduce(1, index, products.abs(), "amax")
        inverse = torch.where(largest < LEAST_LARGEST, 0, 127 / largest)
        return (products * inverse[:, block]).round() * (largest / 127)[:, block]

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
        u = u.masked_fill(~kept, 0)
        parts = tiles.view(u.shape[1] // self._tile, -1), torch.split(u, self._tile, dim=1)
        y = torch.stack([self.channels(*part, x, rows) for part in zip(*parts, strict=True)]).sum(dim=0)
        return y, Tally(mass, left, int(kept.any(dim=0).sum()), u.shape[1])
