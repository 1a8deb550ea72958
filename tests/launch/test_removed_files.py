"""Files of a running engine that another program removes: logind at a logout, or a cleaner of /tmp."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines import engines_left
from scripted_children import Play, stage, supervisor
from waiting import until

from launch.errors import EngineFailed
from launch.processes import supervisor as supervising
from launch.runtime import RuntimeDir
from protocol.sockets import runtime_root
from shm.segment import SHM_FOLDER, engine_prefix


@pytest.fixture
async def play(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    monkeypatch.setattr(supervising, "FILES_SECONDS", 0.01)
    async with stage(monkeypatch) as made:
        yield made


@pytest.mark.parametrize("removed", ["", "lock"])
async def test_engine_that_no_client_can_reach_ends_in_order_with_one_line(play: Play, removed: str) -> None:
    line = r"^another program has removed .* no client can connect: .*$"
    with pytest.raises(EngineFailed, match=line) as failed:  # noqa: PT012 - from the end of the block
        async with supervisor() as engine:
            path = runtime_root() / engine.name
            if removed:
                (path / removed).unlink()
            else:
                shutil.rmtree(path)
            await asyncio.Future()
    assert failed.value.exit_code == 1
    # Connections outlive the names of sockets; the text process has nothing to finish.
    assert [c.process.signals for c in play.children] == [[], [signal.SIGTERM], [], [], []]
    assert engines_left() == []


async def test_removed_description_is_written_again(play: Play) -> None:
    async with supervisor() as engine:
        info = runtime_root() / engine.name / "engine.json"
        before = json.loads(info.read_text())
        info.unlink()
        await until(info.exists)
        assert json.loads(info.read_text()) == before


def test_directory_of_another_engine_with_the_same_name_is_left_alone() -> None:
    first = RuntimeDir.claim("rt-removed")
    shutil.rmtree(first.path)
    assert not first.intact
    second = RuntimeDir.claim("rt-removed")
    segment = Path(SHM_FOLDER + engine_prefix(second.path) + "control-0")
    segment.touch()
    first.remove()
    assert second.intact
    assert segment.exists()
    second.remove()
    assert not segment.exists()


def test_directory_is_locked_against_systemd_tmpfiles() -> None:
    """It skips a directory on which it gets no exclusive lock."""
    claimed = RuntimeDir.claim("rt-locked")
    folder = os.open(claimed.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    claimed.remove()
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
