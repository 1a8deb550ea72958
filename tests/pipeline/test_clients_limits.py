"""Clients that are silent or do not read: heartbeats, queues, congestion, cut-offs. The test has the clock,
and a socket is full while the test lets `send` fail."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
from client_service import Service, service
from clock import Clock
from raw_client import RawClient, raw_client
from waiting import until

from pipeline.serving import clients
from pipeline.serving.clients import OVERHEAD, ClientSocket
from protocol.codec import decode
from protocol.messages import Error, Heartbeat, PolicyChanged, Stats, StatsReply


class Scene(Clock):
    """The time, and whether the sockets are full."""

    full = False


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene, send = Scene(), ClientSocket.send

    def limited(self: ClientSocket, receiver: bytes, frames: list[bytes | memoryview]) -> None:
        if scene.full:
            raise zmq.Again
        send(self, receiver, frames)

    monkeypatch.setattr(ClientSocket, "send", limited)
    monkeypatch.setattr(clients, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(clients, "time", scene)
    return scene


@asynccontextmanager
async def connected(running: Service) -> AsyncIterator[tuple[RawClient, bytes]]:
    """A client and its name."""
    async with raw_client(running.local) as client:
        await client.send(Stats(1))
        await client.expect(StatsReply)
        yield client, running.received[-1][0]


async def heard(client: RawClient, request: int) -> None:
    """The client sends a message and reads its answer."""
    await client.send(Stats(request))
    assert (await client.expect(StatsReply)).request == request


async def full(running: Service, name: bytes) -> None:
    """Wait until the client's socket was found to be full."""
    await until(lambda: running.clients._clients[name].full_since is not None)


async def beats(running: Service, client: RawClient, name: bytes, scene: Scene) -> None:
    """The client sends a heartbeat, and it has been heard."""
    await client.send(Heartbeat(0.0))
    await until(lambda: running.clients._clients[name].last_message == scene.now)


async def test_silent_client_is_disconnected_and_one_that_is_heard_is_not(scene: Scene) -> None:
    async with service() as running, connected(running) as (talking, _), connected(running) as (_, silent):
        scene.now += clients.SILENCE_LIMIT
        while decode(await talking.socket.recv_multipart()) != Heartbeat(scene.now):
            pass  # of an earlier turn
        assert running.gone == []
        await heard(talking, 2)
        scene.now += 1.0
        await until(lambda: running.gone == [silent])
        await heard(talking, 3)
        assert running.clients.counts().items() >= {"connected": 1, "cut_off": 0}.items()


async def test_client_that_does_not_read_is_cut_off_unless_it_reads_again(scene: Scene) -> None:
    async with service() as running, connected(running) as (client, name):
        for request in (5, 6):  # full twice, each time for less than the limit
            scene.full = True
            running.clients.send(name, PolicyChanged(request, "p", True))
            await full(running, name)
            scene.now += 0.7 * clients.SILENCE_LIMIT
            await beats(running, client, name, scene)
            scene.full = False
            assert (await client.expect(PolicyChanged)).request == request
            await heard(client, request)
        assert running.clients.counts()["cut_off"] == 0
        scene.full = True
        running.clients.send(name, PolicyChanged(7, "p", True))
        await full(running, name)
        scene.now += 0.7 * clients.SILENCE_LIMIT
        await beats(running, client, name, scene)  # it is heard, and reads nothing
        scene.now += 0.7 * clients.SILENCE_LIMIT
        await until(lambda: running.gone == [name])
        assert running.clients.counts()["cut_off"] == 1
        scene.full = False
        scene.now += clients.CUT_OFF_SECONDS + 1.0


async def test_client_is_congested_by_the_bytes_that_wait_for_it(scene: Scene, monkeypatch) -> None:
    message = PolicyChanged(1, "p", True)
    monkeypatch.setattr(clients, "CONGESTED_BYTES", 3 * OVERHEAD)
    async with service() as running, connected(running) as (_, name), connected(running) as (_, other):
        scene.full = True
        for count in range(4):  # the third is beyond the limit: each has its own bytes too
            assert running.clients.congested(name) == (count > 2)
            running.clients.send(name, message)
        assert not running.clients.congested(other)
        assert not running.clients.congested(b"unknown")
        scene.full = False
        await until(lambda: not running.clients.congested(name))


async def test_client_with_too_many_waiting_messages_is_cut_off(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr(clients, "QUEUE_LIMIT", 3)
    async with service() as running, connected(running) as (client, name):
        for _ in range(3):
            running.clients.send(name, PolicyChanged(1, "p", True))
        assert running.gone == []
        running.clients.send(name, PolicyChanged(1, "p", True))
        assert running.gone == [name]
        assert (await client.expect(Error)).text == "cut off: 3 messages wait for it"
        running.clients.send(name, PolicyChanged(2, "p", True))  # dropped


async def test_flush_waits_for_all_queues_up_to_its_limit(scene: Scene) -> None:
    async with service() as running, connected(running) as (_, name):
        scene.full = True
        running.clients.send(name, PolicyChanged(1, "p", True))
        began = time.monotonic()
        await running.clients.flush(0.1)
        assert time.monotonic() - began >= 0.1
        scene.full = False
        await running.clients.flush(60.0)
        assert not running.clients.congested(name)
        assert time.monotonic() - began < 60.0
