"""The door's limits: strangers and key holders over tcp harm neither the engine nor each other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket as sockets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
import zmq
import zmq.asyncio
from client_service import CLIENT, ENGINE, works
from door_service import DoorService, door_service
from raw_client import RawClient, raw_client
from waiting import until

from pipeline.door.connection import HANDSHAKE, Connection, Engine
from pipeline.door.limits import CLOSING, PER_CLIENT, PER_STRANGER, RESERVED, DoorLimits
from protocol.client import Client
from protocol.keys import replace_engine_keys, with_client
from protocol.messages import VERSION, Error, Heartbeat, Hello, Score, SetPolicy, Stats, StatsReply
from protocol.sockets import check_tcp

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def strangers(running: DoorService, number: int, words: bytes = b"") -> AsyncIterator[list[Stream]]:
    """Connections that say no more than this."""
    streams = []
    try:
        for _ in range(number):
            streams.append(await asyncio.open_connection(*check_tcp(running.tcp)))
            streams[-1][1].write(words)
        yield streams
    finally:
        for _, writer in streams:
            writer.transport.abort()


async def closed(stream: Stream) -> bool:
    """Whether the other end has closed this connection."""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(0.01):
            while await stream[0].read(1000):
                pass
        return True
    return stream[0].exception() is not None


@asynccontextmanager
async def named_client(running: DoorService, name: bytes) -> AsyncIterator[RawClient]:
    """A client with the key and this ZeroMQ identity."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTING_ID, name),
            (zmq.CURVE_PUBLICKEY, CLIENT.public),
            (zmq.CURVE_SECRETKEY, CLIENT.secret),
            (zmq.CURVE_SERVERKEY, ENGINE.public),
        ):
            socket.setsockopt(option, value)
        socket.connect(running.tcp)
        yield RawClient(socket)


@pytest.mark.parametrize(
    "name", [b"the same identity", bytes(5), b"\0" + os.urandom(4)], ids=["own", "zeros", "made"]
)
async def test_an_identity_that_was_claimed_gets_nothing_of_others(name: bytes) -> None:
    """As identities of a ROUTER these would be refused, receive another's answers or abort the process."""
    async with door_service() as running, named_client(running, name) as victim:
        async with named_client(running, name) as thief:
            for client in (victim, thief):
                await client.send(Hello(VERSION))
                await client.next()
            for request in range(20):
                await victim.send(Stats(request))
                assert (await victim.expect(StatsReply)).request == request
            await thief.send(Stats(99))
            assert (await thief.expect(StatsReply)).request == 99  # and no other's before it
        await works(running.address())


async def test_idle_strangers_cost_no_one_a_connection() -> None:
    limits = DoorLimits(hello=1.5)
    async with door_service(limits) as running, raw_client(running.clients.local) as local:
        before = psutil.Process().num_fds()
        greeting = b"\xff" + bytes(8) + b"\x7f\3\0CURVE"
        async with strangers(running, 150) as idle, strangers(running, 200, greeting) as begun:
            assert len(running.door.strangers) <= limits.strangers_of_machine
            used = psutil.Process().num_fds() - before - len(idle) - len(begun)
            assert used < (limits.strangers + CLOSING) * PER_STRANGER
            await local.send(Stats(1))
            assert (await local.expect(StatsReply)).request == 1
            await works(running.address())
            await until(lambda: not running.door.strangers)  # `hello` seconds after the last
            async with asyncio.timeout(30):  # the last of them may have been accepted since
                for stream in (*idle, *begun):
                    while not await closed(stream):
                        pass
        async with raw_client(running.tcp, keys=CLIENT) as client:
            await asyncio.sleep(limits.hello + 0.5)  # a client stays
            await client.send(Stats(2))
            assert (await client.expect(StatsReply)).request == 2


async def test_a_stranger_cannot_send_more_than_a_handshake() -> None:
    """ZeroMQ would keep a command of 4 MB, and take apart what it says."""
    signature, rest = b"\xff" + bytes(8) + b"\x7f", b"\x03\x01CURVE".ljust(54, b"\0")
    command = b"\x06" + (4 << 20).to_bytes(8) + bytes(2 * HANDSHAKE)
    async with door_service() as running, strangers(running, 1, signature + rest + command) as (stranger,):
        async with asyncio.timeout(DoorLimits.hello / 2):
            while not await closed(stranger):
                pass
        await works(running.address())


