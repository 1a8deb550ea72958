"""What hosts compute with: the same bits everywhere."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from child_harness import SHAPE, small_store, surroundings
from decoding import decode_matrix
from kernel_runs import bits
from work_cases import Case

from pipeline.device import open_device
from protocol.messages import Partial
from shm.layout import DENSE, BlockFormat, format_named
from shm.store import Store, store_name
from workers.kernels.matrix import HostMatrix, quantized
from workers.kernels.native import best

HIDDEN, TILES = 75, 3
FEW = 4  # rows

pytestmark = pytest.mark.usefixtures("one_thread")


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
    matrix = HostMatrix(best(), None, format, (100, 37), data)
    assert matrix.bytes == len(whole)
    y = matrix.product(x)
    for rows in (4, 5):
        np.testing.assert_array_equal(bits(matrix.product(x[:rows])), bits(y[:rows]))
    exact = x @ decode_matrix(format, whole, 100, 37).T
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
