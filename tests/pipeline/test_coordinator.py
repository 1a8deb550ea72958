"""The coordinator between clients, a supervisor and the engine's thread, all in this process."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from child_messages import KEY
from msgspec import structs
from raw_client import raw_client
from waiting import until
from whole_engine import IDENTITY, OPTIONS, coordinator_map

from pipeline import coordinator
from pipeline.config import ResolvedConfig
from pipeline.coordinator import FLOODED, STOPPING, Coordinator
from pipeline.experts.pool import Ticket
from pipeline.serving import engine_inbox
from pipeline.serving.clients import Clients
from protocol.codec import decode, encode
from protocol.messages import (
    VERSION,
    Cancel,
    Done,
    Error,
    Failed,
    Generate,
    Heartbeat,
    PolicyChanged,
    Progress,
    Ready,
    Score,
    SetPolicy,
    Shutdown,
    Stats,
    StatsReply,
)
from protocol.sockets import bind_router, ipc_endpoint, parse_identity

LIMIT = 20.0  # seconds
ASKED = Generate(1, token_ids=(5, 6, 7), max_tokens=3, ignore_eos=True)


class Supervisor:
    """The other end of control.sock, and the coordinator's task."""

    def __init__(self, runtime: Path, config: dict[str, Any]) -> None:
        self.endpoint = ipc_endpoint(runtime, "client.sock")
        self.config = config
        self.context = zmq.asyncio.Context()
        self.socket = bind_router(self.context, ipc_endpoint(runtime, "control.sock"))
        self.heartbeats = 0
        self.serving = asyncio.create_task(Coordinator(config).serve())

    async def next(self) -> Any:
        """The coordinator's next message but heartbeats and progress."""
        async with asyncio.timeout(LIMIT):
            while True:
                sender, *frames = await self.socket.recv_multipart()
                assert parse_identity(sender, KEY) == IDENTITY
                message = decode(frames)
                self.heartbeats += isinstance(message, Heartbeat)
                if not isinstance(message, Heartbeat | Progress):
                    return message

    async def send(self, *frames: bytes) -> None:
        await self.socket.send_multipart([IDENTITY.prove(KEY), *frames])

    async def shut_down(self) -> int:
        """The exit code."""
        await self.send(*encode(Shutdown()))
        return await asyncio.wait_for(self.serving, LIMIT)


@asynccontextmanager
async def supervised(
    model: Path, runtime: Path, options: ResolvedConfig = OPTIONS
) -> AsyncIterator[Supervisor]:
    with coordinator_map(model, runtime, options) as config:
        supervisor = Supervisor(runtime, config)
        try:
            yield supervisor
        finally:
            if not supervisor.serving.done():
                await supervisor.shut_down()
            supervisor.socket.close(linger=0)
            supervisor.context.term()


@pytest.fixture(scope="module")
def tiny_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a tokenizer: no text process runs here, for which the coordinator would wait."""
    folder = tmp_path_factory.mktemp("ids")
    for path in tiny_model.iterdir():
        if path.is_file() and "token" not in path.name:
            shutil.copy(path, folder)
    return folder


class Gate:
    """The engine's steps wait until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self.open = self._open.set

    def wait(self) -> None:
        self.reached.set()
        assert self._open.wait(LIMIT)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, parts = Gate(), Ticket.parts

    def waiting(self: Ticket) -> Any:
        gate.wait()
        return parts(self)

    monkeypatch.setattr(Ticket, "parts", waiting)
    monkeypatch.setattr(coordinator, "JOIN_LIMIT", LIMIT)
    return gate


async def test_coordinator_connects_supervisor_clients_and_engine(tiny_model: Path, tmp_path: Path) -> None:
    async with supervised(tiny_model, tmp_path) as supervisor, raw_client(supervisor.endpoint) as first:
        ready = await supervisor.next()
        notes = ready.notes
        assert ready == Ready(VERSION, "coordinator", 0, 0, os.getpid(), ready.fingerprint, notes)
        assert (len(ready.fingerprint), len(notes)) == (32, 5)
        async with raw_client(supervisor.endpoint) as second:
            message = SetPolicy(7, "all-host")
            await first.send(message)
            assert await first.expect(PolicyChanged) == PolicyChanged(7, "all-host", True)
            assert await second.expect(PolicyChanged) == PolicyChanged(-1, "all-host", True)
            assert await supervisor.next() == message
            await supervisor.send(b"\x01")  # dropped
            await second.send(ASKED)
            assert [m.request for m in (await second.to_the_end(1))[1]] == [1] * 4
            await second.send(Stats(9))
            reply = await second.expect(StatsReply)
            assert (reply.request, reply.stats["clients"]["connected"]) == (9, 2)
            await second.send(ready)
            assert (await second.expect(Error)).text == "a client may not send Ready"
        assert supervisor.heartbeats > 0
        assert await supervisor.shut_down() == 0


