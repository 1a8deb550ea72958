"""The CUDA kernels, emulated on the host, have the bits of the host's kernels: whatever the format, the
number of rows, the slots, the cuts and the order in which tiles land."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from emulated_cuda import EmulatedLauncher, library
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import bits, kernel_of, quick
from numpy.typing import NDArray
from quantized_cases import CODES, HEADS, QUANTIZED, ROWS, records, states

from shm.blocks import BlockFormat
from shm.layout import Bytes, ExpertShape, Float32, StoreLayout, format_named
from workers.kernels.cuda.experts import CudaExperts
from workers.kernels.cuda.matrix import CudaMatrix
from workers.kernels.cuda.sources import Program
from workers.kernels.geometry import Geometry
from workers.kernels.native import Library, best, load

FORMATS = (*((name, "fused") for name in QUANTIZED), ("int4", "portable"))  # each is compiled for itself


def host(name: str) -> Library:
    """The machine's own library, or the portable one."""
    found = load("portable") if name == "portable" else best()
    if not isinstance(found, Library) or (name == "fused" and found.variant == "portable"):
        pytest.skip(f"no {name} library here")
    return found


def launcher(format: BlockFormat, name: str) -> EmulatedLauncher:
    return EmulatedLauncher(library(Program.of_blocks(format, fused=name == "fused")))


def same(found: Float32, expected: Float32) -> None:
    """Equal bits; a number that is none may be another one that is none."""
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(bits(found)[numbers], bits(expected)[numbers])


@dataclass(frozen=True)
class Layer:
    """Experts of one layer, hidden states, and which experts compute which of them."""

    layout: StoreLayout
    data: Bytes  # [experts, expert_bytes]
    x: Float32
    items: tuple[tuple[int, int], ...]  # expert, cut
    rows: tuple[NDArray[np.int32], ...]  # of each item, ascending
    weights: tuple[Float32, ...]

    @property
    def format(self) -> BlockFormat:
        assert isinstance(self.layout.format, BlockFormat)
        return self.layout.format

    def tile(self, expert: int, tile: int) -> Bytes:
        size = self.layout.tile_bytes
        return self.data[expert, tile * size : (tile + 1) * size]


def made(
    name: str, hidden: int, groups: int, tiles: int, number: int, experts: int, *kinds: str, seed: int
) -> Layer:
    random, format = np.random.default_rng(seed), format_named(name)
    assert isinstance(format, BlockFormat)
    tile = groups * format.group
    layout = StoreLayout(ExpertShape(1, experts, hidden, tiles * tile, tile), format)
    codes, head, kind = kinds
    size = experts * tiles * layout.tile_bytes // format.record_bytes
    data = records(random, format, size, codes, head).reshape(experts, -1)
    items, rows = [], []
    for expert in range(experts):
        some = np.flatnonzero(random.random(number) < random.choice([0.1, 0.5, 1.0])).astype(np.int32)
        if len(some):
            items.append((expert, int(random.integers(1, tiles + 1))))
            rows.append(some)
    weights = [random.standard_normal(len(some)).astype(np.float32) for some in rows]
    return Layer(
        layout, data, states(random, kind, number, hidden), tuple(items), tuple(rows), tuple(weights)
    )


def on_host(library: Library, layer: Layer, computed: Sequence[int]) -> Float32:
    """`computed`: tiles of each item."""
    kernel, y = kernel_of(library, layer.layout), np.zeros_like(layer.x)
    x = kernel.quantize(layer.x)
    for (expert, _), tiles, rows, weights in zip(
        layer.items, computed, layer.rows, layer.weights, strict=True
    ):
        if tiles:
            part = kernel.tiles(layer.data[expert, : tiles * layer.layout.tile_bytes], x, rows)
            y[rows] += part * weights[:, None]
    return y


