"""The device's share of a layer, and the memory that its tiles are read from. The device computes resident
tiles while missing ones are under way, and each of these once it has landed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import IntArray
from pipeline.counters import PhaseCounters, StepClock
from pipeline.device import SlabMemory
from pipeline.device.base import DeviceKernel
from pipeline.errors import PlanError
from pipeline.experts.shares import DeviceExpert, Missing
from pipeline.experts.tile_mover import TileMover
from pipeline.policies.view import Target


@dataclass(frozen=True)
class DeviceWork:
    """One layer's device share; its missing tiles are ordered. `missing`: those that cannot be fetched
    because the prefetcher is down; complete once `landing` is exhausted."""

    layer: int
    shares: Sequence[DeviceExpert]
    landing: Iterator[tuple[int, int]]  # (expert, slot), as `TileMover.stream` yields them
    missing: list[Missing]


class EmptyDeviceMemory:
    """An engine without a slab: its capacity is 0, and no tile is ever resident."""

    exists: Literal[False] = False
    capacity = 0
    idle = True

    def __init__(self, layers: int, experts: int) -> None:
        self.residency: IntArray = np.zeros((layers, experts), np.int32)
        self.target = self.residency

    def _nothing(self, *_: object) -> None:
        """Replaces methods of DeviceMemory that act on tiles."""

    audit = count_in = poll = collect_landings = retarget = prefetch = end_layer = _nothing

    def wait_idle(self) -> bool:
        return True

    def begin(self, layer: int, shares: Sequence[DeviceExpert]) -> DeviceWork:
        """Raises PlanError where a share is not empty."""
        if shares:
            raise PlanError("the policy gave work to a device without a slab")
        return DeviceWork(layer, shares, iter(()), [])

    def compute(self, work: DeviceWork, kernel: DeviceKernel, x: Tensor, clock: StepClock) -> Tensor:
        return torch.zeros_like(x)


class DeviceMemory:
    """The slab, and the mover that keeps its residency at the policy's targets."""

    exists: Literal[True] = True

    def __init__(self, mover: TileMover, slab: SlabMemory) -> None:
        self.mover = mover
        self.slab = slab
        self.capacity = mover.cache.capacity  # tiles
        self.residency = mover.cache.residency  # [L, E], live
        self.target = mover.cache.target  # [L, E], live
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

    def begin(self, layer: int, shares: Sequence[DeviceExpert]) -> DeviceWork:
        """Order the shares' missing tiles, before all else."""
        for share in shares:
            if share.resident:
                self.mover.used(layer, share.expert)
        wanted = [Missing(s.expert, s.resident, s.cut) for s in shares if s.resident < s.cut]
        missing: list[Missing] = []
        return DeviceWork(layer, shares, self.mover.stream(layer, wanted, missing), missing)

    def compute(self, work: DeviceWork, kernel: DeviceKernel, x: Tensor, clock: StepClock) -> Tensor:
        """The weighted sum of the shares, float32 [R, H]. Resident tiles are an expert's first, so each
        expert sums its tiles in tile order, and then experts are added in theirs: the bits depend on the cuts
        and not on which tiles happened to be resident."""
        counters = self.mover.counters
        inputs = kernel.activations(x)
        rows = {s.expert: torch.from_numpy(s.rows.astype(np.int64)).to(x.device) for s in work.shares}
        sums: dict[int, Tensor] = {}

        def add(expert: int, slot: int) -> None:
            part = kernel.compute(self.slab.slot(slot), inputs, rows[expert])
            sums[expert] = sums[expert].add_(part) if expert in sums else part

        for share in work.shares:
            for slot in self.mover.cache.slots_of(work.layer, share.expert)[: share.resident]:
                add(share.expert, slot)
                counters.resident_tiles += 1
        clock.mark("device")
        for expert, slot in work.landing:
            clock.mark("link")
            add(expert, slot)
            counters.fetched_tiles += 1
            clock.mark("device")
        clock.mark("link")
        y = torch.zeros_like(x)
        for share in work.shares:
            if share.expert in sums:
                weights = torch.from_numpy(share.weights[:, None]).to(x.device)
                y.index_add_(0, rows[share.expert], sums[share.expert] * weights)
        clock.mark("device")
        return y
