"""The threads that read experts from a store's file to frames, and an error of the disk."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from child_messages import LIMIT, child_endpoint, child_socket, control_segment
from mover_parts import OWN, SHAPE, random_store, with_frames

from pipeline.experts.peers import ChildServerSocket
from protocol.messages import ExpertRead, ReadExpert, Shutdown
from shm.disk_cache import CachedStore
from shm.store import Store
from workers import reader
from workers.reader import Order, Readers, pieces_of, serve


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


def test_a_change_of_urgency_that_comes_after_its_report_reads_nothing(tmp_path) -> None:
    """However many others have ended meanwhile: the frame may be about to be another expert's."""
    frames = 300
    with (
        random_store(SHAPE, "crossed") as whole,
        with_frames(whole, tmp_path, frames) as store,
        control_segment(1) as control,
        child_socket(tmp_path, "read.sock", "reader", OWN) as socket,
    ):

        def run() -> None:
            peer = child_endpoint(tmp_path, "reader", "read.sock", OWN)
            file = CachedStore.open(tmp_path, whole.fingerprint)
            assert file is not None
            with file:
                readers = Readers(file, control.line("reader", 0))
                peer.announce()
                serve(peer, store, readers)
                readers.close()
            peer.close()

        thread = threading.Thread(target=run)
        thread.start()
        socket.wait_ready(1, LIMIT)
        for number in range(frames):
            socket.send(0, ReadExpert(number, 0, 0, number, 1))
        _await_reports(socket, frames)
        for part in store.frame(0):
            part[:] = 7
        socket.send(0, ReadExpert(0, 0, 0, 0, 0))
        socket.send(0, ReadExpert(frames, 0, 1, 1, 1))
        _await_reports(socket, 1)
        socket.send(0, Shutdown())
        thread.join(LIMIT)
        assert all((part == 7).all() for part in store.frame(0))


def _await_reports(socket: ChildServerSocket, count: int) -> None:
    end = time.monotonic() + LIMIT
    while count > 0:
        assert time.monotonic() < end
        count -= sum(isinstance(message, ExpertRead) for _, message in socket.receive(50))
