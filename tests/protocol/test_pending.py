"""A client's unfinished requests: which message belongs to which, and what a lost engine leaves of them."""

import asyncio

import pytest
from msgspec.structs import replace
from protocol_engine import both, engine, until

from protocol.client import Client
from protocol.errors import EngineGone, RequestFailed
from protocol.messages import (
    Calibrate,
    Calibrated,
    Calibrating,
    Cancel,
    Done,
    Error,
    Generate,
    Heartbeat,
    PolicyChanged,
    Queued,
    Stats,
    StatsReply,
    Token,
    Waiting,
)

TOKEN, DONE = Token(9, 0, 7, "x"), Done(9, "length")


async def deliver(server, client, *messages):
    """Send these to every client; returns when all have been read."""
    for peer in list(server.clients):
        for message in messages:
            await server.send(peer, message)
    await client.stats()


@pytest.mark.parametrize(
    ("message", "strays"),
    [
        (TOKEN, 1),
        (DONE, 1),
        (Queued(9, 1), 1),
        (Waiting(9, "b"), 1),
        (Calibrated(9, "/f", {}), 1),
        (Calibrating(9, "reading", 1, 2), 0),
        (StatsReply(9, {}), 0),
        (Error(9, "late"), 0),
        (PolicyChanged(9, "p", True), 0),
        (Heartbeat(), 0),
    ],
)
async def test_message_of_no_request_changes_nothing(endpoint, message, strays):
    async with both(endpoint) as (server, client):
        answer = client.generate(prompt="slow", max_tokens=10_000)
        await until(lambda: answer.token_ids)
        await deliver(server, client, message, message)
        assert client.strays == 2 * strays
        assert answer.done is None


async def test_requests_end_by_their_own_messages_alone(endpoint):
    """The engine has not answered any of these so far: each reply is sent by the test."""
    async with both(endpoint) as (server, client):
        server.mute = True
        answers = [client.generate(prompt="a"), client.generate(prompt="b")]
        asked = [asyncio.create_task(client.stats()) for _ in range(2)]
        setting = asyncio.create_task(client.set_policy("deadly"))
        await until(lambda: len(server.ever(Stats)) == 2 and len(server.ever(Generate)) == 2)
        first, second = (message.request for message in server.ever(Stats))
        policy = setting_number = 4
        server.mute = False
        for peer in server.clients:
            await server.send(peer, StatsReply(second, {"n": 2}))
            await server.send(peer, Done(answers[1].request, "stop", text="b"))
            await server.send(peer, PolicyChanged(-1, "another's", True))
            await server.send(peer, Error(setting_number, "no such policy"))
        assert await asked[1] == {"n": 2}
        assert (await answers[1].result()).text == "b"
        with pytest.raises(RequestFailed, match=r"^no such policy$") as failed:
            await setting
        assert failed.value.usage
        assert (asked[0].done(), answers[0].done, policy) == (False, None, 4)
        for peer in server.clients:
            await server.send(peer, Done(first, "cancelled"))
            await server.send(peer, Error(answers[0].request, "refused"))
        with pytest.raises(RequestFailed, match="cancelled this; it is shutting down") as failed:
            await asked[0]
        assert not failed.value.usage
        with pytest.raises(RequestFailed, match=r"^refused$"):
            await answers[0].result()


async def test_cancelled_calibration_ends_with_one_message(endpoint):
    """Its end is no stray message, whichever it is; a second one is."""
    async with both(endpoint) as (server, client):
        for end in (Done(0, "cancelled"), Calibrated(0, "/f", {})):
            far = []
            waiting = asyncio.create_task(client.calibrate(text="slow", on_progress=far.append))
            await until(lambda far=far: far)
            before, cancelled = client.strays, len(server.ever(Cancel))
            server.mute = True  # the engine's own Done does not come
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda cancelled=cancelled: len(server.ever(Cancel)) > cancelled)
            server.mute = False
            number = server.ever(Calibrate)[-1].request
            await deliver(server, client, replace(end, request=number))
            assert client.strays == before
            await deliver(server, client, Done(number, "cancelled"))
            assert client.strays == before + 1


async def test_leaving_the_client_cancels_answers_and_calibrations_alone(endpoint):
    async with engine(endpoint) as server:
        async with Client.connect(endpoint) as client:
            answer = client.generate(prompt="slow", max_tokens=10_000)
            ended = await client.generate(prompt="hi", max_tokens=1).result()
            calibrating = asyncio.create_task(client.calibrate(text="slow"))
            await until(lambda: len(server.jobs) == 3)
            server.mute = True
            asking = asyncio.create_task(client.stats())
            await until(lambda: server.ever(Stats))
        for waiting in (calibrating, asking):
            with pytest.raises(EngineGone, match="closed"):
                await waiting
        (calibration,) = (message.request for message in server.ever(Calibrate))
        await until(lambda: len(server.ever(Cancel)) >= 2)
        await asyncio.sleep(0.02)
        assert server.ever(Cancel) == [Cancel(answer.request), Cancel(calibration)]
        assert ended.done.reason == "length"
