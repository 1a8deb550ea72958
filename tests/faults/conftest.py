"""Runtime and cache folders for engines that tests start by `launch.py` and kill; engines with
experts on disk."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from fault_engines import LONG, State, answer, sweep_all
from marked_engine import Place

from launch.processes.monitor import Limits
from protocol.messages import Token


@pytest.fixture
def place(request, tiny_model: Path, monkeypatch) -> Iterator[Place]:
    """Folders of the test's own. OPTIONS of its module are those of its engines."""
    with tempfile.TemporaryDirectory(prefix="tk-", dir="/tmp") as folder:  # short: socket paths are
        place = Place(Path(folder), tiny_model, request.module.OPTIONS)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.runtime))  # for the sweeps
        monkeypatch.setenv("XDG_CACHE_HOME", str(place.cache))
        yield place
        sweep_all(place)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(start_engine, on_disk) -> tuple[list[Token], list[Token]]:
    """The answers to PROMPT and to LONG where all experts are in memory."""
    async with start_engine(replace(on_disk, host_memory=None)) as (_, client):
        return await answer(client), await answer(client, LONG, 8)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def state(start_engine, on_disk) -> AsyncIterator[State]:
    """An engine as `on_disk` of the module says."""
    async with start_engine(on_disk, Limits(start_checks=12, stopped_checks=2)) as (supervisor, client):
        state = State(supervisor, client)
        await state.wait_recovered()
        yield state
