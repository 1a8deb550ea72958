"""Clients over tcp: only those with a known key are served; other connections get no information."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import stat
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from client_service import CLIENT, ENGINE, WELCOME, Service, free_endpoint, service, works
from raw_client import raw_client
from waiting import until

from pipeline.config import EngineConfig
from pipeline.serving.client_sockets import TcpListener
from protocol.client import Client
from protocol.codec import encode
from protocol.errors import EngineGone, ProtocolError
from protocol.keys import Address, ClientKeys, new_keys, write_engine_keys
from protocol.messages import VERSION, Hello, Stats, StatsReply
from protocol.sockets import check_tcp, connect_dealer

pytestmark = pytest.mark.skip("clients over tcp speak with the door, which these tests do not start yet")

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
    async with service(tcp=True) as running:
        counts = await works(Address(running.tcp, CLIENT))
        assert (counts["connected"], counts["refused_keys"]) == (1, 0)


@pytest.mark.parametrize("keys", WRONG_KEYS.values(), ids=WRONG_KEYS.keys())
async def test_wrong_keys_get_no_answer(keys: ClientKeys, caplog: pytest.LogCaptureFixture) -> None:
    async with service(tcp=True) as running:
        async with raw_client(running.tcp, hello=False, keys=keys) as connection:
            for _ in range(3):
                await connection.send(Hello(VERSION))
            assert not await connection.socket.poll(700)
        with pytest.raises(EngineGone):
            async with Client.connect(Address(running.tcp, keys), timeout=0.5):
                pass
        counts = await works(Address(running.tcp, CLIENT))
        assert counts["connected"] == 1
        assert running.received == [(running.received[0][0], Stats(0))]
        if keys.engine == ENGINE.public and keys.public != CLIENT.public:
            assert counts["refused_keys"] >= 2
            assert "127.0.0.1 was refused: its key is not in engine.key" in caplog.text


async def test_unencrypted_connection_gets_no_answer() -> None:
    async with service(tcp=True) as running:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(running.tcp)
            await plain.send_multipart(encode(Hello(VERSION)))
            assert not await plain.poll(700)
        assert running.received == []


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
async def test_raw_bytes_get_only_the_greeting(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.sockets.HANDSHAKE_MS", 300)
    async with service(tcp=True) as running:
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
        assert running.clients.counts()["connected"] == 0
        assert running.received == []


async def test_same_routing_id_on_both_sockets_is_two_clients() -> None:
    async with service(tcp=True) as running, raw_client(running.local, identity=b"same" * 4) as local:
        async with raw_client(running.tcp, identity=b"same" * 4, keys=CLIENT) as remote:
            assert running.clients.counts()["connected"] == 2
            await local.send(Stats(1))
            await remote.send(Stats(2))
            assert (await local.expect(StatsReply)).request == 1
            assert (await remote.expect(StatsReply)).request == 2
            names = {name for name, _ in running.received}
            assert len(names) == 2
        await until(lambda: len(running.gone) > 0)  # found by the next heartbeat
        await local.send(Stats(3))
        assert (await local.expect(StatsReply)).request == 3
        (gone,) = running.gone
        assert gone != running.received[-1][0]


async def test_clients_wait_until_the_engine_is_ready(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshakes that time out are repeated; the authentication requests of the first ones do no harm."""
    monkeypatch.setattr("protocol.sockets.HANDSHAKE_MS", 200)
    endpoint = free_endpoint()
    clients = Service(runtime).clients

    async def connect() -> None:
        async with Client.connect(Address(endpoint, CLIENT), timeout=10) as client:
            assert client.welcome == WELCOME

    connecting = [asyncio.create_task(connect()) for _ in range(5)]
    await asyncio.sleep(1.0)
    assert not any(task.done() for task in connecting)
    serving = asyncio.create_task(clients.serve())
    await asyncio.gather(*connecting)
    assert not serving.done()
    serving.cancel()
    await asyncio.wait([serving])
    clients.close()


async def test_flood_of_handshakes_keeps_no_client_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with service(tcp=True) as running:
        with contextlib.ExitStack() as stack:
            for i in range(300):
                connection = stack.enter_context(socket.create_connection(check_tcp(running.tcp)))
                connection.sendall(greeting(b"CURVE")[: 10 + i % 50])
            with zmq.asyncio.Context() as context:
                for _ in range(40):
                    stack.enter_context(connect_dealer(context, running.tcp, keys=OTHER_KEYS))
                await works(Address(running.tcp, CLIENT))
                await until(lambda: running.clients.counts()["refused_keys"] >= 40)
                await works(Address(running.tcp, CLIENT))
                stack.close()
        assert 0 < len([r for r in caplog.records if "was refused" in r.getMessage()]) < 40


def test_tcp_listener_follows_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    endpoint = free_endpoint()
    assert TcpListener.configured(EngineConfig()) is None
    with pytest.raises(
        ProtocolError, match=r"the key file .*/tandem/keys/engine.key does not exist; make keys with"
    ):
        TcpListener.configured(EngineConfig(listen=endpoint))
    write_engine_keys(tmp_path / "a.key", ENGINE)
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600
    listener = TcpListener.configured(EngineConfig(listen=endpoint, key=tmp_path / "a.key"))
    assert listener == TcpListener(endpoint, ENGINE)


async def test_port_in_use_leaves_no_socket_open(runtime: Path) -> None:
    async with service(tcp=True) as running:
        with pytest.raises(ProtocolError, match=rf"^cannot bind {running.tcp}: Address already in use$"):
            Service(runtime)
        async with service() as other:  # not affected by the failed one, whose sockets are closed
            await works(other.local)


async def test_engine_answers_over_tcp(start_engine, plain_config, tmp_path: Path) -> None:
    write_engine_keys(tmp_path / "engine.key", ENGINE)
    endpoint = free_endpoint()
    config = EngineConfig(**(vars(plain_config) | {"listen": endpoint, "key": tmp_path / "engine.key"}))
    async with start_engine(config) as (_, local):
        ids = {"token_ids": (5, 6, 7), "max_tokens": 8, "ignore_eos": True}
        async with Client.connect(Address(endpoint, CLIENT), timeout=20) as remote:
            assert remote.welcome == local.welcome
            # one after the other: a batch of both may differ by rounding
            here, there = [await client.generate(**ids).result() for client in (local, remote)]
            assert len(there.tokens) == 8
            assert here.tokens == there.tokens
            blocks = [block async for block in remote.score(token_ids=range(200), full=True)]
            assert sum(len(block.tokens) for block in blocks) == 200
            counts = (await remote.stats())["clients"]
            assert counts["connected"] >= 2  # the connection of `score` may still be open
        with pytest.raises(EngineGone):
            async with Client.connect(Address(endpoint, OTHER_KEYS), timeout=1.0):
                pass
