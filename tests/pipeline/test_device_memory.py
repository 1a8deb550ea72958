"""Opening an engine's device memory on a stand-in for a GPU: where a process cannot map it, where no
prefetcher comes, and where the engine before this one still holds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from child_messages import KEY, child_socket, control_segment
from failing_prefetcher import start_prefetcher
from fake_gpu import FakeCudaDevice, fake_device
from fake_runtime import FakeRuntime
from mover_parts import SHAPE, random_store

from pipeline.device.base import CONTEXT_BYTES, LEAST_SPARE_BYTES
from pipeline.errors import NoRoom, PrefetcherLost
from pipeline.experts.peers import ExitEvents
from pipeline.policies.view import ModelShape, Target
from pipeline.serving import policy_switch
from pipeline.serving.policy_switch import DeviceMemoryOpener, wait_for_room
from shm.store import Store

MB = 1 << 20


class Parts(SimpleNamespace):
    """The parts of an engine that device memory needs; `Needed` starts the prefetcher's loop in a thread."""

    def start_prefetcher(self, message: object = None) -> None:
        socket, line = self.sockets["prefetcher"], self.control.line("prefetcher", 0)
        self.closing.callback(start_prefetcher(self.config.runtime, self.store, socket, line))


@contextmanager
def engine_parts(folder: Path, device: FakeCudaDevice, store: Store) -> Iterator[Parts]:
    folder.chmod(0o700)
    exits, layout = ExitEvents(), store.layout
    options = SimpleNamespace(expert_cache=0.5, staging=None, link_of=lambda device: None)
    config = SimpleNamespace(
        options=options, runtime=folder, generation=0, key=KEY, fingerprint=store.fingerprint,
        cache=folder / "cache", slab=False,
    )  # fmt: skip
    shape = ModelShape(SHAPE.layers, SHAPE.experts, SHAPE.tiles, 2)
    stage = SimpleNamespace(
        device=device, memory=SimpleNamespace(slab=None), graphs=SimpleNamespace(planned_bytes=0),
        layers=range(SHAPE.layers),
    )  # fmt: skip
    stage.tiles = SHAPE.layers * SHAPE.experts * SHAPE.tiles
    engine = SimpleNamespace(layout=layout, shape=shape, stages=[stage], first=stage)
    with ExitStack() as outer, ExitStack() as closing:
        socket = outer.enter_context(
            child_socket(folder, "fetch.sock", "prefetcher", store.fingerprint, exits)
        )
        parts = Parts(
            config=config, engine=engine, store=store, closing=closing, exits=exits,
            kv_bytes=0, sockets={}, notes=[], tick=lambda: None,
            control=outer.enter_context(control_segment(1)),
        )  # fmt: skip
        parts.bind_socket = lambda role: parts.sockets.update({role: socket})
        parts.to_supervisor = parts.start_prefetcher
        yield parts


def places_a_tile(memory: Any) -> None:
    memory.mover.retarget([Target(1, 2, 3)])
    memory.mover.wait_idle()
    assert memory.residency[1, 2] == 3


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
def test_coordinator_copies_where_no_process_can_map_the_slab(place, refused, caplog) -> None:
    """A handle of this process is no other's: the stand-in refuses to map it, as CUDA does."""
    parts, runtime = place
    parts.config.options.staging = 7  # the plan's
    if refused == "handle":
        runtime.failures["cudaIpcGetMemHandle"] = 0
    memory = DeviceMemoryOpener(parts).open(0)
    assert (memory.staging, memory.slab.link.up) == (7, False)
    assert "no tile is prefetched" in caplog.text
    places_a_tile(memory)


def test_an_attempt_without_a_prefetcher_is_refused_and_the_next_uses_its_slab(place, monkeypatch) -> None:
    parts, runtime = place
    parts.to_supervisor = lambda message: None
    monkeypatch.setattr(policy_switch, "CHILD_LIMIT", 0.3)
    opener = DeviceMemoryOpener(parts)
    with pytest.raises(PrefetcherLost, match="no prefetcher was ready"):
        opener.open(0)
    monkeypatch.undo()
    parts.start_prefetcher()
    places_a_tile(opener.open(0))
    assert runtime.calls["cudaMalloc"] == 1


def test_the_prefetchers_context_is_counted_and_a_first_start_does_not_wait(place) -> None:
    parts, runtime = place
    runtime.total = LEAST_SPARE_BYTES + CONTEXT_BYTES // 2 + 100 * MB
    with pytest.raises(NoRoom, match="of device memory"):
        DeviceMemoryOpener(parts).open(0)


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