async def test_requests_of_a_stopping_engine_are_refused(
    tiny_model: Path, tmp_path: Path, gate: Gate
) -> None:
    """The running one ends as cancelled, after the step."""
    async with supervised(tiny_model, tmp_path) as supervisor, raw_client(supervisor.endpoint) as client:
        await client.send(ASKED)
        await until(gate.reached.is_set)
        ending = asyncio.create_task(supervisor.shut_down())
        while not await client.socket.poll(10):  # the Shutdown has not arrived
            await client.send(SetPolicy(2, "x"))
        await client.send(
            Cancel(1), structs.replace(ASKED, request=3), Score(4, token_ids=(5,)), SetPolicy(5, "x")
        )
        while (refused := await client.next()) == Error(2, STOPPING):
            pass
        assert refused == Done(3, "error", STOPPING)
        assert await client.next() == Done(4, "error", STOPPING)
        assert await client.next() == Error(5, STOPPING)
        gate.open()
        while not isinstance(message := await client.next(), Done):
            pass
        assert (message.request, message.reason) == (1, "cancelled")
        assert await ending == 0


async def test_client_that_floods_the_inbox_is_refused_and_for_a_cancel_cut_off(
    tiny_model: Path, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_inbox, "MOST_WAITING", 2)
    async with supervised(tiny_model, tmp_path) as supervisor, raw_client(supervisor.endpoint) as client:
        await client.send(ASKED)
        await until(gate.reached.is_set)
        await client.send(*(structs.replace(ASKED, request=number) for number in (2, 3, 4)))
        await client.send(SetPolicy(5, "x"), Cancel(1))
        assert await client.next() == Done(4, "error", FLOODED)
        assert await client.next() == Error(5, FLOODED)
        assert await client.next() == Error(-1, f"cut off: {FLOODED}")
        gate.open()


@pytest.mark.parametrize(
    ("changed", "code", "text"),
    [
        ({"context": 1000}, 2, "--context 1000 is more than the model's 256 positions"),
        ({"workers": 1}, 1, "0 of 1 workers were ready after 0 s"),
    ],
    ids=["of the user's", "of the engine's"],
)
async def test_failed_engine_is_reported_with_its_exit_code(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed, code, text
) -> None:
    monkeypatch.setattr("pipeline.serving.engine_parts.CHILD_LIMIT", 0.0)
    async with supervised(tiny_model, tmp_path, replace(OPTIONS, **changed)) as supervisor:
        assert await supervisor.next() == Failed("coordinator", text, code == 2)
        assert await asyncio.wait_for(supervisor.serving, LIMIT) == code


async def test_engine_that_waits_for_a_child_is_given_up_at_shutdown(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "JOIN_LIMIT", 0.1)
    async with supervised(tiny_model, tmp_path, replace(OPTIONS, workers=1)) as supervisor:
        await supervisor.socket.poll()  # the first heartbeat
        await supervisor.shut_down()  # within a child's 60 s
        message = await supervisor.next()
        assert (message.text, message.usage) == ("the engine was stopped while a step waited", False)


async def test_failed_task_ends_the_coordinator_with_an_exit_code(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: Clients, *how: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Clients, "serve", fail)
    async with supervised(tiny_model, tmp_path) as supervisor:
        assert await asyncio.wait_for(supervisor.serving, LIMIT) == 1
    assert "the coordinator failed" in caplog.text
    assert "ZeroDivisionError: a bug" in caplog.text


async def test_endpoint_that_cannot_be_bound_is_a_usage_error(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "client.sock").mkdir()
    with coordinator_map(tiny_model, tmp_path) as config, zmq.asyncio.Context() as context:
        socket = bind_router(context, ipc_endpoint(tmp_path, "control.sock"))
        with pytest.raises(SystemExit) as ended:
            Coordinator(config)
        assert ended.value.code == 2
        _, *frames = await asyncio.wait_for(socket.recv_multipart(), LIMIT)
        failed = decode(frames)
        assert isinstance(failed, Failed)
        assert (failed.role, failed.usage) == ("coordinator", True)
        socket.close(linger=0)
