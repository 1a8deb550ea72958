"""The reference kernel: every format in plain torch operations, on the CPU and on CUDA.

Arithmetic of the plain formats (f32, bf16): matrix products in the format's own dtype; of fp8 in float32. Of
the other quantized ones: activations, and what `activated` gives between the matrices, are rounded to int8
steps group by group, and products are summed in float32. Everything between tiles and experts is float32.
The order of the operations depends only on the tiles and rows, so the same call gives the same bits.

Of formats whose gate and down lie by channel (`shm/floe.py`) activations are rounded to int8 steps in groups
of 64; for gate rows in bf16 to bf16 instead. Of each row u = up @ x, and of the channels that its mask keeps
y = sum of f(gate . x, u) * down, all in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from shm.blocks import LANES, BlockFormat, Scales
from shm.codes import CODE_FORMATS
from shm.expert_math import SWIGLU, ExpertMath, Glu, Relu2
from shm.floe import FloeFormat, RowFormat
from shm.formats import LINE, whole_lines
from shm.fp8 import BLOCK, FP8, blocks_in
from shm.layout import StoreLayout
from shm.mask import Mask, Tally
from shm.quantize import ROW_GROUP, row_head_bytes


def dequantize(format: BlockFormat, data: Tensor, n: int, k: int, factors: Tensor | None = None) -> Tensor:
    """A matrix's weights, float32 [n, k padded to whole records]. Padding of the inputs is not 0 here: the
    activations are 0 there. data: uint8 [format.blocks_bytes(n, k)]; factors: float32, of all blocks or of
    each, in formats that have them."""
    records = data.view(-1, -(-k // format.inputs), format.record_bytes)  # [blocks, records, bytes]
    head = records[..., : format.record_head].contiguous()
    codes = records[..., format.record_head :].reshape(*records.shape[:2], -1, 1, LANES, 4)  # j, 1, i, b
    if format.bits < 8:
        fields = range(0, 8, format.bits)
        codes = torch.cat([codes >> shift & ((1 << format.bits) - 1) for shift in fields], dim=3)
    q = codes.permute(0, 4, 1, 2, 3, 5).flatten(2)
    q = q.view(*q.shape[:2], -1, format.group)
    values = _numbers(format, head, q, factors)  # [blocks, 16, groups, inputs of a group]
    return values.flatten(2).flatten(0, 1)[:n]


def _numbers(format: BlockFormat, head: Tensor, q: Tensor, factors: Tensor | None) -> Tensor:
    """What the codes q [blocks, 16, groups, group] mean under heads [blocks, records, bytes], float32."""

    def each(of_groups: Tensor) -> Tensor:
        return of_groups.float().mT.unsqueeze(-1)  # from [blocks, groups, 16]

    if format.scales == Scales.OWN and format.bits == 8:
        return (q.float() - 128) * each(head.view(torch.float32))
    if format.scales == Scales.OWN:
        scale, zero = head.view(torch.bfloat16).chunk(2, dim=-1)
        return (q.float() - each(zero)) * each(scale)
    kind = CODE_FORMATS[format.name]
    numbers = torch.from_numpy(kind.values).to(q.device)[q.int()]
    if kind.scales is not None:
        scale = torch.from_numpy(kind.scales).to(q.device)[head.int()]
        if factors is not None:
            scale = scale * factors.view(-1, 1, 1)
        return numbers * each(scale.view(len(scale), -1, LANES))
    if kind.zeros:
        numbers = numbers - each(head[..., 32:].view(torch.bfloat16))
    return numbers * each(head[..., :32].view(torch.float16))


def tile_matrices(layout: StoreLayout, tile: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices of a tile uint8 [tile_bytes] of a quantized format, float32: gate, unless ungated, and up
    [n * T, H padded], and down [H, T]."""
    shape, format = layout.shape, layout.format
    assert isinstance(format, BlockFormat)
    hidden, channels, number = shape.hidden, shape.tile, shape.math.matrices - 1
    # Tiles are whole blocks of outputs: gate and up are one matrix of twice as many.
    wide, down = format.blocks_bytes(number * channels, hidden), format.blocks_bytes(hidden, channels)
    of_wide = of_down = None
    if format.factors:
        end = format.matrices_bytes(hidden, channels, number + 1)
        factors = tile[end - LINE : end].view(torch.float32)
        of_wide, of_down = factors[:number].repeat_interleave(channels // LANES), factors[number]
    both = dequantize(format, tile[:wide], number * channels, hidden, of_wide)
    return both, dequantize(format, tile[wide : wide + down], hidden, channels, of_down)


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


def fp8_numbers(data: Tensor, n: int, k: int, matrices: int = 1) -> Tensor:
    """The numbers of a matrix in fp8, or of a tile with so many matrices: float32 [matrices, n, k]. data:
    uint8 [matrix_bytes], or the tile's."""
    return widened(*fp8_parts(data, n, k, matrices))


def fp8_parts(data: Tensor, n: int, k: int, matrices: int = 1) -> tuple[Tensor, Tensor]:
    """Views of the same bytes, as `FP8.parts`."""
    size, blocks = matrices * n * k, (matrices, blocks_in(n), blocks_in(k))
    start = whole_lines(size)
    scales = data[start : start + 4 * prod(blocks)].view(torch.float32).view(blocks)
    return data[:size].view(torch.float8_e4m3fn).view(matrices, n, k), scales


def widened(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers in fp8 [.., n, k] with their blocks' scales, float32."""
    n, k = codes.shape[-2:]
    of_rows = scales.repeat_interleave(BLOCK, dim=-2)[..., :n, :]
    return codes.float() * of_rows.repeat_interleave(BLOCK, dim=-1)[..., :k]


def int8_steps(x: Tensor, group: int, record: int = 0) -> Tensor:
    """Activations [R, K] rounded to int8 codes and back: float32 [R, K padded with 0 to whole groups, or to
    records of more inputs], each group of a row in steps of its largest magnitude / 127."""
    groups = functional.pad(x.float(), (0, -x.shape[-1] % (record or group))).view(len(x), -1, group)
    step = groups.abs().amax(dim=-1, keepdim=True) / 127
    codes = torch.where(step > 0, groups / step, 0).round().clamp(-127, 127)
    return (codes * step).flatten(1)


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def activated(math: ExpertMath, gate: Tensor | None, up: Tensor) -> Tensor:
    """What an expert computes between its matrices, of gate (None: ungated) and up, which have their biases.
    Differentiable."""
    f = math.activation
    if isinstance(f, Relu2):
        return functional.relu(up).square()
    assert gate is not None
    if f == Glu():
        return functional.silu(gate) * up
    g, u = gate.clamp(max=f.gate_max), up.clamp(-f.up_limit, f.up_limit)
    s = f.gate_softcap * torch.tanh(g / f.gate_softcap) if f.gate_softcap else g
    u = f.up_softcap * torch.tanh(u / f.up_softcap) if f.up_softcap else u
    return s * torch.sigmoid(f.alpha * g * (1 + f.cubic * g * g)) * (u + f.offset)


def tile_numbers(layout: StoreLayout, tile: Tensor, head: Tensor | None = None) -> Tensor:
    """A tile's matrices, float32 [matrices, T, H]: gate, unless ungated, up, down's columns. tile: uint8
    [tile_bytes]; head: uint8 [head_bytes], of a format with heads."""
    shape, format = layout.shape, layout.format
    channels, hidden, number = shape.tile, shape.hidden, shape.math.matrices
    if isinstance(format, FloeFormat):
        assert head is not None
        records = tile.view(channels, -1)[:, : format.channel_bytes(hidden)].reshape(channels, 2, -1)
        gate, down = (row_numbers(format.rows, records[:, part], hidden) for part in range(2))
        return torch.stack((gate, dequantize(format.up, head, channels, hidden)[:, :hidden], down))
    if isinstance(format, FP8):
        return fp8_numbers(tile, channels, hidden, number)
    if not isinstance(format, BlockFormat):
        tile = tile[: format.matrices_bytes(hidden, channels, number)]
        return tile.view(DTYPES[format.name]).view(number, channels, hidden).float()
    gate_up, down = tile_matrices(layout, tile)
    return torch.cat((gate_up[:, :hidden], down.mT)).view(number, channels, hidden)


def tile_biases(layout: StoreLayout, tile: Tensor) -> Tensor:
    """The biases in a tile uint8 [tile_bytes], float32 [n, T] as of `TileFormat.biases`."""
    shape, format = layout.shape, layout.format
    if isinstance(format, FloeFormat):
        return channel_biases(format, tile.view(shape.tile, -1), shape.hidden)[None]
    start = whole_lines(format.matrices_bytes(shape.hidden, shape.tile, shape.math.matrices))
    biases = tile[start : start + 4 * shape.math.biases * shape.tile]
    return biases.view(torch.float32).view(-1, shape.tile)


def channel_biases(format: FloeFormat, channels: Tensor, hidden: int) -> Tensor:
    """Gate's biases in channels uint8 [n, channel_bytes]: float32 [n]."""
    start = format.channel_bytes(hidden)
    return channels[:, start : start + 4].contiguous().view(torch.float32).flatten()


class ReferenceKernel:
    """Computes tiles in a uint8 tensor, on that tensor's device."""

    def __init__(self, layout: StoreLayout) -> None:
        self._layout, self._math = layout, layout.shape.math
        self._tile = layout.shape.tile
        self._hidden = layout.shape.hidden
        self._tile_bytes = layout.tile_bytes
        self._plain = DTYPES.get(layout.format.name, torch.float32)
        self._blocks = layout.format if isinstance(layout.format, BlockFormat) else None

    def activations(self, x: Tensor) -> Tensor:
        """Hidden states float32 [R, H] in the kernel's form [R, ...]; once per Work, not once per expert."""
        blocks = self._blocks
        return x.to(self._plain) if blocks is None else int8_steps(x, blocks.group, blocks.inputs)

    def compute(self, data: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        """Sum of the outputs of consecutive tiles. data: uint8 [tiles * tile_bytes]; x: `activations`; rows:
        int64 [n], indices into it. Returns float32 [n, H], a new tensor."""
        x = x[rows]
        total: Tensor | None = None
        for tile in data.view(-1, self._tile_bytes):
            part = self._tile_output(tile, x)
            total = part if total is None else total.add_(part)
        if total is None:
            raise ValueError("no tiles")
        return total

    def _tile_output(self, tile: Tensor, x: Tensor) -> Tensor:
        """Returns the output of one tile, float32 [R, H]."""
        blocks, number = self._blocks, self._math.matrices
        wide = (number - 1) * self._tile
        if blocks is None:
            matrices = tile[: self._layout.format.matrices_bytes(self._hidden, self._tile, number)]
            if isinstance(self._layout.format, FP8):
                matrices = fp8_numbers(matrices, self._tile, self._hidden, number)
            rows = matrices.view(x.dtype).view(number * self._tile, self._hidden)
            return (self._inner(x, rows[:wide], tile) @ rows[wide:]).float()
        gate_up, down = tile_matrices(self._layout, tile)
        return functional.linear(int8_steps(self._inner(x, gate_up, tile), blocks.group), down)

    def _inner(self, x: Tensor, gate_up: Tensor, tile: Tensor) -> Tensor:
        """Returns what is between a tile's matrices, [R, T]; of other kinds than SwiGLU in float32."""
        both = functional.linear(x, gate_up)  # [R, 2T], or ungated [R, T]
        if self._math.bias:
            both = both.float() + tile_biases(self._layout, tile).flatten()
        elif self._math != SWIGLU:
            both = both.float()
        *gate, up = both.chunk(self._math.matrices - 1, dim=1)
        return activated(self._math, gate[0] if gate else None, up).to(x.dtype)


TOGETHER = 1 << 23  # numbers of up that are float32 at a time, a few times over


class ChannelInputs(NamedTuple):
    """Rows of x in the forms that up and gate read: float32 [R, H padded to whole groups], and [R, H]."""

    up: Tensor
    gate: Tensor


class UpByExpert:
    """Computes u of several experts one after the other."""

    kept = None  # a single row is computed as others
    _format: FloeFormat
    _hidden: int

    def inputs(self, rows: int) -> None:
        """None: x is taken as it is."""

    def up(self, heads: Tensor, x: Any, rows: Tensor) -> Tensor:
        """Returns u of all channels of consecutive heads for the rows x[rows], float32 [n, channels]."""
        raise NotImplementedError

    def ups(
        self,
        heads: Tensor,
        experts: Sequence[int],
        x: Any,
        rows: Tensor,
        offsets: NDArray[np.int32],
        channels: Sequence[int],
    ) -> Tensor:
        """Returns u of experts, whose heads are uint8 [E, bytes], without biases: float32 [n, most channels].
        Expert i has `channels[i]` of them, for the rows of x that are rows[offsets[i]:offsets[i + 1]]."""
        u = torch.empty((int(offsets[-1]), max(channels)), dtype=torch.float32, device=heads.device)
        for expert, lo, hi, number in zip(experts, offsets, offsets[1:], channels, strict=False):
            head = heads[expert, : self._format.head_bytes(self._hidden, number)]
            u[lo:hi, :number] = self.up(head, x, rows[lo:hi])
        return u


class ReferenceChannels(UpByExpert):
    """Computes heads and chosen channels in torch, from uint8 tensors, on their device."""

    def __init__(self, layout: StoreLayout) -> None:
        format = layout.format
        assert isinstance(format, FloeFormat)
        self._format = format
        self._hidden = layout.shape.hidden
        self._tile = layout.shape.tile
        self._math = layout.shape.math

    def activations(self, x: Tensor) -> ChannelInputs:
        """Returns the rows x float32 [R, H] in the forms that the products read."""
        steps = int8_steps(x, self._format.up.group)
        if self._format.rows.bits == 16:
            return ChannelInputs(steps, x.bfloat16().float())
        return ChannelInputs(steps, steps[:, : self._hidden])

    def up(self, heads: Tensor, x: ChannelInputs, rows: Tensor) -> Tensor:
        block, inputs, parts = self._format.head_bytes(self._hidden, 16), x.up[rows], []
        for part in torch.split(heads, max(1, TOGETHER // (16 * self._hidden)) * block):
            matrix = dequantize(self._format.up, part, len(part) // block * 16, self._hidden)
            parts.append(functional.linear(inputs, matrix))
        return torch.cat(parts, dim=1)

    def keeps(self, u: Tensor, mask: Mask) -> Tensor:
        """bool [n, channels]: `Mask.keeps` of each tile."""
        size = u.abs().view(torch.int32).view(len(u), -1, self._tile)
        if mask.share == 1:
            return (size >= int(np.float32(mask.threshold).view(np.int32))).view(u.shape)
        order = size.sort(dim=-1, descending=True, stable=True).indices[..., : mask.number(self._tile)]
        return torch.zeros_like(size, dtype=torch.bool).scatter_(-1, order, True).view(u.shape)

    def channels(self, records: Tensor, u: Tensor, x: ChannelInputs, rows: Tensor) -> Tensor:
        """The sum over channels of f(gate . x, u) * down: float32 [n, H]. records: uint8 [channels *
        channel_bytes]; u: float32 [n, channels], with its bias, 0 where a row leaves a channel out; rows:
        int64 [n]."""
        parts = records.view(u.shape[1], -1)
        if u.device.type == "cpu":  # to know them, the host would wait for another device
            read = u.ne(0).any(dim=0)
            parts, u = parts[read], u[:, read]
        if not len(parts):
            return torch.zeros(len(u), self._hidden, device=u.device)
        both = parts[:, : self._format.channel_bytes(self._hidden)].reshape(len(parts), 2, -1)
        gate, down = (row_numbers(self._format.rows, both[:, i], self._hidden) for i in range(2))
        g = functional.linear(x.gate[rows], gate)
        if self._math.bias:
            g = g + channel_biases(self._format, parts, self._hidden)
        inner = activated(self._math, g, u)
        if isinstance(f := self._math.activation, Glu) and f.offset:  # f(g, 0) is another number
            inner = inner.masked_fill(u == 0, 0)
        return inner @ down

    def compute(
        self,
        heads: Tensor,
        tiles: Tensor,
        x: ChannelInputs,
        rows: Tensor,
        mask: Mask,
        biases: Tensor | None = None,
    ) -> tuple[Tensor, Tally]:
        """Consecutive tiles with this mask: their sum float32 [n, H], and what it left out."""
        u = self.up(heads, x, rows)
        u = u if biases is None else u + biases
        kept = self.keeps(u, mask)
        size = u.abs().double()
        mass, left = size.sum().item(), size.masked_fill(kept, 0).sum().item()
        if not mass < float("inf"):
            mass = left = 0.0
        y = self.channels(tiles, u.masked_fill(~kept, 0), x, rows)
        return y, Tally(mass, left, int(kept.any(dim=0).sum()), u.shape[1])
