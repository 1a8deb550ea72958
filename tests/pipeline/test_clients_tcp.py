"""Clients over tcp: only those with a known key are served; other connections get no information."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from child_messages import KEY
from client_service import CLIENT, ENGINE, WELCOME, Service, free_endpoint, works
from door_service import door_service
from msgspec.structs import replace
from raw_client import raw_client
from waiting import until

from pipeline.config import EngineConfig
from pipeline.door.connection import Engine
from pipeline.door.door import Door, listen, probe_peer
from pipeline.door.key_file import KeyFile
from pipeline.door.limits import DoorLimits
from protocol.client import Client
from protocol.codec import encode
from protocol.errors import EngineGone, ProtocolError
from protocol.keys import Address, ClientKeys, new_keys, write_engine_keys
from protocol.messages import VERSION, Hello, Stats, StatsReply
from protocol.sockets import check_tcp, connect_dealer

OTHER_ENGINE, OTHER_CLIENT = new_keys()
OTHER_KEYS = ClientKeys(OTHER_CLIENT.public, OTHER_CLIENT.secret, ENGINE.public)
WRONG_KEYS = {
    "another client's keys": OTHER_KEYS,
    "another engine's key": ClientKeys(CLIENT.public, CLIENT.secret, OTHER_ENGINE.public),
    "another secret": ClientKeys(CLIENT.public, OTHER_CLIENT.secret, ENGINE.public),
}


def greeting(mechanism: bytes, minor: bytes = b"\0") -> bytes:
    """The 64 bytes that a ZMTP 3 connection begins with."""
    return b"\xff" + bytes(7) + b"\1\x7f\3" + minor + mechanism.ljust(20, b"\0") + bytes(32)


def frames(flagged: bool) -> bytes:
    """Hello as ZMTP 1 (the length counts the flags and comes first) or as ZMTP 2 and later."""
    first, second = encode(Hello(VERSION))
    parts = ((1, bytes(first)), (0, bytes(second)))
    if flagged:
        return b"".join(bytes([more, len(part)]) + part for more, part in parts)
    return b"".join(bytes([len(part) + 1, more]) + part for more, part in parts)


async def test_client_with_known_keys_is_served() -> None:
    async with door_service() as running:
        counts = await works(running.address())
        assert (counts["connected"], running.door.refused) == (1, 0)


def test_a_machine_that_was_switched_off_is_noticed() -> None:
    with listen(free_endpoint()) as listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            probe_peer(accepted)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            for option, value in (
                (socket.TCP_KEEPIDLE, 5),  # seconds
                (socket.TCP_KEEPINTVL, 5),
                (socket.TCP_KEEPCNT, 3),
                (socket.TCP_USER_TIMEOUT, 15_000),  # milliseconds
                (socket.TCP_NODELAY, 1),
            ):
                assert accepted.getsockopt(socket.IPPROTO_TCP, option) == value


@pytest.mark.parametrize("keys", WRONG_KEYS.values(), ids=WRONG_KEYS.keys())
async def test_wrong_keys_get_no_answer(keys: ClientKeys, caplog: pytest.LogCaptureFixture) -> None:
    async with door_service() as running:
        async with raw_client(running.tcp, hello=False, keys=keys) as connection:
            for _ in range(3):
                await connection.send(Hello(VERSION))
            assert not await connection.socket.poll(700)
        with pytest.raises(EngineGone):
            async with Client.connect(Address(running.tcp, keys), timeout=0.5):
                pass
        counts = await works(running.address())
        assert counts["connected"] == 1
        assert [message for _, message in running.clients.received] == [Stats(0)]
        if keys.engine == ENGINE.public and keys.public != CLIENT.public:
            assert running.door.refused >= 2
            assert "127.0.0.1 was refused: its key is not in engine.key" in caplog.text


async def test_unencrypted_connection_gets_no_answer() -> None:
    async with door_service() as running:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(running.tcp)
            await plain.send_multipart(encode(Hello(VERSION)))
            assert not await plain.poll(700)
        assert running.clients.received == []


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
        greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
        greeting(b"PLAIN") + b"\x04\x0a\x05HELLO\x01a\x01b",
        greeting(b"CURVE"),
        greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01" + bytes(193),
        greeting(b"CURVE") + b"\x04\x06\x05READY",
        greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER" + frames(True),
        greeting(b"CURVE") + frames(True),
        b"\xff" + bytes(7) + b"\1\x7f\1\5\0\0" + frames(True),  # ZMTP 2
        b"\1\0" + frames(False),  # ZMTP 1
        b"\x00" * 4096,
        bytes(range(256)) * 64,
    ],
    ids=range(13),
)
async def test_raw_bytes_get_only_the_greeting(words: bytes) -> None:
    async with door_service(DoorLimits(hello=0.3)) as running:
        reader, writer = await asyncio.open_connection(*check_tcp(running.tcp))
        writer.write(words)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(5):
                got = await reader.read(1 << 16)
                while more := await reader.read(1 << 16):
                    got += more
        writer.close()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            await writer.wait_closed()
        expected = greeting(b"CURVE", minor=b"\1")
        assert got[: len(expected)] == expected[: len(got)]
        assert len(got) <= len(expected) + 12, got  # and ZMTP's short error code of a handshake
        assert running.clients.clients.counts()["connected"] == 0
        assert running.clients.received == []


async def test_same_routing_id_on_both_sockets_is_two_clients() -> None:
    async with door_service() as running, raw_client(running.clients.local, identity=b"same" * 4) as local:
        async with raw_client(running.tcp, identity=b"same" * 4, keys=CLIENT) as remote:
            assert running.clients.clients.counts()["connected"] == 2
            await local.send(Stats(1))
            await remote.send(Stats(2))
            assert (await local.expect(StatsReply)).request == 1
            assert (await remote.expect(StatsReply)).request == 2
            names = {name for name, _ in running.clients.received}
            assert len(names) == 2
        await until(lambda: len(running.clients.gone) > 0)  # found by the next heartbeat
        await local.send(Stats(3))
        assert (await local.expect(StatsReply)).request == 3
        (gone,) = running.clients.gone
        assert gone != running.clients.received[-1][0]


async def test_clients_wait_until_the_engine_is_ready(runtime: Path) -> None:
    """Connections that the coordinator does not answer yet stay open for longer than that to the Hello."""
    write_engine_keys(runtime / "engine.key", ENGINE)
    endpoint = free_endpoint()
    keys, limits = KeyFile(runtime / "engine.key"), DoorLimits(hello=0.5, silence=0.5)
    door = Door(listen(endpoint), keys, Engine(runtime, KEY, 0), limits)
    opening = asyncio.create_task(door.serve())

    async def connect() -> None:
        async with Client.connect(Address(endpoint, CLIENT), timeout=10) as client:
            assert client.welcome == WELCOME

    connecting = [asyncio.create_task(connect()) for _ in range(5)]
    await asyncio.sleep(1.5)
    assert not any(task.done() for task in connecting)
    assert len(door.clients) == 5
    clients = Service(runtime, remote=True).clients
    serving = asyncio.create_task(clients.serve())
    await asyncio.gather(*connecting)
    assert not serving.done()
    for task in (serving, opening):
        task.cancel()
        await asyncio.wait([task])
    clients.close()


async def test_flood_of_handshakes_keeps_no_client_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with door_service() as running:
        with contextlib.ExitStack() as stack:
            for i in range(300):
                # in a thread: the door accepts them in this event loop, and only so many wait in its backlog
                connecting = asyncio.to_thread(socket.create_connection, check_tcp(running.tcp), 10.0)
                connection = stack.enter_context(await connecting)
                connection.sendall(greeting(b"CURVE")[: 10 + i % 50])
            with zmq.asyncio.Context() as context:
                for _ in range(40):
                    stack.enter_context(connect_dealer(context, running.tcp, keys=OTHER_KEYS))
                await works(running.address())
                await until(lambda: running.door.refused >= 40)
                await works(running.address())
                stack.close()
        assert 0 < len([r for r in caplog.records if "was refused" in r.getMessage()]) < 40


async def test_port_in_use_and_addresses_of_other_machines() -> None:
    async with door_service() as running:
        with pytest.raises(ProtocolError, match=rf"^cannot bind {running.tcp}: Address already in use$"):
            listen(running.tcp)
    with pytest.raises(ProtocolError, match=r"^cannot bind tcp://192.0.2.1:5555: Cannot assign requested"):
        listen("tcp://192.0.2.1:5555")
    with pytest.raises(ProtocolError, match=r"is not tcp://HOST:PORT$"):
        listen("ipc:///tmp/a")


@pytest.mark.parametrize(("listening", "hosts"), [("*", ["127.0.0.1", "[::1]"]), ("[::1]", ["[::1]"])])
async def test_all_addresses_and_ipv6(listening: str, hosts: list[str]) -> None:
    port = free_endpoint().rpartition(":")[2]
    async with door_service(endpoint=f"tcp://{listening}:{port}"):
        for host in hosts:
            await works(Address(f"tcp://{host}:{port}", CLIENT))


async def test_engine_answers_over_tcp(start_engine, plain_config, tmp_path: Path) -> None:
    write_engine_keys(tmp_path / "engine.key", ENGINE)
    endpoint = free_endpoint()
    config = EngineConfig(**(vars(plain_config) | {"listen": endpoint, "key": tmp_path / "engine.key"}))
    async with start_engine(config) as (_, local):
        ids = {"token_ids": (5, 6, 7), "max_tokens": 8, "ignore_eos": True}
        async with Client.connect(Address(endpoint, CLIENT), timeout=20) as remote:
            name = Path(local.welcome.model).name  # without its path
            assert remote.welcome == replace(local.welcome, model=name)
            # one after the other: a batch of both may differ by rounding
            here, there = [await client.generate(**ids).result() for client in (local, remote)]
            assert len(there.tokens) == 8
            assert here.tokens == there.tokens
            blocks = [block async for block in remote.score(token_ids=range(200), full=True)]
            assert sum(len(block.tokens) for block in blocks) == 200
            assert (await remote.stats())["scheduler"]["ended"] == 2
            counts = (await local.stats())["clients"]
            assert counts["connected"] >= 2  # the connection of `score` may still be open
        with pytest.raises(EngineGone):
            async with Client.connect(Address(endpoint, OTHER_KEYS), timeout=1.0):
                pass


async def test_a_killed_door_is_restarted_and_local_clients_do_not_notice(
    start_engine, plain_config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_engine_keys(tmp_path / "engine.key", ENGINE)
    endpoint = free_endpoint()
    config = EngineConfig(**(vars(plain_config) | {"listen": endpoint, "key": tmp_path / "engine.key"}))
    ids = {"token_ids": (5, 6, 7), "max_tokens": 100, "ignore_eos": True}
    caplog.set_level(logging.INFO)
    async with start_engine(config) as (engine, local):
        before = dict(engine.pids)
        (door,) = [identity for identity in before if identity.role == "door"]
        async with Client.connect(Address(endpoint, CLIENT), timeout=20, retry=20) as remote:
            answers = [client.generate(**ids) for client in (local, remote)]
            os.kill(before[door], signal.SIGKILL)
            for answer in answers:
                assert len((await answer.result()).tokens) == 100
        after = engine.pids
        assert {i for i in after if i.role != "door"} == {i for i in before if i.role != "door"}
        assert door not in after
    assert "the door was killed by SIGKILL; it is being restarted" in caplog.text
    assert "the door is up again after" in caplog.text
