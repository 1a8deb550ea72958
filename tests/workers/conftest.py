"""Fixtures of the kernels' tests: the variants that run here, and torch on one thread."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import torch
from child_harness import SHAPE, UNTOUCHED, small_store

from shm.control import ControlSegment
from shm.segment import unlink
from shm.slab import Slab
from shm.store import Store, store_name
from workers.kernels.native import VARIANTS, Library, load


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    if isinstance(found, str):
        pytest.skip(f"{VARIANTS[request.param]}: {found}")
    return found


@pytest.fixture(scope="module")
def fingerprint() -> Iterator[str]:
    """Of a small store."""
    with small_store() as fingerprint:
        yield fingerprint


@pytest.fixture
def control() -> Iterator[ControlSegment]:
    """A control segment for one worker."""
    control = ControlSegment.create(f"/tandem-tests-{uuid.uuid4().hex[:12]}-control-0", 1)
    yield control
    control.close()
    unlink(control.segment.name)


@pytest.fixture
def slab(fingerprint: str) -> Iterator[Slab]:
    """Slots for three experts of the small store, filled with UNTOUCHED."""
    with Store.attach(store_name(fingerprint)) as store:
        name, size = f"/tandem-test-slab-{uuid.uuid4().hex[:12]}", store.layout.tile_bytes
    with Slab.create(name, 3 * SHAPE.tiles, size) as slab:
        slab.segment.array[:] = UNTOUCHED
        yield slab
    unlink(name)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As in a worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
