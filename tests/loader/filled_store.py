"""Fills stores from a checkpoint in the test's own process."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.checkpoint.open import Checkpoint
from pipeline.models.facts import expert_shape
from shm.layout import Bytes, StoreLayout, format_named
from shm.segment import unlink
from shm.store import Store, StoreBuilder, StoreManifest


class Enough(Exception):
    pass


class Stop(list[int]):
    """A `progress` that ends the filling."""

    def append(self, done: int) -> None:
        raise Enough


def layout_of(config: dict[str, Any], format_name: str) -> StoreLayout:
    """With the smallest tiles of the format that have at least 64 channels."""
    tile_format = format_named(format_name)
    return StoreLayout(expert_shape(config, max(64, tile_format.granularity), tile_format), tile_format)


def new_store(model: Checkpoint, layout: StoreLayout) -> StoreBuilder:
    """A store with all expert bytes 255, so that unwritten bytes are visible."""
    form = layout.format.name
    manifest = StoreManifest(model.fingerprint(form, layout.shape.tile), layout.shape, form, model.name)
    builder = StoreBuilder.create(f"/tandem-test-{uuid.uuid4().hex[:12]}", manifest)
    for layer in range(layout.shape.layers):
        builder.layer(layer)[:] = 255
    return builder


@contextmanager
def filled(model: Checkpoint, format_name: str, progress: list[int]) -> Iterator[Bytes]:
    """The bytes of the store filled from a checkpoint; `progress` collects the reported bytes."""
    builder = new_store(model, layout_of(dict(model.config), format_name))
    name = builder.segment.name
    try:
        model.fill(builder, progress.append)
        builder.finish()
    except BaseException:
        builder.discard()
        raise
    try:
        with Store.attach(name) as store:
            yield store.segment.array[-store.layout.total_bytes :]
    finally:
        unlink(name)
