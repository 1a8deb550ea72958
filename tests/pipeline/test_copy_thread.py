"""The prefetcher as a thread: it copies, stops, and a failure of it ends the engine's waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from child_messages import LIMIT, child_socket
from pipeline.experts.copy_thread import start_copy_thread
from pipeline.experts.fetch_link import DEMANDED, FetchLink
from whole_engine import coordinator_map

from pipeline.coordinator_config import CoordinatorConfig
from pipeline.device import open_device
from pipeline.errors import PeerLost
from pipeline.experts.peers import ExitEvents
from pipeline.experts.progress import CopyProgress
from shm.errors import ShmError
from shm.store import Store
from workers.copiers import ShmCopier


class Scene:
    """A running thread, its link and its slab."""

    def __init__(self, model: Path, folder: Path, closing: ExitStack) -> None:
        found = closing.enter_context(coordinator_map(model, folder))
        config = CoordinatorConfig.from_map(found | {"incarnation": 4})
        exits = ExitEvents()
        self.store = closing.enter_context(Store.attach(config.store, config.fingerprint))
        self.socket = closing.enter_context(
            child_socket(folder, "fetch.sock", "prefetcher", config.fingerprint, exits)
        )
        device = open_device("cpu")
        closing.callback(device.close)
        self.slab = device.open_slab(f"{config.control}-slab", 2, self.store.layout.tile_bytes)
        closing.callback(self.slab.close)
        progress = CopyProgress()
        self.link = FetchLink(self.socket, None, progress, stall_limit=0.5)
        self.stop = start_copy_thread(
            config, self.store, self.slab.local_copier(self.store), self.socket, exits, progress
        )
        assert self.link.wait_up(LIMIT)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetcher"]


@pytest.fixture
def scene(tiny_model: Path, tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as closing:
        yield Scene(tiny_model, tmp_path, closing)
    assert threads() == []


def test_thread_copies_tiles_until_it_is_stopped(scene: Scene) -> None:
    assert [(c["role"], c["index"], c["incarnation"]) for c in scene.socket.stats()] == [("prefetcher", 0, 4)]
    order = scene.link.order(1, 2, 1, [1, 0], DEMANDED)
    scene.link.wait(order, 2)
    assert (order.landed, order.final) == (2, True)
    for slot, tile in ((1, 1), (0, 2)):
        assert np.array_equal(scene.slab.slot(slot).numpy(), scene.store.tiles(1, 2, tile, tile + 1))
    assert len(threads()) == 1
    scene.stop()
    assert threads() == []


def test_thread_that_hangs_is_found(scene: Scene, monkeypatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(ShmCopier, "start", lambda *_: goes_on.wait(LIMIT))
    order = scene.link.order(0, 0, 0, [0], DEMANDED)
    with pytest.raises(PeerLost, match=r"^the prefetcher's thread has made no progress for 0.5 s$"):
        scene.link.wait(order, 1)
    goes_on.set()
    monkeypatch.undo()
    scene.stop()


@pytest.mark.parametrize(
    ("error", "line"),
    [(ShmError("no such slab"), "no such slab"), (IndexError("slot 9"), "IndexError: slot 9")],
)
def test_failed_thread_ends_the_engines_waits(scene: Scene, monkeypatch, error, line) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ShmCopier, "start", fail)
    order = scene.link.order(0, 0, 0, [0], DEMANDED)
    with pytest.raises(PeerLost, match=f"^the prefetcher failed: {line}$"):
        scene.link.wait(order, 1)
    (thread,) = threads() or [None]
    if thread is not None:
        thread.join(LIMIT)