def test_broken_connections_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Under the event loop of the process, whose broken transports raise errors of their own."""

    async def connect_and_leave() -> None:
        async with door_service() as running:
            for _ in range(20):
                with sockets.create_connection(check_tcp(running.tcp)) as stranger:
                    stranger.sendall(b"\xff" + bytes(8) + b"\x7f")
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            gc.collect()  # an exception that no task retrieves is logged then

    uvloop.run(connect_and_leave())
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_client_with_a_key_that_never_says_hello_is_closed() -> None:
    async with (
        door_service(DoorLimits(hello=0.5)) as running,
        raw_client(running.tcp, hello=False, keys=CLIENT) as silent,
    ):
        ends = silent.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        assert await ends.poll(3000)
        await ends.recv_multipart()
        assert len(running.door.clients) == 1
        assert await ends.poll(3000)
        silent.socket.disable_monitor()
        ends.close()


async def test_a_client_that_is_silent_after_its_welcome_is_closed_and_one_with_heartbeats_is_not() -> None:
    async with (
        door_service(DoorLimits(silence=1.0)) as running,
        Client.connect(running.address(), silence=1.0) as alive,
        raw_client(running.tcp, keys=CLIENT) as silent,
    ):
        ends = silent.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        assert await ends.poll(5000)
        assert len(running.door.clients) == 1
        await alive.stats()
        silent.socket.disable_monitor()
        ends.close()


async def test_connections_are_limited_by_key() -> None:
    engine, other = with_client(ENGINE, "use", "other")
    async with door_service(DoorLimits(clients_of_key=3)) as running, AsyncExitStack() as stack:
        replace_engine_keys(running.key_file, engine)
        connect = partial(raw_client, running.tcp)
        first = await stack.enter_async_context(connect(keys=CLIENT))
        for _ in range(2):
            await stack.enter_async_context(connect(keys=CLIENT))
        async with connect(keys=CLIENT, hello=False) as fourth:
            await fourth.send(Hello(VERSION))
            answer: Any = await fourth.expect(Error)
            assert answer == Error(-1, "3 clients with this key are connected already; try again later")
        await until(lambda: running.keys.keys == engine)
        await works(running.address(other))
        await first.send(Stats(1))
        await first.expect(StatsReply)
        assert len(running.door.clients) == 3


async def test_a_revoked_key_is_cut_off_and_another_right_takes_effect(caplog) -> None:
    caplog.set_level(logging.WARNING)
    engine, other = with_client(ENGINE, "admin", "other")
    async with door_service() as running:
        replace_engine_keys(running.key_file, engine)
        await until(lambda: running.keys.keys == engine)
        async with (
            raw_client(running.tcp, keys=CLIENT) as revoked,
            raw_client(running.tcp, keys=other) as kept,
        ):
            ends = revoked.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            running.key_file.write_text("{")  # as an editor may, halfway
            await until(lambda: "still are" in caplog.text)
            await works(running.address())
            only = type(engine)(engine.public, engine.secret, engine.admitted[1:])
            running.key_file.unlink()
            replace_engine_keys(running.key_file, only)
            assert await ends.poll(3000)
            await kept.send(Stats(1))
            await kept.expect(StatsReply)
            assert [client.right for client in (c.client for c in running.door.clients) if client] == [
                "admin"
            ]
            revoked.socket.disable_monitor()
            ends.close()
            await until(lambda: running.door.refused > 0)  # it connects again by itself
        assert "was disconnected: its key is revoked" in caplog.text


async def test_a_client_that_the_coordinator_drops_is_closed_after_its_last_message() -> None:
    async with door_service() as running, raw_client(running.tcp, keys=CLIENT) as client:
        ends = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await client.send(*(SetPolicy(i, "x") for i in range(50)), Heartbeat())
        await client.socket.send_multipart([b"x", b"y"])
        for i in range(50):
            assert (await client.expect(Error)).request == i
        assert "malformed" in (await client.expect(Error)).text
        assert await ends.poll(3000)
        client.socket.disable_monitor()
        ends.close()


async def test_the_last_message_of_a_client_that_ends_is_delivered(monkeypatch) -> None:
    monkeypatch.setattr("pipeline.serving.clients.HEARTBEAT_SECONDS", 60.0)  # one would reset the connection
    async with door_service() as running:
        async with raw_client(running.tcp, keys=CLIENT) as client:
            await client.send(*(Score(i, token_ids=(1,)) for i in range(50)))  # not answered here
            client.socket.close(linger=2000)
        await until(lambda: len(running.clients.gone) == 1)
        assert [message.request for _, message in running.clients.received] == [*range(50)]


async def test_a_message_without_an_end_is_bounded() -> None:
    limits = DoorLimits(unread=3 << 20)
    async with door_service(limits) as running, raw_client(running.tcp, keys=CLIENT) as hostile:
        ends = hostile.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await hostile.socket.send_multipart([bytes(1 << 16)] * 100)  # its end would come too late
        assert await ends.poll(3000)
        hostile.socket.disable_monitor()
        ends.close()
        await works(running.address())


def test_limits_leave_the_process_descriptors() -> None:
    assert DoorLimits().within(1 << 20) == DoorLimits()
    for descriptors in (600, 1024, 2000):
        few = DoorLimits().within(descriptors)
        used = few.clients * PER_CLIENT + few.strangers * PER_STRANGER + CLOSING * PER_CLIENT
        assert used <= descriptors - RESERVED
        assert few.clients > 20


async def test_a_connection_that_is_closed_before_it_is_served_closes_its_socket(tmp_path: Path) -> None:
    ours, theirs = sockets.socketpair()
    with zmq.asyncio.Context() as context, theirs:
        connection = Connection(context, ours, 0, Engine(tmp_path, b"", 0), "127.0.0.1", 1)
        connection.close()
        await connection.serve(ENGINE)
        assert theirs.recv(1) == b""
    assert ours.fileno() < 0


async def test_a_message_of_very_many_frames_ends_its_connection_unread(caplog) -> None:
    caplog.set_level(logging.WARNING)
    async with door_service() as running, raw_client(running.tcp, keys=CLIENT) as hostile:
        await hostile.socket.send_multipart([b""] * 50_000)
        await until(lambda: "a message of it has more than 16 frames" in caplog.text)
        assert running.clients.clients.counts()["malformed"] == 0
        await works(running.address())
