"""The channel mover on a real link and slab, beside a tile mover: whatever was predicted, every tile is given
once with exactly the channels that its demand names, and no slot is lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mover_parts import NONE, RETARGET, SHAPE, SLOTS, MoverParts, check_idle, mover_parts, retarget
from pipeline.experts.channel_mover import SPARE_SLOTS, ChannelMover, Landed, Wanted
from pipeline.experts.tile_mover import TileMover

from pipeline.arrays import IntArray
from pipeline.experts.shares import Missing

TILES, T = SHAPE.tiles, SHAPE.tile
PACES = {"unlimited link": None, "slow link": 0.006}  # GB/s: half a millisecond a tile


@pytest.fixture(scope="module", params=PACES.values(), ids=PACES.keys())
def parts(request, mover_store, tmp_path_factory) -> Iterator[MoverParts]:
    with mover_parts(tmp_path_factory.mktemp("channels"), mover_store, SLOTS, request.param) as parts:
        yield parts


def chosen(seed: int, lo: int, hi: int) -> IntArray:
    """Some channels of tiles [lo, hi): of each tile none, a few or all."""
    random = np.random.default_rng(seed)
    share = random.choice([0.0, 0.2, 1.0], size=hi - lo).repeat(T)
    return (lo * T + np.flatnonzero(random.random(len(share)) < share)).astype(np.int32)


def check(parts: MoverParts, layer: int, wanted: list[Wanted], landed: Iterator[Landed]) -> dict[int, int]:
    """Each tile has its channels' records. Returns the end of each expert's tiles that were given."""
    channels = {item.expert: item.channels for item in wanted}
    ends = {item.expert: item.lo for item in wanted}
    for expert, tile, places in landed:
        assert tile == ends[expert]
        ends[expert] += 1
        named = channels[expert]
        named = named[named // T == tile]
        assert len(places) == len(named)
        records = parts.store.tiles(layer, expert, 0, TILES).reshape(SHAPE.padded, -1)
        for place, channel in zip(places.tolist(), named.tolist(), strict=True):
            slot = parts.slab.slot(place // T).numpy().reshape(T, -1)
            np.testing.assert_array_equal(slot[place % T], records[channel])
    return ends


def demand(parts: MoverParts, mover: ChannelMover, layer: int, wanted: list[Wanted]) -> list[Missing]:
    unfetched: list[Missing] = []
    ends = check(parts, layer, wanted, mover.demand(layer, wanted, unfetched))
    gone = {item.expert: item for item in unfetched}
    for item in wanted:
        assert gone.get(item.expert, (0, item.hi))[1] == ends[item.expert]
    return unfetched


def settled(parts: MoverParts, tiles: TileMover, mover: ChannelMover) -> None:
    mover.forget()
    assert mover.idle
    assert tiles.wait_idle()
    check_idle(parts, tiles)


CALLS = st.lists(
    st.one_of(
        RETARGET,
        st.tuples(st.just("predict"), st.integers(0, 1), st.integers(0, 2), st.integers(0, 99)),
        st.tuples(st.just("demand"), st.integers(0, 1), st.sets(st.integers(0, 2)), st.integers(0, 99)),
    ),
    max_size=10,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(capacity=st.integers(0, 16), staging=st.integers(2, 8), calls=CALLS)
def test_any_order_of_calls(parts, capacity, staging, calls) -> None:
    tiles = parts.mover(capacity, staging)
    mover = ChannelMover(tiles, T)
    for call in calls:
        match call:
            case ("predict", layer, expert, seed):
                lo = int(tiles.cache.residency[layer, expert])
                mover.predict(layer, expert, chosen(seed, lo, TILES))
            case ("demand", layer, experts, seed):
                tiles.collect_landings()
                residency = tiles.cache.residency[layer].tolist()
                wanted = [
                    Wanted(e, residency[e], TILES, chosen(seed + e, residency[e], TILES))
                    for e in sorted(experts)
                    if residency[e] < TILES
                ]
                assert demand(parts, mover, layer, wanted) == []
                tiles.update()
            case list(targets):
                retarget(tiles, targets)
                tiles.fetch_missing()
        tiles.cache.audit()
    settled(parts, tiles, mover)
    retarget(tiles, NONE)
    assert tiles.wait_idle()


def test_predicted_channels_are_not_moved_again(parts) -> None:
    mover = ChannelMover(parts.mover(0, 8), T)
    guessed = np.arange(0, 30, 2, dtype=np.int32)
    kept = np.array([0, 1, 2, 20, 28, 35], np.int32)
    mover.predict(1, 2, guessed)
    mover.predict(1, 0, guessed)  # not needed
    assert demand(parts, mover, 1, [Wanted(2, 0, TILES, kept)]) == []
    counted = mover.counters
    assert (counted.guessed, counted.right, counted.kept) == (15, 4, 6)
    mover.forget()
    assert mover.idle
    assert 2 + 4 <= counted.moved <= 2 * len(guessed) + 2


def test_predictions_leave_slots_to_demands(parts) -> None:
    """And a prediction for which few slots are left gets its first channels."""
    tiles = parts.mover(0, 3 + SPARE_SLOTS)
    mover = ChannelMover(tiles, T)
    every = np.arange(SHAPE.padded, dtype=np.int32)
    mover.predict(0, 0, every[: 2 * T])
    mover.predict(0, 1, every)
    mover.predict(0, 2, every)
    assert tiles.cache.free == SPARE_SLOTS
    wanted = [Wanted(expert, 0, TILES, every) for expert in (0, 1, 2)]
    assert demand(parts, mover, 0, wanted) == []
    assert (mover.counters.guessed, mover.counters.right) == (3 * T, 3 * T)
    assert mover.idle
    assert tiles.cache.free == tiles.cache.slots


def test_predictions_of_a_layer_that_needs_nothing_are_dropped(parts) -> None:
    tiles = parts.mover(0, 6)
    mover = ChannelMover(tiles, T)
    mover.predict(0, 0, np.arange(4, dtype=np.int32))
    mover.predict(1, 0, np.arange(4, dtype=np.int32))
    assert list(mover.demand(0, [], [])) == []
    assert not mover.idle
    assert list(mover.demand(1, [], [])) == []
    settled(parts, tiles, mover)


@pytest.mark.parametrize("copies", [0, 1, 3])
def test_prefetcher_that_exits_leaves_tiles_to_the_host(parts, copies: int) -> None:
    """What has landed is given all the same; after the restart everything is fetched again."""
    tiles = parts.mover(0, 8)
    mover = ChannelMover(tiles, T)
    mover.predict(1, 1, chosen(3, 0, TILES))
    parts.prefetcher.exit_after(copies, restarted=False)
    wanted = [Wanted(expert, 0, TILES, np.arange(SHAPE.padded, dtype=np.int32)) for expert in (0, 1)]
    unfetched = demand(parts, mover, 1, wanted)
    assert {item.expert for item in unfetched} >= {1}
    mover.predict(0, 1, chosen(3, 0, TILES))  # no effect
    assert mover.idle
    assert demand(parts, mover, 1, wanted) == [Missing(0, 0, TILES), Missing(1, 0, TILES)]
    parts.prefetcher.start()
    assert tiles.link.wait_up(100)
    assert demand(parts, mover, 1, wanted) == []
    settled(parts, tiles, mover)
