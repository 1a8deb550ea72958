"""A running engine for the tests of a module, on the tiny model, in float32."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from child_messages import PRINT, child_endpoint, child_socket, control_segment
from clock import Clock
from mover_parts import SHAPE, attached_again, random_store
from pool_harness import PoolHarness
from thread_engine import engine_in_threads

from launch.processes.supervisor import Supervisor
from pipeline.backbone.kv_cache import KVCache
from pipeline.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.experts.carriers import ArenaCarrier
from pipeline.experts.peers import ExitEvents, ProgressWatch
from protocol.client import Client
from shm.store import Store

# Tiles of 32 channels: 3 an expert, 24 in all. Four sequences of the whole context (256) fill the KV cache.
CONFIG = EngineConfig(
    policy="all-host",
    format="f32",
    backbone_dtype="f32",
    tile=32,
    workers=2,
    expert_cache=0.5,
    chunk=32,
    max_sequences=6,
)


@pytest.fixture(scope="session")
def plain_config(tiny_model: Path) -> EngineConfig:
    return EngineConfig(**(vars(CONFIG) | {"model": tiny_model}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(start_engine, plain_config) -> AsyncIterator[tuple[Supervisor, Client]]:
    async with start_engine(plain_config) as running:
        yield running


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def exits() -> ExitEvents:
    return ExitEvents()


@pytest.fixture
def reports() -> list[object]:
    """The messages to the supervisor."""
    return []


@pytest.fixture
def make_child(runtime):
    """`make_child(index, generation)`: a child's endpoint that has announced itself."""
    made = []

    def make(index=0, generation=0, fingerprint=PRINT, role="worker", socket="w"):
        made.append(child_endpoint(runtime, role, socket, fingerprint, index, generation))
        made[-1].announce()
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


@pytest.fixture
def pool_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which a pool's workers hang."""
    monkeypatch.setattr(ProgressWatch, "clock", clock.monotonic)
    return clock


@contextmanager
def pool_harness(
    runtime: Path, exits: ExitEvents, reports: list[object], clock: Clock, arena: bool
) -> Iterator[PoolHarness]:
    with control_segment(3) as control, child_socket(runtime, "w", "worker", PRINT, exits, reports) as socket:
        harness = PoolHarness(runtime, socket, control, exits, reports, arena, clock)
        yield harness
        if isinstance(harness.carrier, ArenaCarrier):
            harness.carrier.close()
        for worker in harness.running:
            worker.endpoint.close()


@pytest.fixture(params=["zmq", "shm"])
def harness(
    request: pytest.FixtureRequest,
    runtime: Path,
    exits: ExitEvents,
    reports: list[object],
    pool_clock: Clock,
) -> Iterator[PoolHarness]:
    with pool_harness(runtime, exits, reports, pool_clock, request.param == "shm") as harness:
        yield harness


@pytest.fixture
def over_zmq(
    runtime: Path, exits: ExitEvents, reports: list[object], pool_clock: Clock
) -> Iterator[PoolHarness]:
    """A harness whose Work goes through sockets."""
    with pool_harness(runtime, exits, reports, pool_clock, False) as harness:
        yield harness


@pytest.fixture
def arena(
    runtime: Path, exits: ExitEvents, reports: list[object], pool_clock: Clock
) -> Iterator[PoolHarness]:
    """A harness whose Work goes through shared memory."""
    with pool_harness(runtime, exits, reports, pool_clock, True) as harness:
        yield harness


@pytest.fixture(scope="module")
def mover_store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with random_store(SHAPE, request.module.__name__) as store:
        yield store


@pytest.fixture(scope="module")
def parts(tiny_model: Path, tmp_path_factory) -> Iterator[tuple[Engine, Store, KVCache]]:
    """An engine in threads of this process, its store and a KV cache."""
    with (
        engine_in_threads(tiny_model, tmp_path_factory.mktemp("threads")) as (engine, _),
        attached_again("thread_engine") as store,
    ):
        yield engine, store, KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), 1024)
