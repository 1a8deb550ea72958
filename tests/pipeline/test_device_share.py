"""The device's share of a layer: its sums, its counts, and the orders that it begins."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from made_shares import share_of
from mover_parts import SHAPE, SLOTS, MoverParts, mover_parts

from pipeline.counters import PhaseCounters, StepClock
from pipeline.device import open_device
from pipeline.errors import PlanError
from pipeline.experts.device_share import DeviceMemory, Slab
from pipeline.experts.division import NOTHING, Share
from pipeline.policies.view import ModelShape, Target
from shm.mask import DENSE
from workers.kernels.reference import ReferenceKernel

X = torch.from_numpy(np.random.default_rng(1).standard_normal((3, SHAPE.hidden)).astype(np.float32))


@pytest.fixture(scope="module")
def parts(mover_store, tmp_path_factory) -> Iterator[MoverParts]:
    with mover_parts(tmp_path_factory.mktemp("share"), mover_store, SLOTS) as parts:
        yield parts


def computed(parts: MoverParts, memory: DeviceMemory, share: Share) -> tuple[torch.Tensor, PhaseCounters]:
    """Layer 1's share, and what was counted."""
    counters = PhaseCounters(SHAPE.layers)
    memory.count_in(counters)
    clock = StepClock(counters)
    clock.layer = 1
    work = memory.begin(1, share, X, DENSE, clock)
    y = memory.compute(work, X, clock)
    return y, counters


def memory_on(parts: MoverParts, capacity: int) -> DeviceMemory:
    shape = ModelShape(SHAPE.layers, SHAPE.experts, SHAPE.tiles, 2)
    slab = Slab(parts.slab, capacity, parts.link, parts.copier)
    return DeviceMemory(shape, parts.device, slab, parts.device.expert_kernel(parts.store.layout))


def by_hand(parts: MoverParts, share: Share) -> torch.Tensor:
    kernel, y = ReferenceKernel(parts.store.layout), torch.zeros_like(X)
    for i, (expert, _, cut) in enumerate(share.items.tolist()):
        here = slice(share.offsets[i], share.offsets[i + 1])
        rows = torch.from_numpy(share.rows[here].astype(np.int64))
        weights = torch.from_numpy(share.weights[here, None])
        for tile in range(cut):
            data = torch.from_numpy(parts.store.tiles(1, expert, tile, tile + 1).copy())
            y[rows] += kernel.compute(data, kernel.activations(X), rows) * weights
    return y


def test_resident_and_fetched_tiles_are_summed_and_counted(parts: MoverParts) -> None:
    """The bits depend on the cuts alone."""
    memory = memory_on(parts, 2 * SHAPE.tiles)
    assert memory.capacity == 2 * SHAPE.tiles
    cuts = {0: 4, 2: 3}
    found = []
    for resident in ({0: 2, 2: 3}, {0: 0, 2: 0}, {0: 5, 2: 1}):
        memory.mover.retarget([Target(1, expert, tiles) for expert, tiles in resident.items()])
        memory.mover.wait_idle()
        assert memory.idle
        used = {expert: min(cut, resident[expert]) for expert, cut in cuts.items()}
        share = share_of([(0, used[0], 4), (2, used[2], 3)], [[0, 2], [1, 2]], [[0.5, 2.0], [1.5, -1.0]])
        before = memory.mover.demanded
        y, counters = computed(parts, memory, share)
        np.testing.assert_allclose(y, by_hand(parts, share), rtol=1e-4, atol=1e-5)
        kept = sum(used.values())
        assert (counters.resident_tiles, counters.fetched_tiles) == (kept, 7 - kept)
        assert memory.mover.demanded - before == 7 - kept
        spent = {part for part, seconds in counters.seconds.items() if seconds[1] > 0}
        assert spent == {"device", "link"}
        assert not any(seconds[0] for seconds in counters.seconds.values())
        memory.audit()
        found.append(y)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_engine_without_a_slab_has_an_empty_memory() -> None:
    memory = DeviceMemory(ModelShape(2, 3, 4, 2), open_device("cpu"))
    assert (memory.capacity, memory.staging, memory.idle) == (0, 0, True)
    assert memory.residency.tolist() == memory.target.tolist() == [[0] * 3] * 2
    memory.mover.retarget([Target(0, 0, 0)])
    memory.end_layer(())
    memory.prefetch(())
    memory.poll()
    memory.mover.wait_idle()
    memory.audit()
    assert memory.copied() == (0, 0.0)
    clock = StepClock(PhaseCounters(2))
    assert list(memory.begin(1, NOTHING, X, DENSE, clock).landing) == []
    with pytest.raises(PlanError, match="gave work to a device without a slab"):
        memory.begin(1, share_of([(0, 0, 1)], [[0]]), X, DENSE, clock)
