"""A running engine for the tests of a module, on the tiny model, in float32."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from launch.supervisor import Supervisor
from pipeline.config import EngineConfig
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
