"""All items of a Work in one call: the same bits as tile by tile, with any number of threads; and
numbers that would read or write outside the arrays, which are refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from descriptor_parts import Parts, parts_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import kernel_of
from quantized_cases import KINDS
from work_cases import Case

from shm.descriptor import ITEMS, ROWS, X_ROWS, head_of, numbers
from shm.layout import ExpertShape, StoreLayout, format_named
from workers.kernels.native import WorkKernel, best


def computed(works: WorkKernel, work: Case) -> np.ndarray:
    return work.computed(works)[0]


TICK = np.zeros(1, np.uint64)


@st.composite
def works(draw: st.DrawFn) -> dict[str, object]:
    """Items of up to 4 rows each, of an x of up to 6, or of more rows, some many times as large as others."""
    few = draw(st.booleans())
    experts, tiles, height = (
        draw(st.integers(1, 5)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 6 if few else 70)),
    )
    items, offsets, rows = [], [0], []
    for expert in draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=4 if few else 40)):
        lo = draw(st.integers(0, tiles - 1))
        items.append((expert, lo, draw(st.integers(lo + 1, tiles))))
        rows += sorted(
            draw(st.sets(st.integers(0, height - 1), min_size=1, max_size=min(4 if few else height, height)))
        )
        offsets.append(len(rows))
    return {
        "experts": experts,
        "tiles": tiles,
        "height": height,
        "items": np.array(items, np.int32),
        "offsets": np.array(offsets, np.int32),
        "rows": np.array(rows, np.int32),
        "hidden": draw(st.integers(1, 200)),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["f32", "bf16", "fp8", "int8", "int4", "int4-g128", "int2"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work=works(), kind=st.sampled_from(["swiglu", "clamped", "relu2 biases"]))
def test_work_has_the_same_bits_as_tile_by_tile(library, threads, name, work, kind) -> None:
    form, hidden, random = format_named(name), work["hidden"], np.random.default_rng(work["seed"])
    tile = 2 * form.granularity if form.granularity > 1 else 24
    shape = ExpertShape(1, work["experts"], hidden, tile * work["tiles"], tile, KINDS[kind])
    layout = StoreLayout(shape, form)
    layer = np.zeros(layout.total_bytes, np.uint8)
    for expert in range(shape.experts):
        for n in range(shape.tiles):
            at = layout.offset(0, expert, n)
            data = layer[at : at + layout.tile_bytes]
            form.fill_random(random, hidden, tile, hidden**-0.5, data, math=shape.math)
            form.biases(data, hidden, tile, shape.math)[:] = random.random(tile)
    x = random.standard_normal((work["height"], hidden)).astype(np.float32)
    items, offsets, rows = work["items"], work["offsets"], work["rows"]
    weights = random.random(len(rows), np.float32)

    alone = kernel_of(library, layout)
    inputs = alone.quantize(x)
    wanted = np.zeros_like(x)
    for (expert, lo, hi), start, end in zip(items, offsets, offsets[1:], strict=False):
        at = layout.offset(0, int(expert), int(lo))
        chosen = layer[at : at + int(hi - lo) * layout.tile_bytes]
        part = alone.tiles(chosen, inputs, rows[start:end])
        wanted[rows[start:end]] += part * weights[start:end, None]

    team = library.team(threads)
    TICK[0] = 0
    try:
        works = WorkKernel(library, layout, layer, team, TICK.ctypes.data)
        found = computed(works, Case(0, items, offsets, rows, weights, x))
    finally:
        if team is not None:
            team.close()
    np.testing.assert_array_equal(found, wanted)
    assert int(TICK[0]) == int((items[:, 2] - items[:, 1]).sum())


LEAST, MOST = -(2**31), 2**31 - 1
LIMITED = StoreLayout(ExpertShape(1, 3, 64, 3 * 32, 32), format_named("bf16"))  # whole pages, without padding


def work_of(items: list[tuple[int, int, int]], offsets: list[int], rows: list[int]) -> Case:
    arrays = np.array(items, np.int32).reshape(-1, 3), np.array(offsets, np.int32), np.array(rows, np.int32)
    return Case(0, *arrays, np.ones(len(rows), np.float32), np.ones((3, 64), np.float32))


def right(work: Parts) -> bool:
    """Whether everything that the Work names exists, and each item's rows ascend."""
    experts, tiles, ends = LIMITED.shape.experts, LIMITED.shape.tiles, work.offsets.tolist()
    return (
        work.layer == 0
        and all(0 <= e < experts and 0 <= lo < hi <= tiles for e, lo, hi in work.items.tolist())
        and (ends[0], ends[-1], ends) == (0, len(work.rows), sorted(ends))
        and all(0 <= row < work.x_rows for row in work.rows.tolist())
        and all((np.diff(work.rows[start:end]) > 0).all() for start, end in pairwise(ends))
    )


