"""Remote clients at the coordinator's remote.sock: only the door's connections are heard, each is introduced
once, and limits hold for all connections of a key."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from child_messages import KEY
from client_service import Service, remote_client, service, works
from raw_client import RawClient
from raw_client import raw_client as raw
from waiting import Stopwatch, until

from pipeline.accounts import LOCAL, account_of, client_name
from pipeline.serving import account_limits, introductions, listener
from pipeline.serving.account_limits import (
    ACCOUNT_PLACES,
    LOCAL_PLACES,
    MOST_CLIENTS,
    REFUSED_LIMIT,
    AccountLimits,
)
from protocol.client import Client
from protocol.codec import encode
from protocol.messages import (
    SAY_HELLO,
    VERSION,
    Error,
    Heartbeat,
    Hello,
    PolicyChanged,
    RemoteClient,
    RemoteGone,
    Score,
    SetPolicy,
    Stats,
    StatsReply,
    Welcome,
)
from protocol.sockets import Identity

INTRODUCTION = RemoteClient("key", "use", "127.0.0.1")


def connection(number: int, incarnation: int = 0, role: str = "remote") -> bytes:
    return Identity(role, number, incarnation).prove(KEY)


async def answered(client: RawClient) -> bool:
    return bool(await client.socket.poll(300))


async def flood(client: RawClient) -> None:
    """Until the client is cut off."""
    for _ in range(REFUSED_LIMIT + 1):
        await client.socket.send_multipart([b"\x01"])
    while "cut off" not in (await client.expect(Error)).text:
        pass


async def test_introduced_client_has_its_account_and_right() -> None:
    async with service(remote=True) as running, raw(running.local) as local:
        await local.send(Stats(0))
        await local.expect(StatsReply)
        for right in ("use", "tune", "admin"):
            async with remote_client(running.remote, right + "'s key", right) as client:
                await client.send(Stats(1))
                await client.expect(StatsReply)
                name = running.received[-1][0]
                assert account_of(name) == f"{right}'s key".encode()
                assert running.clients.right_of(name) == right
        assert running.clients.right_of(running.received[0][0]) == "admin"
        assert running.clients.right_of(name + b"another") == "use"


@pytest.mark.parametrize(
    "identity",
    [b"", b"x" * 20, b"remote-1234567-0", b"remote-0-0-0123456789abcdef", connection(0, role="worker")],
    ids=["made", "any", "no proof", "wrong proof", "a worker"],
)
async def test_connection_that_is_not_the_doors_is_not_heard(identity: bytes) -> None:
    async with (
        service(remote=True) as running,
        raw(running.remote, hello=False, identity=identity) as stranger,
    ):
        await stranger.send(INTRODUCTION, Hello(VERSION), Stats(1))
        assert not await answered(stranger)
        assert running.clients.counts()["connected"] == 0
        assert running.received == []


@pytest.mark.parametrize(
    "first",
    [
        Hello(VERSION),
        RemoteClient("key", "owner", ""),
        RemoteClient("", "use", ""),
        RemoteClient("local", "use", ""),
        RemoteClient("a\0b", "use", ""),
        RemoteClient("k" * 1000, "use", ""),
        RemoteClient("key", "use", "x" * 10000),
    ],
    ids=["a Hello", "no right", "no account", "the local account", "a name's end", "long", "too long"],
)
async def test_connection_without_a_valid_introduction_gets_an_error(first: object) -> None:
    async with (
        service(remote=True) as running,
        raw(running.remote, hello=False, identity=connection(1)) as odd,
    ):
        await odd.send(first, Hello(VERSION))
        for _ in range(2):
            assert await odd.expect(Error) == Error(-1, SAY_HELLO)
        assert running.clients.counts()["connected"] == 0


@pytest.mark.parametrize("greeted", [True, False])
async def test_client_whose_connection_has_ended_is_gone_after_its_last_message(greeted: bool) -> None:
    async with (
        service(remote=True) as running,
        remote_client(running.remote, "key", hello=greeted) as client,
    ):
        await client.send(*(Score(i, token_ids=(1,)) for i in range(5)), RemoteGone())
        while (answer := await client.expect(Error)).text == SAY_HELLO:
            assert not greeted
        assert answer == Error(-1, "disconnected")
        assert len(running.received) == 5 * greeted
        assert len(running.gone) == 1
        assert running.clients.counts()["connected"] == 0
        await client.send(Hello(VERSION))
        assert await client.expect(Error) == Error(-1, SAY_HELLO)


async def test_local_client_does_not_end_as_a_remote_one() -> None:
    async with service(remote=True) as running, raw(running.local) as client:
        await client.send(RemoteGone(), Stats(1))
        await client.expect(StatsReply)
        assert running.gone == []


async def test_client_cannot_introduce_itself_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it is known, nor after it was dropped: its messages come on the door's connection."""
    monkeypatch.setattr("pipeline.serving.clients.SILENCE_LIMIT", 0.3)
    monkeypatch.setattr("pipeline.serving.clients.HEARTBEAT_SECONDS", 0.05)
    admin = RemoteClient("another key", "admin", "")
    async with (
        service(remote=True) as running,
        raw(running.remote, hello=False, identity=connection(5)) as client,
    ):
        await client.send(INTRODUCTION, Hello(VERSION))
        await client.expect(Welcome)
        await client.send(admin, Stats(1))
        await client.expect(StatsReply)
        (name, message), (same, _) = running.received  # the coordinator refuses the first
        assert (message, same, running.clients.right_of(name)) == (admin, name, "use")
        await until(lambda: len(running.gone) == 1)
        await client.send(admin, Hello(VERSION))
        for _ in range(3):  # dropped, and both messages
            assert await client.expect(Error) == Error(-1, SAY_HELLO)


