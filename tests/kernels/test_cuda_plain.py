"""The CUDA kernels of bf16 and fp8, emulated on the host: near the exact numbers, and a row's bits do not
depend on other rows, on the tiles' slots or on when they land."""

from __future__ import annotations

import brute_force
import numpy as np
import pytest
import torch
from decoding import decode_matrix
from device_layers import total_of
from emulated_cuda import EmulatedLauncher, library
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import plain_kind, quick
from numpy.typing import NDArray
from quantized_cases import KINDS

from shm.fp8 import FP8
from shm.layout import Bytes, Float32, StoreLayout
from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.experts import FEW, CudaExperts
from workers.kernels.cuda.matrix import FP8_ROWS, FP8_VECTOR, CudaMatrix
from workers.kernels.matrix import quantized


def computed(layout: StoreLayout, data: Bytes, x: Float32, rows: NDArray[np.int32], parts: int) -> Float32:
    """The expert's output for x[rows]; its tiles are added in so many calls."""
    program = Program.of_format(layout.format, layout.shape.math)
    assert program is not None
    launcher = EmulatedLauncher(library(program))
    experts = CudaExperts(launcher, layout)
    offsets, cuts = np.array([0, len(rows)], np.int32), np.array([layout.shape.tiles], np.int32)
    share = experts.begin(torch.from_numpy(x), cuts, offsets, rows, np.ones(len(rows), np.float32))
    size = -(-layout.tile_bytes // 256) * 256
    slab = torch.full((layout.shape.tiles + 1, size), 0xFF, dtype=torch.uint8)
    slots = np.random.default_rng(1).permutation(layout.shape.tiles + 1)[: layout.shape.tiles]
    tiles = []
    for tile, slot in enumerate(slots.tolist()):
        place = slab[slot, : layout.tile_bytes]
        place[:] = torch.from_numpy(data[tile * layout.tile_bytes :][: layout.tile_bytes])
        tiles.append((0, tile, place))
    for part in np.array_split(np.arange(len(tiles)), parts):
        share.add([tiles[i] for i in part])
    assert launcher.launched["quantize"] == 1
    assert launcher.launched.total() <= 2 + 2 * parts
    return total_of(share, torch.from_numpy(x))[rows]


@quick(20)
@given(
    hidden=st.sampled_from([64, 128, 320]),
    tile=st.integers(1, 100),
    tiles=st.integers(1, 3),
    number=st.integers(1, FEW),
    seed=st.integers(0, 2**32 - 1),
)
@example(hidden=320, tile=33, tiles=2, number=8, seed=0)
@example(hidden=64, tile=300, tiles=1, number=3, seed=0)
def test_experts(hidden: int, tile: int, tiles: int, number: int, seed: int) -> None:
    check("bf16", "swiglu", hidden, tile, tiles, number, seed)


@pytest.mark.parametrize("kind", ["all numbers", "relu2 biases"])
def test_every_kind_of_experts(kind: str) -> None:
    for hidden, tile, number in ((320, 33, 8), (64, 7, 3), (2112, 64, 1)):
        check("bf16", kind, hidden, tile, 2, number, number)


@pytest.mark.parametrize(
    ("kind", "hidden", "tile", "tiles", "number"),
    [("swiglu", 384, 384, 1, 3), ("relu2 biases", 128, 128, 2, 2)],
)
def test_experts_in_fp8(kind: str, hidden: int, tile: int, tiles: int, number: int) -> None:
    check("fp8", kind, hidden, tile, tiles, number, number)


def check(name: str, kind: str, hidden: int, tile: int, tiles: int, number: int, seed: int) -> None:
    random, math = np.random.default_rng(seed), KINDS[kind]
    layout, matrices, biases, data = plain_kind(random, math, hidden, tile, tiles, name)
    x = random.standard_normal((number + 2, hidden)).astype(np.float32)
    rows = np.sort(random.permutation(number + 2)[:number]).astype(np.int32)
    together = computed(layout, data, x, rows, 1)
    assert brute_force.expert(*matrices, x[rows], name, math, biases).agrees(together)
    np.testing.assert_array_equal(computed(layout, data, x, rows, tiles), together)
    alone = [computed(layout, data, x, rows[i : i + 1], 1) for i in range(number)]
    np.testing.assert_array_equal(np.concatenate(alone), together)


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows"), [(150, 272, 1), (137, 144, 11), (9, 131, 2), (130, 16, 40)]
)
def test_matrices_of_the_backbone_in_fp8(outputs: int, inputs: int, rows: int) -> None:
    random, format = np.random.default_rng(rows), FP8()
    w, x = (random.standard_normal(size).astype(np.float32) for size in ((outputs, inputs), (rows, inputs)))
    data = quantized(format, w)
    launcher = EmulatedLauncher(library(Program.of_matrices(format)))
    matrix = CudaMatrix(launcher, format, data, (outputs, inputs))
    found = matrix.product(torch.from_numpy(x)).numpy()
    exact = x.astype(np.float64) @ decode_matrix(format, data, outputs, inputs).astype(np.float64).T
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * inputs)
    if rows <= FP8_ROWS and inputs % FP8_VECTOR == 0:
        alone = matrix.product(torch.from_numpy(x[-1:])).numpy()
        np.testing.assert_array_equal(alone, found[-1:])
    with pytest.raises(ValueError, match="are no matrix"):
        CudaMatrix(launcher, format, data[1:], (outputs, inputs))
