"""The device `cuda`, its slab, and the copies to it from this process and from another one."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import brute_force
import numpy as np
import pytest
import torch
from child_harness import SHAPE, small_store, surroundings, weights_of
from numpy.typing import NDArray

from pipeline.arrays import sum_on_host
from pipeline.device import Device, open_device
from pipeline.device.base import SlabMemory
from protocol.messages import Fetch, Fetched, SlabAttached
from shm.store import Store, store_name
from workers import cuda
from workers.copiers import TileCopy
from workers.kernels.reference import ReferenceKernel

pytestmark = pytest.mark.gpu

SLOTS = 2 * SHAPE.tiles
UNTOUCHED = 0xAB


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cuda")


@pytest.fixture(scope="module", params=["f32", "bf16"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A small store, mapped as the prefetcher maps it."""
    with (
        small_store(request.param) as fingerprint,
        Store.attach(store_name(fingerprint), fingerprint, writable=True) as store,
    ):
        yield store


@pytest.fixture
def slab(device: Device, store: Store) -> Iterator[SlabMemory]:
    slab = device.open_slab("/tandem-test-gpu-flags", SLOTS, store.layout.tile_bytes)
    for slot in range(SLOTS):
        slab.slot(slot).fill_(UNTOUCHED)
    torch.cuda.synchronize()  # the copies run on other streams
    yield slab
    slab.close()


def bits(array: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(array).view(np.uint32)


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def holds(slab: SlabMemory, slot: int, tile: NDArray[np.uint8]) -> bool:
    return np.array_equal(slab.slot(slot).cpu().numpy(), tile)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4096), (33, 48), (5, 2, 7), (512, 1024)])
def test_round_trip_is_exact(device: Device, shape: tuple[int, ...]) -> None:
    array = normal(*shape)
    array.flat[0] = -0.0
    array.flat[-1] = np.inf
    tensor = device.from_host(array)
    assert tensor.device == device.torch_device
    assert tensor.dtype == torch.float32
    (back,) = device.to_host(tensor)
    assert back.dtype == np.float32
    assert back.shape == shape
    np.testing.assert_array_equal(bits(back), bits(array))


def test_tensors_of_different_widths_are_read_in_one_call(device: Device) -> None:
    arrays = [normal(9, 48), normal(9, 1), normal(9, 3, 5), normal(9, 2)]
    tensors = [device.from_host(a) for a in arrays]
    for order in ([0, 1, 2, 3], [2, 0], [1, 3, 1]):
        back = device.to_host(*(tensors[i] for i in order))
        for found, index in zip(back, order, strict=True):
            assert found.shape == arrays[index].shape
            np.testing.assert_array_equal(bits(found), bits(arrays[index]))


def busy_tensor(device: Device) -> torch.Tensor:
    """A [64, 8] result that the device is still computing when this returns."""
    x = torch.full((4096, 4096), 1 / 4096, device=device.torch_device)
    y = x
    for _ in range(20):
        y = y @ x
    return y[:64, :8].contiguous()


@pytest.mark.parametrize("hidden", [64, 4096])
def test_partial_sums_in_shared_memory_have_the_bits_of_the_host(device: Device, hidden: int) -> None:
    """The exchange's memory is written again while the GPU is used, as lanes are."""
    random, rows, shards = np.random.default_rng(hidden), 4, 18
    segments = [
        np.frombuffer(mmap.mmap(-1, max(mmap.PAGESIZE, 4 * rows * hidden)), np.uint8) for _ in range(shards)
    ]
    for segment in segments:
        assert device.share_memory(segment) == ""
    for _ in range(50):
        parts = []
        for segment in segments:
            parts.append(segment.view(np.float32)[: rows * hidden].reshape(-1, hidden))
            parts[-1][:] = random.standard_normal((rows, hidden))
        expected = sum_on_host(parts, (rows, hidden))
        y = device.total([], parts, (rows, hidden))
        device.wait(device.fence())
        np.testing.assert_array_equal(bits(y.cpu().numpy()), bits(expected))
    assert device.share_memory(segments[0]) != ""  # registered already
    for segment in segments:
        device.unshare_memory(segment)


def test_fence_follows_all_earlier_work(device: Device) -> None:
    device.wait(None)
    device.wait(device.fence())
    busy_tensor(device)
    fence = device.fence()
    device.wait(fence)
    assert torch.cuda.current_stream().query()  # nothing is left
    device.wait(fence)  # twice is harmless


