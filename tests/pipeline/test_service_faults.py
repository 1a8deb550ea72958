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
from protocol.errors import RequestFailed
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
    Sampling,
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

REFUSED = {
    "over the context": (Generate(0, token_ids=(7,) * 256), "the prompt has 256 tokens, the context is 256"),
    "very many ids": (
        Generate(0, token_ids=(9999,) * (1 << 19)),
        "the prompt has 524288 tokens, the context is 256",
    ),
    "a long resume": (
        Generate(0, token_ids=IDS, resume=(9999,) * (1 << 19)),
        "resume has 524288 tokens, the answer can have 128 at most",
    ),
    "very many turns": (
        Generate(0, messages=(ChatMessage("", ""),) * 5000),
        "5000 turns do not fit the context of 256",
    ),
    "a long text": (Generate(0, prompt="word " * 3000), "the context is 256"),
    "an id beyond the vocabulary": (
        Generate(0, token_ids=(1, 4096)),
        "4096 is outside the vocabulary of 4096",
    ),
    "a negative id": (Generate(0, token_ids=(1, -1)), "-1 is outside"),
    "max_tokens 0": (Generate(0, token_ids=IDS, max_tokens=0), "max_tokens must be at least 1, it is 0"),
    "max_tokens negative": (Generate(0, token_ids=IDS, max_tokens=-5), "max_tokens"),
    "no ids": (Generate(0, token_ids=()), "no tokens"),
    "no turns": (Generate(0, messages=()), "the conversation is empty"),
    "nothing given": (Generate(0), "exactly one of prompt, token_ids and messages"),
    "two given": (Generate(0, prompt="a", token_ids=IDS), "exactly one of"),
    "three given": (Generate(0, prompt="a", token_ids=IDS, messages=TURN), "exactly one of"),
    "an empty stop string": (Generate(0, token_ids=IDS, stop=("x", "")), "a stop string has 0 characters"),
    "a stop string too long": (Generate(0, token_ids=IDS, stop=("x" * 100000,)), "a stop string has"),
    "too many stop strings": (Generate(0, token_ids=IDS, stop=("x",) * 5000), "stop strings are too many"),
    "score nothing": (Score(0), "exactly one of text and token_ids"),
    "score two": (Score(0, text="a", token_ids=IDS), "exactly one of text and token_ids"),
    "score no ids": (Score(0, token_ids=()), "no tokens"),
    "score over the context": (
        Score(0, token_ids=(7,) * 257),
        "the text has 257 tokens",
    ),
    "score an unknown id": (Score(0, token_ids=(9999,)), "9999 is outside"),
    "score no prefill": (
        Score(0, token_ids=IDS, stepwise=True, prefill=0),
        "prefill must be in 1..3, it is 0",
    ),
    "score a long prefill": (Score(0, token_ids=IDS, stepwise=True, prefill=4), "prefill must be in 1..3"),
}
BAD_SAMPLING = {
    "temperature": -0.1,
    "top_k": -1,
    "top_p": 0.0,
    "min_p": 1.5,
    "repetition_penalty": 0.0,
    "seed": -1,
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


async def test_prompt_that_leaves_less_than_reserved_is_refused_with_its_length(engine) -> None:
    async with raw_client(engine[1].endpoint) as raw:
        await raw.send(Generate(0, token_ids=(7,) * 100, reserve=157))
        ((answer,), _) = await raw.until_stats()
        assert (answer.reason, answer.usage, answer.stats) == ("error", True, {"prompt_tokens": 100})
        assert "including 157 tokens of an answer; shorten it" in one_line(answer.error)
        await raw.send(Generate(0, token_ids=(7,) * 100, reserve=156, max_tokens=1))
        assert len((await raw.to_the_end(0))[0]) == 2


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING.items())
async def test_invalid_sampling_is_refused(engine, name, value) -> None:
    with pytest.raises(RequestFailed, match=name) as caught:
        await engine[1].generate(token_ids=IDS, sampling=Sampling(**{name: value})).result()
    one_line(str(caught.value))


@pytest.mark.parametrize(("message", "reason"), POLICIES.values(), ids=POLICIES.keys())
async def test_invalid_policy_is_refused(engine, message, reason) -> None:
    async with raw_client(engine[1].endpoint) as raw:
        await raw.send(message)
        (answer,), stats = await raw.until_stats()
        assert (type(answer), answer.request) == (Error, 0)
        assert reason in one_line(answer.text)
        assert stats["policy"] == "all-host"


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"junk"],
        [b"\x03\x03", b"\xc1"],
        [b"\x03\x03", b"\x81\xa7request\x01", b"extra"],
        [b"\xff\x03", b"\x80"],
        [b"\x09\x03", b"\xdf\xff\xff\xff\xff"],
        [b"\x09\x02", b"\x81\xa7request\x01"],
    ],
    ids=range(7),
)
@pytest.mark.parametrize("known", [True, False], ids=["a client", "no client"])
async def test_malformed_frames_are_answered_and_counted(engine, frames, known) -> None:
    endpoint = engine[1].endpoint
    before = (await engine[1].stats())["clients"]["malformed"]
    async with raw_client(endpoint, hello=known) as raw:
        await raw.socket.send_multipart(frames)
        answer = await raw.expect(Error)
        assert answer.request == -1
        assert one_line(answer.text).startswith("malformed message: ")
        if not known:
            await raw.send(Hello(VERSION))
            await raw.expect(Welcome)
        assert (await raw.until_stats())[1]["clients"]["malformed"] == before + 1
    await works(endpoint)


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


async def test_text_far_beyond_the_context_is_refused_unencoded(engine) -> None:
    async with Client.connect(engine[1].endpoint) as client:
        for given in ({"prompt": "x" * 4_000_000}, {"messages": [ChatMessage("user", "x " * 2_000_000)]}):
            with pytest.raises(RequestFailed, match=r"4000000 char.* at least .* the context is 256"):
                await client.generate(**given).result()
        with pytest.raises(RequestFailed, match="16000 turns do not fit the context of 256"):
            await client.generate(messages=[ChatMessage("user", "")] * 16_000).result()
        with pytest.raises(RequestFailed, match="4000000 characters"):
            async for _ in client.score(text="x" * 4_000_000):
                pass


@pytest.mark.parametrize(
    "flood",
    [Stats(1), SetPolicy(1, "all-host"), Generate(1, token_ids=IDS), None],
    ids=["stats", "policy", "generate", "malformed"],
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
