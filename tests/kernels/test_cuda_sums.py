"""The kernel that adds the workers' partial sums, emulated on the host, has the bits of the host's sum."""

from __future__ import annotations

import numpy as np
import torch
from device_layers import same
from emulated_cuda import EmulatedLauncher, library
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import quick

from pipeline.arrays import sum_on_host
from workers.kernels.cuda.sums import HEADER_BYTES, SUMS, TERM, OutputSums, Weighted, sums_table, table_room

SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, -3e38], np.float32)


@quick(25)
@given(
    number=st.integers(1, 20),
    rows=st.integers(1, 33),
    hidden=st.integers(1, 600),
    special=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(8, 1, 257, True, 0)
@example(17, 4, 256, True, 1)
@example(9, 32, 1, False, 2)
def test_parts_are_added_in_their_order(number, rows, hidden, special, seed) -> None:
    random = np.random.default_rng(seed)
    sums = OutputSums(EmulatedLauncher(library(SUMS)))
    parts = []
    for _ in range(number):
        part = random.standard_normal((rows, hidden)).astype(np.float32)
        if special:
            part.ravel()[:: max(1, int(random.integers(1, 9)))] = random.choice(SPECIAL)
        parts.append(part)
    y = torch.full((rows, hidden), torch.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = sum_on_host(parts, (rows, hidden))
        sums.total(y, [], [part.ctypes.data for part in parts])
        same(y.numpy(), expected)
        # Behind other outputs, in their order, all of them added to what was there.
        shared, biases = (
            torch.from_numpy(random.standard_normal((rows, hidden)).astype(np.float32)) for _ in range(2)
        )
        terms = np.zeros(rows, TERM)
        terms["first"], terms["parts"], terms["weight"] = np.arange(rows)[::-1], 1, 0.5
        of_biases = Weighted(biases.data_ptr(), terms, np.arange(rows + 1, dtype=np.int32))
        made = np.zeros(table_room(rows, rows, number), np.uint8)
        told = sums_table(rows, [shared, of_biases], [part.ctypes.data for part in parts])
        made[: len(told)] = told
        before = y.clone()
        sums.add(made.ctypes.data, y)
        total = (shared + 0.5 * biases.flip(0)).numpy() + expected
        same(y.numpy(), before.numpy() + total)
        made[:HEADER_BYTES] = 0  # nothing to add
        sums.add(made.ctypes.data, y)
        same(y.numpy(), before.numpy() + total)
