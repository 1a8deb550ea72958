"""The device's share of a layer, and the memory that its tiles are read from. The device computes resident
tiles while missing ones are under way, and each of these once it has landed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import IntArray
from pipeline.counters import PhaseCounters, StepClock
from pipeline.device import SlabMemory
from pipeline.device.base import DeviceKernel
from pipeline.errors import PlanError
from pipeline.experts.fetch_link import Order
from pipeline.experts.shares import Missing, Share
from pipeline.experts.tile_mover import TileMover
from pipeline.policies.view import Target


class DeviceWork(NamedTuple):
    """One layer's device share; its missing tiles are ordered. `missing`: those that cannot be fetched
    because the prefetcher is down; complete once `landing` is exhausted."""

    layer: int
    share: Share
    landing: Iterator[tuple[int, int]]  # (expert, slot), as `TileMover.stream` yields them
    missing: list[Missing]


class EmptyDeviceMemory:
    """An engine without a slab: its capacity is 0, and no tile is ever resident."""

    exists: Literal[False] = False
    capacity = staging = 0
    idle = True
    resident_marks: tuple[object, object] = (0.0, 0.0)

    def __init__(self, layers: int, experts: int) -> None:
        self.residency: IntArray = np.zeros((layers, experts), np.int32)
        self.target = self.ordered = self.residency

    def _nothing(self, *_: object) -> None:
        """Replaces methods of DeviceMemory that act on tiles."""

    audit = count_in = poll = collect_landings = retarget = prefetch = end_layer = _nothing

    def wait_idle(self) -> bool:
        return True

    def under_way(self) -> tuple[list[Order], float]:
        return [], 0.0

    def copied(self) -> tuple[int, float]:
        return 0, 0.0

    def begin(self, layer: int, share: Share) -> DeviceWork:
        """Raises PlanError where the share is not empty."""
        if len(share.items):
            raise PlanError("the policy gave work to a device without a slab")
        return DeviceWork(layer, share, iter(()), [])

    def compute(self, work: DeviceWork, kernel: DeviceKernel, x: Tensor, clock: StepClock) -> Tensor:
        return torch.zeros_like(x)


class DeviceMemory:
    """The slab, and the mover that keeps its residency at the policy's targets."""

    exists: Literal[True] = True

    def __init__(self, mover: TileMover, slab: SlabMemory) -> None:
        self.mover = mover
        self.slab = slab
        self.capacity = mover.cache.capacity  # tiles
        self.staging = mover.cache.slots - self.capacity
        self.residency = mover.cache.residency  # [L, E], live
        self.target = mover.cache.target  # [L, E], live
        self.ordered = mover.ordered  # [L, E], live
        self.resident_marks: tuple[object, object] = (0.0, 0.0)  # when `compute` began and ended with them
        # the mover's own, which EmptyDeviceMemory has too
        self.audit = partial(mover.cache.audit, idle=True)
        self.poll = mover.poll_prefetcher
        self.collect_landings = mover.collect_landings
        self.retarget = mover.retarget
        self.wait_idle = mover.wait_idle

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

    def end_layer(self, targets: Iterable[Target]) -> None:
        """Apply the targets that follow the layer, and order tiles below their target."""
        self.mover.retarget(targets)
        self.mover.update()

    def begin(self, layer: int, share: Share) -> DeviceWork:
        """Order the share's missing tiles, before all else."""
        if not len(share.items):
            return DeviceWork(layer, share, iter(()), [])
        items = share.items.tolist()
        for expert, resident, _ in items:
            if resident:
                self.mover.used(layer, expert, resident)
        wanted = [Missing(*item) for item in items if item[1] < item[2]]
        missing: list[Missing] = []
        return DeviceWork(layer, share, self.mover.stream(layer, wanted, missing), missing)

    def compute(self, work: DeviceWork, kernel: DeviceKernel, x: Tensor, clock: StepClock) -> Tensor:
        """The weighted sum of the share, float32 [R, H]. Resident tiles are an expert's first, so each
        expert sums its tiles in tile order, and then experts are added in theirs: the bits depend on the cuts
        and not on which tiles happened to be resident."""
        counters, device = self.mover.counters, self.mover.device
        began = device.time_mark()
        inputs = kernel.activations(x)
        items, offsets = work.share.items.tolist(), work.share.offsets.tolist()
        every = torch.from_numpy(work.share.rows.astype(np.int64)).to(x.device)
        weights = torch.from_numpy(work.share.weights[:, None]).to(x.device)
        places = [slice(start, end) for start, end in pairwise(offsets)]
        rows = {expert: every[place] for (expert, _, _), place in zip(items, places, strict=True)}
        sums: dict[int, Tensor] = {}

        def add(expert: int, slot: int) -> None:
            part = kernel.compute(self.slab.slot(slot), inputs, rows[expert])
            sums[expert] = sums[expert].add_(part) if expert in sums else part

        for expert, resident, _ in items:
            for slot in self.mover.cache.slots_of(work.layer, expert)[:resident]:
                add(expert, slot)
                counters.resident_tiles += 1
        self.resident_marks = began, device.time_mark()
        clock.mark("device")
        for expert, slot in work.landing:
            clock.mark("link")
            add(expert, slot)
            counters.fetched_tiles += 1
            clock.mark("device")
        clock.mark("link")
        y = torch.zeros_like(x)
        for (expert, _, _), place in zip(items, places, strict=True):
            if expert in sums:
                y.index_add_(0, rows[expert], sums[expert] * weights[place])
        clock.mark("device")
        return y
