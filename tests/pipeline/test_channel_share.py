"""The device's share in formats that keep up apart: whatever is resident, predicted or fetched as channels,
it is what a worker computes with the same mask, and only kept channels move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_shares import share_of
from mover_parts import MoverParts, encoded_store, mover_parts
from quantized_cases import KINDS
from thread_engine import device_memory

from pipeline.counters import PhaseCounters, StepClock
from pipeline.experts.channel_share import ChannelMemory
from pipeline.experts.device_share import Slab
from pipeline.experts.division import Share
from pipeline.policies.view import ModelShape, Target
from shm.descriptor import describe
from shm.layout import ExpertShape
from shm.mask import DENSE, Mask, Tally
from workers.kernels.native import store_kernel
from workers.kernels.reference import ReferenceChannels

# 5 tiles, the last one padded; of more channels than any kernel takes together
SHAPE = ExpertShape(layers=2, experts=3, hidden=70, intermediate=600, tile=144)
TILES, T = SHAPE.tiles, SHAPE.tile
MODEL = ModelShape(SHAPE.layers, SHAPE.experts, SHAPE.tiles, 2)
SLOTS = 24
X = np.random.default_rng(1).standard_normal((3, SHAPE.hidden)).astype(np.float32)
MASKS = st.sampled_from([DENSE, Mask(threshold=0.8), Mask(share=0.25), Mask(threshold=1e9), Mask(share=0.0)])
FORMATS = ["floe swiglu", "floe-int4 swiglu", "floe-u8-int8 swiglu", "floe-u4-int4 clamped"]


@pytest.fixture(scope="module", params=FORMATS)
def parts(request, tmp_path_factory) -> Iterator[MoverParts]:
    name, kind = request.param.split()
    folder = tmp_path_factory.mktemp(name)
    with (
        encoded_store(replace(SHAPE, math=KINDS[kind]), str(folder), name) as store,
        mover_parts(folder, store, SLOTS) as parts,
    ):
        yield parts


@pytest.fixture(scope="module")
def memory(parts: MoverParts) -> ChannelMemory:
    found = device_memory(parts, MODEL, 9)
    assert isinstance(found, ChannelMemory)
    return found


def on_host(parts: MoverParts, share: Share, mask: Mask, layer: int = 1) -> tuple[np.ndarray, Tally]:
    """All tiles below the cut, as one worker computes them."""
    items = share.items.copy()
    items[:, 1] = 0
    lists = items, share.offsets, share.rows, share.weights
    y, x = np.empty_like(X), np.ascontiguousarray(X)
    work = describe(layer, *lists, len(X), mask)
    return y, store_kernel(parts.store).compute(work, x, y)


def on_device(memory: ChannelMemory, share: Share, mask: Mask) -> tuple[np.ndarray, Tally, PhaseCounters]:
    counters = PhaseCounters(SHAPE.layers)
    memory.count_in(counters)
    clock, x = StepClock(counters), torch.from_numpy(X)
    work = memory.begin(1, share, x, mask, clock)
    y = memory.compute(work, x, clock).numpy()
    memory.end_layer(())
    memory.mover.wait_idle()
    memory.audit()
    return y, memory.tally(work), counters


def close(found: Tally, wanted: Tally) -> None:
    assert (found.kept, found.channels) == (wanted.kept, wanted.channels)
    assert (found.mass, found.left) == pytest.approx((wanted.mass, wanted.left), rel=1e-5, abs=1e-6)


def share_in(memory: ChannelMemory, cuts: list[int], rows: list[list[int]]) -> Share:
    residency = memory.residency[1].tolist()
    items = [(e, min(r, cut), cut) for e, (r, cut) in enumerate(zip(residency, cuts, strict=True)) if cut]
    used = [rows[e] for e, _, _ in items]
    random = np.random.default_rng(len(items))
    return share_of(items, used, [random.uniform(0.2, 1, len(each)).tolist() for each in used])


ROWS = st.lists(st.sampled_from([[0], [1], [0, 2], [0, 1, 2]]), min_size=3, max_size=3)
CUTS = st.lists(st.integers(0, TILES), min_size=3, max_size=3).filter(any)
TARGETS = st.lists(st.integers(0, 3), min_size=3, max_size=3)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(mask=MASKS, cuts=CUTS, rows=ROWS, before=TARGETS, after=TARGETS, predicted=st.booleans())
def test_it_is_what_a_worker_computes(parts, memory, mask, cuts, rows, before, after, predicted) -> None:
    """`before` is resident; `after` is the target: what it keeps beyond that comes whole."""
    memory.mover.retarget(Target(1, expert, tiles) for expert, tiles in enumerate(before))
    memory.mover.wait_idle()
    share = share_in(memory, cuts, rows)
    if predicted:
        memory.count_in(PhaseCounters(SHAPE.layers))
        other = torch.from_numpy(np.roll(X, 1, axis=1))
        memory.prefetch_channels(1, share, other, mask)
    memory.mover.retarget(Target(1, expert, tiles) for expert, tiles in enumerate(after))
    kept = [min(r, a) for r, a in zip(memory.residency[1].tolist(), after, strict=True)]
    share = share_in(memory, cuts, rows)
    assert share.items[:, 1].tolist() == [min(kept[e], cuts[e]) for e in share.items[:, 0].tolist()]
    y, tally, counters = on_device(memory, share, mask)
    wanted, counted = on_host(parts, share, mask)
    np.testing.assert_array_equal(y, wanted)
    if mask == DENSE:
        assert tally == Tally()
        assert counters.channels.moved == 0 or predicted
        return
    close(tally, counted)
    assert counters.fetched_tiles == sum(
        max(0, min(after[e], cut) - lo) for e, lo, cut in share.items.tolist()
    )


@pytest.mark.parametrize("mask", [Mask(threshold=0.8), Mask(share=0.25)])
def test_only_kept_channels_of_tiles_that_are_not_resident_move(parts, memory, mask: Mask) -> None:
    memory.mover.retarget([Target(1, 0, 2), Target(1, 1, 0), Target(1, 2, 3)])
    memory.mover.wait_idle()
    share = share_in(memory, [TILES, TILES, 0], [[0, 2], [1], []])
    _, tally, counters = on_device(memory, share, mask)
    resident = share.where(np.array([True, False]))._replace(items=np.array([[0, 0, 2]], np.int32))
    there = on_host(parts, resident, mask)[1]
    assert 0 < there.kept < 2 * T
    assert counters.channels.moved == tally.kept - there.kept
    assert (counters.fetched_tiles, counters.resident_tiles) == (0, 2)
    assert memory.residency[1].tolist() == [2, 0, 3]


def test_predicted_channels_of_the_same_input_are_all_right(parts, memory) -> None:
    memory.mover.retarget(Target(1, expert, 0) for expert in range(3))
    counters = PhaseCounters(SHAPE.layers)
    memory.count_in(counters)
    mask, x = Mask(threshold=0.8), torch.from_numpy(X)
    memory.prefetch_channels(1, share_in(memory, [TILES, TILES, 0], [[0], [1], []]), x, mask)
    while not all(order.final for order in memory.mover._guesses.values()):
        parts.link.update(20)
    share = share_in(memory, [TILES, 0, TILES], [[0], [], [1]])
    y, tally, after = on_device(memory, share, mask)
    np.testing.assert_array_equal(y, on_host(parts, share, mask)[0])
    found = after.channels
    assert 0 < found.right == found.guessed < tally.kept
    assert found.moved == tally.kept + found.wasted


@pytest.mark.parametrize("mask", [DENSE, Mask(threshold=0.8), Mask(share=0.25)])
def test_in_torch_as_on_a_gpu(parts, mask: Mask) -> None:
    """The same bits whatever is resident, and what the workers compute to rounding."""
    layout = parts.store.layout
    heads, kernel = (
        parts.device.load_heads(parts.store, range(layout.shape.layers)),
        ReferenceChannels(layout),
    )
    slab = Slab(parts.slab, 9, parts.link, parts.copier)
    memory = ChannelMemory(MODEL, parts.device, slab, kernel, heads, layout)
    rows, found = [[0, 2], [1], [0]], []
    for resident in ([0, 0, 0], [5, 1, 2], [1, 2, 1]):
        memory.mover.retarget(Target(1, expert, 0) for expert in range(3))
        memory.mover.retarget(Target(1, expert, tiles) for expert, tiles in enumerate(resident))
        memory.mover.wait_idle()
        share = share_in(memory, [TILES, 3, 4], rows)
        x = torch.from_numpy(X)
        memory.count_in(PhaseCounters(SHAPE.layers))
        memory.prefetch_channels(1, share, x + 0.1, mask)
        y, tally, _ = on_device(memory, share, mask)
        found.append(y)
        wanted, counted = on_host(parts, share, mask)
        np.testing.assert_allclose(y, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())
        assert tally.kept == (0 if mask == DENSE else counted.kept)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    memory.mover.retarget(Target(1, expert, 0) for expert in range(3))
