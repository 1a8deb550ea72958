"""The reference kernel against a float64 brute force, over all kinds of shapes."""

from __future__ import annotations

from dataclasses import dataclass

import brute_force
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import reference

from shm.layout import Bytes, ExpertShape, Float32, StoreLayout, format_named

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Case:
    """One expert of random numbers, its bytes, and rows to apply it to."""

    layout: StoreLayout
    gate: Float32
    up: Float32
    down: Float32
    x: Float32

    @property
    def format(self) -> str:
        return self.layout.format.name

    @property
    def data(self) -> Bytes:
        """All of the expert's tiles: uint8 [tiles * tile_bytes]."""
        out: Bytes = np.zeros(self.layout.expert_stride, np.uint8)
        self.layout.encode_expert(self.gate, self.up, self.down, out)
        return out[: self.layout.tile_bytes * self.layout.shape.tiles]

    def expected(self) -> brute_force.Expected:
        return brute_force.expert(self.gate, self.up, self.down, self.x, self.format)

    def run(self, data: Bytes) -> Float32:
        return reference(self.layout, data, self.x, np.arange(len(self.x), dtype=np.int32))


def make_case(hidden: int, intermediate: int, tile: int, rows: int, format: str, seed: int) -> Case:
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> Float32:
        return (random.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)

    shape = ExpertShape(layers=1, experts=1, hidden=hidden, intermediate=intermediate, tile=tile)
    wide = (intermediate, hidden)
    x = random.standard_normal((rows, hidden)).astype(np.float32)
    parts = matrix(*wide), matrix(*wide), matrix(*wide[::-1])
    return Case(StoreLayout(shape, format_named(format)), *parts, x)


cases = st.builds(
    make_case,
    hidden=st.integers(1, 70),
    intermediate=st.integers(1, 90),
    tile=st.integers(1, 40),
    rows=st.integers(1, 40),
    format=st.sampled_from(["f32", "bf16"]),
    seed=st.integers(0, 2**32 - 1),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases)
def test_a_whole_expert_equals_the_brute_force(case: Case) -> None:
    found = case.run(case.data)
    assert found.dtype == np.float32
    assert case.expected().agrees(found)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases, st.data())
def test_any_consecutive_split_sums_to_the_whole(case: Case, data: st.DataObject) -> None:
    tiles, size = case.layout.shape.tiles, case.layout.tile_bytes
    cuts = sorted(data.draw(st.sets(st.integers(1, tiles - 1)))) if tiles > 1 else []
    whole = case.run(case.data)
    parts = [
        case.run(case.data[lo * size : hi * size]) for lo, hi in zip([0, *cuts], [*cuts, tiles], strict=True)
    ]
    total = np.sum(parts, axis=0)
    assert case.expected().agrees(total)
    # Each tile's own sum is the same numbers in every call: only the order of the additions differs.
    single = [case.run(case.data[t * size : (t + 1) * size]) for t in range(tiles)]
    slack = 2 * tiles * brute_force.UNIT["f32"] * np.sum(np.abs(single), axis=0) + 1e-30
    assert (np.abs(total - whole) <= slack).all()
