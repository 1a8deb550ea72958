"""Requests in a running engine: cancelled, batched, under changing policies; and the ends of answers."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from equality import near_tie_or_equal
from raw_client import idle, raw_client

from pipeline.policies.presets import PRESETS, make_policy
from pipeline.policies.view import PolicyRequest
from protocol.client import Client
from protocol.messages import (
    Cancel,
    Done,
    Error,
    Generate,
    PolicyChanged,
    Queued,
    Score,
    Scores,
    SetPolicy,
    Token,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND = 1e-4  # between float32 results of different plans and batches
PROMPTS = [tuple(range(10 + i, 10 + i + 7 * (i + 1))) for i in range(5)]  # 7, 14, ... 35 tokens
LONG = tuple(range(100, 300))  # 200 tokens, 7 chunks


async def alone(client: Client, prompt: tuple[int, ...], count: int) -> tuple[list[int], np.ndarray]:
    """The greedy answer without other requests, and its log-probabilities [count, V]."""
    answer = await client.generate(token_ids=prompt, max_tokens=count, ignore_eos=True).result()
    tokens = list(answer.tokens)
    blocks = [b.logprobs async for b in client.score(token_ids=[*prompt, *tokens[:-1]], full=True)]
    return tokens, np.concatenate(blocks)[len(prompt) - 1 :]


def check_request(messages: list, kind: type = Token) -> Done:
    """Any queue positions, any number of messages of one kind in order, exactly one terminal message, no
    more."""
    *before, done = itertools.dropwhile(lambda m: isinstance(m, Queued), messages)
    assert isinstance(done, Done)
    assert all(type(m) is kind for m in before), messages
    if kind is Token:
        assert [m.index for m in before] == list(range(len(before)))
    return done


@pytest.mark.parametrize("before", [0, 1, 5, 20, 100])
async def test_request_is_cancelled_at_any_moment(engine, before) -> None:
    """Eight requests of which six can run: the Cancels, after so many answers, meet some in prefill, some in
    decode, some waiting."""
    async with raw_client(engine[1].endpoint) as raw:
        await raw.send(*(Generate(i, token_ids=LONG, max_tokens=50, ignore_eos=True) for i in range(8)))
        await raw.send(Score(8, token_ids=LONG, stepwise=True))
        early = [await raw.next() for _ in range(before)]
        await raw.send(*(Cancel(i) for i in (5, 5, 3, 8, 7, 0, 6, 4, 1, 2, 99)))
        found = await raw.to_the_end(*range(9))
        for i in range(9):
            messages = [m for m in early if m.request == i] + found[i]
            assert check_request(messages, Scores if i == 8 else Token).reason in ("cancelled", "length")
        assert found[7][-1].reason == "cancelled"
        await raw.send(*(Cancel(i) for i in range(9)))  # all have ended
        assert (await raw.until_stats())[0] == []
    await idle(engine[1])


async def test_batched_answers_equal_those_computed_alone(engine) -> None:
    client = engine[1]
    expected = [await alone(client, prompt, 24) for prompt in PROMPTS]

    async def ask(prompt: tuple[int, ...]) -> list[int]:
        async with Client.connect(client.endpoint) as own:
            answer = await own.generate(token_ids=prompt, max_tokens=24, ignore_eos=True).result()
            assert answer.done.reason == "length"
            return list(answer.tokens)

    answers = await asyncio.gather(*map(ask, PROMPTS))
    for tokens, (reference, logprobs) in zip(answers, expected, strict=True):
        assert near_tie_or_equal(tokens, reference, logprobs, BOUND)
    decode = (await idle(client))["engine"]["decode"]
    assert decode["rows"] > decode["steps"]  # some steps had several sequences


async def test_policy_changes_during_an_answer(engine) -> None:
    """Sets every exact preset in turn, each announced to the other client; the answer equals one computed
    alone."""
    client = engine[1]
    tokens, logprobs = await alone(client, PROMPTS[1], 150)
    async with raw_client(client.endpoint) as raw, raw_client(client.endpoint) as boss:
        await raw.send(Generate(0, token_ids=PROMPTS[1], max_tokens=150, ignore_eos=True))
        found: dict[int, list] = {-1: [], 0: [await raw.expect(Token)]}
        made = [make_policy(PolicyRequest(name), 0) for name in PRESETS]
        # the others measure costs for two seconds, need a calibration or are approximate
        names = [p.name for p in made if p.exact and not (p.needs_costs or p.needs_calibration)]
        for request, name in enumerate([*names, "all-host"]):
            await boss.send(SetPolicy(request, name))
            changed = await boss.expect(PolicyChanged)
            assert (changed.request, changed.policy, changed.exact) == (request, name, True)
        while not any(isinstance(m, Done | Error) for m in found[0]):
            message = await raw.next()
            found[message.request].append(message)
        done = check_request(found[0])
        assert done.reason == "length"
        ours = [m.token for m in found[0][:-1]]
        assert near_tie_or_equal(ours, tokens, logprobs, BOUND)
        later = [m for m in (await raw.until_stats())[0] if isinstance(m, PolicyChanged)]
        assert [m.policy for m in found[-1] + later] == [*names, "all-host"]
        assert all(m.request == -1 for m in found[-1])
        engine_part = done.stats["engine"]["decode"]
        assert engine_part["host_tiles"]
        assert engine_part["resident_tiles"] + engine_part["fetched_tiles"]
