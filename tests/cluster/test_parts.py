"""Parts of a store have the bytes of the whole store; codes of x are made again exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_model
from pipeline.checkpoint.random_model import RandomModel
from pipeline.cluster.rows import RowCoder
from pipeline.errors import UsageError
from pipeline.models.facts import expert_shape, narrowed
from shm.layout import ExpertShape, Part, StoreLayout, format_named
from shm.segment import unlink
from shm.store import Store, StoreBuilder, StoreManifest, store_name
from workers.kernels.c_types import Geometry
from workers.kernels.native import best

BOUNDS = (0, 1, 2, 3)


@contextmanager
def filled(source: ModelSource, format: str, part: Part | None = None) -> Iterator[Store]:
    """The store of a model's part."""
    shape = expert_shape(source.config, 128, format_named(format))
    fingerprint = source.fingerprint(format, shape.tile)
    if part is not None:
        shape, fingerprint = narrowed(part, shape), part.fingerprint(fingerprint)
    manifest = StoreManifest(fingerprint, shape, format, source.name, part=part)
    with ExitStack() as closing:
        builder = StoreBuilder.create(store_name(fingerprint), manifest)
        closing.callback(unlink, builder.segment.name)
        source.fill(builder, lambda done: None)
        builder.finish()
        yield closing.enter_context(Store.attach(store_name(fingerprint), fingerprint))


@pytest.mark.parametrize("format", ["f32", "bf16", "int8", "int4", "nvfp4", "mxfp4", "fp8", "q8_0"])
@pytest.mark.parametrize("held", [(0, 2), (1,)])
def test_tiles_of_a_part_are_those_of_the_whole(
    three_tiles: Path, format: str, held: tuple[int, ...]
) -> None:
    part, source = Part(BOUNDS, held), open_model(three_tiles)
    with filled(source, format) as whole, filled(source, format, part) as some:
        assert some.manifest.part == part
        assert some.layout.shape.tiles == len(held)
        for layer, expert in np.ndindex(2, 4):
            for lane in held:
                first = part.first(lane)
                expected = whole.tiles(layer, expert, lane, lane + 1)
                np.testing.assert_array_equal(some.tiles(layer, expert, first, first + 1), expected)


def test_random_tiles_of_a_part_are_those_of_the_whole(three_tiles: Path) -> None:
    source = RandomModel("random", open_model(three_tiles).config)
    with filled(source, "int4") as whole, filled(source, "int4", Part((0, 1, 3), (1,))) as some:
        np.testing.assert_array_equal(some.tiles(0, 3, 0, 2), whole.tiles(0, 3, 1, 3))


def test_lanes_that_do_not_fit_are_refused_in_one_line(three_tiles: Path) -> None:
    shape = expert_shape(open_model(three_tiles).config, 128, format_named("int4"))
    with pytest.raises(UsageError, match="lanes of 4 tiles for experts of 3"):
        narrowed(Part((0, 2, 4), (0,)), shape)
    for bounds, held in (
        ((0, 2, 1), (0,)),
        ((1, 2), (0,)),
        ((0, 3), ()),
        ((0, 1, 3), (1, 0)),
        ((0, 3), (1,)),
    ):
        with pytest.raises(ValueError, match="lanes"):
            Part(bounds, held)


numbers = st.floats(width=32) | st.floats(-4, 4, width=32)


@given(hnp.arrays(np.float32, (2, 192), elements=numbers))
def test_codes_are_made_again_of_what_travels(x: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    layout = StoreLayout(ExpertShape(1, 1, 192, 128, 128), format_named("int8"))
    kernel, coder = best().kernel(Geometry.of_tiles(layout)), RowCoder(layout)
    received = coder.decode(coder.encode(x))
    again, expected = kernel.quantize(received), kernel.quantize(x)
    np.testing.assert_array_equal(again.codes, expected.codes)
    np.testing.assert_array_equal(again.factors.view(np.int32), expected.factors.view(np.int32))
