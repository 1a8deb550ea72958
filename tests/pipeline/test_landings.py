"""Tiles that the device waits for by itself, on the stand-in for a GPU: whatever is ordered, cancelled or
placed, and whoever exits when, no kernel whose result is used has read a wrong byte, no stream is stuck, and
all slots come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from emulated_cuda import EmulatedLauncher, library
from fake_gpu import fake_device
from fake_graphs import RecordedLauncher
from fake_runtime import FakeRuntime, Status
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from made_shares import share_of
from mover_parts import (
    DEMAND,
    FULL,
    LIMIT,
    NONE,
    RETARGET,
    SHAPE,
    SLOTS,
    MoverParts,
    check_idle,
    check_slots,
    encoded_store,
    missing,
    mover_parts,
    retarget,
)
from numpy.typing import NDArray
from pipeline.experts.demand_stream import DemandStream
from pipeline.experts.fetch_link import Order
from pipeline.experts.landings import Landings
from pipeline.experts.tile_mover import TileMover
from shm.landing_flags import CYCLE, LandingFlags, next_number, reached

from pipeline.counters import PhaseCounters, StepClock
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.shares import Missing
from shm import landing_flags
from shm.errors import ShmError
from shm.layout import ExpertShape, format_named
from shm.mask import DENSE
from shm.segment import unlink
from shm.store import Store
from workers.cuda import CudaError
from workers.cuda_copier import open_copier
from workers.kernels.cuda.experts import CudaExperts
from workers.kernels.cuda.sources import Program

TILES = SHAPE.tiles


class Place(NamedTuple):
    parts: MoverParts
    runtime: FakeRuntime
    landings: Landings


@contextmanager
def place_at(folder: Path, store: Store, first: int = 0) -> Iterator[Place]:
    """A mover's parts on the stand-in; all flags begin at this number."""
    with fake_device() as (device, runtime):
        runtime.limit = LIMIT
        with mover_parts(folder, store, SLOTS, device=device, first_number=first) as parts:
            landings = parts.link.landings
            assert landings is not None
            yield Place(parts, runtime, landings)
            runtime.drain()


@pytest.fixture(scope="module")
def shared(mover_store, tmp_path_factory) -> Iterator[Place]:
    """Numbers begin at the end of their cycle."""
    with place_at(tmp_path_factory.mktemp("landings"), mover_store, CYCLE - 6) as place:
        yield place


@pytest.fixture
def place(mover_store, tmp_path) -> Iterator[Place]:
    with place_at(tmp_path, mover_store) as place:
        yield place


def computed(
    place: Place, mover: TileMover, layer: int, wanted: list[Missing], each: Callable[[int], object] = id
) -> list[Missing]:
    """A layer's demanded tiles are read by late kernels, as they are given; `each` is called with the number
    of each group. The reads that count are all right. Returns the tiles that were handed back."""
    parts, unfetched = place.parts, list[Missing]()
    due = {item.expert: item.lo for item in wanted}
    reads: list[bool] = []
    groups = 0
    for group in DemandStream(mover, layer, wanted, unfetched).groups(ahead=True):
        if group is None:  # anew
            reads, due = [], {item.expert: item.lo for item in wanted}
            continue
        each(groups := groups + 1)
        for expert, slot in group:

            def read(to=reads, slot=slot, expert=expert, tile=due[expert]) -> None:  # type: ignore[no-untyped-def]
                to.append(parts.holds(slot, layer, expert, tile))

            place.runtime.launch(read)
            due[expert] += 1
    place.runtime.torch_stream.drain()
    assert all(reads)
    assert len(reads) == sum(due[item.expert] - item.lo for item in wanted)
    for item in sorted(unfetched):
        assert item.lo == due[item.expert] < item.hi
        due[item.expert] = item.hi
    assert due == {item.expert: item.hi for item in wanted}
    return unfetched


def wait_idle(place: Place, mover: TileMover) -> None:
    place.parts.prefetcher.start()
    deadline = time.monotonic() + LIMIT
    while not mover.wait_idle():
        assert time.monotonic() < deadline
    check_idle(place.parts, mover)


