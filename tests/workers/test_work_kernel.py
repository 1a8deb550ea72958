"""All items of a Work in one call: the same bits as tile by tile, with any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import kernel_of

from shm.layout import ExpertShape, StoreLayout, format_named

TICK = np.zeros(1, np.uint64)


@st.composite
def works(draw: st.DrawFn) -> dict[str, object]:
    """Items of up to 4 rows each, of an x of up to 6."""
    experts, tiles, height = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    items, offsets, rows = [], [0], []
    for expert in draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=4)):
        lo = draw(st.integers(0, tiles - 1))
        items.append((expert, lo, draw(st.integers(lo + 1, tiles))))
        rows += sorted(draw(st.sets(st.integers(0, height - 1), min_size=1, max_size=min(4, height))))
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
@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "int4-g128"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work=works())
def test_work_has_the_same_bits_as_tile_by_tile(library, threads, name, work) -> None:
    form, hidden, random = format_named(name), work["hidden"], np.random.default_rng(work["seed"])
    tile = 2 * form.granularity if form.granularity > 1 else 24
    shape = ExpertShape(1, work["experts"], hidden, tile * work["tiles"], tile)
    layout = StoreLayout(shape, form)
    layer = np.zeros(layout.total_bytes, np.uint8)
    for expert in range(shape.experts):
        for n in range(shape.tiles):
            at = layout.offset(0, expert, n)
            form.fill_random(random, hidden, tile, hidden**-0.5, layer[at : at + layout.tile_bytes])
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
        found = kernel_of(library, layout, team).work(
            layer[: layout.tile_bytes], layout.expert_stride, items, offsets, inputs, rows, weights,
            TICK.ctypes.data,
        )  # fmt: skip
    finally:
        if team is not None:
            team.close()
    np.testing.assert_array_equal(found, wanted)
    assert int(TICK[0]) == int((items[:, 2] - items[:, 1]).sum())
