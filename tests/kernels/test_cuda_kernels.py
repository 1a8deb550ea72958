"""The CUDA kernels, emulated on the host, have the bits of the host's kernels: whatever the format, the
number of rows, the slots, the cuts and the order in which tiles land."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from device_layers import Layer, host, made, on_device, on_host, same
from emulated_cuda import EmulatedLauncher, library
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import quick
from quantized_cases import BLOCKS, CODES, HEADS, KINDS, QUANTIZED, ROWS, records

from shm.blocks import BlockFormat, Int2
from shm.expert_math import SWIGLU, ExpertMath
from shm.layout import Float32, format_named
from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.experts import CudaExperts
from workers.kernels.cuda.matrix import CudaMatrix
from workers.kernels.matrix import HostMatrix

# Each is compiled for itself, which takes a second.
FORMATS = (*QUANTIZED, "q4_0", "q8_0", "mxfp4", "nvfp4")
ALL_FORMATS = tuple(pytest.param(name, marks=[pytest.mark.slow] * (name not in FORMATS)) for name in BLOCKS)


def launcher(format: BlockFormat, math: ExpertMath = SWIGLU) -> EmulatedLauncher:
    return EmulatedLauncher(library(Program.of_blocks(format, math)))


def emulated(launcher: EmulatedLauncher, layer: Layer, resident: list[int], seed: int) -> Float32:
    return on_device(CudaExperts(launcher, layer.layout), launcher.device, layer, resident, seed)


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
@example("int4", 257, 2, 3, 64, 3, "random", "normal", "normal", 1)
@example("int4", 70, 2, 2, 40, 3, "random", "normal", "normal", 1)
@example("int4-g128", 129, 1, 2, 33, 2, "random", "normal", "spikes", 2)
@example("int8", 130, 1, 2, 9, 2, "random", "mixed", "normal", 3)
@example("q8_0", 70, 2, 2, 40, 3, "random", "mixed", "normal", 4)
@example("mxfp4", 95, 2, 3, 64, 3, "random", "mixed", "normal", 5)
@example("nvfp4", 47, 2, 3, 64, 3, "random", "mixed", "normal", 6)
def test_layers(format, hidden, groups, tiles, number, experts, codes, head, kind, seed) -> None:
    layer = made(format, hidden, groups, tiles, number, experts, codes, head, kind, seed=seed)
    if not layer.items:
        return
    random = np.random.default_rng(seed + 1)
    resident = [int(random.integers(0, cut + 1)) for _, cut in layer.items]
    found = emulated(launcher(layer.format), layer, resident, seed)
    same(found, on_host(host("fused"), layer))


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("biases", "int4-g128"),
        ("clamped", "int8"),
        ("all numbers", "int4"),
        ("relu2 biases", "int4"),
        ("relu2 biases", "nvfp4"),
    ],
)
def test_every_kind_of_experts(kind: str, format: str) -> None:
    for number in (1, 2, 7, 40):
        made_of = ("random", "normal", "normal")
        layer = made(format, 130, 2, 2, number, 1, *made_of, seed=number, math=KINDS[kind])
        every = np.arange(number, dtype=np.int32)
        layer = replace(layer, items=((0, 2),), rows=(every,), weights=(np.ones(number, np.float32),))
        found = emulated(launcher(layer.format, KINDS[kind]), layer, [2], number)
        same(found, on_host(host("fused"), layer))


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_every_number_of_rows(format: str) -> None:
    """And a row's bits do not depend on the others."""
    library = host("fused")
    for number in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 63, 64):
        layer = made(format, 192, 1, 2, number, 1, "random", "normal", "normal", seed=number)
        every = np.arange(number, dtype=np.int32)
        layer = Layer(layer.layout, layer.data, layer.x, ((0, 2),), (every,), (np.ones(number, np.float32),))
        found = emulated(launcher(layer.format), layer, [2], number)
        same(found, on_host(library, layer))


@pytest.mark.parametrize("format", ["int4", "int4-g128"])
def test_a_row_of_many_small_experts_fills_a_gpu(format: str) -> None:
    """By a block of threads for each of its units at least, whatever a group of the format."""
    layer = made(
        format, 2048, 768 // format_named(format).granularity, 1, 1, 8, "random", "normal", "normal", seed=1
    )
    rows = (np.zeros(1, np.int32),) * 8
    items = tuple((expert, 1) for expert in range(8))
    layer = replace(layer, items=items, rows=rows, weights=(np.ones(1, np.float32),) * 8)
    gpu = launcher(layer.format)
    same(emulated(gpu, layer, [1] * 8, 1), on_host(host("fused"), layer))
    assert gpu.blocks["gate_up_1"] >= 132


def test_tiles_that_land_beside_experts_of_many_rows() -> None:
    """Their sums are added to what earlier tiles have written, by the kernels for few rows too."""
    layer = made("int4", 100, 1, 3, 40, 3, "random", "normal", "normal", seed=5)
    rows = tuple(np.arange(number, dtype=np.int32) for number in (40, 3, 7))
    weights = tuple(np.full(len(some), 0.5, np.float32) for some in rows)
    layer = Layer(layer.layout, layer.data, layer.x, ((0, 3), (1, 3), (2, 3)), rows, weights)
    for resident in ([0, 0, 0], [3, 1, 2], [3, 3, 0]):
        found = emulated(launcher(layer.format), layer, resident, 1)
        same(found, on_host(host("fused"), layer))


def test_the_smallest_numbers_have_the_codes_of_the_host() -> None:
    """Where a step is rounded by much, a number may be more than 127 of them."""
    form, random = format_named("int4"), np.random.default_rng(1)
    assert isinstance(form, BlockFormat)
    data = records(random, form, 2 * 2, "random", "huge").reshape(-1)
    x = np.concatenate([random.integers(-top, top + 1, (4, 128)) for top in (1, 63, 64, 130, 190, 300)])
    x = (x * 2.0**-149).astype(np.float32)
    matrix = HostMatrix(host("fused"), None, form, (32, 128), data)
    found = CudaMatrix(launcher(form), form, data, (32, 128)).product(torch.from_numpy(x))
    same(found.numpy(), matrix.product(x))
    assert found.any()


MATRICES = (*map(format_named, FORMATS), Int2(64))


@quick(25)
@given(
    form=st.sampled_from(MATRICES),
    outputs=st.integers(1, 300),
    inputs=st.integers(1, 400),
    rows=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
@example(MATRICES[0], 17, 65, 33, 0)
@example(MATRICES[2], 1, 1, 1, 0)
@example(MATRICES[-1], 40, 200, 40, 0)
@example(format_named("mxfp4"), 33, 97, 33, 0)
@example(format_named("nvfp4"), 33, 49, 12, 0)
def test_matrices(form, outputs, inputs, rows, seed) -> None:
    random, library = np.random.default_rng(seed), host("fused")
    data = np.empty(form.matrix_bytes(outputs, inputs), np.uint8)
    form.encode_matrix(random.standard_normal((outputs, inputs)).astype(np.float32), data)
    x = random.standard_normal((rows, inputs)).astype(np.float32)
    on_host = HostMatrix(library, None, form, (outputs, inputs), data)
    matrix = CudaMatrix(launcher(form), form, data, (outputs, inputs))
    assert matrix.bytes == len(data)
    for part in (x, x[:1], x):
        same(matrix.product(torch.from_numpy(part)).numpy(), on_host.product(part))