@pytest.mark.parametrize("slot_bytes", [1, 255, 256, 1000, 3 << 20])
def test_slots_are_stable_and_disjoint(device: Device, slot_bytes: int) -> None:
    slab = device.open_slab("/tandem-test-gpu-flags", 5, slot_bytes)
    try:
        assert slab.slots == 5
        assert slab.slot_bytes >= slot_bytes
        base = slab.slot(0).data_ptr()
        for slot in range(5):
            view = slab.slot(slot)
            assert (view.dtype, view.device, view.numel()) == (torch.uint8, device.torch_device, slot_bytes)
            assert view.data_ptr() == base + slot * slab.slot_bytes  # as a copier finds it
            assert view.data_ptr() % 256 == 0
            view.fill_(slot + 1)
        for slot in range(5):
            assert (slab.slot(slot) == slot + 1).all()
        address = slab.address()
        assert (address.kind, address.slots, address.slot_bytes) == ("cuda", 5, slab.slot_bytes)
        assert len(address.handle) == cuda.IPC_HANDLE_BYTES
    finally:
        slab.close()


@pytest.mark.parametrize("chunk", [cuda.REGISTER_CHUNK, 1 << 16])
def test_copier_brings_tiles_that_the_stream_waits_for(slab, store, chunk, monkeypatch) -> None:
    """Before their pages are locked, and after."""
    monkeypatch.setattr(cuda, "REGISTER_CHUNK", chunk)  # a small one: tiles cross from one into the next
    copier = slab.copier(store, None)
    for expert in range(2):
        copies = [TileCopy(1, expert, index, 2 * index) for index in range(SHAPE.tiles)]
        copier.ready(copier.begin(copies))
        for index in range(SHAPE.tiles):
            assert holds(slab, 2 * index, store.tiles(1, expert, index, index + 1))
            assert (slab.slot(2 * index + 1) == UNTOUCHED).all()
        copier.locks._thread.join()
    assert copier.copied[0] == 2 * SHAPE.tiles
    copier.close()
    copier.locks.undo()
    memory = store.segment.array
    assert cuda.page_lock(memory) == (memory.nbytes, "")
    cuda.page_unlock(memory, memory.nbytes)


@pytest.mark.timeout(300)
def test_prefetcher_process_copies_tiles_to_their_slots(slab: SlabMemory, store: Store) -> None:
    """The real prefetcher, and a second one after it, as after a restart."""
    with surroundings("prefetcher", store.fingerprint) as place:
        for number, link_gbps in enumerate((None, 1.0)):
            child = place.start(link_gbps=link_gbps)
            place.receive(place.work)
            place.receive(place.control)
            place.send(child, slab.address())
            assert place.expect(SlabAttached) == SlabAttached(child.generation)
            slots = np.random.default_rng(number).permutation(SLOTS)[: SHAPE.tiles].tolist()
            place.send(child, Fetch(number, 1, number, 0, tuple(slots), 1, np.zeros(0, np.int32)))
            for index, slot in enumerate(slots):
                report = place.expect(Fetched)
                assert (report.id, report.landed) == (number, index + 1)
                assert holds(slab, slot, store.tiles(1, number, index, index + 1))
            assert place.shut_down(child, place.control) == 0
            assert place.complaints() == ""
            for index, slot in enumerate(slots):
                assert holds(slab, slot, store.tiles(1, number, index, index + 1))


def test_invalid_handle_is_refused(device: Device) -> None:
    with pytest.raises(cuda.CudaError, match="cudaIpcOpenMemHandle"):
        cuda.open_ipc_handle(0, bytes(cuda.IPC_HANDLE_BYTES))


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
def test_kernel_equals_brute_force_and_cpu(device: Device, store: Store, rows: int) -> None:
    kernel, format = ReferenceKernel(store.layout), store.layout.format.name
    x = normal(rows, SHAPE.hidden)
    tiles = torch.from_numpy(store.tiles(0, 3, 0, SHAPE.tiles).copy())
    there, every = tiles.to(device.torch_device), torch.arange(rows)
    on_device = kernel.compute(there, kernel.activations(device.from_host(x)), every.to(device.torch_device))
    (found,) = device.to_host(on_device)
    expected = brute_force.expert(*weights_of(0, 3), x, format)
    on_cpu = kernel.compute(tiles, kernel.activations(torch.from_numpy(x)), every).numpy()
    assert expected.agrees(found)
    assert (np.abs(found - on_cpu) <= 2 * expected.bound).all()
