"""The device's share of a layer in a format that keeps up apart (FloE, `shm/floe.py`): the device has the up
matrices of all experts, computes u = up x, and of a tile that is not resident only the channels that the
layer's mask keeps are copied.

A tile below its expert's target will stay, so it is copied whole; so is every tile of a layer without a
mask. Whether a tile is resident, came whole or as channels, it gives the same bits: a row's sum is over the
channels that the row keeps. A device with a kernel for it reads a single row's channels wherever they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.arrays import IntArray
from pipeline.counters import StepClock
from pipeline.device import Device
from pipeline.device.base import DeviceChannelKernel, Kept, LayerSum, SlabMemory
from pipeline.device.tile_sums import TileSums
from pipeline.experts.device_share import DeviceMemory, DeviceWork, Slab, rows_of
from pipeline.experts.division import Share
from pipeline.experts.mover import Landed, Wanted
from pipeline.policies.view import ModelShape
from shm.layout import StoreLayout
from shm.mask import DENSE, NOTHING, Mask, Tally
from workers.kernels.cuda.matrix import KEPT
from workers.kernels.cuda.sums import TERM, Weighted

Records = IntArray  # of channels that were copied: their places in the slab, counted over all slots


class MaskedExpert(NamedTuple):
    """The masked channels of the tiles [0, cut) of one expert."""

    kept: IntArray  # the channels that some row keeps, ascending
    tiles: IntArray  # [cut + 1]: tile i has kept[tiles[i]:tiles[i + 1]]
    mass: NDArray[np.float32]  # [cut]: the sum of |u|
    left: NDArray[np.float32]  # [cut]: of the channels that are left out
    u: Tensor  # float32 [n, channels], 0 where a row leaves a channel out
    chosen: Tensor  # float32 [n, len(kept)]: the kept channels of u


Masked = dict[int, MaskedExpert]  # a layer's experts; empty without a mask


class ChannelMemory(DeviceMemory):
    """Device memory with the heads of all experts beside the slab."""

    kernel: DeviceChannelKernel

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        slab: Slab,
        kernel: DeviceChannelKernel,
        heads: dict[int, Tensor],
        layout: StoreLayout,
    ) -> None:
        """`heads`: as `Device.load_heads` gives them."""
        super().__init__(shape, device, slab, kernel, layout.shape.tile)
        self._memory = slab.memory
        self._heads = heads
        self._layout = layout
        self._tile = layout.shape.tile

    def poll(self) -> None:
        self.mover.forget()  # what a step that failed has left
        super().poll()

    # --- channels of later layers --------------------------------------------------------------------------

    def prefetch_channels(self, layer: int, share: Share, x: Tensor, mask: Mask) -> None:
        if mask == DENSE or not self.mover.link.up:
            return
        share = share.where(share.items[:, 1] < share.items[:, 2])
        masked = self._masked(layer, share, self.kernel.activations(x), mask)
        for expert, there, _ in share.items.tolist():
            kept, tiles = masked[expert].kept, masked[expert].tiles
            self.mover.predict(layer, expert, kept[tiles[there] :])

    def inputs(self, rows: int) -> None:
        """x is taken as it is."""

    def start(self, layer: int, share: Share, x: Tensor, timed: bool) -> None:
        """Nothing: masks come first, and are waited for."""

    # --- a layer -------------------------------------------------------------------------------------------

    def begin(self, layer: int, share: Share, x: Tensor, mask: Mask, clock: StepClock) -> DeviceWork:
        """Begin a share, as DeviceMemory.begin. Computes u and its masks first: they say what is copied."""
        if mask == DENSE:
            return super().begin(layer, share, x, mask, clock)._replace(masked={})
        self._use(layer, share)
        clock.mark("submit")
        masked = self._masked(layer, share, self.kernel.activations(x), mask)
        clock.mark("device")
        wanted = []
        for expert, lo, cut in share.items.tolist():
            whole = max(lo, min(cut, int(self.target[layer, expert])))
            if lo < whole:
                wanted.append(Wanted(expert, lo, whole))
            if whole < cut:
                kept, tiles = masked[expert].kept, masked[expert].tiles
                wanted.append(Wanted(expert, whole, cut, kept[tiles[whole] :]))
        return DeviceWork(layer, share, self.mover.demand(layer, wanted), masked)

    def _bytes(self, landed: Landed) -> Tensor | Records:
        """A landed tile, or the places of its kept channels."""
        return self._memory.slot(landed.slot) if landed.places is None else landed.places

    def _records(self, places: Records) -> Tensor:
        """Records by their places, uint8. Without a copy where they follow each other in one slot."""
        size, each = self._layout.tile_bytes // self._tile, self._tile
        slots, at = np.divmod(places, each)
        if not len(places):
            return self._memory.slot(0)[:0]
        if slots[0] == slots[-1] and at[-1] - at[0] == len(at) - 1 and (at[1:] > at[:-1]).all():
            return self._memory.slot(int(slots[0]))[int(at[0]) * size : (int(at[-1]) + 1) * size]
        whole = self._memory.all_slots
        every = whole[:, : each * size].view(len(whole), each, size)
        chosen: Tensor = every[tuple(self.device.from_host(np.stack([slots, at]).astype(np.int64)))]
        return chosen.flatten()

    def _masked(self, layer: int, share: Share, inputs: Any, mask: Mask) -> Masked:
        """Compute u of the share's tiles, and the masks' channels on the host, in one copy."""
        rows = rows_of(share, self.device)
        us, sums = [], []
        for expert, _, cut in share.items.tolist():
            u = self._up(layer, expert, cut, inputs, rows[expert])
            kept, size = self.kernel.keeps(u, mask), u.abs()
            by_tile = (len(u), cut, self._tile)
            sums += [
                kept.any(dim=0).float()[None],
                size.view(by_tile).double().sum(dim=(0, 2)).float()[None],
                size.masked_fill(kept, 0).view(by_tile).double().sum(dim=(0, 2)).float()[None],
            ]
            us.append(u.masked_fill_(~kept, 0))
        if not us:
            return {}
        on_host = self.device.to_host(*sums)
        chosen = [np.flatnonzero(marks[0]).astype(np.int32) for marks in on_host[::3]]
        ends = np.cumsum([len(channels) for channels in chosen]).tolist()
        every = self.device.from_host(np.concatenate(chosen).astype(np.int64))
        masses, left = ([numbers[0] for numbers in on_host[part::3]] for part in (1, 2))
        masked = {}
        for i, (expert, _, cut) in enumerate(share.items.tolist()):
            tiles = np.searchsorted(chosen[i], np.arange(cut + 1) * self._tile).astype(np.int32)
            of_u = us[i][:, every[ends[i] - len(chosen[i]) : ends[i]]]
            masked[expert] = MaskedExpert(chosen[i], tiles, masses[i], left[i], us[i], of_u)
        return masked

    def _up(self, layer: int, expert: int, tiles: int, inputs: Any, rows: Tensor) -> Tensor:
        """u of an expert's first tiles, float32 [n, channels]."""
        heads, layout = self._heads[layer][expert], self._layout
        biases = None
        if layout.shape.math.bias:
            end = layout.up_biases + 4 * tiles * self._tile
            biases = heads[layout.up_biases : end].view(torch.float32)
        return self.kernel.up(heads[: tiles * layout.head_bytes], inputs, rows, biases)

    def begin_sum(self, layer: int, share: Share, x: Tensor, masked: Masked | None = None) -> LayerSum:
        inputs, experts, masked = self.kernel.activations(x), share.items[:, 0].tolist(), masked or {}
        us = {expert: of.u for expert, of in masked.items()}
        if not masked:
            rows_by, cuts = rows_of(share, self.device), share.items[:, 2].tolist()
            for expert, cut in zip(experts, cuts, strict=True):
                us[expert] = self._up(layer, expert, cut, inputs, rows_by[expert])
        if len(x) == 1 and (kept := self.kernel.kept) is not None:
            return OneRow(self._memory, self._layout, kept, inputs, share, us, masked)

        def output(item: int, tile: int, data: Tensor | Records, rows: Tensor) -> Tensor:
            expert = experts[item]
            if isinstance(data, Tensor):
                u = us[expert][:, tile * self._tile : (tile + 1) * self._tile]
            else:
                of, data = masked[expert], self._records(data)
                u = of.chosen[:, of.tiles[tile] : of.tiles[tile + 1]]
            return self.kernel.channels(data, u.contiguous(), inputs, rows)

        return TileSums(x, share.offsets, share.rows, share.weights, output, self.device.from_host)

    def tally(self, work: DeviceWork) -> Tally:
        masked: Masked = work.masked
        parts = []
        for expert in masked.values():
            mass, left = (float(of.sum(dtype=np.float64)) for of in (expert.mass, expert.left))
            if not mass < np.inf:
                mass = left = 0.0
            parts.append(Tally(mass, left, len(expert.kept), len(expert.mass) * self._tile))
        return Tally.of(parts) if parts else NOTHING


