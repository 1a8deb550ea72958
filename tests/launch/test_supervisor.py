"""The real supervisor on children that a test plays: order, configurations, messages, ends. No processes."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines import engines_left
from scripted_children import KILLED, PID, Play, ScriptedChild, stage, supervisor
from waiting import until

from launch.errors import StartFailed, WrongUsage
from launch.processes.cores import Cores
from launch.processes.monitor import Limits
from pipeline.assets import model_dir
from protocol.messages import VERSION, Failed, Heartbeat, SetPolicy, Shutdown
from protocol.sockets import Identity, runtime_root
from shm.segment import SHM_FOLDER
from shm.store import store_name

CHILDREN = ["coordinator", "worker 0", "worker 1"]
NEVER = Limits(check_interval=1e6)


@pytest.fixture
async def play(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    async with stage(monkeypatch) as made:
        yield made


@pytest.mark.parametrize(
    ("asked", "held", "said"),
    [
        ("127.0.0.1", "127.0.0.1", "cannot be bound: Address already in use"),
        ("127.0.0.1", "::1", r"\[::1\]:{port}, which clients of localhost may reach, cannot be bound: A"),
        ("0.0.0.0", "::1", r"\[::1\]:{port}, which clients of localhost may reach, cannot be bound: A"),
    ],
)
async def test_a_port_in_use_is_one_line_before_anything_is_started(
    play: Play, asked: str, held: str, said: str
) -> None:
    with socket.create_server((held, 0), family=socket.AF_INET6 if ":" in held else socket.AF_INET) as other:
        port = other.getsockname()[1]
        with pytest.raises(WrongUsage, match=f"^--http {asked}:{port}: {said.format(port=port)}"):
            await supervisor(NEVER, http=f"{asked}:{port}").__aenter__()
    assert play.children == engines_left() == []


async def test_children_start_and_stop_in_order(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem")
    play.notes = {"loader": ("attached", "no huge pages"), "worker": ("not pinned",)}
    async with supervisor(NEVER) as engine:
        spawned = [event for event in play.events if event.endswith("spawned")]
        order = ["coordinator", "text process", "loader", "worker 0", "worker 1"]
        assert spawned == [f"{name} is spawned" for name in order]
        configured = [event for event in play.events if event.endswith("configured")]
        # The coordinator waits for the store, which the text process does not need.
        assert configured[:2] == ["text process is configured", "loader is configured"]
        assert sorted(configured[2:]) == sorted(f"{name} is configured" for name in CHILDREN)
        cores = Cores.here()
        threads = [len(cpus.cores) for cpus in cores.for_workers(2)]
        assert [c.threads for c in play.children] == [cores.computing, 1, cores.computing, *threads]
        assert engine.pids == {
            Identity(*who, 0): PID for who in (("coordinator", 0), ("worker", 0), ("worker", 1), ("text", 0))
        }
        folder = runtime_root() / engine.name
        info = json.loads((folder / "engine.json").read_text())
        assert info["endpoint"] == engine.endpoint == f"ipc://{folder}/client.sock"
        assert (info["name"], info["version"]) == (engine.name, VERSION)
        assert info["model"] == str(model_dir())
        levels = {r.getMessage(): r.levelno for r in caplog.records}
        assert levels["store: attached"] == levels["worker 0: not pinned"] == logging.INFO
        assert levels["store: no huge pages"] == logging.WARNING
        assert any(line.endswith(": all-host on the CPU, 2 workers") for line in levels)
        play.events.clear()
        play.obeys = lambda child: child.identity.role != "coordinator"
        ending = asyncio.create_task(engine.__aexit__(None, None, None))
        await until(lambda: play.events)
        await asyncio.sleep(0.02)
        assert play.events == ["coordinator gets Shutdown"]  # the others serve it to its end
        play.child("coordinator").process.end(0)
        await ending
        assert sorted(play.events[1:]) == ["worker 0 gets Shutdown", "worker 1 gets Shutdown"]
        assert {c.identity.role: c.process.signals for c in play.children if c.process.signals} == {
            "text": [signal.SIGTERM]
        }
    assert engines_left() == []
    assert not (Path(SHM_FOLDER) / store_name(play.fingerprint)[1:]).exists()


async def test_nothing_stays_behind_however_often_the_end_is_cancelled(play: Play) -> None:
    async def use() -> None:
        async with supervisor(NEVER):
            await asyncio.Future()

    using = asyncio.create_task(use())
    await play.spawned("worker", 1)
    while not using.done():
        using.cancel()
        await asyncio.sleep(0)
    assert using.cancelled()
    assert engines_left() == []
    assert not (Path(SHM_FOLDER) / store_name(play.fingerprint)[1:]).exists()
    assert all(child.process.returncode is not None for child in play.children)


# --- the loader ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", [True, False])
async def test_loader_that_fails_ends_the_start_with_its_line(play: Play, usage: bool) -> None:
    def script(child: ScriptedChild) -> None:
        child.send(Failed("loader", "no such tensor", usage), Failed("loader", "a second", not usage))
        child.process.end(1)

    play.script = script
    with pytest.raises(StartFailed, match=r"^no such tensor$") as failed:
        async with supervisor(NEVER):
            pass
    assert failed.value.exit_code == (2 if usage else 1)
    assert play.child("coordinator").process.signals == [signal.SIGTERM]  # it does not receive yet
    assert engines_left() == []


@pytest.mark.parametrize(
    ("role", "code", "line"),
    [
        ("loader", KILLED, "the loader was killed by SIGKILL"),
        ("loader", 3, "the loader exited with code 3"),
        ("text", 3, "the text process exited with code 3"),
        ("text", -signal.SIGPROF, "the model's tokenizer took longer than 20 s to load"),
        ("text", -signal.SIGABRT, "the model's tokenizer failed to load, or needs more than 4 GB of memory"),
    ],
)
async def test_early_exit_without_a_word_ends_the_start(
    play: Play, role: str, code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.processes.children.LAST_MESSAGE_LIMIT", 0.02)
    play.script = lambda child: child.process.end(code) if child.identity.role == role else play.begin(child)
    with pytest.raises(StartFailed, match=f"^{line}$") as failed:
        async with supervisor(NEVER):
            pass
    assert failed.value.exit_code == (2 if "tokenizer" in line else 1)
    assert engines_left() == []


async def test_ready_that_arrives_after_the_exit_of_the_loader_counts(play: Play) -> None:
    def script(child: ScriptedChild) -> None:
        if child.identity.role != "loader":
            return child.ready()
        play.make_store()
        child.process.end(0)
        return asyncio.get_running_loop().call_later(0.05, child.ready) and None

    play.script = script
    async with supervisor(NEVER) as engine:
        assert engine.endpoint


async def test_silent_loader_is_stopped_and_one_with_progress_is_not(play: Play) -> None:
    talks = 0

    def talk(child: ScriptedChild) -> None:
        nonlocal talks
        if child.identity.role != "loader":
            return
        talks += 1
        if talks < 8:
            child.send(Heartbeat())
            asyncio.get_running_loop().call_later(0.05, talk, child)

    play.script = talk
    with pytest.raises(StartFailed, match=r"^the loader was silent for 0 s and was stopped$"):
        async with supervisor(Limits(check_interval=1e6, loader_silence=0.15)):
            pass
    assert talks == 8  # 0.35 s
    assert play.child("loader").received == [Shutdown()]  # it removes what it has built
    assert play.child("loader").process.signals == []


async def test_store_that_was_removed_meanwhile_is_loaded_again(play: Play) -> None:
    def script(child: ScriptedChild) -> None:
        if child.identity.role == "loader" and child.identity.generation < 2:
            play.fingerprint = "0" * 64  # no store
            child.ready()
            child.process.end(0)
        else:
            play.begin(child)

    play.script = script
    async with supervisor(NEVER) as engine:
        loaders = [c for c in play.children if c.identity.role == "loader"]
        assert [c.identity.generation for c in loaders] == [0, 1, 2]
        assert play.child("worker").config["fingerprint"] == play.fingerprint
        assert engine.endpoint


# --- a running engine ---------------------------------------------------------------------------------------


async def test_restarted_coordinator_has_the_policy_that_was_set_last(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem")
    play.notes = {"worker": ("not pinned",)}
    async with supervisor(NEVER) as engine:
        slab = Path(SHM_FOLDER) / (engine._control_name[1:].replace("control-0", "slab-0"))
        slab.touch()
        first = play.child("coordinator")
        assert first.config["slab"] is False
        first.send(SetPolicy(0, "random", {"seed": " 03"}))
        await until(lambda: engine.config.policy == "random")
        caplog.clear()
        first.process.end(KILLED)
        second = await play.spawned("coordinator", 0, 1)
        assert not slab.exists()
        assert (second.config["config"]["policy"], second.config["slab"]) == ("random", True)
        assert second.config["config"]["policy_options"] == {"seed": "3"}
        assert engine.config.policy == "random"
        assert [c.process.returncode for c in play.children[3:5]] == [KILLED] * 2
        await until(lambda: "the engine is up again" in caplog.text)
        assert "not pinned" not in caplog.text  # it was said of the first generation
        second.send(SetPolicy(0, "all-host"))
        await until(lambda: engine.config.policy == "all-host")
        second.process.end(KILLED)
        assert (await play.spawned("coordinator", 0, 2)).config["slab"] is False
