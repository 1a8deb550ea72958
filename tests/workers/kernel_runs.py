"""Runs of the C kernels and of the reference on the same bytes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from quantized_cases import Case

from shm.layout import Float32, StoreLayout
from workers.kernels.native import Geometry, Kernel, Library, Team
from workers.kernels.reference import ReferenceKernel

seeds = st.integers(0, 2**32 - 1)


def quick(examples: int) -> settings:
    """The library is the same for all of a test's examples."""
    health = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, suppress_health_check=health)


def bits(array: Float32) -> NDArray[np.uint32]:
    return np.ascontiguousarray(array).view(np.uint32)


def kernel_of(library: Library, layout: StoreLayout, team: Team | None = None) -> Kernel:
    shape = layout.shape
    return library.kernel(Geometry(layout.format, shape.hidden, shape.hidden, shape.tile), team)


def run(library: Library, case: Case, team: Team | None = None) -> Float32:
    kernel = kernel_of(library, case.layout, team)
    return kernel.tiles(case.data, kernel.quantize(case.x), case.rows)


def reference(layout: StoreLayout, data: NDArray[np.uint8], x: Float32, rows: NDArray[np.int32]) -> Float32:
    kernel = ReferenceKernel(layout)
    activations = kernel.activations(torch.from_numpy(x))
    return kernel.compute(
        torch.from_numpy(data), activations, torch.from_numpy(rows.astype(np.int64))
    ).numpy()