CALLS = st.sampled_from(["update", "predict", "wait_idle", "kill", "start", "abandon"])
EXIT_AFTER = st.tuples(st.integers(0, 12), st.booleans())
FAILURE = st.integers(0, 3)  # the waits until one cannot be enqueued


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@example(capacity=18, staging=4, calls=[FULL, "update", (0, [5, 5, 5]), NONE, (1, [5, 5, 0]), FULL, "kill"])
@example(capacity=0, staging=4, calls=[(3, True), (0, [2, 2, 0]), (0, [2, 2, 0]), (1, [5, 5, 5])])
@example(capacity=4, staging=4, calls=[0, (0, [2, 2, 0]), 1, (1, [2, 2, 0]), "abandon", (1, [2, 2, 0])])
@example(
    capacity=15, staging=4, calls=[FULL[:5], "predict", "update", (0, [5, 1, 0]), (6, False), (1, [4] * 3)]
)
@given(
    capacity=st.integers(0, 20),
    staging=st.integers(1, 4),
    calls=st.lists(st.one_of(RETARGET, DEMAND, CALLS, EXIT_AFTER, FAILURE), max_size=12),
)
def test_any_order_of_calls_exits_and_failures(shared: Place, capacity, staging, calls) -> None:
    parts, prefetcher = shared.parts, shared.parts.prefetcher
    prefetcher.start()
    assert parts.link.wait_up(LIMIT)
    mover = parts.mover(capacity, staging)
    predicted, abandoned = False, False
    for call in calls:
        match call:
            case "update":
                mover.update()
            case "predict":
                predicted = not predicted
            case "abandon":
                abandoned = not abandoned
            case "wait_idle":
                wait_idle(shared, mover)
            case "kill":
                prefetcher.kill()
            case "start":
                prefetcher.start()
            case int(waits):
                shared.runtime.failures["cuStreamWaitValue32"] = waits
            case tuple((tiles, bool(restarted))):
                prefetcher.exit_after(tiles, restarted)
            case tuple((layer, cuts)):
                wanted = missing(mover, layer, cuts)
                if abandoned:  # the step has failed: nothing is computed
                    with suppress(CudaError):
                        for _ in DemandStream(mover, layer, wanted, []).groups(ahead=True):
                            pass
                else:
                    with suppress(CudaError):
                        computed(shared, mover, layer, wanted)
                shared.runtime.failures.clear()
            case list(targets) if predicted:
                with suppress(Exception):
                    mover.retarget(targets, predicted=True)
            case list(targets):
                retarget(mover, targets)
        check_slots(parts, mover)
    shared.runtime.failures.clear()
    wait_idle(shared, mover)
    mover.retarget(NONE)  # the next example begins with an idle prefetcher
    wait_idle(shared, mover)
    assert shared.landings.trusted


def test_the_machine_has_used_flags(shared: Place) -> None:
    assert shared.runtime.calls["cuStreamWaitValue32"] > 20


@pytest.mark.parametrize("tiles", range(2 * TILES))
def test_prefetcher_exits_at_every_tile(shared: Place, tiles: int) -> None:
    """Before the first wait, between both groups, and behind the last one; then the next demand is whole."""
    prefetcher = shared.parts.prefetcher
    prefetcher.start()
    assert shared.parts.link.wait_up(LIMIT)
    mover = shared.parts.mover(0, SLOTS)
    prefetcher.exit_after(tiles, restarted=False)
    wanted = missing(mover, 0, [TILES, TILES, 0])
    lost = computed(shared, mover, 0, wanted)
    assert 2 * TILES - tiles <= sum(item.hi - item.lo for item in lost) <= 2 * TILES
    assert mover.cache.free == SLOTS
    prefetcher.start()
    assert shared.parts.link.wait_up(LIMIT)
    assert computed(shared, mover, 0, wanted) == []


def test_a_prefetcher_that_exited_is_not_up(place: Place) -> None:
    """Nobody has looked at the link since: the new one is waited for."""
    place.parts.prefetcher.kill()
    place.parts.prefetcher.start()
    assert place.parts.link.wait_up(LIMIT)
    mover = place.parts.mover(0, SLOTS)
    assert computed(place, mover, 0, missing(mover, 0, [TILES, TILES, 0])) == []


def test_the_device_waits_and_the_host_launches_ahead(place: Place) -> None:
    """Both groups are given while no tile has landed."""
    release = place.runtime.hold_copies()
    mover, groups = place.parts.mover(0, SLOTS), []

    def given(number: int) -> None:
        groups.append(number)
        assert not any(place.landings.landed(slot, number) for slot, number in place.landings.waiting.items())
        if number == 2:
            release()

    assert computed(place, mover, 1, missing(mover, 1, [TILES, 0, TILES]), given) == []
    assert groups == [1, 2]
    assert place.landings.waiting == {}
    flags = place.parts.slab.flags
    assert flags is not None
    assert sorted(flags.array[:SLOTS]) == [0] * (SLOTS - 2 * TILES) + [2] * (2 * TILES)


