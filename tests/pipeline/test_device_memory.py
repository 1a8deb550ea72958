"""Opening an engine's device memory on a stand-in for a GPU: where a process cannot map it, where no
prefetcher comes, and where the engine before this one still holds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from child_messages import KEY, LIMIT, child_endpoint, child_socket, control_segment
from fake_gpu import FakeCudaDevice, fake_device
from fake_runtime import FakeRuntime
from mover_parts import SHAPE, random_store

from pipeline.device.base import CONTEXT_BYTES, SPARE_BYTES
from pipeline.errors import NoRoom, PrefetcherLost
from pipeline.experts.peers import ChildServerSocket, ExitEvents
from pipeline.memory.limits import STAGING_TILES
from pipeline.policies.view import ModelShape, Target
from pipeline.serving import device_memory
from pipeline.serving.device_memory import DeviceMemoryOpener, wait_for_room
from protocol.messages import AttachSlab, Shutdown
from shm.store import Store
from workers.prefetcher import CopyLoop

MB = 1 << 20


class Parts(SimpleNamespace):
    """The parts of an engine that device memory needs; `Needed` starts the prefetcher's loop in a thread."""

    def start_prefetcher(self, message: object = None) -> None:
        def copy() -> None:
            endpoint = child_endpoint(self.config.runtime, "prefetcher", "fetch.sock", self.store.fingerprint)
            endpoint.announce()
            CopyLoop(endpoint, self.store, None, lambda: None).serve()
            endpoint.close()

        thread = threading.Thread(target=copy, daemon=True)
        thread.start()

        def stop() -> None:
            self.sockets["prefetcher"].send(0, Shutdown())
            thread.join(LIMIT)
            assert not thread.is_alive()

        self.closing.callback(stop)


@contextmanager
def engine_parts(folder: Path, device: FakeCudaDevice, store: Store) -> Iterator[Parts]:
    folder.chmod(0o700)
    exits, layout = ExitEvents(), store.layout
    options = SimpleNamespace(
        expert_cache=0.5, staging=None, prefetcher="process", landings="auto", link_gbps=None
    )
    config = SimpleNamespace(
        options=options, runtime=folder, incarnation=0, key=KEY, fingerprint=store.fingerprint,
        cache=folder / "cache", slab=False,
    )  # fmt: skip
    shape = ModelShape(SHAPE.layers, SHAPE.experts, SHAPE.tiles, 2)
    graphs = SimpleNamespace(planned_bytes=0)
    backbone = SimpleNamespace(pending_bytes=0)
    engine = SimpleNamespace(layout=layout, shape=shape, backbone=backbone, graphs=graphs)
    with ExitStack() as outer, ExitStack() as closing:
        socket = outer.enter_context(
            child_socket(folder, "fetch.sock", "prefetcher", store.fingerprint, exits)
        )
        parts = Parts(
            config=config, device=device, engine=engine, store=store, closing=closing, exits=exits,
            kv_bytes=0, sockets={}, notes=[], tick=lambda: None,
            control=outer.enter_context(control_segment(1)),
        )  # fmt: skip
        parts.bind_socket = lambda role: parts.sockets.update({role: socket})
        parts.to_supervisor = parts.start_prefetcher
        yield parts


def places_a_tile(memory: Any) -> None:
    memory.mover.retarget([Target(1, 2, 3)])
    memory.mover.wait_idle()
    memory.audit()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Parts, FakeRuntime]]:
    with (
        fake_device() as (device, runtime),
        random_store(SHAPE, "device_memory") as store,
        engine_parts(tmp_path, device, store) as parts,
    ):
        runtime.total = 4 << 30
        yield parts, runtime


@pytest.mark.parametrize("refused", ["handle", "mapping"])
def test_a_thread_copies_where_no_process_can_map_the_slab(place, refused) -> None:
    """A handle of this process is no other's: the stand-in refuses to map it, as CUDA does."""
    parts, runtime = place
    if refused == "handle":
        runtime.failures["cudaIpcGetMemHandle"] = 0
    memory = DeviceMemoryOpener(parts).open()
    assert memory.staging == STAGING_TILES
    places_a_tile(memory)
    assert memory.mover.link.stats()["landings"] == "flags"
    until = time.monotonic() + LIMIT
    while not memory.mover.link.landings.may_wait and time.monotonic() < until:
        time.sleep(0.01)  # until the pages are locked
    assert memory.mover.link.landings.may_wait


def test_with_auto_a_thread_copies_beside_an_idle_process(place, monkeypatch) -> None:
    parts, runtime = place
    monkeypatch.setattr(device_memory, "prefetcher_kind", lambda *asked: "thread")
    parts.config.options.prefetcher, parts.config.slab = "auto", True
    parts.config.options.staging = 7
    parts.start_prefetcher()  # as the supervisor has
    memory = DeviceMemoryOpener(parts).open()
    assert memory.mover.link.kind == "thread"
    assert memory.staging == parts.config.options.staging == 7  # the plan's
    places_a_tile(memory)
    assert runtime.calls["cudaIpcGetMemHandle"] == 0


def test_an_attempt_without_a_prefetcher_is_refused_and_the_next_uses_its_slab(place, monkeypatch) -> None:
    parts, runtime = place
    parts.to_supervisor = lambda message: None
    monkeypatch.setattr(device_memory, "CHILD_LIMIT", 0.3)
    opener = DeviceMemoryOpener(parts)
    with pytest.raises(PrefetcherLost, match="no prefetcher was ready"):
        opener.open()
    monkeypatch.undo()
    parts.start_prefetcher()
    places_a_tile(opener.open())
    assert runtime.calls["cudaMalloc"] == 1


def test_the_prefetchers_context_is_counted_and_a_first_start_does_not_wait(place) -> None:
    parts, runtime = place
    runtime.total = SPARE_BYTES + CONTEXT_BYTES // 2 + 100 * MB
    with pytest.raises(NoRoom, match="of device memory"):
        DeviceMemoryOpener(parts).open()
    parts.config.options.prefetcher = "thread"
    places_a_tile(DeviceMemoryOpener(parts).open())


def test_a_restarted_engine_waits_for_the_memory_of_the_one_before(monkeypatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", naps.append)

    def check() -> None:
        if len(naps) < 3:
            raise NoRoom("held")

    wait_for_room(check, 60.0, lambda: None)
    assert len(naps) == 3
    naps.clear()
    with pytest.raises(NoRoom):
        wait_for_room(check, 0.0, lambda: None)
    assert naps == []


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_landings_are_reported_by_messages_where_that_is_asked(place, kind, monkeypatch) -> None:
    parts, runtime = place
    monkeypatch.setattr(device_memory, "prefetcher_kind", lambda *asked: kind)
    sent: list[object] = []
    send = ChildServerSocket.send

    def noted(self: ChildServerSocket, index: int, message: object) -> None:
        sent.append(message)
        send(self, index, message)

    monkeypatch.setattr(ChildServerSocket, "send", noted)
    runtime.failures["cudaIpcOpenMemHandle"] = 0  # of this process, which it is not for
    parts.config.options.landings = "messages"
    memory = DeviceMemoryOpener(parts).open()
    places_a_tile(memory)
    assert memory.mover.link.stats()["landings"] == "messages"
    assert [m.flags for m in sent if isinstance(m, AttachSlab)] == [""] * (kind == "process")
    assert runtime.calls["cuStreamWriteValue32"] == 2  # the trial's
