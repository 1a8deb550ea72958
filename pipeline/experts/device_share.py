"""The device's share of a layer, and the memory that its tiles are read from. The device computes resident
tiles while missing ones are copied, and each of these once it has landed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pipeline.counters import PhaseCounters, StepClock
from pipeline.device import Device, SlabMemory
from pipeline.device.base import Added, LayerSum
from pipeline.device.cuda import CudaGraphs
from pipeline.errors import PlanError
from pipeline.experts.cache import ExpertCache
from pipeline.experts.division import Share
from pipeline.experts.link import PrefetchLink
from pipeline.experts.mover import Landed, Link, Mover, Wanted
from pipeline.policies.view import ModelShape, Target
from shm.mask import NOTHING, Mask, Tally
from workers.copiers import Copier


class DeviceWork(NamedTuple):
    """One layer's device share while it is computed. Its missing tiles are being copied; `landing` has to be
    exhausted."""

    layer: int
    share: Share
    landing: Iterator[list[Landed]]
    masked: Any = None  # the layer's masks, for the memory itself
    started: LayerSum | None = None  # with the resident tiles, where `start` has given them to the device


class Slab(NamedTuple):
    """A slab, and what moves tiles into it."""

    memory: SlabMemory
    capacity: int  # tiles that may be kept
    link: PrefetchLink
    copier: Copier


class DeviceMemory:
    """The slab, and the mover that keeps its residency at the policy's targets; without a slab its capacity
    is 0, and no tile is ever resident."""

    resident_marks: tuple[object, object] = (0.0, 0.0)  # when `compute` began and ended with resident tiles

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        slab: Slab | None = None,
        kernel: Any = None,
        channels: int = 1,
    ) -> None:
        """`kernel`: of the experts' format; `channels`: of a tile."""
        sizes = shape.layers, shape.experts, shape.tiles
        self.device, self.slab, self.kernel = device, slab, kernel
        self.capacity, slots = (slab.capacity, slab.memory.slots) if slab else (0, 0)
        cache = ExpertCache(*sizes, self.capacity, slots, device.fence)
        self.mover = Mover(
            cache,
            slab.link if slab else Link(),
            slab.copier if slab else None,
            wait=device.wait,
            each=device.on_host,
            channels=channels,
        )
        self.count_in(PhaseCounters(shape.layers))
        self.staging = slots - self.capacity
        self.residency = cache.residency  # [L, E], live
        self.target = cache.target  # [L, E], live

    @property
    def idle(self) -> bool:
        """Nothing is being fetched in the background."""
        return self.mover.idle

    def audit(self) -> None:
        """Check the cache while nothing is under way. Raises AssertionError: a bug in the engine."""
        self.mover.cache.audit(idle=True)

    def copied(self) -> tuple[int, float]:
        """Return the tiles that were copied so far, by whichever process, and the seconds of that."""
        if self.slab is None:
            return 0, 0.0
        (tiles, seconds), (others, elsewhere) = self.slab.copier.copied, self.slab.link.copied
        return tiles + others, seconds + elsewhere

    def count_in(self, counters: PhaseCounters) -> None:
        """Count moved and computed tiles here from now on."""
        self.counters = self.mover.counters = counters

    def poll(self) -> None:
        """Handle the prefetcher's start or exit, also while no order is under way; then bring residency
        nearer to the targets."""
        if self.slab is not None:
            self.slab.link.update(0)
            self.mover.update()

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
        """Begin to copy the share's missing tiles, before all else. x: float32 [R, H], the experts'
        input. Raises PlanError for a share without a slab."""
        self._use(layer, share)
        wanted = [Wanted(*item) for item in share.items.tolist() if item[1] < item[2]]
        return DeviceWork(layer, share, self.mover.demand(layer, wanted))

    def inputs(self, rows: int) -> Any:
        """Memory for so many rows of x as DeviceKernel says; None where x itself is taken."""
        return None if self.kernel is None else self.kernel.inputs(rows)

    def looks(self, layer: int, routers: Sequence[int], graphs: CudaGraphs) -> tuple[Any, ...]:
        """Return what a graph computes beside these routers of a layer, from their logits and its inputs."""
        return ()

    def start(self, layer: int, share: Share, x: Any, timed: bool) -> LayerSum | None:
        """Give a device that computes beside this thread the share's resident tiles, before `begin`, so that
        it has work while the host's share is planned. x: as DeviceKernel takes it. `timed`: between two
        marks."""
        if self.device.on_host or self.slab is None or not len(share.items):
            return None
        return self._resident(self.begin_sum(layer, share, x), layer, share, timed)

    def _resident(self, sum_: LayerSum, layer: int, share: Share, timed: bool) -> LayerSum:
        """Add a share's resident tiles."""
        assert self.slab is not None
        began, slots_of = self.device.time_mark() if timed else 0.0, self.mover.cache.slots_of
        tiles = [
            (item, tile, self.slab.memory.slot(slot))
            for item, (expert, number, _) in enumerate(share.items.tolist())
            for tile, slot in enumerate(slots_of(layer, expert)[:number])
        ]
        sum_.add(tiles)
        self.counters.resident_tiles += len(tiles)
        if timed:
            self.resident_marks = began, self.device.time_mark()
        return sum_

    def _use(self, layer: int, share: Share) -> None:
        """The share's resident tiles are computed."""
        if self.slab is None and len(share.items):
            raise PlanError("the policy gave work to a device without a slab")
        for expert, resident, _ in share.items.tolist():
            if resident:
                self.mover.used(layer, expert, resident)

    def compute(self, work: DeviceWork, x: Any, clock: StepClock, timed: bool = True) -> Added:
        """Return the weighted sum of the share, float32 [R, H]. Resident tiles are an expert's first, so each
        expert sums its tiles in tile order, and then experts are added in theirs: the bits depend on the cuts
        and not on which tiles happened to be resident."""
        counters, layer = self.counters, work.started
        if layer is None:
            sum_ = self.begin_sum(work.layer, work.share, x, work.masked)
            layer = self._resident(sum_, work.layer, work.share, timed)
        clock.mark("device")
        place = {expert: item for item, expert in enumerate(work.share.items[:, 0].tolist())}
        for group in work.landing:
            clock.mark("link")
            counters.fetched_tiles += sum(one.places is None for one in group)
            layer.add([(place[one.expert], one.tile, self._bytes(one)) for one in group])
            clock.mark("device")
        clock.mark("link")
        y = layer.result()
        clock.mark("device")
        return y

    def _bytes(self, landed: Landed) -> Any:
        """A landed tile's bytes, uint8; of chosen channels what `begin_sum` takes."""
        assert self.slab is not None
        return self.slab.memory.slot(landed.slot)

    def begin_sum(self, layer: int, share: Share, x: Any, masked: Any = None) -> LayerSum:
        """Return the sum of the share, which has no tiles yet. `masked`: the layer's masks."""
        sum_: LayerSum = self.kernel.begin(x, share.items[:, 2], share.offsets, share.rows, share.weights)
        return sum_

    def tally(self, work: DeviceWork) -> Tally:
        """Return what the masks of a computed share have left out."""
        return NOTHING
