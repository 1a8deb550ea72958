"""Requests in a running engine: cancelled, batched, repeated, queued, abandoned; and the ends of answers."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from equality import near_tie_or_equal
from raw_client import idle, raw_client

from launch.equality import Verdict, compare
from pipeline.policies.presets import PRESETS, make_policy
from pipeline.policies.view import PolicyRequest
from protocol.client import Client
from protocol.messages import (
    Cancel,
    ChatMessage,
    Done,
    Error,
    Generate,
    PolicyChanged,
    Queued,
    Sampling,
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


def same_answer(tokens: list, reference: list) -> bool:
    """Whether two answers, as Token messages, are equal up to near-ties."""
    return compare([t.token for t in tokens], reference, BOUND).verdict is not Verdict.MISMATCH


def check_request(messages: list, kind: type = Token) -> Done:
    """Any queue positions, any number of messages of one kind in order, exactly one terminal message, no
    more."""
    *before, done = itertools.dropwhile(lambda m: isinstance(m, Queued), messages)
    assert isinstance(done, Done)
    assert all(type(m) is kind for m in before), messages
    if kind is Token:
        assert [m.index for m in before] == list(range(len(before)))
    return done


@pytest.mark.parametrize("wait", [0, 0.002, 0.01, 0.03, 0.08, 0.2])
async def test_request_is_cancelled_at_any_moment(engine, wait) -> None:
    """Eight requests of which six can run: the Cancel meets some in prefill, some in decode, some waiting."""
    async with raw_client(engine[1].endpoint) as raw:
        await raw.send(*(Generate(i, token_ids=LONG, max_tokens=50, ignore_eos=True) for i in range(8)))
        await raw.send(Score(8, token_ids=LONG, stepwise=True))
        await asyncio.sleep(wait)
        await raw.send(*(Cancel(i) for i in (5, 5, 3, 8, 7, 0, 6, 4, 1, 2, 99)))
        found = await raw.to_the_end(*range(9))
        for i in range(9):
            assert check_request(found[i], Scores if i == 8 else Token).reason in ("cancelled", "length")
        assert check_request(found[7]).reason == "cancelled"
        await raw.send(*(Cancel(i) for i in range(9)))  # all have ended
        assert (await raw.until_stats())[0] == []
    await idle(engine[1])


async def test_only_its_own_client_cancels_a_request(engine) -> None:
    async with raw_client(engine[1].endpoint) as owner, raw_client(engine[1].endpoint) as other:
        await owner.send(Generate(0, token_ids=(5, 6), max_tokens=40, ignore_eos=True))
        await other.send(Cancel(0))
        assert (await other.until_stats())[0] == []
        assert check_request((await owner.to_the_end(0))[0]).reason == "length"


async def test_batched_answers_equal_those_computed_alone(engine) -> None:
    client = engine[1]
    expected = [await alone(client, prompt, 24) for prompt in PROMPTS]

    async def ask(prompt: tuple[int, ...], start: float) -> list[int]:
        async with Client.connect(client.endpoint) as own:
            await asyncio.sleep(start)
            answer = await own.generate(token_ids=prompt, max_tokens=24, ignore_eos=True).result()
            assert answer.done.reason == "length"
            return list(answer.tokens)

    answers = await asyncio.gather(*(ask(p, 0.01 * i) for i, p in enumerate(PROMPTS)))
    for tokens, (reference, logprobs) in zip(answers, expected, strict=True):
        assert near_tie_or_equal(tokens, reference, logprobs, BOUND)
    decode = (await idle(client))["engine"]["decode"]
    assert decode["rows"] > decode["steps"]  # some steps had several sequences


async def test_seed_repeats_an_answer(engine) -> None:
    async def sample(seed: int | None) -> tuple[int, ...]:
        sampling = Sampling(temperature=1.0, top_p=0.95, seed=seed)
        answer = engine[1].generate(token_ids=PROMPTS[0], max_tokens=24, sampling=sampling, ignore_eos=True)
        return (await answer.result()).tokens

    assert await sample(7) == await sample(7)
    assert await sample(7) != await sample(8)
    assert await sample(None) != await sample(None)  # the engine chooses a new seed each time


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


async def test_requests_of_a_disconnected_client_are_released(engine) -> None:
    """The client's forty answers of 200 tokens are not computed to the end."""
    before = (await idle(engine[1]))["engine"]["decode"]["rows"]
    async with raw_client(engine[1].endpoint) as raw:
        many = (Generate(i, token_ids=(5, 6, 7), max_tokens=200, ignore_eos=True) for i in range(40))
        await raw.send(*many)
        while not isinstance(await raw.next(), Token):
            pass
        assert (await engine[1].stats())["scheduler"]["kv_tokens_used"] > 0
    after = (await idle(engine[1]))["engine"]["decode"]["rows"]
    assert after - before < 40 * 200 / 2
    await asyncio.sleep(1.0)  # a heartbeat later the other tests' clients are disconnected too
    assert (await engine[1].stats())["clients"]["connected"] == 1


