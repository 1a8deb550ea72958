"""Mappings at multiples of a huge page, and pages collapsed into huge ones."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm import segment
from shm.huge import HUGE, collapse, map_shared, private
from shm.segment import Segment, unlink

SIZE = 3 * HUGE + 12345  # whole huge pages and a rest that is no whole page


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.posix_fallocate(descriptor, 0, SIZE)
    yield descriptor
    os.close(descriptor)


def mapped(address: int) -> bool:
    """Whether this address is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        lo, hi = (int(end, 16) for end in line.split()[0].split("-"))
        if lo <= address < hi:
            return True
    return False


def test_mapping_is_aligned_complete_and_shared(descriptor: int) -> None:
    ours, theirs = map_shared(descriptor, SIZE, writable=True), map_shared(descriptor, SIZE, writable=False)
    assert ours.ctypes.data % HUGE == theirs.ctypes.data % HUGE == 0
    ours[[0, HUGE, SIZE - 1]] = (1, 2, 3)
    assert len(theirs) == SIZE
    assert theirs[[0, HUGE, SIZE - 1]].tolist() == [1, 2, 3]


@pytest.mark.parametrize("size", [0, 1, 4096, HUGE - 1, HUGE, SIZE])
def test_private_memory_is_new_writable_and_as_large_as_asked_for(size: int) -> None:
    array = private(size)
    assert (array.shape, array.dtype) == ((size,), np.uint8)
    assert not array.any()
    array[:] = 7
    assert (array == 7).all()
    assert size < HUGE or array.ctypes.data % HUGE == 0
    if size >= HUGE:
        address, view = array.ctypes.data, array[HUGE - 1 :]
        del array
        gc.collect()
        assert view[0] == 7
        del view
        gc.collect()
        assert not mapped(address + size - 1)


def test_collapsing_pages_keeps_their_bytes(descriptor: int) -> None:
    array = map_shared(descriptor, SIZE, writable=True)
    array[:] = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    before = array.copy()
    joined = collapse(array)
    assert joined % HUGE == 0
    assert joined <= SIZE
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("whole", [True, False])
def test_new_segment_is_allocated_whether_or_not_the_kernel_collapses(monkeypatch, whole: bool) -> None:
    """Pages that are not collapsed are populated by their thread."""
    populated: list[int] = []

    def collapsed(memory: np.ndarray) -> int:
        return len(memory) // HUGE * HUGE if whole else 0

    monkeypatch.setattr(segment, "collapse", collapsed)
    monkeypatch.setattr(segment, "populate", lambda memory: populated.append(len(memory)))
    monkeypatch.setattr(segment, "ALLOCATION_STEP", 2 * HUGE)
    name = f"/tandem-huge-{os.getpid()}"
    with Segment.create(name, SIZE):
        blocks = os.stat(f"/dev/shm{name}").st_blocks
        unlink(name)
    assert blocks * 512 >= SIZE
    assert sorted(populated) == ([] if whole else [SIZE - 2 * HUGE, 2 * HUGE])
