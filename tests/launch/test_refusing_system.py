"""A system that refuses files, descriptors or processes: one line, and the engine goes on where it can."""

from __future__ import annotations

import asyncio
import errno
import shutil
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engines import engines_left
from scripted_children import KILLED, Play, stage, supervisor
from waiting import until

from launch import runtime
from launch.errors import EngineFailed, StartFailed
from launch.processes import children
from launch.processes import supervisor as supervising
from launch.processes.monitor import Limits
from protocol.sockets import Identity, runtime_root

LIMITS = Limits(check_interval=1e6, first_pause=0.001)


@pytest.fixture
async def play(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    async with stage(monkeypatch) as made:
        yield made


def full(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device", "/run/x")


async def test_start_that_cannot_write_is_one_line(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "atomic_file", full)
    line = "^the engine could not be started: /run/x: No space left on device$"
    with pytest.raises(StartFailed, match=line):
        async with supervisor(LIMITS):
            pytest.fail("the engine was started")
    assert engines_left() == []


async def test_worker_is_restarted_once_the_system_gives_descriptors_again(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = iter((errno.EMFILE, errno.ENOMEM))

    async def spawn(*arguments: Any) -> Any:
        if (number := next(refusals, 0)) != 0:
            raise OSError(number, "refused")
        return await play.spawn(*arguments)

    async with supervisor(LIMITS) as engine:
        monkeypatch.setattr(children, "spawn", spawn)
        play.child("worker", 1).process.end(KILLED)
        await until(lambda: Identity("worker", 1, 3) in engine.pids)
        assert "the worker 1 could not be started: refused; it is being restarted" in caplog.messages


def test_files_that_cannot_be_removed_do_not_fail_other_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = runtime_root() / "rt-stays"
    place.mkdir(mode=0o700)
    (place / "lock").touch()
    (place / "core").touch()
    with monkeypatch.context() as patch:
        patch.setattr(type(place), "rmdir", full)
        assert runtime.sweep() == []
    assert caplog.messages == [
        "what the killed engine rt-stays left cannot be removed: /run/x: No space left on device"
    ]
    assert runtime.sweep() == []  # without its lock it is of unknown origin, and empty
    assert not place.exists()


@pytest.mark.parametrize("removed", ["", "lock"])
async def test_engine_that_no_client_can_reach_ends_in_order_with_one_line(
    play: Play, removed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "FILES_SECONDS", 0.01)
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
