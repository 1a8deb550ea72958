"""The device's share of a layer: resident tiles are computed while the missing ones are fetched, and those as
they land."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.counters import PhaseCounters, StepClock
from pipeline.device import SlabMemory
from pipeline.device.base import DeviceKernel
from pipeline.experts.shares import DeviceShare, Missing
from pipeline.experts.tile_mover import TileMover


def run_on_device(
    kernel: DeviceKernel,
    slab: SlabMemory,
    mover: TileMover,
    layer: int,
    shares: Sequence[DeviceShare],
    x: Tensor,
    counters: PhaseCounters,
    clock: StepClock,
) -> tuple[Tensor, list[Missing]]:
    """The weighted sum of the shares, float32 [R, H], and the tiles that could not be fetched because the
    prefetcher exited. Each expert sums its tiles in tile order (resident ones are its first), then experts
    are added in theirs: the bits depend on the cuts and not on the residency."""
    unfetched: list[Missing] = []
    for share in shares:
        if share.resident:
            mover.used(layer, share.expert)
    missing = [Missing(s.expert, s.resident, s.cut) for s in shares if s.resident < s.cut]
    landing = mover.stream(layer, missing, unfetched)
    inputs = kernel.activations(x)
    y = torch.zeros_like(x)
    rows = {s.expert: torch.from_numpy(s.rows.astype(np.int64)).to(x.device) for s in shares}
    sums: dict[int, Tensor] = {}

    def add(expert: int, slot: int) -> None:
        part = kernel.run(slab.slot(slot), inputs, rows[expert])
        sums[expert] = sums[expert].add_(part) if expert in sums else part

    for share in shares:
        for slot in mover.cache.slots_of(layer, share.expert)[: share.resident]:
            add(share.expert, slot)
            counters.resident_tiles += 1
    clock.mark("device")
    for expert, slot in landing:
        clock.mark("link")
        add(expert, slot)
        counters.fetched_tiles += 1
        clock.mark("device")
    clock.mark("link")
    for share in shares:
        if share.expert in sums:
            weights = torch.from_numpy(share.weights[:, None]).to(x.device)
            y.index_add_(0, rows[share.expert], sums[share.expert] * weights)
    clock.mark("device")
    return y, unfetched
