"""The threads that read experts from a store's file to frames, and an error of the disk."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from child_messages import LIMIT, control_segment
from mover_parts import SHAPE, random_store, with_frames

from shm.disk_cache import CachedStore
from shm.store import Store
from workers import reader
from workers.reader import Order, Readers, pieces_of


@pytest.fixture
def store(tmp_path) -> Iterator[tuple[Store, Store, CachedStore]]:
    """All experts in memory, the same with three frames, and the file."""
    with random_store(SHAPE, "reader") as whole, with_frames(whole, tmp_path, 3) as store:
        file = CachedStore.open(tmp_path, whole.fingerprint)
        assert file is not None
        with file:
            yield whole, store, file


@contextmanager
def failing(file: CachedStore) -> Iterator[None]:
    """Reading the file is an error of input and output: of memory that is not mapped, the kernel says so."""
    kept, memory = os.dup(file._descriptor), os.open("/proc/self/mem", os.O_RDONLY)
    os.dup2(memory, file._descriptor)
    try:
        yield
    finally:
        os.dup2(kept, file._descriptor)
        os.close(kept)
        os.close(memory)


def test_an_error_of_the_disk_ends_an_order_in_one_line_and_no_later_one(store, monkeypatch) -> None:
    monkeypatch.setattr(reader, "PAUSE", 0.0)
    whole, partial, file = store
    with control_segment(1) as control:
        readers = Readers(file, control.line("reader", 0))

        def read(number: int, expert: int, frame: int) -> str:
            pieces = pieces_of(partial, 1, expert, frame)
            order = Order(number, pieces, len(pieces), 0)
            readers.put(order, 0)
            assert select.select([readers.bell], [], [], LIMIT)[0]
            assert readers.take_ended() == [order]
            return order.error

        with failing(file):
            assert read(0, 2, 0) == f"the cached store {file.path} cannot be read: Input/output error"
        assert read(1, 2, 0) == ""
        assert read(2, 0, 2) == ""
        readers.close()
    for expert, frame in ((2, 0), (0, 2)):
        tiles = whole.tiles(1, expert, 0, SHAPE.tiles)
        assert (partial.tiles(0, frame, 0, SHAPE.tiles) == tiles).all()