async def test_numbers_of_connections_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introductions, "REMEMBERED", 2)
    known = introductions.Introductions(KEY)
    frames = [bytes(frame) for frame in encode(INTRODUCTION)]
    for number in (3, 9, 5, 4):
        assert known.read(connection(number), frames) == INTRODUCTION
    for number in (3, 9, 5, 4, 1):
        with pytest.raises(introductions.MalformedMessage, match="introduced before"):
            known.read(connection(number), frames)
    assert known.read(connection(6), frames) == INTRODUCTION
    assert known.read(connection(3, incarnation=1), frames) == INTRODUCTION  # of a restarted door
    with pytest.raises(introductions.MalformedMessage, match="introduced before"):
        known.read(connection(7), frames)


async def test_account_that_is_cut_off_does_not_return_by_a_new_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its other connections end too; other keys and local clients go on."""
    monkeypatch.setattr(account_limits, "CUT_OFF_SECONDS", 2.0)
    async with (
        service(remote=True) as running,
        Client.connect(running.local) as local,
        remote_client(running.remote, "hostile") as first,
        remote_client(running.remote, "hostile") as second,
        remote_client(running.remote, "other") as other,
    ):
        await flood(first)
        assert (await second.expect(Error)).text.startswith("cut off")
        assert len(running.gone) == 2
        async with remote_client(running.remote, "hostile", hello=False) as again:
            await again.send(Hello(VERSION))
            assert (await again.expect(Error)).text.startswith("cut off: this key")
        await other.send(Stats(1))
        await other.expect(StatsReply)
        await local.stats()
        await asyncio.sleep(2.0)
        async with remote_client(running.remote, "hostile"):
            pass


async def test_refusals_of_all_connections_of_a_key_are_counted_together() -> None:
    async with service(remote=True) as running, AsyncExitStack() as stack:
        for _ in range(REFUSED_LIMIT + 1):
            client = await stack.enter_async_context(remote_client(running.remote, "hostile"))
            await client.socket.send_multipart([b"\x01"])
        await until(lambda: len(running.gone) == REFUSED_LIMIT + 1)


async def test_account_whose_messages_take_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they arrive on one connection or many; what the engine's thread took counts, too."""
    monkeypatch.setattr(account_limits, "COST_BURST", 0.02)
    async with service(remote=True) as running, AsyncExitStack() as stack:
        other = await stack.enter_async_context(remote_client(running.remote, "other"))
        many = [await stack.enter_async_context(remote_client(running.remote, "key")) for _ in range(4)]
        for _ in range(200):
            for client in many:
                await client.send(Heartbeat())
        for client in many:
            assert (
                await client.expect(Error)
            ).text == "cut off: its messages take too much of the engine's time"
        async with remote_client(running.remote, "third") as third:
            await third.send(Stats(1))
            await third.expect(StatsReply)
            running.clients.charge(running.received[-1][0], 0.1)
            await third.send(Stats(2))
            assert (await third.expect(Error)).text.startswith("cut off: its messages take")
        await other.send(Stats(1))
        await other.expect(StatsReply)