def test_nothing_is_allocated_while_the_device_waits(tmp_path, monkeypatch) -> None:
    """A layer's share by the kernels themselves, late: no tile has landed when all is launched."""
    of_int4 = Program.of_format(format_named("int4"), fused=True)
    assert of_int4 is not None
    shape = ExpertShape(layers=2, experts=3, hidden=64, intermediate=320, tile=64)
    share = share_of([(0, 0, 5), (2, 0, 4)], [[0, 2], [1, 2]], [[0.5, 2.0], [1.5, -1.0]])
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32))
    with encoded_store(shape, "no_allocations", "int4") as store, place_at(tmp_path, store) as place:
        parts, runtime = place.parts, place.runtime
        launcher = LateLauncher(library(of_int4), parts.device)
        memory = DeviceMemory(parts.mover(0, SLOTS), parts.slab, CudaExperts(launcher, store.layout))
        clock, release, wait = StepClock(PhaseCounters(2)), runtime.hold_copies(), parts.link.wait
        uploads: list[int] = []

        def released(order: Order, landed: int) -> None:  # the host waits: everything has been launched
            uploads.append(runtime.calls["cudaMemcpyAsync"])
            release()
            wait(order, landed)

        monkeypatch.setattr(parts.link, "wait", released)
        for _ in range(2):
            work = memory.begin(1, share, x, DENSE, clock)
            y = memory.compute(work, x, clock)
            runtime.torch_stream.drain()
            assert runtime.behind_waits == []
            expected = CudaExperts(EmulatedLauncher(library(of_int4)), store.layout).begin(
                x, share.items[:, 2], share.offsets, share.rows, share.weights
            )
            tiles = [(i, t, e) for i, (e, _, cut) in enumerate(share.items.tolist()) for t in range(cut)]
            expected.add([(i, t, torch.from_numpy(store.tiles(1, e, t, t + 1).copy())) for i, t, e in tiles])
            assert torch.equal(y, expected.result())
        assert uploads[0] >= 2  # both groups
        assert place.landings.trusted


class LateLauncher(RecordedLauncher):
    """Kernels run some time later, on torch's stream."""

    def upload(self, data: NDArray[np.uint8]) -> torch.Tensor:
        self.uploaded = [*getattr(self, "uploaded", []), super().upload(data)]  # read later
        return self.uploaded[-1]

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        again = super().launch
        self._runtime.launch(lambda: again(kernel, blocks, threads, *arguments))
        if kernel == "combine":  # the last one; then the host frees its memory, which torch's allocator keeps
            self._runtime.torch_stream.drain()


def test_a_device_is_released_where_nobody_asks_for_the_rest(place: Place) -> None:
    release = place.runtime.hold_copies()
    mover = place.parts.mover(0, SLOTS)
    stream = DemandStream(mover, 0, missing(mover, 0, [TILES, TILES, 0]), []).groups(ahead=True)
    assert len(next(iter(stream)) or ()) == 2 * TILES - 2 * TILES // 4
    stream.close()  # type: ignore[attr-defined]
    place.runtime.torch_stream.drain()
    assert place.landings.waiting == {}
    release()


def test_tiles_that_land_behind_the_guard_are_computed_again(place: Place) -> None:
    place.landings.limit = 0.2
    mover = place.parts.mover(0, SLOTS)
    release = place.runtime.hold_copies()

    def stands_still(number: int) -> None:
        if number == 2:
            place.runtime.torch_stream.drain()
            release()

    assert computed(place, mover, 0, missing(mover, 0, [TILES, TILES, 0]), stands_still) == []
    assert not place.landings.trusted


def test_a_device_is_released_while_the_engine_looks_for_landings(place: Place) -> None:
    """The copies wait for the device: the engine's thread sees none, however often it looks."""
    place.landings.limit = 0.2
    mover, release = place.parts.mover(0, SLOTS), place.runtime.hold_copies()

    def copies() -> None:
        until = time.monotonic() + LIMIT / 2
        while place.landings.trusted and time.monotonic() < until:
            time.sleep(0.01)
        release()

    waiting = threading.Thread(target=copies)
    waiting.start()
    assert computed(place, mover, 0, missing(mover, 0, [TILES, TILES, 0])) == []
    waiting.join()
    assert not place.landings.trusted


@pytest.mark.parametrize("ended", ["guard", "close"])
def test_a_device_is_released_while_the_engine_stands_still(mover_store, tmp_path, ended, caplog) -> None:
    """The prefetcher has exited, and the engine's thread waits for the device, or ends."""
    with place_at(tmp_path, mover_store) as place:
        place.landings.limit = 0.2 if ended == "guard" else LIMIT
        mover, prefetcher = place.parts.mover(0, SLOTS), place.parts.prefetcher

        def stands_still(number: int) -> None:
            if number == 1:
                prefetcher.present.thread.join(LIMIT)
                if ended == "close":
                    place.landings.close()
                place.runtime.torch_stream.drain()

        prefetcher.exit_after(2, restarted=False)
        lost = computed(place, mover, 0, missing(mover, 0, [TILES, TILES, 0]), stands_still)
        assert lost
        assert (place.parts.link.landings is None) == (ended == "guard") == ("none has landed" in caplog.text)
        prefetcher.start()
        assert place.parts.link.wait_up(LIMIT)
        assert computed(place, mover, 0, missing(mover, 0, [TILES, TILES, 0])) == []