def on_device(
    launcher: EmulatedLauncher, layer: Layer, resident: Sequence[int], computed: Sequence[int], seed: int
) -> Float32:
    """Tiles in slots in any order: `resident` of each item at once, the rest one by one."""
    random, size = np.random.default_rng(seed), layer.layout.tile_bytes
    wanted = [(item, tile) for item, number in enumerate(computed) for tile in range(number)]
    slots = random.permutation(len(wanted) + 2)[: len(wanted)]
    slab = torch.full((len(wanted) + 2, -(-size // 256) * 256), 0xFF, dtype=torch.uint8)
    places = {}
    for (item, tile), slot in zip(wanted, slots.tolist(), strict=True):
        slab[slot, :size] = torch.from_numpy(layer.tile(layer.items[item][0], tile).copy())
        places[item, tile] = slab[slot, :size]
    experts = CudaExperts(launcher, layer.layout)
    offsets = np.cumsum([0, *map(len, layer.rows)]).astype(np.int32)
    cuts = np.array([cut for _, cut in layer.items], np.int32)
    share = experts.begin(
        torch.from_numpy(layer.x), cuts, offsets, np.concatenate(layer.rows), np.concatenate(layer.weights)
    )
    share.add([(item, places[item, tile]) for item, tile in wanted if tile < resident[item]])
    landing = [(item, tile) for item, tile in wanted if tile >= resident[item]]
    while landing:
        next_of = {item: tile for item, tile in reversed(landing)}
        item = int(random.choice(list(next_of)))
        landing.remove((item, next_of[item]))
        share.add([(item, places[item, next_of[item]])])
    return share.result().numpy()


@quick(20)
@given(
    format=st.sampled_from(FORMATS),
    hidden=st.integers(1, 300),
    groups=st.integers(1, 2),
    tiles=st.integers(1, 3),
    number=st.integers(1, 64),
    experts=st.integers(1, 4),
    codes=st.sampled_from(CODES),
    head=st.sampled_from(HEADS),
    kind=st.sampled_from(ROWS),
    seed=st.integers(0, 2**32 - 1),
)
@example(("int4", "fused"), 257, 2, 3, 64, 3, "random", "normal", "normal", 1)
@example(("int4", "portable"), 70, 2, 2, 40, 3, "random", "normal", "normal", 1)
@example(("int4-g128", "fused"), 129, 1, 2, 33, 2, "random", "normal", "spikes", 2)
@example(("int8", "fused"), 130, 1, 2, 9, 2, "random", "mixed", "normal", 3)
def test_layers(format, hidden, groups, tiles, number, experts, codes, head, kind, seed) -> None:
    format, name = format
    layer = made(format, hidden, groups, tiles, number, experts, codes, head, kind, seed=seed)
    if not layer.items:
        return
    random = np.random.default_rng(seed + 1)
    library, computed = host(name), [cut for _, cut in layer.items]
    resident = [int(random.integers(0, cut + 1)) for cut in computed]
    if random.random() < 0.2:  # the prefetcher is down: not all tiles land
        computed = [int(random.integers(few, cut + 1)) for few, cut in zip(resident, computed, strict=True)]
    found = on_device(launcher(layer.format, name), layer, resident, computed, seed)
    same(found, on_host(library, layer, computed))


@pytest.mark.parametrize("format", QUANTIZED)
def test_every_number_of_rows(format: str) -> None:
    """And a row's bits do not depend on the others."""
    library = host("fused")
    for number in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 63, 64):
        layer = made(format, 192, 1, 2, number, 1, "random", "normal", "normal", seed=number)
        every = np.arange(number, dtype=np.int32)
        layer = Layer(layer.layout, layer.data, layer.x, ((0, 2),), (every,), (np.ones(number, np.float32),))
        found = on_device(launcher(layer.format, "fused"), layer, [2], [2], number)
        same(found, on_host(library, layer, [2]))


def test_decode_step_launches_four_kernels() -> None:
    """Whatever the number of experts and tiles, and two more for each tile that lands."""
    layer = made("int4", 128, 1, 4, 1, 6, "random", "normal", "normal", seed=1)
    rows = tuple(np.zeros(1, np.int32) for _ in range(6))
    layer = Layer(
        layer.layout,
        layer.data,
        layer.x,
        tuple((e, 4) for e in range(6)),
        rows,
        (np.ones(1, np.float32),) * 6,
    )
    gpu = launcher(layer.format, "fused")
    on_device(gpu, layer, [4] * 6, [4] * 6, 0)
    assert gpu.launched == {"quantize": 1, "gate_up_1": 1, "down_1": 1, "combine": 1}
    gpu.launched.clear()
    on_device(gpu, layer, [4, 3, 4, 4, 4, 2], [4] * 6, 0)
    assert gpu.launched == {"quantize": 1, "gate_up_1": 4, "down_1": 4, "combine": 1}


@quick(25)
@given(
    format=st.sampled_from(QUANTIZED),
    outputs=st.integers(1, 300),
    inputs=st.integers(1, 400),
    rows=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
@example("int4", 17, 65, 33, 0)
@example("int8", 1, 1, 1, 0)
def test_matrices(format, outputs, inputs, rows, seed) -> None:
    form, random, library = format_named(format), np.random.default_rng(seed), host("fused")
    assert isinstance(form, BlockFormat)
    data = np.empty(form.matrix_bytes(outputs, inputs), np.uint8)
    form.encode_matrix(random.standard_normal((outputs, inputs)).astype(np.float32), data)
    x = random.standard_normal((rows, inputs)).astype(np.float32)
    kernel = library.kernel(Geometry(form, inputs, outputs))
    matrix = CudaMatrix(launcher(form, "fused"), form, data, (outputs, inputs))
    assert matrix.bytes == len(data)
    for part in (x, x[:1], x):
        same(matrix.product(torch.from_numpy(part)).numpy(), kernel.matmul(data, kernel.quantize(part)))