class OneRow:
    """The sum of a share of one row, whose kept channels a kernel reads where they lie."""

    def __init__(
        self,
        memory: SlabMemory,
        layout: StoreLayout,
        kept: Kept,
        x: Any,
        share: Share,
        us: dict[int, Tensor],
        masked: Masked,
    ) -> None:
        """`x`: the kernel's activations; `us`: of each expert, float32 [1, channels]."""
        self._kept, self._x, self._weights = kept, x, share.weights
        self._tile, self._size = layout.shape.tile, layout.tile_bytes // layout.shape.tile
        self._slots, self._stride = memory.all_slots.data_ptr(), memory.all_slots.stride(0)
        self._experts, cuts = share.items[:, 0].tolist(), share.items[:, 2]
        self._us, self._masked = us, masked
        self._first = np.cumsum(cuts) - cuts  # lines of earlier experts
        self._computed = np.zeros(len(cuts), np.int32)
        on_device = next(iter(us.values()))
        self._out = on_device.new_empty(int(cuts.sum()), layout.shape.hidden)

    def add(self, tiles: Sequence[tuple[int, int, Any]]) -> None:
        """Compute tiles, as LayerSum says; of chosen channels their places."""
        items = np.zeros(len(tiles), KEPT)
        addresses, channels, end = [], [], 0
        for at, (item, tile, data) in enumerate(tiles):
            expert, lo = self._experts[item], tile * self._tile
            which = np.arange(self._tile, dtype=np.int32)
            if self._masked:
                of = self._masked[expert]
                which = of.kept[of.tiles[tile] : of.tiles[tile + 1]] - np.int32(lo)
            if isinstance(data, Tensor):
                addresses.append(data.data_ptr() + which.astype(np.int64) * self._size)
            else:
                slots, places = np.divmod(data.astype(np.int64), self._tile)
                addresses.append(self._slots + slots * self._stride + places * self._size)
            u = self._us[expert].data_ptr() + 4 * lo
            items[at] = u, end, len(which), self._first[item] + tile
            channels.append(which)
            end += len(which)
            self._computed[item] += 1
        if tiles:
            records, which = np.concatenate(addresses), np.concatenate(channels)
            self._kept(items, records, which, self._x, self._out)

    def result(self) -> Weighted:
        """Return the sum, as LayerSum says."""
        there = self._computed > 0
        terms = np.zeros(int(there.sum()), TERM)
        terms["first"], terms["parts"], terms["stride"] = self._first[there], self._computed[there], 1
        terms["weight"] = self._weights[there]
        return Weighted(self._out.data_ptr(), terms, np.array([0, len(terms)], np.int32), self._out)
