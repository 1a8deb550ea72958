"""What hosts compute with: C or torch by the format alone, and the same bits everywhere."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from child_harness import SHAPE, small_store, surroundings
from kernel_runs import bits
from numpy.typing import NDArray
from work_cases import Case

from pipeline.device import open_device
from protocol.messages import Partial
from shm.control import ControlSegment
from shm.layout import DENSE, BlockFormat, ExpertShape, Float32, StoreLayout, format_named
from shm.segment import unlink
from shm.store import Store, store_name
from workers.kernels.host import Activations, HostKernel
from workers.kernels.matrix import HostMatrix, quantized

HIDDEN, TILES = 75, 3
FEW = 4  # rows

pytestmark = pytest.mark.usefixtures("one_thread")


def make_tiles(name: str) -> tuple[StoreLayout, NDArray[np.uint8]]:
    format = format_named(name)
    layout = StoreLayout(ExpertShape(1, 1, HIDDEN, TILES * 128, 128), format)
    random = np.random.default_rng(1)
    tiles = [np.empty(layout.tile_bytes, np.uint8) for _ in range(TILES)]
    for tile in tiles:
        format.fill_random(random, HIDDEN, 128, 0.1, tile)
    return layout, np.concatenate(tiles)


def states(rows: int) -> Float32:
    return np.random.default_rng(rows).standard_normal((rows, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("name", DENSE)
def test_progress_is_counted_by_tiles(name: str) -> None:
    layout, tiles = make_tiles(name)
    segment = ControlSegment.create(f"/tandem-tests-ticks-{name}", 1)
    try:
        line = segment.line("worker", 0)
        kernel = HostKernel(layout, line=line)
        for calls, rows in enumerate((1, 17), start=1):
            kernel.compute(tiles, Activations(states(rows)), np.arange(rows, dtype=np.int32))
            assert line.ticks == calls * TILES
            assert segment.line("prefetcher", 0).ticks == 0
        size = layout.tile_bytes
        every_tile = np.pad(tiles, (0, layout.total_bytes - len(tiles)))
        store = cast(
            Store,
            SimpleNamespace(
                tiles=lambda *at: tiles[at[2] * size : at[3] * size], all_tiles=lambda: every_tile
            ),
        )
        for rows in (FEW, FEW + 1):  # in one call, and item by item
            x, every = states(rows + 1), np.arange(1, rows + 1, dtype=np.int32)
            weights = np.linspace(-1, 2, rows, dtype=np.float32)
            items, ends, before = (
                np.array([[0, 1, TILES]], np.int32),
                np.array([0, rows], np.int32),
                line.ticks,
            )
            found, _ = Case(0, items, ends, every, weights, x).computed_on(kernel, store)
            assert line.ticks == before + TILES - 1
            part = kernel.compute(tiles[size:], Activations(x), every) * weights[:, None]
            np.testing.assert_array_equal(found, np.concatenate((np.zeros_like(x[:1]), part)))
    finally:
        del kernel, line
        segment.close()
        unlink(segment.segment.name)


@pytest.mark.parametrize("name", [name for name, f in DENSE.items() if isinstance(f, BlockFormat)])
def test_a_matrix_is_quantized_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    format = format_named(name)
    assert isinstance(format, BlockFormat)
    monkeypatch.setattr("workers.kernels.matrix.PART_NUMBERS", 2 * 37 * 16)  # two blocks of outputs
    w = np.random.default_rng(3).standard_normal((100, 37)).astype(np.float32)
    whole = np.empty(format.matrix_bytes(100, 37), np.uint8)
    format.encode_matrix(w, whole)
    data = quantized(format, w)
    np.testing.assert_array_equal(data, whole)
    x = np.random.default_rng(4).standard_normal((5, 37)).astype(np.float32)
    matrix = HostMatrix(format, data, (100, 37), None)
    assert matrix.bytes == len(whole)
    y = matrix.product(x)
    for rows in (4, 5):
        np.testing.assert_array_equal(bits(matrix.product(x[:rows])), bits(y[:rows]))
    exact = x @ format.decode_matrix(whole, 100, 37).T
    np.testing.assert_allclose(y, exact, atol=0.02 * np.abs(exact).max())


@pytest.mark.timeout(300)  # importing torch takes long where many others compute
@pytest.mark.parametrize("name", DENSE)
def test_a_worker_and_the_device_cpu_give_the_same_bits(name: str) -> None:
    """The worker on one core, the device on all."""
    tile = 2 * DENSE[name].granularity if DENSE[name].granularity > 1 else 16
    device = open_device("cpu")
    with (
        small_store(name, tile) as fingerprint,
        surroundings("worker", fingerprint) as place,
        Store.attach(store_name(fingerprint), fingerprint) as store,
    ):
        device.prepare(1 << 40)
        kernel = device.expert_kernel(store.layout)
        worker = place.start(cores=sorted(os.sched_getaffinity(0))[:1])
        place.ready()
        for expert, rows in enumerate((1, FEW, 9, 40)):
            x = np.random.default_rng(rows).standard_normal((rows, SHAPE.hidden)).astype(np.float32)
            every = np.arange(rows, dtype=np.int32)
            item = [(expert, 0, store.layout.shape.tiles)], [0, rows], every, np.ones(rows)
            place.send(worker, Case(1, *item, x, seq=rows).message(worker.generation))
            tiles = torch.from_numpy(store.tiles(1, expert, 0, store.layout.shape.tiles).copy())
            here = kernel.compute(tiles, kernel.activations(device.from_host(x)), torch.arange(rows))
            np.testing.assert_array_equal(bits(place.expect(Partial).y), bits(here.numpy()))
        assert place.shut_down(worker, place.control) == 0
        assert place.complaints() == ""
    device.close()
