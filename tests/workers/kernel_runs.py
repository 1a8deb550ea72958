"""Runs of the C kernels and of the reference on the same bytes."""

from __future__ import annotations

import numpy as np
import torch
from decoding import decode
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from quantized_cases import Case, records

from shm.expert_math import SWIGLU, ExpertMath
from shm.layout import BlockFormat, Bytes, ExpertShape, Float32, StoreLayout, format_named
from workers.kernels.c_types import Geometry
from workers.kernels.native import Kernel, Library, Team
from workers.kernels.reference import ReferenceKernel

seeds = st.integers(0, 2**32 - 1)


def quick(examples: int) -> settings:
    """The library is the same for all of a test's examples."""
    health = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, suppress_health_check=health)


def bits(array: Float32) -> NDArray[np.uint32]:
    return np.ascontiguousarray(array).view(np.uint32)


def any_matrix(
    random: np.random.Generator, format: BlockFormat, n: int, k: int, codes: str, head: str
) -> Bytes:
    """A matrix of any records, uint8 [matrix_bytes]."""
    out = np.zeros(format.matrix_bytes(n, k), np.uint8)
    size = format.blocks_bytes(n, k)
    out[:size] = records(random, format, size // format.record_bytes, codes, head).reshape(-1)
    if format.factors:
        format.factors_of(out)[0] = random.uniform(0.001, 2)
    return out


def plain_expert(
    random: np.random.Generator, hidden: int, tile: int, tiles: int, name: str = "bf16"
) -> tuple[StoreLayout, tuple[Float32, Float32, Float32], Bytes]:
    """A layout of one expert in a plain format; its gate, up and down in float32; its tiles' bytes."""
    layout, matrices, _, data = plain_kind(random, SWIGLU, hidden, tile, tiles, name)
    assert matrices[0] is not None
    return layout, (matrices[0], *matrices[1:]), data


def plain_kind(
    random: np.random.Generator, math: ExpertMath, hidden: int, tile: int, tiles: int, name: str = "bf16"
) -> tuple[StoreLayout, tuple[Float32 | None, Float32, Float32], list[Float32], Bytes]:
    """The same for any kind of experts, with their biases; of fp8 the numbers in the tiles."""
    layout = StoreLayout(ExpertShape(1, 1, hidden, tiles * tile, tile, math), format_named(name))
    wide = (tiles * tile, hidden)
    gate, up, down = (
        (random.standard_normal(s) * s[1] ** -0.5).astype(np.float32) for s in (wide, wide, wide[::-1])
    )
    biases = [random.standard_normal(tiles * tile).astype(np.float32) for _ in range(math.biases)]
    matrices = gate if math.gated else None, up, down
    data = np.zeros(layout.expert_stride, np.uint8)
    layout.encode_expert(*matrices, data, biases=biases)
    data = data[: tiles * layout.tile_bytes]
    if name == "fp8":
        kept = [decode(layout.format, one, hidden, tile, math=math) for one in data.reshape(tiles, -1)]
        *wide, down = np.concatenate(kept, axis=1)
        matrices = (wide[0] if math.gated else None, wide[-1], np.ascontiguousarray(down.T))
    return layout, matrices, biases, data


def kernel_of(library: Library, layout: StoreLayout, team: Team | None = None) -> Kernel:
    return library.kernel(Geometry.of_tiles(layout), team)


def run(library: Library, case: Case, team: Team | None = None) -> Float32:
    kernel = kernel_of(library, case.layout, team)
    return kernel.tiles(case.data, kernel.quantize(case.x), case.rows)


def reference(layout: StoreLayout, data: NDArray[np.uint8], x: Float32, rows: NDArray[np.int32]) -> Float32:
    kernel = ReferenceKernel(layout)
    activations = kernel.activations(torch.from_numpy(x))
    return kernel.compute(
        torch.from_numpy(data), activations, torch.from_numpy(rows.astype(np.int64))
    ).numpy()