@pytest.mark.parametrize(
    "work",
    [
        work_of([(0, 0, 1)], [0, 5], [0, MOST, LEAST, -1, 1]),  # ascending for differences of 32 bits
        work_of([(0, 1, LEAST)], [0, 1], [0]),
        work_of([(0, LEAST, 1), (0, 0, 1)], [0, 1, 2], [0, 1]),
        work_of([(0, 0, 1)], [0, MOST], [0]),
        work_of([(0, 0, 1)], [0, 2], [1, 0]),
    ],
)
def test_numbers_whose_differences_wrap_are_refused(work: Case) -> None:
    works = WorkKernel(best(), LIMITED, np.zeros(LIMITED.total_bytes, np.uint8))
    with pytest.raises(IndexError):
        computed(works, work)


@pytest.mark.parametrize("number", [ITEMS, ROWS, X_ROWS])
@pytest.mark.parametrize("size", [-1, 4, 1 << 10, 1 << 62, (1 << 63) - 1, -(1 << 63)])
def test_sizes_beyond_the_memory_are_refused(library, number: int, size: int) -> None:
    work = work_of([(0, 0, 1)], [0, 1], [0])
    descriptor, y = work.descriptor, np.empty_like(work.x)
    head_of(descriptor)[number] = size
    works = WorkKernel(library, LIMITED, np.zeros(LIMITED.total_bytes, np.uint8))
    with pytest.raises(IndexError, match="larger than their memory"):
        works.compute(descriptor, work.x, y)
    if number != X_ROWS or size < 0:
        with pytest.raises(IndexError, match="larger than their memory"):
            parts_of(descriptor)  # for torch


def test_every_truncated_descriptor_is_refused(library) -> None:
    """And one that is too long is not: a lane's has all its room."""
    work = work_of([(0, 0, 1), (1, 1, 3)], [0, 1, 2], [0, 2])
    works = WorkKernel(library, LIMITED, np.zeros(LIMITED.total_bytes, np.uint8))
    whole, y = work.descriptor, np.empty_like(work.x)
    assert len(whole) == numbers(2, 2)
    for length in range(len(whole)):
        with pytest.raises(IndexError, match="larger than their memory"):
            works.compute(whole[:length].copy(), work.x, y)
        with pytest.raises(IndexError, match="larger than their memory"):
            parts_of(whole[:length])
    works.compute(np.append(whole, np.int32(7)), work.x, y)


def test_short_x_and_y_and_other_generations_are_refused(library) -> None:
    work = work_of([(0, 0, 1)], [0, 1], [0])
    tiles = np.zeros(LIMITED.total_bytes, np.uint8)
    works = WorkKernel(library, LIMITED, tiles)
    for x, y in ((work.x[:2], work.x.copy()), (work.x, work.x[:2].copy())):
        with pytest.raises(IndexError, match="larger than their memory"):
            works.compute(work.descriptor, x, y)
    third = WorkKernel(library, LIMITED, tiles, generation=3)
    with pytest.raises(IndexError, match="another generation"):
        computed(third, work)
    assert not third.compute(work.message(3).descriptor, work.x, work.x.copy()).channels


@settings(max_examples=300)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 30), st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 9)), max_size=4
    )
)
def test_any_bytes_are_computed_or_refused(changes: list[tuple[int, int]]) -> None:
    """Whatever numbers a descriptor has, C computes what Python would or refuses it, and goes on."""
    works = WorkKernel(best(), LIMITED, np.zeros(LIMITED.total_bytes, np.uint8))
    work = work_of([(0, 0, 1), (1, 1, 3)], [0, 1, 2], [0, 2])
    descriptor, y = work.descriptor, np.full_like(work.x, 7)
    for place, number in changes:
        descriptor[place % len(descriptor)] = number
    try:
        parts = parts_of(descriptor)
        usable = parts.x_rows <= len(y) and not parts.generation and parts.mask == (0, 1) and right(parts)
    except IndexError:
        usable = False
    if usable:
        works.compute(descriptor, work.x, y)
        assert (y[: parts.x_rows] != 7).all()
    else:
        with pytest.raises(IndexError):
            works.compute(descriptor, work.x, y)
        assert (y == 7).all()


def test_tiles_that_are_no_whole_store_are_refused(library) -> None:
    tiles = np.zeros(LIMITED.total_bytes, np.uint8)
    for short in (tiles[:-1], tiles[:0]):
        with pytest.raises(ValueError, match="weights"):
            WorkKernel(library, LIMITED, short)
