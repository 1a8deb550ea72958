"""The reference kernel of the quantized formats, against the contract's integer arithmetic in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from kernel_runs import quick, reference
from quantized_cases import Case, cases, expected

from shm.layout import ExpertShape, StoreLayout, format_named

pytestmark = pytest.mark.usefixtures("one_thread")


@quick(40)
@given(cases(20))
def test_an_expert_equals_the_integer_arithmetic(case: Case) -> None:
    y, bound = expected(case)
    found = reference(case.layout, case.data, case.x, case.rows)
    assert found.dtype == np.float32
    assert (np.abs(found - y) <= bound).all()
    assert not found[~case.x[case.rows].any(axis=1)].any()


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
