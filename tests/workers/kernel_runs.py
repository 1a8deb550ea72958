"""Runs of the C kernels and of the reference on the same bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from quantized_cases import Case

from shm.layout import Bytes, ExpertShape, Float32, StoreLayout, format_named
from workers.kernels.geometry import Geometry
from workers.kernels.native import Kernel, Library, Team
from workers.kernels.reference import ReferenceKernel

seeds = st.integers(0, 2**32 - 1)


def quick(examples: int) -> settings:
    """The library is the same for all of a test's examples."""
    health = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, suppress_health_check=health)


def bits(array: Float32) -> NDArray[np.uint32]:
    return np.ascontiguousarray(array).view(np.uint32)


def bf16_expert(
    random: np.random.Generator, hidden: int, tile: int, tiles: int
) -> tuple[StoreLayout, tuple[Float32, Float32, Float32], Bytes]:
    """A layout of one expert in bf16, the expert's gate, up and down in float32, and its tiles' bytes."""
    layout = StoreLayout(ExpertShape(1, 1, hidden, tiles * tile, tile), format_named("bf16"))
    wide = (tiles * tile, hidden)
    gate, up, down = (
        (random.standard_normal(s) * s[1] ** -0.5).astype(np.float32) for s in (wide, wide, wide[::-1])
    )
    data = np.zeros(layout.expert_stride, np.uint8)
    layout.encode_expert(gate, up, down, data)
    return layout, (gate, up, down), data[: tiles * layout.tile_bytes]


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


class OtherThreads:
    """The threads of this process that were started since."""

    def __init__(self) -> None:
        self._known = set(os.listdir("/proc/self/task"))

    def _sleeps(self) -> dict[str, int]:
        """How often each has gone to sleep."""
        new = set(os.listdir("/proc/self/task")) - self._known
        lines = {i: Path(f"/proc/self/task/{i}/status").read_text().splitlines() for i in new}
        word = "voluntary_ctxt_switches:"
        return {i: int(line.split()[1]) for i in new for line in lines[i] if line.startswith(word)}

    def are_woken(self, call: Callable[[], object]) -> bool:
        """Whether a call wakes all of them: most of three calls, because a thread may be late for one."""
        woken = 0
        for _ in range(3):
            before = self._sleeps()
            call()
            until = time.monotonic() + 0.05
            while not (all_slept := all(n > before[i] for i, n in self._sleeps().items())):
                if time.monotonic() > until:
                    break
                time.sleep(0.001)
            woken += all_slept
        return woken >= 2
