"""The device's share of a layer in a format that keeps up apart (FloE, `shm/floe.py`): the device has the up
matrices of all experts, computes u = up x, and of a tile that is not resident only the channels that the
layer's mask keeps are copied.

A tile below its expert's target will stay, so it is copied whole; so is every tile of a layer without a
mask. Whether a tile is resident, came whole or as channels, it gives the same bits: a row's sum is over the
channels that the row keeps. A device with a kernel for it reads a single row's channels wherever they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.arrays import FloatArray, IntArray
from pipeline.counters import StepClock
from pipeline.device import Device
from pipeline.device.base import DeviceChannelKernel, Kept, LayerSum
from pipeline.device.cuda import FLOAT, CudaGraphs
from pipeline.experts.device_share import DeviceMemory, DeviceWork, Slab
from pipeline.experts.division import Share
from pipeline.experts.mover import Landed, Wanted
from pipeline.policies.view import ModelShape
from shm.layout import StoreLayout
from shm.mask import DENSE, NOTHING, Mask, Tally
from workers.kernels.cuda.matrix import KEPT
from workers.kernels.cuda.sums import TERM, Weighted
from workers.kernels.tile_sums import TileSums

Records = IntArray  # of channels that were copied: their places in the slab, counted over all slots


class MaskedExpert(NamedTuple):
    """The masked channels of the tiles [0, cut) of one expert."""

    kept: IntArray  # the channels that some row keeps, ascending
    tiles: IntArray  # [cut + 1]: tile i has kept[tiles[i]:tiles[i + 1]]
    mass: NDArray[np.float32]  # [cut]: the sum of |u|
    left: NDArray[np.float32]  # [cut]: of the channels that are left out
    u: Tensor  # float32 [n, channels], of several rows 0 where one leaves a channel out
    chosen: Tensor | None = None  # float32 [n, len(kept)]: the kept channels of u; None of a single row

    @classmethod
    def of(
        cls, flags: NDArray[np.generic], mass: FloatArray, left: FloatArray, u: Tensor, tile: int
    ) -> MaskedExpert:
        """Returns it by what is not 0 for the kept channels. `tile`: channels of one."""
        kept = np.flatnonzero(flags).astype(np.int32)
        tiles = np.searchsorted(kept, np.arange(len(mass) + 1) * tile).astype(np.int32)
        return cls(kept, tiles, mass, left, u)


class Masked(NamedTuple):
    """A layer's experts under its mask, and their input as the kernel reads it."""

    x: Any
    experts: dict[int, MaskedExpert]


