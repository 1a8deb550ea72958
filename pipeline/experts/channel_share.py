"""The device's share of a layer in a format that keeps up apart (FloE, `shm/floe.py`): the device has the up
matrices of all experts, computes u = up x, and of a tile that is not resident only the channels that the
layer's mask keeps are fetched.

A tile below its expert's target will stay, so it is fetched whole; so is every tile of a layer without a
mask. Whether a tile is resident, came whole or as channels, it gives the same bits: a row's sum is over the
channels that the row keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeline.arrays import IntArray
from pipeline.counters import PhaseCounters, StepClock
from pipeline.device import SlabMemory
from pipeline.device.base import DeviceChannelKernel
from pipeline.device.tile_sums import TileSums
from pipeline.experts.channel_mover import ChannelMover, Wanted
from pipeline.experts.channel_mover import Landed as LandedChannels
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.device_work import DeviceWork, Landed, Landing, rows_of
from pipeline.experts.shares import Missing, Share
from pipeline.experts.tile_mover import TileMover
from shm.layout import StoreLayout
from shm.mask import DENSE, NOTHING, Mask, Tally


@dataclass
class MaskedExpert:
    """Of the tiles [0, cut) of one expert."""

    kept: IntArray  # the channels that some row keeps, ascending
    tiles: IntArray  # [cut + 1]: tile i has kept[tiles[i]:tiles[i + 1]]
    mass: NDArray[np.float32]  # [cut]: the sum of |u|
    left: NDArray[np.float32]  # [cut]: of the channels that are left out
    u: Tensor  # float32 [n, channels], 0 where a row leaves a channel out
    chosen: Tensor  # float32 [n, len(kept)]: the kept channels of u


@dataclass
class MaskedLayer:
    """One layer's masks. `experts` is empty without one; u is then computed when it is used."""

    mask: Mask
    experts: dict[int, MaskedExpert] = field(default_factory=dict)
    dense: dict[int, Tensor] = field(default_factory=dict)  # u of each expert, without a mask
    cuts: dict[int, int] = field(default_factory=dict)


