"""The reference kernel of the quantized formats, against the contract's integer arithmetic in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shm.layout import BlockFormat, Bytes, ExpertShape, Float32, StoreLayout, format_named
from workers.kernels.reference import ReferenceKernel

Float64 = NDArray[np.float64]

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Case:
    """One expert of random numbers in its bytes, and rows to apply it to."""

    layout: StoreLayout
    data: Bytes  # all tiles
    x: Float32

    @property
    def format(self) -> BlockFormat:
        assert isinstance(self.layout.format, BlockFormat)
        return self.layout.format

    def run(self, first: int = 0, last: int | None = None) -> Float32:
        kernel = ReferenceKernel(self.layout)
        size = self.layout.tile_bytes
        data = torch.from_numpy(self.data[first * size : None if last is None else last * size])
        return kernel.compute(
            data, kernel.activations(torch.from_numpy(self.x)), torch.arange(len(self.x))
        ).numpy()


def make_case(
    name: str, hidden: int, intermediate: int, groups: int, rows: int, spread: float, seed: int
) -> Case:
    random = np.random.default_rng(seed)
    fmt = format_named(name)
    shape = ExpertShape(1, 1, hidden, intermediate, groups * fmt.granularity)
    layout = StoreLayout(shape, fmt)
    wide = (intermediate, hidden)
    parts = [(random.standard_normal(s) * s[1] ** -0.5).astype(np.float32) for s in (wide, wide, wide[::-1])]
    out = np.zeros(layout.expert_stride, np.uint8)
    layout.encode_expert(*parts, out)
    x = random.standard_normal((rows, hidden)) * np.exp(spread * random.standard_normal((rows, hidden)))
    x[random.random(rows) < 0.1] = 0
    return Case(layout, out[: layout.tile_bytes * shape.tiles], x.astype(np.float32))


cases = st.builds(
    make_case,
    st.sampled_from(["int8", "int4", "int4-g128"]),
    hidden=st.integers(1, 300),
    intermediate=st.integers(1, 300),
    groups=st.integers(1, 3),
    rows=st.integers(1, 20),
    spread=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**32 - 1),
)


@dataclass(frozen=True)
class Steps:
    """Activations in whole steps of each group's largest magnitude / 127."""

    codes: Float64  # [R, K]
    step: Float64  # [R, K]: the group's, for each input
    unsure: Float64  # [R, K]: how far a code may be off in steps, where the number is half way between two

    @classmethod
    def of(cls, values: Float64, group: int, slack: float) -> Steps:
        step = np.zeros_like(values)
        for lo in range(0, values.shape[1], group):
            part = slice(lo, lo + group)
            step[:, part] = np.abs(values[:, part]).max(axis=1, keepdims=True) / 127
        exact = np.divide(values, step, out=np.zeros_like(values), where=step > 0)
        codes = np.rint(exact)
        unsure = (np.abs(np.abs(exact - codes) - 0.5) < slack).astype(np.float64)
        return cls(codes, step, unsure)

    def dot(self, w: Float64) -> Float64:
        """With a matrix [N, K]: [R, N]."""
        return (self.codes * self.step) @ w.T

    def doubt(self, w: Float64) -> Float64:
        return (self.unsure * self.step) @ np.abs(w).T