async def test_flood_takes_a_share_of_the_time_and_another_client_is_heard(monkeypatch) -> None:
    """Messages that take 10 ms each: 15 a second have their turn."""
    monkeypatch.setattr(account_limits, "COST_BURST", 1000.0)
    monkeypatch.setattr(listener, "MESSAGE_SECONDS", 0.01)
    async with service() as running, raw(running.local) as hostile, raw(running.local) as other:
        for count in range(200):
            await hostile.send(SetPolicy(count, "x"))
        watch = Stopwatch()
        await other.send(Stats(1))
        await other.expect(StatsReply)
        assert watch.shows(0.0, 2.0)
        await asyncio.sleep(1.0)
        assert 5 < len(running.received) < 40 * watch.range()[1]
        hostile.socket.close(linger=0)


async def test_local_client_that_is_cut_off_ends_alone() -> None:
    async with service() as running, raw(running.local) as hostile, Client.connect(running.local) as other:
        await flood(hostile)
        await other.stats()
        assert len(running.gone) == 1


async def places(running: Service, stack: AsyncExitStack, account: str, count: int) -> int:
    """The number of this account's new clients that are served."""

    async def connect() -> bool:
        client = await stack.enter_async_context(remote_client(running.remote, account, hello=False))
        await client.send(Hello(VERSION))
        return isinstance(await client.next(), Welcome)

    return sum([await connect() for _ in range(count)])


async def test_places_of_a_key_and_of_all_keys_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local clients always find theirs."""
    monkeypatch.setattr("pipeline.serving.clients.SILENCE_LIMIT", 60.0)  # they send no heartbeats
    async with service(remote=True) as running, AsyncExitStack() as stack:
        assert await places(running, stack, "first", ACCOUNT_PLACES + 3) == ACCOUNT_PLACES
        keys = (MOST_CLIENTS - LOCAL_PLACES) // ACCOUNT_PLACES
        assert sum([await places(running, stack, f"key {i}", ACCOUNT_PLACES) for i in range(1, keys)])
        assert running.clients.counts()["connected"] == MOST_CLIENTS - LOCAL_PLACES
        assert await places(running, stack, "last", 1) == 0
        await works(running.local)


def test_local_clients_take_no_places_of_the_number_of_remote_ones() -> None:
    limits = AccountLimits()
    for number in range(MOST_CLIENTS - 1):
        assert limits.no_place(LOCAL) == ""
        limits.add(client_name(LOCAL, b"%d" % number))
    assert limits.no_place(b"key") == ""  # the last place of all
    limits.add(client_name(b"key", b""))
    assert all(limits.no_place(account).startswith(f"{MOST_CLIENTS} clients") for account in (LOCAL, b"key"))


async def test_client_that_has_not_said_hello_gets_nothing_and_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.serving.clients.SILENCE_LIMIT", 0.3)
    monkeypatch.setattr("pipeline.serving.clients.HEARTBEAT_SECONDS", 0.05)
    async with service(remote=True) as running:
        async with remote_client(running.remote, "key", hello=False) as silent:
            await until(lambda: running.clients.counts()["connected"] == 1)
            running.clients.broadcast(PolicyChanged(-1, "p", True), b"")
            assert await silent.expect(Error) == Error(-1, SAY_HELLO)
        await asyncio.sleep(0)
        assert len(running.gone) == 1