class ChannelMemory(DeviceMemory):
    """Device memory with the heads of all experts beside the slab."""

    kernel: DeviceChannelKernel
    ahead = False  # its sums are made of channels too, which are reported by messages

    def __init__(
        self,
        mover: TileMover,
        slab: SlabMemory,
        kernel: DeviceChannelKernel,
        heads: list[Tensor],
        layout: StoreLayout,
    ) -> None:
        """`heads`: as `Device.load_heads` gives them."""
        super().__init__(mover, slab, kernel)  # type: ignore[arg-type]
        self.channels = ChannelMover(mover, layout.shape.tile)
        self.poll, self.wait_idle = self._poll, self._wait_idle
        self._heads = heads
        self._layout = layout
        self._tile = layout.shape.tile
        self._named: dict[int, set[int]] = {}  # of layers to come: the experts that were predicted

    @property
    def idle(self) -> bool:
        return self.mover.idle and self.channels.idle

    def _poll(self) -> None:
        self.channels.forget()  # what a step that failed has left
        self.mover.poll_prefetcher()

    def _wait_idle(self) -> bool:
        self.channels.forget()
        return self.mover.wait_idle()

    def count_in(self, counters: PhaseCounters) -> None:
        super().count_in(counters)
        self.channels.counters = counters.channels

    # --- channels of later layers --------------------------------------------------------------------------

    def prefetch_channels(self, layer: int, share: Share, x: Tensor, mask: Mask) -> None:
        if mask == DENSE or not self.mover.link.up:
            return
        named = self._named[layer] = set(share.items[:, 0].tolist())
        self.channels.counters.named_experts += len(named)
        wanted = share.items[:, 1] < share.items[:, 2]
        share = share.take(np.flatnonzero(wanted).tolist())
        masked = self._masked(layer, share, self.kernel.activations(x), mask)
        for expert, there, _ in share.items.tolist():
            found = masked.experts[expert]
            self.channels.predict(layer, expert, found.kept[found.tiles[there] :])

    # --- a layer -------------------------------------------------------------------------------------------

    def begin(self, layer: int, share: Share, x: Tensor, mask: Mask, clock: StepClock) -> DeviceWork:
        """Computes u and its masks first: they say what is ordered."""
        self._use(layer, share)
        if (named := self._named.pop(layer, None)) is not None:
            used = share.items[:, 0].tolist()
            self.channels.counters.used_experts += len(used)
            self.channels.counters.right_experts += len(named.intersection(used))
        items, missing = share.items.tolist(), list[Missing]()
        if mask == DENSE:
            self.channels.demand(layer, (), missing)
            wanted = [Missing(*item) for item in items if item[1] < item[2]]
            masked = MaskedLayer(mask, cuts={expert: cut for expert, _, cut in items})
            return DeviceWork(
                layer, share, self._stream(layer, share, wanted, missing), missing, masked=masked
            )
        clock.mark("submit")
        masked = self._masked(layer, share, self.kernel.activations(x), mask)
        clock.mark("device")
        whole, chosen = [], []
        for expert, lo, cut in items:
            kept = max(lo, min(cut, int(self.mover.cache.target[layer, expert])))
            whole += [Missing(expert, lo, kept)] * (lo < kept)
            if kept < cut:
                found = masked.experts[expert]
                chosen.append(Wanted(expert, kept, cut, found.kept[found.tiles[kept] :]))
        if whole:  # the link takes them first, and they leave the slots to channels
            landing = self._both(layer, self._stream(layer, share, whole, missing), chosen, missing)
        else:
            landing = self._chosen(self.channels.demand(layer, chosen, missing))
        return DeviceWork(layer, share, landing, missing, masked=masked)

    def _both(self, layer: int, whole: Landing, chosen: list[Wanted], missing: list[Missing]) -> Landing:
        yield from whole
        gone = {item.expert: place for place, item in enumerate(missing)}
        for item in chosen:
            if item.expert in gone:  # the rest of an expert is one range
                place = gone[item.expert]
                missing[place] = missing[place]._replace(hi=item.hi)
        there = [item for item in chosen if item.expert not in gone]
        yield from self._chosen(self.channels.demand(layer, there, missing))

    def _chosen(self, landing: Iterator[LandedChannels]) -> Iterator[list[Landed]]:
        size = self._layout.tile_bytes // self._tile
        for expert, tile, places in landing:
            yield [Landed(expert, tile, self.slab.records(places, size, self._tile))]

    def _masked(self, layer: int, share: Share, inputs: Any, mask: Mask) -> MaskedLayer:
        """u of the share's tiles, and the masks' channels on the host, in one copy."""
        found, rows = MaskedLayer(mask), rows_of(share, self.mover.device)
        us, sums = [], []
        for expert, _, cut in share.items.tolist():
            u = self.kernel.up(self._up(layer, expert, cut), inputs, rows[expert])
            kept, size = self.kernel.keeps(u, mask), u.abs()
            by_tile = (len(u), cut, self._tile)
            sums += [
                kept.any(dim=0).float()[None],
                size.view(by_tile).double().sum(dim=(0, 2)).float()[None],
                size.masked_fill(kept, 0).view(by_tile).double().sum(dim=(0, 2)).float()[None],
            ]
            us.append(u.masked_fill_(~kept, 0))
        if not us:
            return found
        on_host = self.mover.device.to_host(*sums)
        chosen = [np.flatnonzero(marks[0]).astype(np.int32) for marks in on_host[::3]]
        ends = np.cumsum([len(channels) for channels in chosen]).tolist()
        every = self.mover.device.from_host(np.concatenate(chosen).astype(np.int64))
        masses, left = ([numbers[0] for numbers in on_host[part::3]] for part in (1, 2))
        for i, (expert, _, cut) in enumerate(share.items.tolist()):
            tiles = np.searchsorted(chosen[i], np.arange(cut + 1) * self._tile).astype(np.int32)
            of_u = us[i][:, every[ends[i] - len(chosen[i]) : ends[i]]]
            found.experts[expert] = MaskedExpert(chosen[i], tiles, masses[i], left[i], us[i], of_u)
        return found

    def _up(self, layer: int, expert: int, tiles: int) -> Tensor:
        """The heads of an expert's first tiles."""
        return self._heads[layer][expert, : tiles * self._layout.head_bytes]

    def begin_sum(self, work: DeviceWork, x: Tensor) -> TileSums:
        inputs, experts, share = self.kernel.activations(x), work.share.items[:, 0].tolist(), work.share

        def output(item: int, tile: int, data: Tensor, rows: Tensor) -> Tensor:
            return self._output(work, experts[item], tile, data, inputs, rows)

        upload = self.mover.device.from_host
        return TileSums(x, share.offsets, share.rows, share.weights, output, upload)

    def _output(
        self, work: DeviceWork, expert: int, tile: int, data: Tensor, inputs: Any, rows: Tensor
    ) -> Tensor:
        """A tile's output for the rows inputs[rows]: float32 [n, H], a new tensor."""
        masked: MaskedLayer = work.masked
        whole = slice(tile * self._tile, (tile + 1) * self._tile)
        found = masked.experts.get(expert)
        if found is None:
            u = masked.dense.get(expert)
            if u is None:
                heads = self._up(work.layer, expert, masked.cuts[expert])
                u = masked.dense[expert] = self.kernel.up(heads, inputs, rows)
            u = u[:, whole]
        elif len(data) == self._layout.tile_bytes:
            u = found.u[:, whole]
        else:
            u = found.chosen[:, found.tiles[tile] : found.tiles[tile + 1]]
        return self.kernel.channels(data, u.contiguous(), inputs, rows)

    def tally(self, work: DeviceWork) -> Tally:
        masked: MaskedLayer = work.masked
        gone = {expert: lo for expert, lo, _ in work.missing}
        parts = []
        for expert, found in masked.experts.items():
            tiles = gone.get(expert, len(found.mass))
            mass, left = (float(of[:tiles].sum(dtype=np.float64)) for of in (found.mass, found.left))
            if not mass < np.inf:
                mass = left = 0.0
            parts.append(Tally(mass, left, int(found.tiles[tiles]), tiles * self._tile))
        return Tally.of(parts) if parts else NOTHING
