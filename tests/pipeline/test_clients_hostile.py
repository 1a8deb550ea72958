"""Hostile clients are answered, counted and cut off, and harm no other client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
import tracemalloc
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.asyncio
from client_service import WELCOME, Service, service, works
from raw_client import RawClient
from raw_client import raw_client as raw
from waiting import Stopwatch, until

from pipeline.serving import clients
from pipeline.serving.clients import (
    ANONYMOUS_REFUSALS,
    CUT_OFF_MOST,
    LARGEST,
    MOST_FRAMES,
    REFUSED_LIMIT,
)
from protocol.client import Client
from protocol.codec import decode, encode
from protocol.messages import (
    VERSION,
    Cancel,
    Error,
    Generate,
    Heartbeat,
    Hello,
    SetPolicy,
    Stats,
    StatsReply,
)
from protocol.sockets import connect_dealer


async def pour(client: RawClient, frames: list[bytes], count: int) -> None:
    for _ in range(count):
        await client.socket.send_multipart(frames)


async def everything(client: RawClient, quiet: float = 0.5) -> list[object]:
    """All messages until none has arrived for a while; heartbeats do not count."""
    found = []
    until = time.monotonic() + quiet
    while (remaining := until - time.monotonic()) > 0:
        if await client.socket.poll(int(remaining * 1000) + 1):
            message = decode(await client.socket.recv_multipart())
            if not isinstance(message, Heartbeat):
                found.append(message)
                until = time.monotonic() + quiet
    return found


def count(running: Service, name: str) -> int:
    return running.clients.counts()[name]


async def test_client_that_sends_a_message_of_very_many_frames_is_cut_off() -> None:
    async with service() as running, raw(running.local) as hostile, Client.connect(running.local) as other:
        await hostile.socket.send_multipart([b"x"] * 50_000)
        answer = await hostile.expect(Error)
        assert answer.text == f"cut off: a message of more than {MOST_FRAMES} frames"
        assert (await other.stats())["cut_off"] == 1


async def test_client_that_floods_with_malformed_frames_is_cut_off(caplog) -> None:
    """Each kind counts: the first ones are of every kind."""
    kinds = [
        [b""],
        [b"\x01"],
        [b"\xff\x03", b"\x80"],
        [b"x"] * MOST_FRAMES,
        [b"\x03\x03", b"\xdf\xff\xff\xff\xff"],
    ]
    assert len(kinds) <= REFUSED_LIMIT
    async with service() as running, raw(running.local) as hostile, Client.connect(running.local) as other:
        for _ in range(3000 // len(kinds)):
            for frames in kinds:
                await pour(hostile, frames, 1)
        answers = await everything(hostile)
        assert len(answers) == REFUSED_LIMIT + 1
        assert all(isinstance(a, Error) and a.request == -1 for a in answers)
        assert answers[-1].text.startswith("cut off: more than 20 messages in a second")
        assert (count(running, "cut_off"), count(running, "malformed")) == (1, REFUSED_LIMIT + 1)
        await until(lambda: count(running, "unheard") == 3000 - REFUSED_LIMIT - 1)
        assert len(running.gone) == 1
        await hostile.send(Hello(VERSION))  # still shut out
        assert await everything(hostile) == []
        assert (await other.stats())["connected"] == 1
        assert len([r for r in caplog.records if "cut off" in r.getMessage()]) == 1


async def test_client_that_was_cut_off_may_reconnect_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.serving.clients.CUT_OFF_SECONDS", 0.3)
    async with service() as running, raw(running.local) as hostile:
        await pour(hostile, [b""], 50)
        await until(lambda: count(running, "cut_off") == 1)
        await everything(hostile)
        await hostile.send(Hello(VERSION), Stats(1))
        assert [type(m).__name__ for m in await everything(hostile)] == ["Welcome", "StatsReply"]


async def test_cut_off_client_of_the_library_has_the_reason() -> None:
    async with service() as running, Client.connect(running.local) as unlucky:
        await unlucky.stats()
        running.clients.cut_off(running.received[-1][0], "a test")
        assert str(await unlucky.lost()) == "the engine ended this connection: cut off: a test"
        await works(running.local)


@pytest.mark.parametrize("frames", [[b""], encode(Stats(1)), encode(Hello(VERSION + 1))], ids=range(3))
async def test_connections_without_welcome_share_a_few_answers_a_second(frames: list[bytes]) -> None:
    async with service() as running, contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(raw(running.local, hello=False)) for _ in range(20)]
        for connection in connections:
            await pour(connection, frames, 100)
        answers = [m for found in await asyncio.gather(*map(everything, connections)) for m in found]
        assert ANONYMOUS_REFUSALS <= len(answers) <= 3 * ANONYMOUS_REFUSALS
        assert {(type(a), a.request) for a in answers} == {(Error, -1)}
        await connections[0].send(Hello(VERSION))  # a correct Hello is still answered
        while isinstance(answer := await connections[0].next(), Error):
            pass  # a refusal that a busy machine sent late
        assert answer == WELCOME


async def test_connections_without_welcome_leave_no_state() -> None:
    """1,700 routing ids, each with a refused message: memory does not grow."""
    async with service() as running, Client.connect(running.local) as other:

        async def connect_unknown(number: int) -> None:
            for i in range(number):
                async with raw(running.local, hello=False, identity=os.urandom(200)) as connection:
                    await connection.send(Stats(1))
                    if i % 50 == 0:
                        await other.stats()  # so what came before has been read

        await connect_unknown(100)
        tracemalloc.start()
        try:
            await connect_unknown(100)
            before, _ = tracemalloc.get_traced_memory()
            await connect_unknown(1500)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 1500 * 100
        assert count(running, "connected") == 1


async def test_names_of_cut_off_clients_are_bounded() -> None:
    """The oldest is forgotten, and may connect again."""
    async with service() as running, raw(running.local) as first:
        await first.send(Stats(1))
        await first.next()
        name = running.received[-1][0]
        for i in range(CUT_OFF_MOST):
            running.clients.cut_off(name if i == 0 else name + b"%d" % i, "a test")
        await everything(first, quiet=0.1)
        await first.send(Hello(VERSION))
        assert await everything(first) == []
        running.clients.cut_off(name + b"one more", "a test")
        await first.send(Hello(VERSION))
        assert await first.next() == WELCOME


async def test_client_that_repeats_hello_is_cut_off() -> None:
    async with service() as running, raw(running.local) as hostile, Client.connect(running.local) as other:
        await pour(hostile, encode(Hello(VERSION)), 1000)
        *welcomes, last = await everything(hostile)
        assert 1 <= len(welcomes) <= REFUSED_LIMIT
        assert set(map(type, welcomes)) <= {type(WELCOME)}
        assert isinstance(last, Error)
        assert last.text == "cut off: it repeats its Hello"
        assert (await other.stats())["connected"] == 1


async def test_thousand_connections_that_vanish_after_hello_are_released() -> None:
    """Connected clients are served meanwhile, and new ones afterwards."""
    process = psutil.Process()
    async with service() as running, Client.connect(running.local) as other:
        descriptors, sent = process.num_fds(), 0

        def seen() -> int:
            return len(running.gone) + count(running, "connected") - 1

        with zmq.asyncio.Context() as context:
            for _ in range(20):
                with contextlib.ExitStack() as crowd:
                    for _ in range(50):
                        dealer = crowd.enter_context(connect_dealer(context, running.local))
                        dealer.setsockopt(zmq.LINGER, 0)
                        await dealer.send_multipart(encode(Hello(VERSION)))
                    await other.stats()
                    sent += 50  # some vanish before their Hello is read
                    await until(lambda sent=sent: seen() > sent // 2)
        await until(lambda: count(running, "connected") == 1)
        await until(lambda: process.num_fds() <= descriptors + 8)
        assert len(running.gone) > 500


async def test_clients_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.serving.clients.MOST_CLIENTS", 3)
    async with service() as running, contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            last = await stack.enter_async_context(raw(running.local))
        async with raw(running.local, hello=False) as late:
            await late.send(Hello(VERSION))
            refusal = await late.expect(Error)
            assert refusal.text == "3 clients are connected already; try again later"
            last.socket.close(linger=0)
            await until(lambda: count(running, "connected") == 2)
            await late.send(Hello(VERSION))
            assert await late.next() == WELCOME
        await stack.aclose()
        await until(lambda: count(running, "connected") == 0)


async def test_bug_in_message_handling_cuts_off_only_its_client(caplog: pytest.LogCaptureFixture) -> None:
    async with service() as running, raw(running.local) as unlucky, Client.connect(running.local) as other:
        await unlucky.send(Cancel(1))
        assert (await unlucky.expect(Error)).text == "cut off: the engine failed on its message"
        assert "ZeroDivisionError" in caplog.text
        assert (await other.stats())["cut_off"] == 1


async def test_answer_that_cannot_be_encoded_ends_its_request() -> None:
    async with service() as running, raw(running.local) as client:
        await client.send(Generate(7, prompt="a"))
        answer = await client.expect(Error)
        assert answer.request == 7
        assert answer.text.startswith("the engine's answer cannot be sent: Done")
        await client.send(Stats(8))
        assert (await client.next()).request == 8


async def test_frame_larger_than_any_message_ends_the_connection() -> None:
    async with service() as running:
        async with raw(running.local) as hostile:
            ends = hostile.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            await hostile.socket.send_multipart([b"\x01", bytes(LARGEST + 10000)])
            assert await ends.poll(5000)
            hostile.socket.disable_monitor()
            ends.close()
        await works(running.local)
        assert count(running, "malformed") == 0


async def test_unread_messages_are_bounded(runtime: Path) -> None:
    """While the socket is not read, as before the engine is built: unread messages stay with the sender."""
    unread, process = Service(runtime), psutil.Process()
    before = process.memory_info().rss
    try:
        with zmq.Context() as context, connect_dealer(context, unread.local, send_hwm=1) as hostile:
            taken = 0
            while taken < 100 and hostile.poll(500, zmq.POLLOUT):
                hostile.send(BIG, copy=False)  # one buffer for all: only the receiver's memory grows
                taken += 1
            assert 1 < taken < 15
            assert process.memory_info().rss - before < 15 * len(BIG)
            hostile.close(linger=0)
    finally:
        unread.clients.close()


BIG = random.Random(1).randbytes(4 << 20)


async def test_total_of_all_outboxes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends requests and does not read is cut off before memory is full, the largest outbox
    first."""
    monkeypatch.setattr("pipeline.serving.clients.QUEUED_BYTES", 4 << 20)
    async with service() as running, raw(running.local) as deaf, Client.connect(running.local) as other:
        for i in range(3000):
            await deaf.send(Stats(i))
        await until(lambda: count(running, "cut_off") == 1)
        assert (await other.stats())["connected"] == 1


async def test_flood_takes_a_share_of_the_time_and_another_client_is_heard(monkeypatch) -> None:
    """Messages that take 10 ms each: 15 a second have their turn."""
    monkeypatch.setattr(clients, "MESSAGE_SECONDS", 0.01)
    async with service() as running, raw(running.local) as hostile, raw(running.local) as other:
        for number in range(200):
            await hostile.send(SetPolicy(number, "x"))
        watch = Stopwatch()
        await other.send(Stats(1))
        await other.expect(StatsReply)
        assert watch.shows(0.0, 2.0)
        await until(lambda: len(running.received) > 10)
        assert len(running.received) < 10 + 40 * watch.range()[1]
        hostile.socket.close(linger=0)