async def test_requests_beyond_the_kv_cache_wait(engine) -> None:
    """Eight requests that need 250 tokens of the KV cache's 1024 each, with small ones in between."""
    async with raw_client(engine[1].endpoint) as raw:
        large = [Generate(i, token_ids=LONG, max_tokens=50, ignore_eos=True) for i in range(8)]
        small = [Generate(i, token_ids=(5,), max_tokens=3, ignore_eos=True) for i in range(8, 16)]
        await raw.send(*(m for pair in zip(large, small, strict=True) for m in pair))
        most = {"running": 0, "waiting": 0, "kv_tokens_used": 0}
        found: dict[int, list] = {i: [] for i in range(16)}
        while sum(isinstance(ms[-1], Done) for ms in found.values() if ms) < 16:
            messages, stats = await raw.until_stats()
            for message in messages:
                found[message.request].append(message)
            most = {key: max(most[key], stats["scheduler"][key]) for key in most}
            await asyncio.sleep(0.005)
        for i, messages in found.items():
            assert check_request(messages).reason == "length"
            assert sum(isinstance(m, Token) for m in messages) == (50 if i < 8 else 3)
        assert 4 <= most["running"] <= 6
        assert most["waiting"] >= 9
        assert 750 <= most["kv_tokens_used"] <= 1024
    await idle(engine[1])


async def say(client: Client, turns: list[ChatMessage], conversation: str | None) -> tuple[list, Done]:
    answer = client.generate(messages=turns, max_tokens=20, ignore_eos=True, conversation=conversation)
    tokens = [token async for token in answer]
    assert answer.done is not None
    return tokens, answer.done


async def test_second_turn_prefills_only_new_tokens(engine) -> None:
    """It equals a fresh prefill of the whole conversation. Names of conversations are separate for each
    client."""
    turns = [ChatMessage("user", "What is a list?")]
    async with Client.connect(engine[1].endpoint) as client:
        tokens, first = await say(client, turns, "x")
        assert first.stats["kv_reused_tokens"] == 0
        text = "".join(token.text for token in tokens) + first.text
        turns += [ChatMessage("assistant", text), ChatMessage("user", "And a dict?")]
        before = (await idle(client))["engine"]["prefill"]["rows"]
        again, second = await say(client, turns, "x")
        reused, whole = second.stats["kv_reused_tokens"], second.stats["prompt_tokens"]
        assert reused >= first.stats["prompt_tokens"] - 1
        scheduler = await idle(client)
        assert scheduler["engine"]["prefill"]["rows"] - before == whole - reused
        assert scheduler["scheduler"]["conversations"] == 1
        assert scheduler["scheduler"]["kv_tokens_kept"] >= whole + 19
        async with Client.connect(client.endpoint) as new_client:
            fresh, done = await say(new_client, turns, "x")
        assert done.stats["kv_reused_tokens"] == 0
        assert same_answer(again, fresh)
    await idle(engine[1], kept=False)  # released with their clients


async def test_answer_ends_at_a_stop_string_and_at_the_context(engine) -> None:
    client = engine[1]
    whole = await client.generate(token_ids=PROMPTS[0], max_tokens=60, ignore_eos=True).result()
    assert whole.done.reason == "length"
    middle = whole.text[len(whole.text) // 2 :][:3]
    stopped = await client.generate(
        token_ids=PROMPTS[0], max_tokens=60, ignore_eos=True, stop=("\0never", middle)
    ).result()
    assert stopped.done.reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(middle)]
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    to_the_end = await client.generate(token_ids=LONG, max_tokens=10**9, ignore_eos=True).result()
    assert (len(to_the_end.tokens), to_the_end.done.reason) == (256 - len(LONG), "length")
    last = await client.generate(token_ids=(7,) * 255, max_tokens=9, ignore_eos=True).result()
    assert (len(last.tokens), last.done.reason) == (1, "length")


async def test_text_and_conversations_are_prompts(engine) -> None:
    client = engine[1]
    for given in ({"prompt": "def add(a, b):"}, {"messages": (ChatMessage("user", "What is a list?"),)}):
        result = await client.generate(max_tokens=5, ignore_eos=True, **given).result()
        assert len(result.tokens) == 5
        assert result.done.stats["prompt_tokens"] > 3
    blocks = [b async for b in client.score(text="def add(a, b):")]
    assert sum(len(b.tokens) for b in blocks) == 1 + sum(len(b.chosen) for b in blocks)
