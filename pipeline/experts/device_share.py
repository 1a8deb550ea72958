"""The device's share of a layer, and the memory that its tiles are read from. The device computes resident
tiles while missing ones are under way, and each of these once it has landed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from torch import Tensor

from pipeline.counters import PhaseCounters, StepClock
from pipeline.device import SlabMemory
from pipeline.device.base import DeviceKernel, LayerSum
from pipeline.experts.demand_stream import DemandStream
from pipeline.experts.device_work import DeviceWork, Landed, Landing
from pipeline.experts.fetch_link import Order
from pipeline.experts.shares import Missing, Share
from pipeline.experts.tile_mover import TileMover
from pipeline.policies.view import Target
from shm.mask import NOTHING, Mask, Tally


class DeviceMemory:
    """The slab, and the mover that keeps its residency at the policy's targets."""

    exists: Literal[True] = True
    ahead = True  # tiles may be given before they have landed, see DemandStream.groups
    kernel: Any  # of the experts' format

    def __init__(self, mover: TileMover, slab: SlabMemory, kernel: DeviceKernel) -> None:
        self.mover = mover
        self.slab = slab
        self.kernel = kernel
        self.capacity = mover.cache.capacity  # tiles
        self.staging = mover.cache.slots - self.capacity
        self.residency = mover.cache.residency  # [L, E], live
        self.target = mover.cache.target  # [L, E], live
        self.ordered = mover.ordered  # [L, E], live
        self.resident_marks: tuple[object, object] = (0.0, 0.0)  # when `compute` began and ended with them
        # the mover's own, which EmptyDeviceMemory has too
        self.audit = partial(mover.cache.audit, idle=True)
        self.collect_landings = mover.collect_landings
        self.retarget = mover.retarget
        self.poll, self.wait_idle = mover.poll_prefetcher, mover.wait_idle

    @property
    def idle(self) -> bool:
        """Whether no tile is being fetched in the background."""
        return self.mover.idle

    def under_way(self) -> tuple[list[Order], float]:
        """The link's orders, and the seconds since the present tile began to move."""
        link = self.mover.link
        return link.under_way(), link.moving_for()

    def copied(self) -> tuple[int, float]:
        """The tiles that were copied so far, and the seconds of copying them."""
        return self.mover.link.copied

    def count_in(self, counters: PhaseCounters) -> None:
        """Count moved and computed tiles here from now on."""
        self.mover.counters = counters

    def prefetch(self, targets: Iterable[Target]) -> None:
        """Set predicted targets and order their tiles."""
        self.mover.retarget(targets, predicted=True)
        self.mover.fetch_missing()

    def prefetch_channels(self, layer: int, share: Share, x: Tensor, mask: Mask) -> None:
        """Order the channels of missing tiles that the mask of a later layer would keep if its input were x;
        nothing in formats without heads."""

    def end_layer(self, targets: Iterable[Target]) -> None:
        """Apply the targets that follow the layer, and order tiles below their target."""
        self.mover.retarget(targets)
        self.mover.update()

    def begin(self, layer: int, share: Share, x: Tensor, mask: Mask, clock: StepClock) -> DeviceWork:
        """Order the share's missing tiles, before all else. x: float32 [R, H], the experts' input."""
        self._use(layer, share)
        wanted = [Missing(*item) for item in share.items.tolist() if item[1] < item[2]]
        missing: list[Missing] = []
        return DeviceWork(layer, share, self._stream(layer, share, wanted, missing), missing)

    def _use(self, layer: int, share: Share) -> None:
        """The share's resident tiles are computed."""
        for expert, resident, _ in share.items.tolist():
            if resident:
                self.mover.used(layer, expert, resident)

    def _stream(self, layer: int, share: Share, wanted: list[Missing], missing: list[Missing]) -> Landing:
        """Order whole tiles of the share, at once."""
        ahead = self.ahead and not self.kernel.allocates(share.offsets)
        landing = DemandStream(self.mover, layer, wanted, missing).groups(ahead=ahead) if wanted else iter(())

        def give() -> Landing:
            given, next_tile = 0, {item.expert: item.lo for item in wanted}
            for group in landing:
                if group is None:
                    self.mover.counters.fetched_tiles -= given
                    next_tile = {item.expert: item.lo for item in wanted}
                    yield None
                    continue
                given += len(group)
                self.mover.counters.fetched_tiles += len(group)
                found = []
                for expert, slot in group:
                    found.append(Landed(expert, next_tile[expert], self.slab.slot(slot)))
                    next_tile[expert] += 1
                yield found

        return give()

    def compute(self, work: DeviceWork, x: Tensor, clock: StepClock) -> Tensor:
        """The weighted sum of the share, float32 [R, H]. Resident tiles are an expert's first, so each
        expert sums its tiles in tile order, and then experts are added in theirs: the bits depend on the cuts
        and not on which tiles happened to be resident."""
        counters, device, items = self.mover.counters, self.mover.device, work.share.items.tolist()
        began, slots_of = device.time_mark(), self.mover.cache.slots_of
        layer = self.begin_sum(work, x)
        resident = [
            (item, tile, self.slab.slot(slot))
            for item, (expert, number, _) in enumerate(items)
            for tile, slot in enumerate(slots_of(work.layer, expert)[:number])
        ]
        layer.add(resident)
        counters.resident_tiles += len(resident)
        self.resident_marks = began, device.time_mark()
        clock.mark("device")
        place = {expert: item for item, (expert, _, _) in enumerate(items)}
        for group in work.landing:
            clock.mark("link")
            if group is None:  # anew, without the tiles that have not landed
                layer, group = self.begin_sum(work, x), []
                layer.add(resident)
            layer.add([(place[expert], tile, data) for expert, tile, data in group])
            clock.mark("device")
        clock.mark("link")
        y = layer.result()
        clock.mark("device")
        return y

    def begin_sum(self, work: DeviceWork, x: Tensor) -> LayerSum:
        """Of the share, which has no tiles yet."""
        share = work.share
        sum_: LayerSum = self.kernel.begin(x, share.items[:, 2], share.offsets, share.rows, share.weights)
        return sum_

    def tally(self, work: DeviceWork) -> Tally:
        """What the masks of a computed share have left out, without the tiles that could not be fetched."""
        return NOTHING