class Looked:
    """The masks of a layer for a single row, which the device computes before the host knows the routing: of
    the experts with the largest logits, where most routers choose them. They come with these logits, so that
    the host waits once for both."""

    def __init__(self, memory: ChannelMemory, graphs: CudaGraphs) -> None:
        shape, self._tile, self._graphs = memory.shape, memory.tile, graphs
        number, channels = shape.top_k, shape.tiles * memory.tile
        there = memory.device.torch_device
        self.u = torch.zeros((number, channels), dtype=torch.float32, device=there)
        self._ends = np.cumsum(
            [number, number * channels // FLOAT, number * shape.tiles, number * shape.tiles]
        )
        self._numbers = torch.zeros(int(self._ends[-1]), dtype=torch.float32, device=there)
        self._on_host = graphs.answers(int(self._ends[-1]))
        self.x: Any = None  # the inputs that it was computed from, as the kernel reads them

    def compute(self, memory: ChannelMemory, layer: int, mask: Mask, logits: Tensor, x: Any) -> None:
        """Enqueue it, in a graph. `logits`: float32 [1, E]."""
        self.x, chosen = x, logits.topk(len(self.u)).indices[0]
        self.u.copy_(memory.up_of_chosen(layer, chosen, x))
        kept = memory.kernel.keeps(self.u, mask)
        sums = [numbers.flatten() for numbers in masses(self.u, kept, self._tile)]
        flags = kept.to(torch.uint8).view(-1).view(torch.float32)
        torch.cat([chosen.to(torch.int32).view(torch.float32), flags, *sums], out=self._numbers)
        self._graphs.device.copy_back(self._numbers, self._on_host)

    def reads(self, x: Tensor) -> bool:
        """The present layer's x is what it was computed from."""
        return self.x is not None and bool(self.x.x.data_ptr() == x.data_ptr())

    def experts(self, cuts: dict[int, int]) -> dict[int, MaskedExpert] | None:
        """Return these experts with so many tiles each; None where one of them was not looked at."""
        chosen, flags, *sums = np.split(self._on_host, self._ends[:-1])
        line_of = {expert: line for line, expert in enumerate(chosen.view(np.int32).tolist())}
        if not cuts.keys() <= line_of.keys():
            return None
        marks, (mass, left) = (
            flags.view(np.uint8).reshape(self.u.shape),
            (numbers.reshape(len(self.u), -1) for numbers in sums),
        )
        found = {}
        for expert, cut in cuts.items():
            line, end = line_of[expert], cut * self._tile
            numbers = mass[line, :cut].copy(), left[line, :cut].copy()
            u = self.u[line : line + 1, :end]
            found[expert] = MaskedExpert.of(marks[line, :end], *numbers, u, self._tile)
        return found


@dataclass(frozen=True)
class Look:
    """A part of a graph: the masks of a layer, which may be the next one, for the present layer's x."""

    memory: ChannelMemory
    layer: int
    mask: Mask
    looked: Looked

    def __call__(self, logits: dict[int, Tensor], x: Any) -> None:
        """Compute them. `logits`: those of the graph, by probe; of this layer there are some."""
        own, added = logits[self.layer], logits.get(-self.layer) if self.layer else None
        self.looked.compute(self.memory, self.layer, self.mask, own if added is None else own + added, x)


def masses(u: Tensor, kept: Tensor, tile: int) -> list[Tensor]:
    """Returns sums of |u| [n, channels] of each row and tile, and of what is left out: float32 [n, tiles]."""
    size = u.abs()
    return [
        numbers.view(len(u), -1, tile).double().sum(dim=2).float()
        for numbers in (size, size.masked_fill(kept, 0))
    ]


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
        self._memory, self.shape = slab.memory, shape
        self._heads = heads
        self._layout = layout
        self.tile = layout.shape.tile
        self._lines = torch.empty((0, layout.shape.hidden), device=device.torch_device)
        # Of the latest step, by layers and whether they were predicted: masks for a single row, which are
        # looked at in the next one.
        self._wanted: dict[tuple[int, bool], Mask] = {}
        self._places: dict[bool, Looked] = {}
        self._looks: dict[int, Look] = {}  # of the present layer's graph

    def poll(self) -> None:
        self.mover.forget()  # what a step that failed has left
        super().poll()

    # --- channels of later layers --------------------------------------------------------------------------

    def prefetch_channels(self, layer: int, share: Share, x: Tensor, mask: Mask) -> None:
        if mask == DENSE or not self.mover.link.up:
            return
        self._note(layer, x, mask, predicted=True)
        share = share.where(share.items[:, 1] < share.items[:, 2])
        masked = self._masked(layer, share, x, mask).experts
        for expert, there, _ in share.items.tolist():
            kept, tiles = masked[expert].kept, masked[expert].tiles
            self.mover.predict(layer, expert, kept[tiles[there] :])

    def start(self, layer: int, share: Share, x: Tensor, timed: bool) -> None:
        """Nothing: masks come first."""

    # --- masks before the routing is known -----------------------------------------------------------------

    def _note(self, layer: int, x: Tensor, mask: Mask, *, predicted: bool) -> None:
        """A mask is wanted, and will probably be in the next step."""
        if len(x) == 1 and self.kernel.kept is not None:
            self._wanted[layer, predicted] = mask

    def looks(self, layer: int, routers: Sequence[int], graphs: CudaGraphs) -> tuple[Look, ...]:
        self._looks = {}
        for of, predicted in ((layer, False), (layer + 1, True)):
            mask = self._wanted.pop((of, predicted), None)
            if mask is not None and of in routers:
                if predicted not in self._places:
                    self._places[predicted] = Looked(self, graphs)
                self._looks[of] = Look(self, of, mask, self._places[predicted])
        return tuple(self._looks.values())

    def up_of_chosen(self, layer: int, chosen: Tensor, x: Any) -> Tensor:
        """Return u of whole experts that the device names, int64 [k], for a single row: float32 [k,
        channels]."""
        number, biases = len(chosen), self._biases(layer)
        each, channels = np.arange(number + 1, dtype=np.int32), self.shape.tiles * self.tile
        u = self.kernel.ups(self._heads[layer], chosen, x, chosen, each, [channels] * number)
        return u if biases is None else u.add_(biases[chosen])

    def _biases(self, layer: int) -> Tensor | None:
        """Return up's, float32 [E, channels]; None where there are none."""
        layout = self._layout
        if not layout.shape.math.bias:
            return None
        end = layout.up_biases + FLOAT * self.shape.tiles * self.tile
        return self._heads[layer][:, layout.up_biases : end].view(torch.float32)

    # --- a layer -------------------------------------------------------------------------------------------

    def begin(self, layer: int, share: Share, x: Tensor, mask: Mask, clock: StepClock) -> DeviceWork:
        """Begin a share, as DeviceMemory.begin. Its masks, which say what is copied, are computed first where
        they did not come with the routers' logits."""
        if mask == DENSE:
            return super().begin(layer, share, x, mask, clock)
        self._use(layer, share)
        clock.mark("submit")
        self._note(layer, x, mask, predicted=False)
        masked = self._masked(layer, share, x, mask)
        clock.mark("device")
        wanted = []
        for expert, lo, cut in share.items.tolist():
            whole = max(lo, min(cut, int(self.target[layer, expert])))
            if lo < whole:
                wanted.append(Wanted(expert, lo, whole))
            if whole < cut:
                kept, tiles = masked.experts[expert].kept, masked.experts[expert].tiles
                wanted.append(Wanted(expert, whole, cut, kept[tiles[whole] :]))
        return DeviceWork(layer, share, self.mover.demand(layer, wanted), masked)

    @property
    def slots(self) -> tuple[int, int]:
        """The address of the first slot, and the bytes from one to the next."""
        return self._memory.all_slots.data_ptr(), self._memory.all_slots.stride(0)

    def _bytes(self, landed: Landed) -> Tensor | Records:
        """A landed tile, or the places of its kept channels."""
        return self._memory.slot(landed.slot) if landed.places is None else landed.places

    def _records(self, places: Records) -> Tensor:
        """Records by their places, uint8. Without a copy where they follow each other in one slot."""
        size, each = self._layout.tile_bytes // self.tile, self.tile
        slots, at = np.divmod(places, each)
        if not len(places):
            return self._memory.slot(0)[:0]
        if slots[0] == slots[-1] and at[-1] - at[0] == len(at) - 1 and (at[1:] > at[:-1]).all():
            return self._memory.slot(int(slots[0]))[int(at[0]) * size : (int(at[-1]) + 1) * size]
        whole = self._memory.all_slots
        every = whole[:, : each * size].view(len(whole), each, size)
        chosen: Tensor = every[tuple(self.device.from_host(np.stack([slots, at]).astype(np.int64)))]
        return chosen.flatten()

    def _masked(self, layer: int, share: Share, x: Tensor, mask: Mask) -> Masked:
        """Return u of the share's tiles, and the masks' channels on the host: those that a graph has looked
        at, or by one copy."""
        items = share.items.tolist()
        look = self._looks.get(layer)
        if look is not None and look.mask == mask and look.looked.reads(x):
            seen = look.looked.experts({expert: cut for expert, _, cut in items})
            if seen is not None:
                return Masked(look.looked.x, seen)
        inputs = self.kernel.activations(x)
        if not items:
            return Masked(inputs, {})
        us, sums = self._up(layer, share, inputs), []
        for u in us.values():
            kept = self.kernel.keeps(u, mask)
            sums += [kept.any(dim=0).float()[None]]
            sums += [numbers.double().sum(dim=0).float()[None] for numbers in masses(u, kept, self.tile)]
            u.masked_fill_(~kept, 0)
        on_host = [numbers[0] for numbers in self.device.to_host(*sums)]
        triples = zip(on_host[::3], on_host[1::3], on_host[2::3], us.items(), strict=True)
        experts = {
            expert: MaskedExpert.of(flags, mass, left, u, self.tile)
            for flags, mass, left, (expert, u) in triples
        }
        if not (len(x) == 1 and self.kernel.kept is not None):
            every = self.device.from_host(
                np.concatenate([of.kept for of in experts.values()]).astype(np.int64)
            )
            parts = torch.split(every, [len(of.kept) for of in experts.values()])
            for (expert, of), part in zip(experts.items(), parts, strict=True):
                experts[expert] = of._replace(chosen=of.u[:, part])
        return Masked(inputs, experts)

    def _up(self, layer: int, share: Share, inputs: Any) -> dict[int, Tensor]:
        """Return u of each expert's first tiles, float32 [n, channels]."""
        experts, channels = share.items[:, 0].tolist(), (share.items[:, 2] * self.tile).tolist()
        rows, offsets = self.device.from_host(share.rows.astype(np.int64)), share.offsets.astype(np.int32)
        u, biases = (
            self.kernel.ups(self._heads[layer], experts, inputs, rows, offsets, channels),
            self._biases(layer),
        )
        found = {}
        for expert, number, lo, hi in zip(experts, channels, offsets, offsets[1:], strict=False):
            found[expert] = u[lo:hi, :number]
            if biases is not None:
                found[expert].add_(biases[expert, :number])
        return found

    def begin_sum(self, layer: int, share: Share, x: Any, masked: Masked | None = None) -> LayerSum:
        if masked is None:
            of: dict[int, MaskedExpert] = {}
            inputs = self.kernel.activations(x) if isinstance(x, Tensor) else x
            us = self._up(layer, share, inputs)
        else:
            inputs, of = masked
            us = {expert: one.u for expert, one in of.items()}
        experts = share.items[:, 0].tolist()
        if (
            len(share.rows) == len(experts)
            and (kept := self.kernel.kept) is not None
            and not share.rows.any()
        ):
            return OneRow(self, self._layout, kept, inputs, share, us, of)

        def output(item: int, tile: int, data: Tensor | Records, rows: Tensor) -> Tensor:
            expert = experts[item]
            if isinstance(data, Tensor):
                u = us[expert][:, tile * self.tile : (tile + 1) * self.tile]
            else:
                one, data = of[expert], self._records(data)
                assert one.chosen is not None
                u = one.chosen[:, one.tiles[tile] : one.tiles[tile + 1]]
            return self.kernel.channels(data, u.contiguous(), inputs, rows)

        return TileSums(x, share.offsets, share.rows, share.weights, output, self.device.from_host)

    def lines(self, number: int) -> Tensor:
        """Return memory for so many lines of outputs, float32 [number, H], until the next call."""
        if number > len(self._lines):
            self._lines = self._lines.new_empty((number, self._lines.shape[1]))
        return self._lines[:number]

    def tally(self, work: DeviceWork) -> Tally:
        masked: Masked | None = work.masked
        parts = []
        for expert in masked.experts.values() if masked else ():
            mass, left = (float(of.sum(dtype=np.float64)) for of in (expert.mass, expert.left))
            if not mass < np.inf:
                mass = left = 0.0
            parts.append(Tally(mass, left, len(expert.kept), len(expert.mass) * self.tile))
        return Tally.of(parts) if parts else NOTHING


class OneRow:
    """The sum of a share of one row, whose kept channels a kernel reads where they lie."""

    def __init__(
        self,
        memory: ChannelMemory,
        layout: StoreLayout,
        kept: Kept,
        x: Any,
        share: Share,
        us: dict[int, Tensor],
        masked: dict[int, MaskedExpert],
    ) -> None:
        """`x`: the kernel's activations; `us`: of each expert, float32 [1, channels]."""
        self._kept, self._x, self._weights = kept, x, share.weights
        self._tile, self._size = layout.shape.tile, layout.tile_bytes // layout.shape.tile
        self._slots, self._stride = memory.slots
        self._experts, cuts = share.items[:, 0].tolist(), share.items[:, 2]
        self._us, self._masked = us, masked
        self._first = np.cumsum(cuts) - cuts  # lines of earlier experts
        self._computed = np.zeros(len(cuts), np.int32)
        self._out = memory.lines(int(cuts.sum()))

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
