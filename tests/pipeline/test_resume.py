"""Resumed answers have the same tokens and texts as uninterrupted ones.

In float32. A resumed answer prefills tokens that the whole answer decoded, so greedy tokens may differ at
near-ties. Seeded answers draw the same random numbers, and a difference by rounding is very unlikely."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from msgspec.structs import replace
from raw_client import RawClient, raw_client

from launch.equality import F32_BOUND, Verdict, compare
from protocol.messages import ChatMessage, Done, Generate, Queued, Sampling, Token

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH = 14
PROMPT = Generate(0, prompt="über 日本", max_tokens=LENGTH, ignore_eos=True)
SEEDED = Sampling(temperature=1.0, seed=7)
SHAPED = Sampling(temperature=0.9, top_k=300, top_p=0.98, repetition_penalty=1.4, seed=3)


@dataclass(frozen=True)
class Answer:
    """A received answer."""

    tokens: list[Token]
    done: Done

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.token for token in self.tokens)

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens) + self.done.text


@pytest_asyncio.fixture(loop_scope="module")
async def raw(engine) -> AsyncIterator[RawClient]:
    async with raw_client(engine[1].endpoint) as raw:
        yield raw


async def answers(raw: RawClient, *asked: Generate) -> list[Answer]:
    """All requested at once, so that they are computed in varying batches."""
    await raw.send(*asked)
    came = await raw.to_the_end(*(message.request for message in asked))
    found = []
    for message in asked:
        *tokens, done = (m for m in came[message.request] if not isinstance(m, Queued))
        assert isinstance(done, Done), done
        whole = Answer(tokens, done)
        first = len(message.resume)
        assert [token.index for token in whole.tokens] == list(range(first, first + len(whole.tokens)))
        found.append(whole)
    return found


async def check_all_cuts(raw: RawClient, asked: Generate) -> Answer:
    """Resume the answer at every point, and compare the rest with the whole answer's."""
    (whole,) = await answers(raw, asked)
    assert "error" not in whole.done.reason
    cuts = range(len(whole.ids) + 1)
    resumed = await answers(raw, *(replace(asked, request=cut, resume=whole.ids[:cut]) for cut in cuts))
    for cut, rest in zip(cuts, resumed, strict=True):
        remaining = whole.tokens[cut:]
        if asked.sampling.temperature == 0 and rest.ids != whole.ids[cut:]:
            assert compare(rest.ids, remaining, F32_BOUND).verdict is Verdict.NEAR_TIE, cut
            continue
        assert rest.ids == whole.ids[cut:], cut
        assert [token.text for token in rest.tokens] == [token.text for token in remaining]
        assert (rest.done.reason, rest.done.text) == (whole.done.reason, whole.done.text)
        assert rest.done.stats["prompt_tokens"] == whole.done.stats["prompt_tokens"]
    return whole


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(repetition_penalty=1.5), SEEDED, SHAPED],
    ids=["greedy", "penalised", "seeded", "shaped"],
)
async def test_resumed_answer_equals_the_whole(raw, sampling) -> None:
    whole = await check_all_cuts(raw, replace(PROMPT, sampling=sampling))
    assert len(whole.ids) == LENGTH
    assert whole.done.reason == "length"


async def test_resume_within_a_character(raw) -> None:
    """Random weights and a high temperature: many tokens are parts of characters, some complete in the
    end."""
    held = 0
    for seed in range(3):
        sampling = Sampling(temperature=3.0, seed=seed)
        whole = await check_all_cuts(raw, replace(PROMPT, sampling=sampling, max_tokens=30))
        held += sum(not token.text for token in whole.tokens)
    assert held > 0


async def test_stop_string_is_found_across_the_cut(raw) -> None:
    (whole,) = await answers(raw, replace(PROMPT, sampling=SEEDED))
    text = whole.text
    for start in (3, len(text) // 2, len(text) - 6):
        stop = (text[start : start + 5], "never in it")
        asked = replace(PROMPT, sampling=SEEDED, stop=stop)
        stopped = await check_all_cuts(raw, asked)
        assert stopped.done.reason == "stop"
        assert stopped.text == text[: text.index(stop[0])]
    # text that may become a stop string is held back until the Done
    asked = replace(PROMPT, sampling=SEEDED, stop=(text[-3:] + "and more",))
    assert (await check_all_cuts(raw, asked)).text == text


async def test_end_token_ends_a_resumed_answer(raw) -> None:
    """The end token has no Token message, so it is drawn again."""
    asked = [  # a penalty below 1 makes tokens of the prompt more probable: the end token
        Generate(i, token_ids=(5, 2), max_tokens=12, sampling=Sampling(1.5, repetition_penalty=0.3, seed=i))
        for i in range(18)
    ]
    ends = zip(asked, await answers(raw, *asked), strict=True)
    ended = [message for message, whole in ends if whole.done.reason == "stop" and len(whole.ids) > 2]
    assert (await check_all_cuts(raw, ended[0])).done.reason == "stop"


async def test_resumed_answer_reuses_what_was_computed(raw) -> None:
    chat = Generate(0, messages=(ChatMessage("user", "Hi"),), max_tokens=8, ignore_eos=True)
    (whole,) = await answers(raw, chat)
    (rest,) = await answers(raw, replace(chat, request=1, resume=whole.ids[:5]))
    assert rest.ids == whole.ids[5:]
    known = rest.done.stats["prompt_tokens"]
    assert known == whole.done.stats["prompt_tokens"]
    assert rest.done.stats["kv_reused_tokens"] == known  # and 4 tokens of the answer, which are no prompt
    turn = ChatMessage("assistant", whole.text)
    more = replace(chat, request=2, messages=(*chat.messages, turn, ChatMessage("user", "And?")))
    (after,) = await answers(raw, more)
    assert after.done.stats["kv_reused_tokens"] >= known


async def test_resume_up_to_the_end_of_the_context(engine, raw) -> None:
    context = engine[1].welcome.context
    asked = Generate(0, token_ids=(5,) * (context - 6), max_tokens=100, ignore_eos=True)
    whole = await check_all_cuts(raw, asked)
    assert len(whole.ids) == 6
