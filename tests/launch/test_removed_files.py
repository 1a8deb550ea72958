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
from launch.processes.limits import Limits
from launch.runtime import RuntimeDir
from protocol.sockets import runtime_root
from shm.segment import SHM_FOLDER, engine_prefix
from shm.store import store_name

OFTEN = Limits(check_interval=1e6, files_interval=0.01)


@pytest.fixture
async def play(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    async with stage(monkeypatch) as made:
        yield made


@pytest.mark.parametrize("removed", ["store", "control"])
async def test_removed_segments_are_one_warning_and_the_engine_goes_on(
    play: Play, caplog: pytest.LogCaptureFixture, removed: str
) -> None:
    async with supervisor(OFTEN) as engine:
        name = store_name(play.fingerprint) if removed == "store" else engine._configs.control_name
        await asyncio.sleep(0.05)
        assert "another program" not in caplog.text
        os.unlink(SHM_FOLDER + name)
        await until(lambda: "another program has removed shared memory of this engine" in caplog.text)
        (line,) = [line for line in caplog.messages if "another program" in line]
        assert "\n" not in line
        assert "loginctl enable-linger" in line
        await asyncio.sleep(0.05)
        assert caplog.text.count("another program") == 1
        assert {identity.role for identity in engine.pids} == {"coordinator", "worker", "text"}
    assert engines_left() == []


@pytest.mark.parametrize("removed", ["", "lock", "control.sock"])
async def test_engine_that_no_client_can_reach_ends_in_order_with_one_line(play: Play, removed: str) -> None:
    line = r"^another program has removed .* no client can connect: .*$"
    with pytest.raises(EngineFailed, match=line) as failed:  # noqa: PT012 - from the end of the block
        async with supervisor(OFTEN) as engine:
            path = runtime_root() / engine.name
            await asyncio.sleep(0.05)
            if removed:
                (path / removed).unlink()
            else:
                shutil.rmtree(path)
            await asyncio.sleep(10)
    assert failed.value.exit_code == 1
    # Connections outlive the names of sockets; the text process has nothing to finish.
    assert [c.process.signals for c in play.children] == [[], [signal.SIGTERM], [], [], []]
    assert engines_left() == []


async def test_removed_description_is_written_again(play: Play) -> None:
    async with supervisor(OFTEN) as engine:
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
