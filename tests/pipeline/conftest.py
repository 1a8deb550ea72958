"""A running engine for the tests of a module, on the tiny model, in float32."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from moving_parts import control_segment, peer_of, peer_socket
from peer_words import PRINT
from pool_scene import Scene

from launch.processes.supervisor import Supervisor
from pipeline.config import EngineConfig
from pipeline.experts.peers import ExitEvents
from protocol.client import Client

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
def runtime(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def deaths() -> ExitEvents:
    return ExitEvents()


@pytest.fixture
def said() -> list[object]:
    """What the supervisor was told."""
    return []


@pytest.fixture
def make_peer(runtime):
    """`make_peer(index, incarnation)`: a peer that has announced itself, and answers as the test says."""
    made = []

    def make(index=0, incarnation=0, fingerprint=PRINT, role="worker", socket="w"):
        made.append(peer_of(runtime, role, socket, fingerprint, index, incarnation))
        made[-1].announce()
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def pool_scene(runtime: Path) -> Iterator[Scene]:
    deaths, said = ExitEvents(), []
    with (
        control_segment(3) as control,
        peer_socket(runtime, "w", "worker", PRINT, deaths, said) as socket,
    ):
        scene = Scene(runtime, socket, control, deaths)
        scene.said = said
        yield scene
        for worker in scene.alive:
            worker.peer.close()