def test_until_the_device_may_wait_the_host_does(place: Place, monkeypatch) -> None:
    monkeypatch.setattr(place.landings, "_ready", lambda: False)
    before, mover = place.runtime.calls["cuStreamWaitValue32"], place.parts.mover(0, SLOTS)
    assert computed(place, mover, 0, missing(mover, 0, [TILES, TILES, 0])) == []
    assert place.runtime.calls["cuStreamWaitValue32"] == before
    assert place.parts.slab.flags is not None
    assert (place.parts.slab.flags.array[:SLOTS] == 2).sum() == 2 * TILES  # they are written and read


def test_reports_behind_flags_are_counted_once(place: Place) -> None:
    link, mover = place.parts.link, place.parts.mover(TILES, 2)
    for _ in range(3):
        before = link.copied[0]
        mover.retarget(FULL[:1])
        wait_idle(place, mover)
        mover.retarget(NONE)
        deadline = time.monotonic() + LIMIT
        while link.copied[0] < before + 3 and time.monotonic() < deadline:
            link.update(10)
        assert link.copied[0] == before + 3


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostGetDevicePointer", "cuStreamWriteValue32"])
def test_without_operations_on_memory_landings_are_reported(mover_store, tmp_path, call, caplog) -> None:
    caplog.set_level("INFO")
    with fake_device() as (device, runtime):
        runtime.failures[call] = 0
        slab = device.open_slab(f"/tandem-test-no-flags-{tmp_path.name}", 2, 1000)
        assert slab.flags is None
        assert slab.address().flags == ""
        (line,) = [r.message for r in caplog.records if "landings are reported by messages" in r.message]
        assert call in line
        slab.close()


def test_a_driver_whose_writes_do_not_arrive_is_found_and_leaves_no_stream_waiting(
    mover_store, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("workers.device_flags.TRIAL_LIMIT", 0.1)
    with fake_device() as (device, runtime):
        runtime.limit = LIMIT
        monkeypatch.setattr(runtime, "cuStreamWriteValue32", lambda *_: (Status(0),), raising=False)
        slab = device.open_slab(f"/tandem-test-no-writes-{tmp_path.name}", 2, 1000)
        assert slab.flags is None
        runtime.drain()
        slab.close()


@pytest.mark.parametrize("fails", [None, "cudaHostRegister", "cuStreamWaitValue32"])
def test_a_prefetcher_that_cannot_write_flags_says_so(mover_store, tmp_path, monkeypatch, fails) -> None:
    """Page-locked memory of its own aside, nothing of the flags stays behind."""
    with fake_device() as (device, runtime):
        slab = device.open_slab(f"/tandem-test-attached-{tmp_path.name}", 2, 4096)
        monkeypatch.setattr("workers.cuda_copier.open_ipc_handle", lambda *_: slab.all_slots.data_ptr())
        monkeypatch.setattr(runtime, "cudaIpcCloseMemHandle", lambda address: (0,), raising=False)
        monkeypatch.setattr("workers.cuda.PageLocks._lock", lambda self: None)
        own = runtime.registered.copy()
        if fails:
            runtime.failures[fails] = 0
        copier = open_copier(slab.address(), mover_store, None, lambda: None)
        assert copier.flags is (fails is None)
        assert len(runtime.registered) == len(own) + copier.flags
        copier.close()
        assert runtime.registered == own
        slab.close()


@given(number=st.integers(0, CYCLE - 1), orders=st.integers(1, 6))
def test_numbers_of_a_slot_go_on_in_a_cycle(number: int, orders: int) -> None:
    """A flag that is behind never releases a wait for a later number; a landed or aborted one does."""
    before = [number]
    for _ in range(orders):
        following = next_number(number)
        assert following % 2 == 0
        assert following != landing_flags.NONE
        assert not any(reached(old, following) for old in before)
        assert reached(following, following)
        assert reached(following + 1, following)
        before += [following, following + 1]
        number = following


def test_flags_are_shared_and_belong_to_one_slab(tmp_path) -> None:
    name = f"/tandem-test-flags-{tmp_path.name}"
    made = LandingFlags.create(name, 3)
    try:
        other = LandingFlags.attach(made.segment.name, 3)
        other.array[:] = np.arange(5)
        assert made.landed(2, 2)
        made.abort(2, 2)
        assert other.array.tolist() == [0, 1, 3, 3, 4]
        other.close()
        with pytest.raises(ShmError, match="flags of 4 slots"):
            LandingFlags.attach(made.segment.name, 4)
    finally:
        made.close()
        unlink(name)
