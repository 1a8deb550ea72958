"""Invalid requests: exactly one answer of one clear line, and the engine continues."""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest
import zmq
from raw_client import one_line, raw_client

from protocol.client import Client
from protocol.codec import encode
from protocol.messages import (
    VERSION,
    ChatMessage,
    Done,
    Error,
    Generate,
    Hello,
    Partial,
    PolicyChanged,
    Ready,
    Score,
    SetPolicy,
    Stats,
    Token,
    Welcome,
    Work,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURN = (ChatMessage("user", "Hello"),)
IDS = (5, 6, 7)

# One of each kind: the limits themselves are in test_jobs.py and test_text_queue.py.
REFUSED = {
    "over the context": (Generate(0, token_ids=(7,) * 256), "the prompt has 256 tokens, the context is 256"),
    "a long resume": (Generate(0, token_ids=IDS, resume=(9999,) * (1 << 19)), "resume has 524288 tokens"),
    "a text that fits no context": (Generate(0, prompt="x" * 4_000_000), "4000000 characters, at least"),
    "a long text": (Generate(0, prompt="word " * 3000), "the context is 256"),
    "no turns": (Generate(0, messages=()), "the conversation is empty"),
    "too many stop strings": (Generate(0, token_ids=IDS, stop=("x",) * 5000), "stop strings are too many"),
    "score an unknown id": (Score(0, token_ids=(9999,)), "9999 is outside"),
}
POLICIES = {
    "unknown": (SetPolicy(0, "on-demnd"), "did you mean on-demand"),
    "far": (SetPolicy(0, "?"), "supported: all-host"),
    "option": (SetPolicy(0, "on-demand", {"scoop": "layer"}), "has no option 'scoop'"),
    "nothing near": (SetPolicy(0, "all-host", {"x": "1"}), "it has placement, gate"),
    "value": (SetPolicy(0, "on-demand", {"placement": "gobal"}), "gobal"),
    "out of range": (SetPolicy(0, "random", {"seed": "-3"}), "seed"),
}


async def generates(client: Client) -> None:
    result = await client.generate(token_ids=IDS, max_tokens=2, ignore_eos=True).result()
    assert len(result.tokens) == 2


async def works(endpoint: str) -> None:
    """A new client gets an answer."""
    async with Client.connect(endpoint) as client:
        await generates(client)


@pytest.mark.parametrize(("message", "reason"), REFUSED.values(), ids=REFUSED.keys())
async def test_invalid_request_is_refused_in_one_line(engine, message, reason) -> None:
    async with raw_client(engine[1].endpoint) as raw:
        await raw.send(message)
        ((answer,), stats) = await raw.until_stats()
        assert (type(answer), answer.request, answer.reason) == (Done, 0, "error")
        assert reason in one_line(answer.error)
        assert (stats["scheduler"]["running"], stats["scheduler"]["waiting"]) == (0, 0)
        await raw.send(Generate(0, token_ids=IDS, max_tokens=1))  # the number is free again
        assert len((await raw.to_the_end(0))[0]) == 2


@pytest.mark.parametrize(("message", "reason"), POLICIES.values(), ids=POLICIES.keys())
async def test_invalid_policy_is_refused(engine, message, reason) -> None:
    async with raw_client(engine[1].endpoint) as raw:
        await raw.send(message)
        (answer,), stats = await raw.until_stats()
        assert (type(answer), answer.request) == (Error, 0)
        assert reason in one_line(answer.text)
        assert stats["policy"] == "all-host"


async def test_hello_of_another_version_is_refused(engine) -> None:
    async with raw_client(engine[1].endpoint, hello=False) as raw:
        await raw.send(Hello(VERSION + 1))
        answer = await raw.expect(Error)
        assert (answer.request, answer.text) == (
            -1,
            f"this engine speaks version {VERSION}, not {VERSION + 1}",
        )
        await raw.send(Stats(1))  # before the Hello
        assert (await raw.expect(Error)).text == "say Hello first"
        first, *rest = encode(Hello(VERSION + 1))
        await raw.socket.send_multipart([bytes(first)[:1] + bytes([VERSION + 1]), *rest])
        assert f"version {VERSION + 1}" in one_line((await raw.expect(Error)).text)
        await raw.send(Hello(VERSION))
        await raw.expect(Welcome)


async def test_messages_between_processes_are_refused_from_a_client(engine) -> None:
    x = np.zeros((1, 4), np.float32)
    work = Work(np.zeros(17, np.int32), x)
    ready = Ready(VERSION, "worker", 0, 9, 1, "f" * 64)
    sent = [work, ready, Partial(0, 0, 0.0, x), Token(1, 0, 0, ""), PolicyChanged(1, "all-host", True)]
    async with raw_client(engine[1].endpoint) as raw:
        await raw.send(*sent)
        answers, _ = await raw.until_stats()
        assert [type(a) for a in answers] == [Error] * len(sent)
        for message, answer in zip(sent, answers, strict=True):
            assert type(message).__name__ in one_line(answer.text)
    await works(engine[1].endpoint)


@pytest.mark.parametrize(
    "flood",
    [SetPolicy(1, "all-host"), Generate(1, token_ids=IDS), None],
    ids=["policy", "generate", "malformed"],
)
async def test_flooding_client_does_not_stall_other_clients(engine, flood) -> None:
    """For longer than the silence after which the other client gives its engine up."""
    endpoint = engine[1].endpoint
    async with raw_client(endpoint) as raw, Client.connect(endpoint, silence=1.6) as other:

        async def pour() -> None:
            frames = [b"\x01"] if flood is None else encode(flood)
            while True:
                with contextlib.suppress(zmq.Again):
                    for _ in range(50):
                        await raw.socket.send_multipart(frames, flags=zmq.NOBLOCK)
                await asyncio.sleep(0)

        pouring = asyncio.create_task(pour())
        try:
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                await generates(other)
        finally:
            pouring.cancel()
    await works(engine[1].endpoint)
