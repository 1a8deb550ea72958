"""The reference kernel of the quantized formats, against the contract's integer arithmetic in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import quick, reference
from quantized_cases import Case, cases, expected, make_case

from shm.layout import ExpertShape, StoreLayout, format_named
from workers.kernels.reference import ReferenceKernel

pytestmark = pytest.mark.usefixtures("one_thread")


@quick(40)
@given(cases(20))
def test_an_expert_equals_the_integer_arithmetic(case: Case) -> None:
    y, bound = expected(case)
    found = reference(case.layout, case.data, case.x, case.rows)
    assert found.dtype == np.float32
    assert (np.abs(found - y) <= bound).all()
    assert not found[~case.x[case.rows].any(axis=1)].any()


@quick(20)
@given(cases(20))
def test_sum_of_single_tiles_equals_all_tiles(case: Case) -> None:
    tiles = [case.tile(index) for index in range(case.layout.shape.tiles)]
    whole, *parts = (reference(case.layout, data, case.x, case.rows) for data in (case.data, *tiles))
    slack = 1e-6 * (np.abs(parts).sum(axis=0).max() + 1e-30)
    np.testing.assert_allclose(whole, np.sum(parts, axis=0), rtol=0, atol=slack)


@quick(20)
@given(cases(20), st.data())
def test_rows_are_chosen_and_repeated(case: Case, data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, len(case.x) - 1), min_size=1, max_size=8)), np.int32)
    every = np.arange(len(rows), dtype=np.int32)
    chosen = reference(case.layout, case.data, case.x, rows)
    np.testing.assert_array_equal(chosen, reference(case.layout, case.data, case.x[rows], every))


@pytest.mark.parametrize(("name", "most"), [("int8", 0.03), ("int4", 0.2), ("int4-g128", 0.25)])
def test_the_result_is_near_that_of_the_weights(name: str, most: float) -> None:
    random = np.random.default_rng(7)
    layout = StoreLayout(ExpertShape(1, 1, 256, 384, 128), format_named(name))
    wide = (384, 256)
    gate, up, down = (random.standard_normal(s).astype(np.float32) * 0.06 for s in (wide, wide, wide[::-1]))
    out = np.zeros(layout.expert_stride, np.uint8)
    layout.encode_expert(gate, up, down, out)
    x = random.standard_normal((16, 256)).astype(np.float32)
    found = reference(layout, out[: layout.tile_bytes * 3], x, np.arange(16, dtype=np.int32))
    a, b = x @ gate.T, x @ up.T
    y = (a / (1 + np.exp(-a)) * b) @ down.T
    assert np.linalg.norm(found - y) < most * np.linalg.norm(y)


def test_progress_is_counted_for_each_tile() -> None:
    case = make_case("int4", 70, 1, 4, 3, "random", "normal", "normal", 1)
    ticks: list[None] = []
    kernel = ReferenceKernel(case.layout, lambda: ticks.append(None))
    kernel.compute(torch.from_numpy(case.data), kernel.activations(torch.from_numpy(case.x)), torch.arange(3))
    assert len(ticks) == case.layout.shape.tiles