def expected(case: Case, first: int, last: int) -> tuple[Float64, Float64]:
    """The sum of some tiles [R, H] and how far from it the kernel may be."""
    shape, size, group = case.layout.shape, case.layout.tile_bytes, case.format.group
    total, bound = np.zeros(case.x.shape), np.full(case.x.shape, 1e-30)
    for tile in range(first, last):
        data = case.data[tile * size : (tile + 1) * size]
        gate, up, down = case.format.decode(data, shape.hidden, shape.tile).astype(np.float64)
        x = Steps.of(case.x.astype(np.float64), group, 1e-5)
        a, b = x.dot(gate), x.dot(up)
        reach = [1e-5 * (np.abs(case.x) @ np.abs(w).T) + x.doubt(w) for w in (gate, up)]
        with np.errstate(over="ignore"):
            inner = a / (1 + np.exp(-a)) * b
        inner_error = 1.1 * reach[0] * np.abs(b) + np.abs(a) * reach[1] + reach[0] * reach[1]
        largest = np.zeros_like(inner)
        for lo in range(0, shape.tile, group):
            part = slice(lo, lo + group)
            largest[:, part] = np.abs(inner[:, part]).max(axis=1, keepdims=True)
        # An inexact number may be rounded to the next step where it lies near the middle of two.
        slack = np.divide(128 * inner_error, largest, out=np.ones_like(inner), where=largest > 0).max() + 1e-5
        steps = Steps.of(inner, group, min(slack, 0.6))
        total += steps.dot(down.T)
        bound += steps.doubt(down.T) + 2 * (inner_error + 1e-5 * np.abs(inner)) @ np.abs(down)
        bound += 1e-5 * (np.abs(inner) @ np.abs(down))
    return total, bound


@settings(max_examples=40, deadline=None)
@given(cases)
def test_an_expert_equals_the_integer_arithmetic(case: Case) -> None:
    y, bound = expected(case, 0, case.layout.shape.tiles)
    found = case.run()
    assert found.dtype == np.float32
    assert (np.abs(found - y) <= bound).all()
    assert not found[~case.x.any(axis=1)].any()


@settings(max_examples=20, deadline=None)
@given(cases)
def test_sum_of_single_tiles_equals_all_tiles(case: Case) -> None:
    parts = [case.run(tile, tile + 1) for tile in range(case.layout.shape.tiles)]
    np.testing.assert_allclose(
        case.run(), np.sum(parts, axis=0), rtol=0, atol=1e-6 * (np.abs(parts).sum(axis=0).max() + 1e-30)
    )


@settings(max_examples=20, deadline=None)
@given(cases, st.data())
def test_rows_are_chosen_and_repeated(case: Case, data: st.DataObject) -> None:
    kernel = ReferenceKernel(case.layout)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(case.x) - 1), min_size=1, max_size=8)))
    x = torch.from_numpy(case.x)
    chosen = kernel.compute(torch.from_numpy(case.data), kernel.activations(x), rows)
    alone = kernel.compute(torch.from_numpy(case.data), kernel.activations(x[rows]), torch.arange(len(rows)))
    np.testing.assert_array_equal(chosen.numpy(), alone.numpy())


@pytest.mark.parametrize(("name", "most"), [("int8", 0.03), ("int4", 0.2), ("int4-g128", 0.25)])
def test_the_result_is_near_that_of_the_weights(name: str, most: float) -> None:
    random = np.random.default_rng(7)
    fmt = format_named(name)
    layout = StoreLayout(ExpertShape(1, 1, 256, 384, 128), fmt)
    wide = (384, 256)
    gate, up, down = (random.standard_normal(s).astype(np.float32) * 0.06 for s in (wide, wide, wide[::-1]))
    out = np.zeros(layout.expert_stride, np.uint8)
    layout.encode_expert(gate, up, down, out)
    x = random.standard_normal((16, 256)).astype(np.float32)
    case = Case(layout, out[: layout.tile_bytes * 3], x)
    a, b = x @ gate.T, x @ up.T
    y = (a / (1 + np.exp(-a)) * b) @ down.T
    assert np.linalg.norm(case.run() - y) < most * np.linalg.norm(y)


def test_progress_is_counted_for_each_tile() -> None:
    case = make_case("int4", 70, 200, 1, 3, 0.0, 1)
    ticks: list[None] = []
    kernel = ReferenceKernel(case.layout, lambda: ticks.append(None))
    kernel.compute(torch.from_numpy(case.data), kernel.activations(torch.from_numpy(case.x)), torch.arange(3))
    assert len(ticks) == case.layout.shape.tiles
